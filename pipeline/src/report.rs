//! The report of a step: time and memory.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::{Duration, Instant};

use flow_comm::ProcessGroup;
use flow_plan::schedule::{Action, Costs, Schedule, simulate};
use serde::{Deserialize, Serialize};

use crate::error::{Result, job_rank};

/// Time and memory of the last step on this rank: [`Pipeline::report`](crate::Pipeline::report). Times
/// are those of the host. On GPUs these are the times of enqueueing the computations.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The rank in the job.
    pub rank: usize,
    /// Seconds from the step's begin to its end.
    pub seconds: f64,
    /// This rank's stages.
    pub stages: BTreeMap<usize, StageReport>,
    /// The part of the step in which this rank computed nothing.
    pub bubble: f64,
    /// The bubble of this rank that the schedule's simulator predicts, if all stages take as long as
    /// this rank's.
    pub predicted_bubble: f64,
    /// The most micro-batches between their forward and the end of their backward, in all of this rank's
    /// stages together.
    pub peak_activations: usize,
    /// The most bytes of activations that were held at once, in all of this rank's stages together.
    pub peak_activation_bytes: usize,
}

/// Time and memory of the last step in one stage.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct StageReport {
    /// Seconds of a forward: the mean of the micro-batches.
    pub forward: f64,
    /// Seconds of a backward with both its halves: the mean of the micro-batches.
    pub backward: f64,
    /// The most bytes that the stage held at once for its backwards.
    ///
    /// Inputs that came from another rank count, and so does memory that libtorch allocated in the
    /// forward and did not free at its end. That is tensors that autograd has saved, and outputs.
    /// With recomputation the latter count from the recomputation to the end of the backward.
    /// Weights, gradients and the batch do not count. A tensor that two stages of a rank hold
    /// counts once.
    ///
    /// Allocations are measured when a stage has inputs of such shapes for the first time, on the thread
    /// that calls the step.
    pub activation_bytes: usize,
}

/// Measurements of a step.
#[derive(Default)]
pub struct Measured {
    computations: Vec<(Action, Duration)>,
    peak_activations: usize,
    peak_bytes: usize,
    peak_bytes_of_stages: BTreeMap<usize, usize>,
}

impl Measured {
    /// Begins the measurement of a computation.
    pub fn begin(&self, action: Action) -> (Action, Instant) {
        (action, Instant::now())
    }

    /// Ends the measurement of a computation.
    pub fn end(&mut self, (action, began): (Action, Instant)) {
        self.computations.push((action, began.elapsed()));
    }

    /// Takes note of the bytes that are held now, by stage and micro-batch.
    pub fn hold(&mut self, held: &HashMap<(usize, usize), usize>) {
        self.peak_activations = self.peak_activations.max(held.len());
        self.peak_bytes = self.peak_bytes.max(held.values().sum());
        let mut stages = BTreeMap::<usize, usize>::new();
        for (&(stage, _), bytes) in held {
            *stages.entry(stage).or_default() += bytes;
        }
        for (stage, bytes) in stages {
            let peak = self.peak_bytes_of_stages.entry(stage).or_default();
            *peak = bytes.max(*peak);
        }
    }

    /// Reports a step that took so long on this rank of `group`, the pipeline's.
    pub fn report(
        &self,
        schedule: &Schedule,
        group: &ProcessGroup,
        step: Duration,
    ) -> Result<Report> {
        let mut stages = BTreeMap::<usize, StageReport>::new();
        // Seconds of a micro-batch in all stages: forward, gradients of inputs, those of weights.
        let mut costs = [0.0; 3];
        let count = schedule.micro_batches() as f64;
        for (action, took) in &self.computations {
            let took = took.as_secs_f64() / count;
            let stage = stages.entry(action.stage()).or_default();
            let parts = match action {
                Action::Forward { .. } => [took, 0.0, 0.0],
                Action::BackwardInput { .. } => [0.0, took, 0.0],
                Action::BackwardWeight { .. } => [0.0, 0.0, took],
                _ => [0.0, took / 2.0, took / 2.0],
            };
            stage.forward += parts[0];
            stage.backward += parts[1] + parts[2];
            costs.iter_mut().zip(parts).for_each(|(cost, part)| *cost += part);
        }
        for (stage, bytes) in &self.peak_bytes_of_stages {
            stages.entry(*stage).or_default().activation_bytes = *bytes;
        }
        let [forward, backward_input, backward_weight] =
            costs.map(|cost| cost / stages.len().max(1) as f64);
        let costs = Costs { forward, backward_input, backward_weight, ..Costs::default() };
        let busy: f64 = self.computations.iter().map(|(_, took)| took.as_secs_f64()).sum();
        let seconds = step.as_secs_f64();
        Ok(Report {
            rank: job_rank(group),
            seconds,
            stages,
            bubble: 1.0 - busy / seconds,
            predicted_bubble: simulate(schedule, &costs)?.bubble(group.rank()),
            peak_activations: self.peak_activations,
            peak_activation_bytes: self.peak_bytes,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {}: step {:.3} ms, bubble {:.3} (predicted {:.3}), at most {} activations, {} KiB",
            self.rank,
            self.seconds * 1e3,
            self.bubble,
            self.predicted_bubble,
            self.peak_activations,
            self.peak_activation_bytes.div_ceil(1 << 10),
        )?;
        for (number, stage) in &self.stages {
            write!(
                f,
                "; stage {number}: forward {:.3} ms, backward {:.3} ms, {} KiB",
                stage.forward * 1e3,
                stage.backward * 1e3,
                stage.activation_bytes.div_ceil(1 << 10),
            )?;
        }
        Ok(())
    }
}
