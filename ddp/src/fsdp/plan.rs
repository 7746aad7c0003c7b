//! The memory that a model and its optimizer need, before they need it.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use flow_autograd::{OptimizerState, identity};
use flow_comm::ProcessGroup;
use tch::nn::Variables;
use tch::{Device, Kind, Tensor};

use super::machine_memory::{MachineMemory, size};
use super::shared_parameters::bytes_of;
use crate::bucket::assignment::{Caps, Item, assign};
use crate::error::{Error, Result};
use crate::model_check::agree;
use crate::optimizer_choice::{OptimizerChoice, one_line};

/// The caps of buckets, in MiB. They are smaller than those of a [`Ddp`](crate::Ddp), as each rank has the whole
/// gradients of a bucket in memory.
pub(super) const BUCKET_CAPS: [f64; 2] = [1.0, 4.0];

/// Bytes that the training of a model in an [`Fsdp`](crate::Fsdp) takes on a machine, on all its ranks together.
/// Activations are not among them, nor what an operation needs on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Parameters, which all ranks have in common.
    pub parameters: u64,
    /// Gradients of the parameters that are trained, of which each rank keeps a part.
    pub gradients: u64,
    /// [Ignored parameters](crate::FsdpBuilder::ignored_parameters) and their gradients, of all ranks.
    pub ignored: u64,
    /// The optimizer's state, of which each rank keeps a part.
    pub optimizer: u64,
    /// Whole gradients during backward, in two buckets of each rank, with the default
    /// [`bucket_cap_mb`](crate::FsdpBuilder::bucket_cap_mb).
    pub buckets: u64,
    /// The elements of the optimizer's state for each that is trained: 2 of Adam, 1 of SGD with momentum.
    pub state_elements: u64,
}

/// Memory that cannot be foretold.
#[derive(thiserror::Error, Debug)]
#[error("Fsdp::plan: {0}")]
pub struct PlanError(pub(super) String);

impl MemoryPlan {
    /// Counts the memory of the variables of a store with an optimizer.
    pub(crate) fn new(
        store: &Mutex<Variables>,
        choice: &OptimizerChoice,
        ranks: usize,
    ) -> Result<Self, PlanError> {
        let state_elements = state_elements(choice).map_err(|reason| {
            PlanError(format!("the optimizer cannot be made: {reason}; use one of tch's"))
        })?;
        Ok(Self::of(store, &choice.ignored, state_elements, ranks))
    }

    /// Counts the memory of the variables of a store.
    fn of(
        store: &Mutex<Variables>,
        ignored: &HashSet<usize>,
        state_elements: u64,
        ranks: usize,
    ) -> Self {
        let variables = store.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = HashSet::new();
        let mut parameters = 0;
        let mut of_each_rank = 0;
        let mut trained = Vec::new();
        for variable in &variables.trainable_variables {
            let tensor = &variable.tensor;
            if !seen.insert(identity(tensor)) {
                continue;
            }
            let bytes = bytes_of(tensor) as u64;
            if ignored.contains(&identity(tensor)) {
                of_each_rank += if tensor.requires_grad() { 2 * bytes } else { bytes };
                continue;
            }
            parameters += bytes;
            if tensor.requires_grad() {
                trained.push(Item { bytes: bytes_of(tensor), class: tensor.kind() as u8 });
            }
        }
        let gradients: u64 = trained.iter().map(|item| item.bytes as u64).sum();
        let waiting = if ranks > 1 { unreduced(&trained) } else { 0 };
        Self {
            parameters,
            gradients,
            ignored: ranks as u64 * of_each_rank,
            optimizer: state_elements * gradients,
            buckets: ranks as u64 * waiting,
            state_elements,
        }
    }

    /// Returns the sum of all.
    pub fn total(&self) -> u64 {
        self.certain() + self.buckets
    }

    /// Returns what is needed whatever the size of buckets.
    fn certain(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer + self.ignored
    }

    /// Returns what is wrong if these bytes are all that ranks can have.
    fn check(&self, there: u64) -> Result<(), String> {
        if self.certain() <= there {
            return Ok(());
        }
        let without_state = self.certain() - self.optimizer;
        let advice = if self.state_elements > 1 && without_state + self.gradients <= there {
            "without a second moment it would fit, as with SGD with momentum"
        } else if self.state_elements > 0 && without_state <= there {
            "without the optimizer's state it would fit, as with SGD without momentum"
        } else {
            "take a machine with more memory, or divide the model, as a pipeline does"
        };
        Err(format!(
            "Fsdp: training needs {} on this machine ({}), and {} are there: {advice}",
            size(self.certain()),
            self.certain_parts(),
            size(there)
        ))
    }

