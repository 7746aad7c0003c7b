//! Meshes: ranks in an n-dimensional array, with a group for each of its rows along each axis.

use std::collections::HashSet;
use std::fmt;

use super::ProcessGroup;
use super::split::{check_members, make_group};
use crate::error::Result;

/// An axis of a mesh, by its number or its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Axis<'a> {
    /// Counted from 0, the outermost.
    Number(usize),
    /// A name that the mesh was given.
    Name(&'a str),
}

impl From<usize> for Axis<'_> {
    fn from(number: usize) -> Self {
        Self::Number(number)
    }
}

impl<'a> From<&'a str> for Axis<'a> {
    fn from(name: &'a str) -> Self {
        Self::Name(name)
    }
}

impl fmt::Display for Axis<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => write!(f, "{name:?}"),
        }
    }
}

/// Ranks of a group in an n-dimensional array, as `torch.distributed.DeviceMesh`. For each axis,
/// this rank has a group with the ranks whose other coordinates are its own. They are numbered by
/// their coordinate on the axis.
///
/// The order is the caller's. In the mesh `[[0, 2], [1, 3]]`, ranks 0 and 2 make up the first row,
/// which is a group along axis 1. Ranks 0 and 1 make up the first column, a group along axis 0:
///
/// ```no_run
/// use flow_comm::{Mesh, ProcessGroup};
///
/// let group = ProcessGroup::from_env()?; // four ranks
/// let mesh = Mesh::new(&group, &[0, 2, 1, 3], &[2, 2])?.with_names(&["data", "model"])?;
/// if group.rank() == 2 {
///     assert_eq!(mesh.coordinates(), Some(vec![0, 1]));
///     assert_eq!(mesh.group("model")?.ranks(), [0, 2]);
///     assert_eq!(mesh.group(0)?.ranks(), [2, 3]);
/// }
/// # Ok::<(), flow_comm::Error>(())
/// ```
#[derive(Clone)]
pub struct Mesh {
    /// The group whose ranks they are.
    parent: ProcessGroup,
    ranks: Vec<usize>,
    shape: Vec<usize>,
    names: Vec<String>,
    /// The groups by axis; none on ranks outside the mesh.
    groups: Vec<ProcessGroup>,
}

impl Mesh {
    /// Arranges `ranks`, in row-major order, in an array of this shape. All ranks of `group` call
    /// this with the same arguments, those outside the mesh as well. It makes the groups of an axis
    /// in one collective, so a mesh with three axes costs three.
    ///
    /// # Errors
    ///
    /// `ranks` are no different ranks of `group`, or fill no array of this shape; on all ranks,
    /// arguments that differ, and too little shared memory.
    pub fn new(group: &ProcessGroup, ranks: &[usize], shape: &[usize]) -> Result<Self> {
        check_members(group, "Mesh::new", ranks)?;
        let size = shape.iter().try_fold(1_usize, |size, &extent| size.checked_mul(extent));
        if shape.is_empty() || size != Some(ranks.len()) {
            let reason = format!("{} ranks fill no array of shape {shape:?}", ranks.len());
            return Err(group.caller().argument("Mesh::new", reason));
        }
        let mut mesh = Self {
            parent: group.clone(),
            ranks: ranks.to_vec(),
            shape: shape.to_vec(),
            names: Vec::new(),
            groups: Vec::new(),
        };
        let coordinates = mesh.coordinates();
        for axis in 0..shape.len() {
            let members = coordinates.as_ref().map(|own| mesh.line(own, axis));
            let world = &group.core().world;
            let agreed = (ranks, shape, axis);
            let line = make_group(group, world, "Mesh::new", &agreed, members.as_deref())?;
            mesh.groups.extend(line);
        }
        Ok(mesh)
    }

    /// Names the axes, the outermost first.
    ///
    /// # Errors
    ///
    /// Not one name for each axis, or a name twice.
    pub fn with_names(mut self, names: &[&str]) -> Result<Self> {
        let different: HashSet<&&str> = names.iter().collect();
        if names.len() != self.shape.len() || different.len() != names.len() {
            let axes = self.shape.len();
            let reason = format!("{names:?} must be {axes} different names, one for each axis");
            return Err(self.parent.caller().argument("Mesh::with_names", reason));
        }
        self.names = names.iter().map(ToString::to_string).collect();
        Ok(self)
    }

