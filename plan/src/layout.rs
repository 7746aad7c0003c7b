//! The layout of a job on its ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::schedule::ScheduleKind;

/// The part of the forward that the backward computes again, so that fewer activations are kept
/// (Korthikanti et al. 2022).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Nothing.
    None,
    /// The scores of attention.
    Selective,
    /// Each layer, from its input.
    Full,
}

impl Recompute {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        }
    }
}

/// The numbers of samples that a step may have.
pub(crate) const BATCHES: std::ops::RangeInclusive<usize> = 1..=1 << 32;

/// The layout of a job: a mesh of `pipeline` x `data` x `tensor` ranks, and their work. Ranks of tensor
/// parallelism are neighbours.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Layout {
    /// Ranks that share a batch.
    pub data: usize,
    /// Ranks that share each layer.
    pub tensor: usize,
    /// Ranks that share the list of layers.
    pub pipeline: usize,
    /// Samples that pass the pipeline at once.
    pub micro_batch: usize,
    /// The order of forwards and backwards.
    pub schedule: ScheduleKind,
    /// Stages of a rank: 2 for zb-v, 2 or more for interleaved, else 1.
    pub chunks: usize,
    /// The stage of ZeRO (Rajbhandari et al. 2020). Ranks of data parallelism share out: with 0 nothing,
    /// with 1 the optimizer's state, with 2 gradients too, with 3 weights too.
    pub zero: u8,
    /// Whether the ranks of a node have the weights once in common, beside ZeRO 2, as in Flow's `Fsdp`.
    pub shared_weights: bool,
    /// The part of the forward that the backward computes again.
    pub recompute: Recompute,
    /// Whether ranks of tensor parallelism share out the activations between its matrix products.
    pub sequence_parallel: bool,
}

impl Layout {
    /// Returns the number of all ranks.
    pub fn ranks(&self) -> usize {
        self.data.saturating_mul(self.tensor).saturating_mul(self.pipeline)
    }

    /// Returns the number of stages of the model.
    pub fn stages(&self) -> usize {
        self.pipeline.saturating_mul(self.chunks)
    }

    /// Returns the number of micro-batches of a batch that pass each pipeline.
    pub fn micro_batches(&self, batch: usize) -> usize {
        batch / self.data.saturating_mul(self.micro_batch).max(1)
    }

    /// Returns an error unless the layout divides the model and the batch, and the cluster can have it.
    pub(crate) fn check(&self, model: &Model, batch: usize, cluster: &Cluster) -> Result<()> {
        match self.reason_against(model, batch, cluster) {
            None => Ok(()),
            Some(reason) => Err(Error::Layout { layout: self.to_string(), reason }),
        }
    }

    /// Returns why the layout is impossible, or None if it is possible.
    pub(crate) fn reason_against(
        &self,
        model: &Model,
        batch: usize,
        cluster: &Cluster,
    ) -> Option<String> {
        let Self { data, tensor, pipeline, micro_batch, chunks, .. } = *self;
        if [data, tensor, pipeline, micro_batch, chunks].contains(&0) {
            return Some("all sizes are at least 1".into());
        }
        let name = self.schedule.name();
        match self.schedule {
            ScheduleKind::Interleaved if chunks < 2 => {
                return Some("interleaved takes 2 chunks or more".into());
            }
            ScheduleKind::ZbV if chunks != 2 => return Some("zb-v takes 2 chunks".into()),
            ScheduleKind::Gpipe | ScheduleKind::OneFOneB | ScheduleKind::ZbH1 if chunks != 1 => {
                return Some(format!("{name} takes 1 chunk, not {chunks}"));
            }
            _ => {}
        }
        if self.zero > 3 {
            return Some("ZeRO stages go from 0 to 3".into());
        }
        if let Some(reason) = self.reason_against_sharing(cluster) {
            return Some(reason.into());
        }
        if !BATCHES.contains(&batch) {
            return Some(format!("a batch of {batch}; give 1 to 2^32 samples"));
        }
        if !model.tensor_parallel.is_multiple_of(tensor) {
            let most = model.tensor_parallel;
            return Some(format!("tensor parallelism must divide {most}, the model's heads"));
        }
        let stages = self.stages();
        let layers = model.layers.len();
        if stages > layers {
            return Some(format!("{stages} stages are more than the model's {layers} layers"));
        }
        if !batch.is_multiple_of(data.saturating_mul(micro_batch)) {
            let need = format!("{data} x {micro_batch} samples do not divide the batch of {batch}");
            return Some(need);
        }
        let micro_batches = self.micro_batches(batch);
        let fewest = self.schedule.fewest_micro_batches(pipeline);
        if micro_batches < fewest {
            return Some(format!(
                "{name} takes {fewest} micro-batches or more, not {micro_batches}"
            ));
        }
        None
    }

