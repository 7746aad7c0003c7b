//! A sparse gradient: the entries of all ranks are gathered and added up, as in PyTorch.

use flow_comm::{ProcessGroup, ReduceOp};
use flow_tensor::TensorCollectives;
use tch::{Device, Kind, Tensor};

use super::Bucket;
use super::pending::Pending;
use crate::error::{Result, failed};
use crate::parameter::Parameter;
use crate::stats::BucketTimes;

/// The gradient of one parameter.
pub(crate) struct SparseBucket {
    shape: Vec<i64>,
    kind: Kind,
    device: Device,
    op: ReduceOp,
    gradient: Option<Tensor>,
    reduced: Option<Tensor>,
    /// Bytes of this rank's entries in the last reduction.
    bytes: usize,
}

impl SparseBucket {
    /// Makes the bucket of a parameter; `op` is Avg or Sum.
    pub fn new(parameter: &Parameter, op: ReduceOp) -> Self {
        Self {
            shape: parameter.shape.clone(),
            kind: parameter.kind,
            device: parameter.tensor.device(),
            op,
            gradient: None,
            reduced: None,
            bytes: 0,
        }
    }

    /// Returns indices and values of this rank's entries, one in each row. The indices have
    /// `sparse_dim` columns.
    fn entries(&self, gradient: Option<&Tensor>, sparse_dim: i64) -> (Tensor, Tensor) {
        if let Some(gradient) = gradient {
            return (gradient.indices().transpose(0, 1).contiguous(), gradient.values());
        }
        let rows = [&[0], &self.shape[sparse_dim as usize..]].concat();
        let indices = Tensor::zeros([0, sparse_dim], (Kind::Int64, self.device));
        (indices, Tensor::zeros(rows, (self.kind, self.device)))
    }

    fn tensor(&self, indices: &Tensor, values: &Tensor, is_coalesced: bool) -> Tensor {
        let options = (values.kind(), self.device);
        let shape = &self.shape[..];
        Tensor::sparse_coo_tensor_indices_size(indices, values, shape, options, is_coalesced)
    }
}

impl Bucket for SparseBucket {
    fn set_step(&mut self, _: u32) {}

    fn mark_ready(&mut self, _: usize, gradient: &Tensor, _: bool) -> Result<bool> {
        self.gradient = Some(gradient.shallow_clone());
        Ok(false)
    }

    fn mark_unused(&mut self, _: usize) -> Result<()> {
        self.gradient = None;
        Ok(())
    }

    fn waits_for_ranks(&self) -> bool {
        true
    }

    fn launch(&mut self) -> flow_comm::Result<Pending> {
        Ok(Pending::at_end())
    }

    fn complete(&mut self, group: &ProcessGroup) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let own = self.gradient.as_ref().map(Tensor::coalesce);
        let described = match &own {
            Some(own) => [own.sparse_dim(), own.values().size()[0]],
            None => [0, 0],
        };
        let mut of_ranks = vec![0; 2 * group.world_size()];
        group.all_gather(&described, &mut of_ranks)?;
        let mut sparse_dims = Vec::new();
        let mut counts = Vec::new();
        for described in of_ranks.chunks_exact(2) {
            sparse_dims.push(described[0]);
            counts.push(described[1] as usize);
        }
        sparse_dims.retain(|&dim| dim > 0);
        sparse_dims.sort_unstable();
        sparse_dims.dedup();
        if sparse_dims.len() > 1 {
            let reason = format!(
                "the sparse gradients of ranks have indices of {sparse_dims:?} dimensions: all ranks \
                 compute them alike"
            );
            return Err(failed(group, reason));
        }
        let sparse_dim = sparse_dims.first().copied().unwrap_or(1);
        let (mut indices, mut values) = self.entries(own.as_ref(), sparse_dim);
        self.bytes = indices.numel() * Kind::Int64.elt_size_in_bytes()
            + values.numel() * self.kind.elt_size_in_bytes();
        if counts.iter().any(|&count| count > 0) {
            indices = group.all_gather_v_tensor(&indices, &counts)?;
            values = group.all_gather_v_tensor(&values, &counts)?;
        }
        // The sum of half precision is rounded once.
        let wide = if self.kind == Kind::Double { Kind::Double } else { Kind::Float };
        let sum = self.tensor(&indices.transpose(0, 1), &values.to_kind(wide), false).coalesce();
        let mut values = sum.values();
        if self.op == ReduceOp::Avg {
            values /= group.world_size() as f64;
        }
        self.reduced = Some(self.tensor(&sum.indices(), &values.to_kind(self.kind), true));
        Ok(())
    }

    fn join_gradients(&self) -> Result<()> {
        Ok(())
    }

    fn gradient(&self, _: usize) -> Option<&Tensor> {
        self.gradient.as_ref()
    }

    fn reduced_grad(&self, _: usize) -> Option<&Tensor> {
        self.reduced.as_ref()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn times(&self) -> Option<BucketTimes> {
        None
    }

    fn reset(&mut self, _: bool) {
        self.gradient = None;
        self.reduced = None;
    }
}
