//! Parts of a batch.

use flow_autograd::BoxError;
use flow_global::{GlobalTensor, Placement, Sbp, from_local};
use serde::{Deserialize, Serialize};
use tch::Tensor;

/// A part of a batch. The parts pass the stages one after the other. If the batch cannot be divided
/// evenly, the first parts have one row more (`torch.tensor_split`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MicroBatch {
    /// Its number, from 0.
    pub index: usize,
    /// Its first row in the batch.
    pub start: i64,
    /// Its number of rows.
    pub rows: i64,
    /// The number of rows of the batch.
    pub batch_rows: i64,
}

impl MicroBatch {
    /// Makes one of `count` parts.
    pub(crate) fn new(index: usize, count: usize, batch_rows: i64) -> Self {
        let at = index as i64;
        let count = count as i64;
        let least = batch_rows / count;
        let longer = batch_rows % count;
        let start = at * least + at.min(longer);
        Self { index, start, rows: least + i64::from(at < longer), batch_rows }
    }

    /// Returns its share of the batch.
    pub(crate) fn weight(&self) -> f64 {
        self.rows as f64 / self.batch_rows as f64
    }

    /// Takes its rows of a tensor that has the rows of the batch, such as the labels. Of a global tensor
    /// each rank takes these rows of its local.
    ///
    /// # Panics
    /// The tensor has another number of rows than the batch. In a loss this is an error of the step.
    pub fn of(&self, tensor: &Tensor) -> Tensor {
        self.try_of(tensor).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) fn try_of(&self, tensor: &Tensor) -> Result<Tensor, BoxError> {
        if !tensor.is_global() {
            self.check(tensor)?;
            return Ok(tensor.f_narrow(0, self.start, self.rows)?);
        }
        let placement = tensor.placement()?;
        let sbp = tensor.sbp()?;
        let local = tensor.to_local()?;
        self.check(&local)?;
        let parts = parts_of_rows(&placement, &sbp);
        let mut sizes = tensor.size();
        if sizes[0] != self.batch_rows * parts as i64 {
            return Err(format!(
                "a batch of {} rows is split unevenly: this rank has {}; give a batch whose rows \
                 {parts} can divide",
                sizes[0], self.batch_rows
            )
            .into());
        }
        sizes[0] = self.rows * parts as i64;
        Ok(from_local(&local.f_narrow(0, self.start, self.rows)?, sizes, &placement, sbp)?)
    }

    fn check(&self, tensor: &Tensor) -> Result<(), BoxError> {
        match batch_rows(tensor) {
            Some(rows) if rows == self.batch_rows => Ok(()),
            _ => Err(format!(
                "a tensor of shape {:?} is no batch of {} rows: give one whose first dimension is \
                 the batch",
                tensor.size(),
                self.batch_rows
            )
            .into()),
        }
    }
}

/// Joins the tensors of micro-batches, the reverse of [`MicroBatch::of`].
pub(crate) fn join(parts: &[(MicroBatch, Tensor)]) -> Result<Tensor, BoxError> {
    let Some((_, first)) = parts.first() else { return Err("there is nothing to join".into()) };
    if !first.is_global() {
        let parts: Vec<&Tensor> = parts.iter().map(|(_, part)| part).collect();
        return Ok(Tensor::f_cat(&parts, 0)?);
    }
    if let [(_, whole)] = parts {
        return Ok(whole.shallow_clone());
    }
    let placement = first.placement()?;
    let sbp = first.sbp()?;
    let mut locals = Vec::new();
    for (micro_batch, part) in parts {
        let local = part.to_local()?;
        if part.sbp()? != sbp || batch_rows(&local) != Some(micro_batch.rows) {
            return Err(format!(
                "an output of shape {:?} and SBP {:?} has not the {} rows that each rank has of \
                 micro-batch {}: split its rows as those of the batch",
                part.size(),
                part.sbp()?,
                micro_batch.rows,
                micro_batch.index
            )
            .into());
        }
        locals.push(local);
    }
    let local = Tensor::f_cat(&locals, 0)?;
    let mut sizes = first.size();
    sizes[0] = local.size()[0] * parts_of_rows(&placement, &sbp) as i64;
    Ok(from_local(&local, sizes, &placement, sbp)?)
}

/// Returns the number of parts into which ranks split the rows of a global tensor.
fn parts_of_rows(placement: &Placement, sbp: &[Sbp]) -> usize {
    let mut parts = 1;
    for (&sbp, &ranks) in sbp.iter().zip(placement.shape()) {
        if sbp == Sbp::Split(0) {
            parts *= ranks;
        }
    }
    parts
}

/// Returns the number of rows of this rank's part of a batch.
pub(crate) fn local_rows(tensor: &Tensor) -> Result<Option<i64>, BoxError> {
    if tensor.is_global() {
        return Ok(batch_rows(&tensor.to_local()?));
    }
    Ok(batch_rows(tensor))
}

fn batch_rows(tensor: &Tensor) -> Option<i64> {
    tensor.size().first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_of_tensor_split() {
        let batch = Tensor::arange(11, (tch::Kind::Int64, tch::Device::Cpu));
        for count in 1..=11 {
            let parts = batch.tensor_split(count as i64, 0);
            for (index, part) in parts.iter().enumerate() {
                assert_eq!(MicroBatch::new(index, count, 11).of(&batch), *part);
            }
        }
    }
}
