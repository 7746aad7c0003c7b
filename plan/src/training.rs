//! The training of a model: bytes of a parameter, and which communication runs beside computing.

use serde::Deserialize;

use crate::cluster::{Cluster, Group};
use crate::error::{Error, Result, not_negative, positive, share};

/// The bytes of a parameter, and the overlap of communication and computing. The defaults are those of mixed precision with Adam.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Training {
    /// Bytes of an element of activations.
    pub element: f64,
    /// Bytes of a parameter's weight.
    pub weights: f64,
    /// Bytes of a parameter's gradient, which is also what data parallelism reduces.
    pub gradients: f64,
    /// Bytes of the optimizer's state for a parameter. A copy of the weight in 4 bytes and Adam's two
    /// averages make 12.
    pub optimizer: f64,
    /// The part of the reduction of gradients that runs beside the backward, from 0 to 1. With ZeRO 3
    /// it is also the part of gathering weights that runs beside forward and backward.
    pub data_overlap: f64,
    /// The part of a send between stages that keeps neither rank from computing, from 0 to 1. Ranks
    /// still wait for what they need.
    pub pipeline_overlap: f64,
    /// Whether each rank of tensor parallelism sends its part only, and the receivers gather
    /// (Narayanan et al. 2021, section 4.1). With sequence parallelism this always holds.
    pub scatter_gather: bool,
    /// Whether a rank keeps what sequence parallelism has gathered for linear layers, as Flow's
    /// example `gpt` does. Otherwise the rank keeps its part, and the backward gathers again
    /// (Korthikanti et al. 2022, section 4.2.2).
    pub keep_gathered: bool,
    /// How weights are gathered with ZeRO 3.
    pub gathering: Gathering,
}

/// What the software of ZeRO 3 does to gather weights, beside sending them. The default is that of a
/// good one: a layer at a time, into its place, twice a step. What is whole is that of Flow's `FullyShard`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gathering {
    /// Tensors of a layer that have a collective each.
    pub tensors: f64,
    /// Whether full recomputation gathers weights once more than the backward after it.
    pub again: bool,
    /// How often what is sent is read from memory or written to it, at the full speed of memory.
    pub memory_passes: f64,
    /// Seconds for each rank of a collective.
    pub rank_seconds: f64,
    /// Layers whose weights a rank has whole at once. By default that which computes, and the next one.
    pub whole_weights: f64,
    /// Layers whose gradients a rank has whole at once. By default the last one's as backward leaves them
    /// and in one piece, and those of two layers that are being reduced.
    pub whole_gradients: f64,
}

impl Default for Gathering {
    fn default() -> Self {
        Self {
            tensors: 1.0,
            again: false,
            memory_passes: 0.0,
            rank_seconds: 0.0,
            whole_weights: 2.0,
            whole_gradients: 4.0,
        }
    }
}

impl Gathering {
    /// Returns the seconds of `collectives` of `bytes` in all, without those of sending.
    pub(crate) fn seconds(
        &self,
        bytes: f64,
        collectives: f64,
        group: &Group,
        cluster: &Cluster,
    ) -> f64 {
        if group.size == 1 {
            return 0.0;
        }
        self.memory_passes * bytes / cluster.memory_bandwidth
            + self.rank_seconds * collectives * group.size as f64
    }
}

impl Default for Training {
    fn default() -> Self {
        Self {
            element: 2.0,
            weights: 2.0,
            gradients: 2.0,
            optimizer: 12.0,
            data_overlap: 0.0,
            pipeline_overlap: 0.0,
            scatter_gather: false,
            keep_gathered: false,
            gathering: Gathering::default(),
        }
    }
}

impl Training {
    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("training.element", self.element),
            ("training.weights", self.weights),
            ("training.gradients", self.gradients),
            ("training.optimizer", self.optimizer),
        ];
        for (field, bytes) in sizes {
            if !(0.0..=1024.0).contains(&bytes) {
                return Err(Error::field(field, bytes, "give a number of bytes from 0 to 1024"));
            }
        }
        positive("training.gathering.tensors", self.gathering.tensors)?;
        not_negative("training.gathering.memory_passes", self.gathering.memory_passes)?;
        not_negative("training.gathering.rank_seconds", self.gathering.rank_seconds)?;
        not_negative("training.gathering.whole_weights", self.gathering.whole_weights)?;
        not_negative("training.gathering.whole_gradients", self.gathering.whole_gradients)?;
        share("training.data_overlap", self.data_overlap)?;
        share("training.pipeline_overlap", self.pipeline_overlap)
    }
}