    fn certain_parts(&self) -> String {
        let mut text = format!(
            "{} of parameters, {} of gradients, {} of the optimizer's state",
            size(self.parameters),
            size(self.gradients),
            size(self.optimizer)
        );
        if self.ignored > 0 {
            text += &format!(", {} of ignored parameters", size(self.ignored));
        }
        text
    }

    /// Returns what is wrong if so many bytes are free while the ranks' own parameters are copied.
    fn check_copy(&self, available: u64) -> Result<(), String> {
        if self.parameters <= available {
            return Ok(());
        }
        Err(format!(
            "Fsdp: the parameters need {} once more on this machine, beside what each rank has of them, and \
             {} are free: take fewer ranks or a machine with more memory, or divide the model, as a \
             pipeline does",
            size(self.parameters),
            size(available)
        ))
    }
}

/// In a line, such as `31.0 GB: 8.0 GB of parameters, ...`.
impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = size(self.total());
        write!(f, "{total}: {}, {} in buckets", self.certain_parts(), size(self.buckets))
    }
}

/// Returns the error of a machine that has no room for the model that is to be wrapped. All ranks call
/// this.
pub(crate) fn check_wrapping(
    group: &ProcessGroup,
    store: &Mutex<Variables>,
    ignored: &HashSet<usize>,
) -> Result<()> {
    let plan = MemoryPlan::of(store, ignored, 0, group.local_world_size());
    let memory = MachineMemory::read();
    let there = there(group, memory)?;
    let available = memory.map_or(u64::MAX, |memory| memory.available);
    let checked = plan.check(there).and_then(|()| plan.check_copy(available));
    agree(group, checked.map_err(|reason| Error::fsdp(group, reason)))
}

/// Returns the error of a machine that has not enough memory to train a model with this optimizer. All
/// ranks call this.
pub(crate) fn check_optimizer(
    group: &ProcessGroup,
    store: &Mutex<Variables>,
    choice: &OptimizerChoice,
) -> Result<()> {
    // Of one that cannot be made, its maker says why.
    let state_elements = state_elements(choice).unwrap_or(0);
    let plan = MemoryPlan::of(store, &choice.ignored, state_elements, group.local_world_size());
    let checked = plan.check(there(group, MachineMemory::read())?);
    agree(group, checked.map_err(|reason| Error::fsdp(group, reason)))
}

/// Returns the bytes that the ranks of this machine can have: what they have now is of this training, or
/// may be freed. All ranks call this.
fn there(group: &ProcessGroup, memory: Option<MachineMemory>) -> Result<u64> {
    let own = [memory.map_or(0, |memory| memory.own as i64)];
    let mut all = vec![0; group.world_size()];
    group.all_gather(&own, &mut all)?;
    let Some(memory) = memory else { return Ok(u64::MAX) };
    let ranks = group.ranks_on_machine_of(group.rank());
    let owned: i64 = ranks.into_iter().map(|rank| all[rank]).sum();
    Ok(memory.available.saturating_add(owned as u64))
}

