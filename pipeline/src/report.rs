//! What a step took.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use flow_plan::schedule::{simulate, Action, Costs, Schedule};

use crate::error::Result;

/// What the last step took on this rank: [`Pipeline::report`](crate::Pipeline::report).
#[derive(Clone, Debug)]
pub struct Report {
    /// Seconds from the step's begin to its end.
    pub seconds: f64,
    /// Seconds of a forward, and of a backward with both its halves: by stage, the mean of the
    /// micro-batches.
    pub stages: BTreeMap<usize, [f64; 2]>,
    /// The part of the step in which this rank computed nothing.
    pub bubble: f64,
    /// What the schedule's simulator has for the bubble of this rank, if all stages took as long as
    /// this rank's.
    pub predicted_bubble: f64,
    /// The most micro-batches that were between their forward and the end of their backward in one
    /// of this rank's stages.
    pub peak_activations: usize,
}

/// The clock of a step.
#[derive(Default)]
pub struct Measured {
    computations: Vec<(Action, Duration)>,
    peak_activations: usize,
}

impl Measured {
    pub fn begin(&self, action: Action) -> (Action, Instant) {
        (action, Instant::now())
    }

    /// The computation is over, and so many activations are held.
    pub fn end(&mut self, (action, began): (Action, Instant), activations: usize) {
        self.computations.push((action, began.elapsed()));
        self.peak_activations = self.peak_activations.max(activations);
    }

    pub fn report(&self, schedule: &Schedule, rank: usize, step: Duration) -> Result<Report> {
        let mut stages = BTreeMap::<usize, [f64; 2]>::new();
        // Of a micro-batch in a stage: forward, the gradients of inputs, those of weights.
        let mut costs = [0.0; 3];
        for (action, took) in &self.computations {
            let took = took.as_secs_f64();
            let (number, parts) = match action {
                Action::Forward { .. } => (0, [took, 0.0, 0.0]),
                Action::BackwardInput { .. } => (1, [0.0, took, 0.0]),
                Action::BackwardWeight { .. } => (1, [0.0, 0.0, took]),
                _ => (1, [0.0, took / 2.0, took / 2.0]),
            };
            stages.entry(action.stage()).or_default()[number] += took;
            costs.iter_mut().zip(parts).for_each(|(cost, part)| *cost += part);
        }
        let count = schedule.micro_batches() as f64;
        stages.values_mut().flatten().for_each(|seconds| *seconds /= count);
        let [forward, backward_input, backward_weight] =
            costs.map(|cost| cost / count / stages.len().max(1) as f64);
        let costs = Costs { forward, backward_input, backward_weight, ..Costs::default() };
        let busy: f64 = self.computations.iter().map(|(_, took)| took.as_secs_f64()).sum();
        let seconds = step.as_secs_f64();
        Ok(Report {
            seconds,
            stages,
            bubble: 1.0 - busy / seconds,
            predicted_bubble: simulate(schedule, &costs)?.bubble(rank),
            peak_activations: self.peak_activations,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "step {:.3} ms, bubble {:.3} (predicted {:.3}), at most {} activations",
            self.seconds * 1e3,
            self.bubble,
            self.predicted_bubble,
            self.peak_activations
        )?;
        for (stage, [forward, backward]) in &self.stages {
            let (forward, backward) = (forward * 1e3, backward * 1e3);
            write!(f, "; stage {stage}: forward {forward:.3} ms, backward {backward:.3} ms")?;
        }
        Ok(())
    }
}
