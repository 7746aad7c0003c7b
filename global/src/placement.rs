//! Placements: which ranks a tensor is placed on, as an array of ranks.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use flow_tensor::ProcessGroup;

use crate::error::{Error, Result};
use crate::runtime::Runtime;
use crate::sbp::{B, NdSbp, Sbp};

/// Ranks of a process group in an array of any number of axes. The order counts: in
/// `[[0, 2], [1, 3]]` rank 2 follows rank 0 on the second axis.
#[derive(Clone)]
pub struct Placement(Arc<Inner>);

struct Inner {
    /// Row-major.
    ranks: Vec<usize>,
    shape: Vec<usize>,
    /// Of the axes; empty if they have none.
    names: Vec<String>,
    /// None of an array of ranks only, on which there are no tensors.
    runtime: Option<Arc<Runtime>>,
}

impl PartialEq for Placement {
    fn eq(&self, other: &Self) -> bool {
        let one = &*self.0;
        let other = &*other.0;
        std::ptr::eq(one, other)
            || (one.ranks == other.ranks
                && one.shape == other.shape
                && one.runtime.as_ref().map(Arc::as_ptr) == other.runtime.as_ref().map(Arc::as_ptr))
    }
}

impl Eq for Placement {}

impl Hash for Placement {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (&self.0.ranks, &self.0.shape).hash(hasher);
    }
}

/// Nested arrays or vectors of ranks.
pub trait Ranks {
    /// Returns the extents of the array.
    ///
    /// # Errors
    /// Parts of it differ in shape: says which shapes they have.
    fn shape(&self) -> std::result::Result<Vec<usize>, String>;

    /// Appends the ranks, row-major.
    fn flatten(&self, ranks: &mut Vec<usize>);
}

impl Ranks for usize {
    fn shape(&self) -> std::result::Result<Vec<usize>, String> {
        Ok(Vec::new())
    }

    fn flatten(&self, ranks: &mut Vec<usize>) {
        ranks.push(*self);
    }
}

impl<T: Ranks> Ranks for [T] {
    fn shape(&self) -> std::result::Result<Vec<usize>, String> {
        let shapes = self.iter().map(Ranks::shape).collect::<std::result::Result<Vec<_>, _>>()?;
        let first = shapes.first().cloned().unwrap_or_default();
        match shapes.iter().find(|&shape| *shape != first) {
            Some(other) => Err(format!("parts have the shapes {first:?} and {other:?}")),
            None => Ok([vec![self.len()], first].concat()),
        }
    }

    fn flatten(&self, ranks: &mut Vec<usize>) {
        self.iter().for_each(|part| part.flatten(ranks));
    }
}

impl<T: Ranks, const N: usize> Ranks for [T; N] {
    fn shape(&self) -> std::result::Result<Vec<usize>, String> {
        self[..].shape()
    }

    fn flatten(&self, ranks: &mut Vec<usize>) {
        self[..].flatten(ranks);
    }
}

impl<T: Ranks> Ranks for Vec<T> {
    fn shape(&self) -> std::result::Result<Vec<usize>, String> {
        self[..].shape()
    }

    fn flatten(&self, ranks: &mut Vec<usize>) {
        self[..].flatten(ranks);
    }
}

impl Placement {
    /// Returns the same ranks, of a process group.
    pub(crate) fn on(self, group: &ProcessGroup) -> Result<Self> {
        let size = group.world_size();
        if let Some(&rank) = self.ranks().iter().find(|&&rank| rank >= size) {
            return Err(Error::NoSuchRank { rank, size, placement: self.to_string() });
        }
        let ranks = self.0.ranks.clone();
        let shape = self.0.shape.clone();
        let runtime = Some(Runtime::of(group));
        Ok(Self(Arc::new(Inner { ranks, shape, names: Vec::new(), runtime })))
    }

    /// Makes an array of ranks, without a group: there are no tensors on it.
    ///
    /// # Errors
    /// No ranks, a rank twice, or parts of different shapes.
    pub fn of(ranks: impl Ranks) -> Result<Self> {
        let mut flat = Vec::new();
        ranks.flatten(&mut flat);
        Self::with_shape(flat, ranks.shape().map_err(Error::Ragged)?)
    }

    /// Puts `ranks`, row-major, in an array of this shape.
    ///
    /// # Errors
    /// No ranks, a rank twice, or ranks that do not fill the array.
    pub fn with_shape(ranks: Vec<usize>, shape: Vec<usize>) -> Result<Self> {
        if ranks.is_empty() {
            return Err(Error::NoRanks);
        }
        if shape.iter().product::<usize>() != ranks.len() || shape.is_empty() {
            let reason = format!("{} ranks are no array of shape {shape:?}", ranks.len());
            return Err(Error::Ragged(reason));
        }
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        let repeated = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        let placement = Self(Arc::new(Inner { ranks, shape, names: Vec::new(), runtime: None }));
        match repeated {
            Some(rank) => Err(Error::Repeated(rank, placement.to_string())),
            None => Ok(placement),
        }
    }

    /// Returns the same placement, whose axes have names: `placement.named(["data", "tensor"])`.
    /// Placements that differ in names only are equal.
    ///
    /// # Errors
    /// Not one name for each axis, or a name twice.
    pub fn named(self, names: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let mut named = names.iter().enumerate();
        let is_repeated = named.any(|(index, name)| names[..index].contains(name));
        if names.len() != self.axes() || is_repeated {
            return Err(Error::Names { names, placement: self.to_string() });
        }
        let ranks = self.0.ranks.clone();
        let shape = self.0.shape.clone();
        let runtime = self.0.runtime.clone();
        Ok(Self(Arc::new(Inner { ranks, shape, names, runtime })))
    }