/// Returns the elements of state that an optimizer keeps for each of a parameter: it takes a step.
fn state_elements(choice: &OptimizerChoice) -> Result<u64, String> {
    let parameter = Tensor::zeros([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let optimizer = choice.build_for(&parameter).map_err(one_line)?;
    let gradient = Tensor::zeros([1], (Kind::Float, Device::Cpu));
    flow_autograd::set_grad(&parameter, Some(&gradient)).map_err(one_line)?;
    optimizer.step().map_err(one_line)?;
    let state = optimizer.state().map_err(one_line)?;
    Ok(state.tensors.iter().filter(|(name, _)| !name.ends_with(".step")).count() as u64)
}

/// Returns the most bytes of gradients that a rank has not reduced: those of a bucket, and of the one that
/// fills. `trained` is in the order of the parameters' use.
fn unreduced(trained: &[Item]) -> u64 {
    let order: Vec<usize> = (0..trained.len()).rev().collect();
    let buckets = assign(trained, &order, &Caps::mib(&BUCKET_CAPS));
    let bytes: Vec<u64> = buckets
        .iter()
        .map(|members| members.iter().map(|&member| trained[member].bytes as u64).sum())
        .collect();
    let windows = bytes.windows(bytes.len().clamp(1, 2));
    windows.map(|buckets| buckets.iter().sum()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use tch::nn::{Adam, AdamW, OptimizerConfig, RmsProp, Sgd, VarStore};

    use super::*;
    use crate::Fsdp;

    fn elements(config: impl OptimizerConfig + Send + 'static) -> u64 {
        state_elements(&OptimizerChoice::new(config, 0.1)).unwrap()
    }

    #[test]
    fn the_state_of_each_optimizer_is_counted() {
        assert_eq!(elements(Sgd::default()), 0);
        assert_eq!(elements(Sgd { momentum: 0.9, ..Default::default() }), 1);
        assert_eq!(elements(Adam::default()), 2);
        assert_eq!(elements(AdamW::default()), 2);
        assert_eq!(elements(RmsProp::default()), 1);
        assert_eq!(elements(RmsProp { momentum: 0.9, centered: true, ..Default::default() }), 3);
    }

    #[test]
    fn parameters_count_once_and_frozen_ones_have_no_gradient() {
        let vs = VarStore::new(Device::Cpu);
        let _ = vs.root().zeros("trained", &[1000]);
        let _ = vs.root().zeros("frozen", &[10]).set_requires_grad(false);
        let _ = vs.root().zeros_no_train("buffer", &[5000]);
        let plan = Fsdp::plan(&vs, Adam::default(), 2).unwrap();
        assert_eq!((plan.parameters, plan.gradients, plan.optimizer), (4040, 4000, 8000));
        assert_eq!((plan.buckets, plan.total()), (2 * 4000, 4040 + 4000 + 8000 + 8000));
        assert_eq!(Fsdp::plan(&vs, Sgd::default(), 1).unwrap().total(), 4040 + 4000);
    }

    #[test]
    fn ignored_parameters_count_for_each_rank() {
        let vs = VarStore::new(Device::Cpu);
        let _ = vs.root().zeros("common", &[1000]);
        let _ = vs.root().zeros("own", &[500]);
        let _ = vs.root().zeros("frozen", &[10]).set_requires_grad(false);
        let group = ProcessGroup::in_process(1).unwrap().remove(0);
        let builder = Fsdp::builder(&group).ignored_parameters(&["own", "frozen"]);
        let plan = builder.plan(&vs, Adam::default(), 3).unwrap();
        assert_eq!((plan.parameters, plan.gradients, plan.optimizer), (4000, 4000, 8000));
        assert_eq!((plan.ignored, plan.buckets), (3 * (2 * 2000 + 40), 3 * 4000));
        assert_eq!(plan.total(), 16_000 + 12_120 + 12_000);
        assert!(plan.check(28_119).unwrap_err().contains("0.0 MB of ignored parameters"));
        let builder = builder.ignored_parameters(&["another"]);
        let error = builder.plan(&vs, Adam::default(), 3).unwrap_err().to_string();
        assert!(error.starts_with("Fsdp::plan: ignored_parameters names another,"), "{error}");
    }

    /// Buckets of 1 MiB and 4 MiB: the last parameter's alone, and then two at a time.
    #[test]
    fn two_buckets_wait() {
        const MIB: usize = 1 << 20;
        let items = vec![Item { bytes: 3 * MIB, class: 0 }; 21];
        assert_eq!(unreduced(&items), 12 * MIB as u64);
        assert_eq!(unreduced(&items[..2]), 6 * MIB as u64);
        assert_eq!(unreduced(&items[..1]), 3 * MIB as u64);
        assert_eq!(unreduced(&[]), 0);
    }

    fn of_8_gb() -> MemoryPlan {
        MemoryPlan {
            parameters: 8_000_000_000,
            gradients: 8_000_000_000,
            ignored: 0,
            optimizer: 16_000_000_000,
            buckets: 100_000_000,
            state_elements: 2,
        }
    }

    #[test]
    fn a_small_machine_is_an_error_that_says_what_would_fit() {
        let plan = of_8_gb();
        let error = |there: u64| plan.check(there).unwrap_err();
        assert_eq!(plan.check(32_000_000_000), Ok(()));
        assert_eq!(
            error(24_000_000_000),
            "Fsdp: training needs 32.0 GB on this machine (8.0 GB of parameters, 8.0 GB of gradients, \
             16.0 GB of the optimizer's state), and 24.0 GB are there: without a second moment it would \
             fit, as with SGD with momentum"
        );
        assert!(error(16_000_000_000).contains("as with SGD without momentum"));
        assert!(error(15_900_000_000).contains("a machine with more memory"));
        let sgd = MemoryPlan { optimizer: 0, state_elements: 0, ..plan };
        assert!(sgd.check(15_900_000_000).unwrap_err().contains("a machine with more memory"));
        assert_eq!(plan.check_copy(8_000_000_000), Ok(()));
        let text = plan.check_copy(7_000_000_000).unwrap_err();
        assert!(text.contains("8.0 GB once more") && text.contains("7.0 GB are free"), "{text}");
    }

    #[test]
    fn a_plan_is_a_line() {
        assert_eq!(
            of_8_gb().to_string(),
            "32.1 GB: 8.0 GB of parameters, 8.0 GB of gradients, 16.0 GB of the optimizer's state, \
             100.0 MB in buckets"
        );
    }
}
