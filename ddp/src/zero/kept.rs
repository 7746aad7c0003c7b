//! Gradients of which each rank keeps its parts only.

use std::ops::Range;

use flow_comm::ProcessGroup;
use tch::{Kind, Tensor};

use super::sharded_parameter::ShardedParameter;
use crate::error::Result;

/// Where an optimizer finds this rank's parts of gradients, of a model that shards them. Parameters have
/// their places in the optimizer.
pub(crate) trait KeptGradients: Send + Sync {
    /// Returns the ranks that share the state with `rank`.
    fn sharers(&self, group: &ProcessGroup, rank: usize) -> Vec<usize>;

    /// Parts the parameters among the sharers. The error says why an optimizer cannot have them.
    fn part(&self, parameters: &mut [ShardedParameter]) -> Result<(), String>;

    /// Returns the elements of a parameter that are stepped on this rank, which are these.
    fn own_part(
        &self,
        parameter: &ShardedParameter,
        place: usize,
        elements: &Range<usize>,
    ) -> Result<Tensor, String>;

    /// Returns the memory of this rank's part of a gradient; None of a parameter that is never trained.
    fn memory(&self, place: usize) -> Option<Tensor>;

    /// Returns whether a gradient is there.
    fn is_there(&self, place: usize) -> bool;

    /// Returns this rank's parts of parameters, whose `.grad` is this rank's part of the gradients.
    fn parts(&self) -> Result<Vec<Tensor>>;

    /// Checks that a step may begin. The error says what is wrong.
    fn check(&self) -> Result<(), String>;

    /// Waits until all ranks have come to the step.
    fn begin_step(&self, group: &ProcessGroup) -> Result<()>;

    /// Notes that this rank has stepped its parts.
    fn has_stepped(&self);

    /// Waits until forward may use what ranks have stepped.
    fn end_step(&self, group: &ProcessGroup) -> Result<()>;

    /// Clips the norm of all ranks' gradients together to `max`, and returns what it was. All ranks call
    /// this.
    fn clip_grad_norm(&self, group: &ProcessGroup, max: f64) -> Result<f64>;

    /// Drops the gradients.
    fn clear(&self) -> Result<(), flow_autograd::Error>;

    /// Has a failure of this rank reach the others.
    fn abort(&self, cause: &str);
}

/// Clips the norm of gradients together to `max`, of which these `ranks` have all, and returns what it was.
/// All ranks call this.
pub(crate) fn clip_grad_norm(
    group: &ProcessGroup,
    ranks: &[usize],
    gradients: Vec<Tensor>,
    max: f64,
) -> Result<f64> {
    let mut square = 0.0;
    for gradient in &gradients {
        square += gradient.abs().norm_scalaropt_dtype(2.0, Kind::Double).double_value(&[]).powi(2);
    }
    let mut squares = vec![0.0; group.world_size()];
    group.all_gather(&[square], &mut squares)?;
    let norm = ranks.iter().map(|&rank| squares[rank]).sum::<f64>().sqrt();
    let factor = max / (norm + 1e-6);
    if factor < 1.0 {
        for mut gradient in gradients {
            let _ = tch::no_grad(|| gradient.g_mul_scalar_(factor));
        }
    }
    Ok(norm)
}