    /// Returns why the ranks cannot have the weights in common, if they are to.
    fn reason_against_sharing(&self, cluster: &Cluster) -> Option<&'static str> {
        if !self.shared_weights {
            return None;
        }
        if !cluster.shared_memory {
            return Some("ranks share weights where `cluster.shared_memory` is true");
        }
        if self.zero != 2 {
            return Some("ranks share weights with ZeRO 2");
        }
        if self.tensor * self.pipeline > 1 {
            return Some("ranks share weights with data parallelism alone");
        }
        if self.data > cluster.ranks_per_node {
            return Some("ranks share weights on one node");
        }
        None
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { data, tensor, pipeline, micro_batch, zero, .. } = self;
        write!(f, "dp {data} x tp {tensor} x pp {pipeline}, micro-batch {micro_batch}, ")?;
        write!(f, "{}", self.schedule.name())?;
        if self.schedule == ScheduleKind::Interleaved {
            write!(f, " x {}", self.chunks)?;
        }
        write!(f, ", ZeRO {zero}, recompute {}", self.recompute.name())?;
        if self.shared_weights {
            write!(f, ", shared weights")?;
        }
        if self.sequence_parallel {
            write!(f, ", sequence parallel")?;
        }
        Ok(())
    }
}

/// Parts of a layout that are given. The search tries all values of the others.
#[derive(Clone, Copy, Default, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Constraints {
    /// The wanted [`Layout::data`].
    pub data: Option<usize>,
    /// The wanted [`Layout::tensor`].
    pub tensor: Option<usize>,
    /// The wanted [`Layout::pipeline`].
    pub pipeline: Option<usize>,
    /// The wanted [`Layout::micro_batch`].
    pub micro_batch: Option<usize>,
    /// The wanted [`Layout::schedule`].
    pub schedule: Option<ScheduleKind>,
    /// The wanted [`Layout::chunks`].
    pub chunks: Option<usize>,
    /// The wanted [`Layout::zero`].
    pub zero: Option<u8>,
    /// The wanted [`Layout::shared_weights`].
    pub shared_weights: Option<bool>,
    /// The wanted [`Layout::recompute`].
    pub recompute: Option<Recompute>,
    /// The wanted [`Layout::sequence_parallel`].
    pub sequence_parallel: Option<bool>,
}

impl Constraints {
    /// Returns these parts, with those of `other` where none is given here.
    pub fn or(self, other: Self) -> Self {
        Self {
            data: self.data.or(other.data),
            tensor: self.tensor.or(other.tensor),
            pipeline: self.pipeline.or(other.pipeline),
            micro_batch: self.micro_batch.or(other.micro_batch),
            schedule: self.schedule.or(other.schedule),
            chunks: self.chunks.or(other.chunks),
            zero: self.zero.or(other.zero),
            shared_weights: self.shared_weights.or(other.shared_weights),
            recompute: self.recompute.or(other.recompute),
            sequence_parallel: self.sequence_parallel.or(other.sequence_parallel),
        }
    }

    /// Returns an error if a size is 0 or there is no such stage of ZeRO.
    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("layout.data", self.data),
            ("layout.tensor", self.tensor),
            ("layout.pipeline", self.pipeline),
            ("layout.micro_batch", self.micro_batch),
            ("layout.chunks", self.chunks),
        ];
        if let Some((field, _)) = sizes.iter().find(|(_, size)| *size == Some(0)) {
            return Err(Error::field(*field, "0", "give 1 or more"));
        }
        match self.zero {
            Some(zero) if zero > 3 => Err(Error::field("layout.zero", zero, "give 0 to 3")),
            _ => Ok(()),
        }
    }

    /// Makes a layout of these parts. A part that is not given is 1, 1f1b, or nothing.
    pub fn filled(self) -> Layout {
        let shared_weights = self.shared_weights.unwrap_or(false);
        Layout {
            data: self.data.unwrap_or(1),
            tensor: self.tensor.unwrap_or(1),
            pipeline: self.pipeline.unwrap_or(1),
            micro_batch: self.micro_batch.unwrap_or(1),
            schedule: self.schedule.unwrap_or(ScheduleKind::OneFOneB),
            chunks: self.chunks.unwrap_or(1),
            zero: self.zero.unwrap_or(if shared_weights { 2 } else { 0 }),
            shared_weights,
            recompute: self.recompute.unwrap_or(Recompute::None),
            sequence_parallel: self.sequence_parallel.unwrap_or(false),
        }
    }
}