    /// Returns the names of the axes; empty if they have none.
    pub fn names(&self) -> &[String] {
        &self.0.names
    }

    /// Returns the axis with this name.
    ///
    /// # Errors
    /// There is none.
    pub fn axis(&self, name: &str) -> Result<usize> {
        let found = self.0.names.iter().position(|other| other == name);
        found.ok_or_else(|| Error::NoSuchAxis {
            name: name.to_owned(),
            placement: self.to_string(),
            names: self.0.names.clone(),
        })
    }

    /// Returns SBPs by the names of their axes, the other axes B: `placement.sbp([("tensor",
    /// S(1))])?`.
    ///
    /// # Errors
    /// An axis has no such name.
    pub fn sbp<'a>(&self, of: impl IntoIterator<Item = (&'a str, Sbp)>) -> Result<NdSbp> {
        let mut sbp = vec![B; self.axes()];
        for (name, of_axis) in of {
            sbp[self.axis(name)?] = of_axis;
        }
        Ok(sbp)
    }

    /// Returns the ranks, row-major.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// Returns the extent of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    pub(crate) fn runtime(&self) -> Result<&Arc<Runtime>> {
        self.0.runtime.as_ref().ok_or_else(|| Error::NoGroup(self.to_string()))
    }

    /// Returns the same ranks, for what a runtime keeps.
    pub(crate) fn without_group(&self) -> Self {
        let ranks = self.0.ranks.clone();
        let shape = self.0.shape.clone();
        Self(Arc::new(Inner { ranks, shape, names: Vec::new(), runtime: None }))
    }

    /// Returns the number of axes.
    pub fn axes(&self) -> usize {
        self.0.shape.len()
    }

    /// Returns where a rank is among [`Placement::ranks`].
    pub fn position(&self, rank: usize) -> Option<usize> {
        self.0.ranks.iter().position(|&other| other == rank)
    }

    /// Returns the coordinates of a position, one for each axis.
    pub fn coordinates(&self, position: usize) -> Vec<usize> {
        let mut rest = position;
        let mut coordinates: Vec<usize> = self
            .0
            .shape
            .iter()
            .rev()
            .map(|&extent| {
                let coordinate = rest % extent;
                rest /= extent;
                coordinate
            })
            .collect();
        coordinates.reverse();
        coordinates
    }

    /// Returns the position with these coordinates.
    pub fn position_at(&self, coordinates: &[usize]) -> usize {
        coordinates
            .iter()
            .zip(&self.0.shape)
            .fold(0, |position, (at, extent)| position * extent + at)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn nested(f: &mut fmt::Formatter<'_>, ranks: &[usize], shape: &[usize]) -> fmt::Result {
            let Some((&extent, inner)) = shape.split_first() else {
                return write!(f, "{}", ranks[0]);
            };
            f.write_str("[")?;
            for (index, part) in ranks.chunks(ranks.len() / extent).enumerate() {
                f.write_str(if index == 0 { "" } else { ", " })?;
                nested(f, part, inner)?;
            }
            f.write_str("]")
        }
        nested(f, &self.0.ranks, &self.0.shape)
    }
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Placement({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_shape_are_kept() {
        let placement = Placement::of([[0, 2], [1, 3]]).unwrap();
        assert_eq!((placement.ranks(), placement.shape()), (&[0, 2, 1, 3][..], &[2, 2][..]));
        assert_eq!(placement.to_string(), "[[0, 2], [1, 3]]");
        assert_eq!(placement.position(2).map(|at| placement.coordinates(at)), Some(vec![0, 1]));
        assert_eq!(placement.position(4), None);
        assert_ne!(placement, Placement::of([[0, 1], [2, 3]]).unwrap());
        let deep = Placement::of([[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]).unwrap();
        assert_eq!(deep.shape(), [2, 2, 3]);
        for position in 0..12 {
            assert_eq!(deep.position_at(&deep.coordinates(position)), position);
        }
    }

    #[test]
    fn axes_have_names() {
        let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
        let named = mesh.clone().named(["data", "tensor"]).unwrap();
        assert_eq!(named, mesh);
        assert_eq!(named.axis("tensor").unwrap(), 1);
        assert_eq!(named.sbp([("tensor", crate::S(1))]).unwrap(), [B, crate::S(1)]);
        let error = named.axis("pipe").unwrap_err().to_string();
        let expected = "the placement [[0, 1], [2, 3]] has no axis \"pipe\"; its axes are named \
                        [\"data\", \"tensor\"]";
        assert_eq!(error, expected);
        let error = mesh.named(["a", "a"]).unwrap_err().to_string();
        let expected = "the names [\"a\", \"a\"] do not fit the placement [[0, 1], [2, 3]]: each axis \
                        needs a name of its own";
        assert_eq!(error, expected);
    }

    #[test]
    fn what_is_no_array_of_ranks_is_an_error() {
        let none: [usize; 0] = [];
        assert!(matches!(Placement::of(none), Err(Error::NoRanks)));
        let error = Placement::of([0, 1, 0]).unwrap_err();
        let expected = "rank 0 is twice in the placement [0, 1, 0]; give each rank one position";
        assert_eq!(error.to_string(), expected);
        let error = Placement::of(vec![vec![0, 1], vec![2]]).unwrap_err();
        let expected =
            "the ranks of a placement must fill an array: parts have the shapes [2] and [1]";
        assert_eq!(error.to_string(), expected);
    }
}
