//! The first dimension of tensors, in blocks of different lengths.

use flow_comm::ProcessGroup;
use tch::Tensor;

use crate::error::{Result, failed};
use crate::tensors::units;

/// The length of each rank's block, in elements of the buffer.
pub(crate) type Counts = Vec<usize>;

/// A tensor's first dimension, which is divided among ranks.
pub(crate) struct Rows<'a> {
    group: &'a ProcessGroup,
    operation: &'static str,
    size: Vec<i64>,
    /// How many elements of a buffer a row is, see [`HostTensor`](crate::tensors::HostTensor).
    elements: usize,
}

impl<'a> Rows<'a> {
    /// Looks at a tensor, which must have a dimension.
    pub fn of(group: &'a ProcessGroup, operation: &'static str, tensor: &Tensor) -> Result<Self> {
        let size = tensor.size();
        let Some((_, row)) = size.split_first() else {
            return Err(failed(group, operation)("the tensor has no first dimension".into()));
        };
        let elements = row.iter().product::<i64>() as usize * units(tensor.kind());
        Ok(Self { group, operation, size, elements })
    }

    /// Checks that `counted` is the length of the first dimension.
    pub fn check(&self, what: &str, counted: Option<usize>) -> Result<()> {
        if counted == Some(self.size[0] as usize) {
            return Ok(());
        }
        let counted = counted.map_or("missing".into(), |counted| counted.to_string());
        let reason = format!(
            "{what} is {counted}, but the first dimension of {:?} is {}",
            self.size, self.size[0]
        );
        Err(failed(self.group, self.operation)(reason))
    }

    /// Blocks of this many rows as numbers of elements, and the shape of all of them together.
    pub fn blocks(&self, counts: &[usize]) -> Result<(Counts, Vec<i64>)> {
        let failed = failed(self.group, self.operation);
        if counts.len() != self.group.world_size() {
            let ranks = self.group.world_size();
            return Err(failed(format!(
                "{} counts for {ranks} ranks: give one for each",
                counts.len()
            )));
        }
        let total = sum(counts)
            .filter(|total| total.checked_mul(self.elements.max(1)).is_some())
            .and_then(|total| i64::try_from(total).ok())
            .ok_or_else(|| failed("the counts are too large".into()))?;
        let mut shape = self.size.clone();
        shape[0] = total;
        Ok((counts.iter().map(|count| count * self.elements).collect(), shape))
    }
}

/// Returns the sum of counts, if it is a number.
pub(crate) fn sum(counts: &[usize]) -> Option<usize> {
    counts.iter().try_fold(0, |sum: usize, &count| sum.checked_add(count))
}