    /// Returns the extent of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the names of the axes; empty if they have none.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the ranks in row-major order, by their numbers in the group that the mesh was made
    /// from.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Returns this rank's coordinate on each axis; `None` outside the mesh.
    pub fn coordinates(&self) -> Option<Vec<usize>> {
        let mut index = self.ranks.iter().position(|&rank| rank == self.parent.rank())?;
        let mut coordinates = vec![0; self.shape.len()];
        for (coordinate, extent) in coordinates.iter_mut().zip(&self.shape).rev() {
            *coordinate = index % extent;
            index /= extent;
        }
        Some(coordinates)
    }

    /// Returns the group along an axis: the ranks that differ from this one on that axis only. The
    /// same group at each call.
    ///
    /// # Errors
    ///
    /// There is no such axis, or this rank is outside the mesh.
    pub fn group<'a>(&self, axis: impl Into<Axis<'a>>) -> Result<&ProcessGroup> {
        let axis = self.axis("Mesh::group", axis.into())?;
        self.groups.get(axis).ok_or_else(|| self.outside("Mesh::group"))
    }

    /// Makes the groups of this rank unusable on all their ranks, whose waits end with `cause`: see
    /// [`Member::abort`](crate::Member::abort).
    pub fn abort(&self, cause: &str) {
        self.groups.iter().for_each(|group| group.abort(cause));
    }

    /// Returns the mesh of some axes through this rank: the ranks that differ from it on these axes
    /// only, in the given order of axes. It shares the groups of this mesh, so nothing is
    /// communicated.
    ///
    /// # Errors
    ///
    /// There is no such axis, an axis is given twice, or this rank is outside the mesh.
    pub fn sub_mesh(&self, axes: &[Axis]) -> Result<Self> {
        let operation = "Mesh::sub_mesh";
        let own = self.coordinates().ok_or_else(|| self.outside(operation))?;
        let axes: Vec<usize> =
            axes.iter().map(|&axis| self.axis(operation, axis)).collect::<Result<_>>()?;
        let different: HashSet<&usize> = axes.iter().collect();
        if axes.is_empty() || different.len() != axes.len() {
            let reason = format!("{axes:?} must be different axes");
            return Err(self.parent.caller().argument(operation, reason));
        }
        let mut indices = vec![self.index(&own) - self.offset(&own, &axes)];
        for &axis in &axes {
            let stride = self.stride(axis);
            let extents = 0..self.shape[axis];
            indices = indices
                .iter()
                .flat_map(|&index| extents.clone().map(move |c| index + c * stride))
                .collect();
        }
        Ok(Self {
            parent: self.parent.clone(),
            ranks: indices.iter().map(|&index| self.ranks[index]).collect(),
            shape: axes.iter().map(|&axis| self.shape[axis]).collect(),
            names: axes.iter().filter_map(|&axis| self.names.get(axis).cloned()).collect(),
            groups: axes.iter().map(|&axis| self.groups[axis].clone()).collect(),
        })
    }

    /// Returns the ranks along an axis through these coordinates.
    fn line(&self, coordinates: &[usize], axis: usize) -> Vec<usize> {
        let start = self.index(coordinates) - self.offset(coordinates, &[axis]);
        (0..self.shape[axis]).map(|c| self.ranks[start + c * self.stride(axis)]).collect()
    }

    /// Returns how far apart neighbours on an axis are in row-major order.
    fn stride(&self, axis: usize) -> usize {
        self.shape[axis + 1..].iter().product()
    }

    fn index(&self, coordinates: &[usize]) -> usize {
        let all: Vec<usize> = (0..self.shape.len()).collect();
        self.offset(coordinates, &all)
    }

    /// Returns what the coordinates on these axes add to the index in row-major order.
    fn offset(&self, coordinates: &[usize], axes: &[usize]) -> usize {
        axes.iter().map(|&axis| coordinates[axis] * self.stride(axis)).sum()
    }

    fn axis(&self, operation: &str, axis: Axis) -> Result<usize> {
        let number = match axis {
            Axis::Number(number) => Some(number).filter(|&number| number < self.shape.len()),
            Axis::Name(name) => self.names.iter().position(|known| known == name),
        };
        number.ok_or_else(|| {
            let reason = format!(
                "there is no axis {axis} in a mesh of shape {:?} with names {:?}",
                self.shape, self.names
            );
            self.parent.caller().argument(operation, reason)
        })
    }

    fn outside(&self, operation: &str) -> crate::Error {
        let reason = format!("this rank is not one of the mesh's, {:?}", self.ranks);
        self.parent.caller().argument(operation, reason)
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mesh({:?}, shape {:?}, names {:?})", self.ranks, self.shape, self.names)
    }
}
