//! Local SGD: ranks average their parameters every few steps, instead of gradients in each.

use std::collections::HashSet;

use flow_comm::{ProcessGroup, ReduceOp};
use flow_tensor::TensorCollectives;
use tch::Tensor;
use tch::nn::VarStore;

use crate::error::{Error, Result};
use crate::model_check::first_mismatch;

/// Averages the parameters of a model over all ranks every few steps (S. U. Stich, "Local SGD
/// Converges Fast and Communicates Little", 2018). This pays where the network is slow.
///
/// Call [`average_parameters`](Self::average_parameters) after each step of the optimizer. Gradients
/// are averaged in the first steps only, or only within a machine: see
/// [`PostLocalSgd`](crate::comm_hooks::PostLocalSgd).
///
/// ```no_run
/// use flow_ddp::comm_hooks::PostLocalSgd;
/// use flow_ddp::{Ddp, ModelAverager, ProcessGroup};
/// use tch::nn::{self, ModuleT, OptimizerConfig};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = ProcessGroup::from_env()?;
/// # let batches = Vec::<(tch::Tensor, tch::Tensor)>::new();
/// # let vs = nn::VarStore::new(tch::Device::Cpu);
/// # let net = nn::linear(vs.root(), 784, 10, Default::default());
/// let alone = group.split(Some(group.rank()), 0)?.expect("each rank is in a group");
/// let hook = PostLocalSgd::new(&alone)?.start_iter(100);
/// let model = Ddp::builder(&group).comm_hook(hook).wrap(net, &vs)?;
/// let mut averager = ModelAverager::periodic(&group, 4, 100)?;
/// let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
/// for (x, y) in &batches {
///     optimizer.backward_step(&model.forward_t(x, true).cross_entropy_for_logits(y));
///     averager.average_parameters(&vs)?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ModelAverager {
    /// Periods and groups, from the smallest to the largest.
    levels: Vec<(u64, ProcessGroup)>,
    warmup_steps: u64,
    /// The step from which periods count.
    origin: u64,
    step: u64,
}

impl ModelAverager {
    /// Returns an averager over all ranks of `group` that begins after `warmup_steps`, and averages
    /// every `period` steps from then on: PyTorch's `PeriodicModelAverager`.
    ///
    /// # Errors
    ///
    /// The period is 0.
    pub fn periodic(group: &ProcessGroup, period: u64, warmup_steps: u64) -> Result<Self> {
        check(group, &[(period, group.world_size())])?;
        let levels = vec![(period, group.clone())];
        Ok(Self { levels, warmup_steps, origin: warmup_steps, step: 0 })
    }

    /// Returns an averager over groups of several sizes: PyTorch's `HierarchicalModelAverager`. Each
    /// pair is a period and the number of ranks, in the order of `group`, that average then. In a
    /// step that several periods divide, the last of them counts. All ranks of `group` call this.
    ///
    /// # Errors
    ///
    /// A period is 0, or not above the one before. A size does not divide the group's, or the last
    /// one is not the group's. Other ranks have other periods, sizes or first steps. A failure of the
    /// group.
    pub fn hierarchical(
        group: &ProcessGroup,
        periods_and_sizes: &[(u64, usize)],
        warmup_steps: u64,
    ) -> Result<Self> {
        let lines = [format!("averages {periods_and_sizes:?} after {warmup_steps} steps")];
        if let Some(difference) = first_mismatch(group, &lines)? {
            return Err(unfit(group, format!("ranks differ: {difference}")));
        }
        check(group, periods_and_sizes)?;
        let mut levels = Vec::with_capacity(periods_and_sizes.len());
        for &(period, size) in periods_and_sizes {
            let color = group.rank() / size;
            let part = group.split(Some(color), 0)?.unwrap_or_else(|| group.clone());
            levels.push((period, part));
        }
        Ok(Self { levels, warmup_steps, origin: 0, step: 0 })
    }

    /// Averages the trainable variables of `vs`, if it is time to. Returns whether it was. All ranks
    /// call this after each step.
    ///
    /// # Errors
    ///
    /// A failure of the group. On a CPU also ranks that are in different steps.
    pub fn average_parameters(&mut self, vs: &VarStore) -> Result<bool> {
        let step = self.step;
        self.step += 1;
        if step < self.warmup_steps {
            return Ok(false);
        }
        let passed = step - self.origin;
        let Some((_, group)) =
            self.levels.iter().rfind(|(period, _)| passed.is_multiple_of(*period))
        else {
            return Ok(false);
        };
        // Ranks in different steps must not take each other's parameters.
        let group = group.with_digest(self.step);
        tch::no_grad(|| {
            let mut parameters = trained(vs);
            for parameter in parameters.iter_mut().filter(|parameter| parameter.is_complex()) {
                *parameter = parameter.view_as_real();
            }
            group.all_reduce_coalesced(&mut parameters, ReduceOp::Avg)
        })?;
        Ok(true)
    }

    /// Returns how many steps there have been: what a checkpoint keeps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Sets how many steps there have been, from a checkpoint.
    pub fn resume(&mut self, step: u64) {
        self.step = step;
    }
}

fn check(group: &ProcessGroup, periods_and_sizes: &[(u64, usize)]) -> Result<()> {
    let ranks = group.world_size();
    let mut before = 0;
    for &(period, size) in periods_and_sizes {
        if period <= before {
            return Err(unfit(group, format!("the period {period} must be above {before}")));
        }
        if !ranks.is_multiple_of(size) {
            return Err(unfit(group, format!("{size} ranks must divide the group's {ranks}")));
        }
        before = period;
    }
    match periods_and_sizes.last() {
        Some(&(_, size)) if size == ranks => Ok(()),
        _ => Err(unfit(group, format!("the last level must have all {ranks} ranks"))),
    }
}

fn unfit(group: &ProcessGroup, reason: String) -> Error {
    Error::model(group, format!("model averager: {reason}"))
}

/// Returns the parameters that are trained, each once.
pub(crate) fn trained(vs: &VarStore) -> Vec<Tensor> {
    let mut seen = HashSet::new();
    let trained = vs.trainable_variables().into_iter().filter(Tensor::requires_grad);
    trained.filter(|tensor| seen.insert(flow_autograd::identity(tensor))).collect()
}
