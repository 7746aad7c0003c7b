//! Runs that somebody has measured, beside what is predicted for them.

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::error::{positive, Error, Result};
use crate::layout::Constraints;
use crate::model::{Layer, Transformer};
use crate::prediction::{predict, Prediction};
use crate::task::{cluster_of, from_json, model_of, Task};
use crate::training::Training;

/// Measured runs on one cluster, in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunsFile {
    /// Where the numbers are from.
    source: String,
    cluster: Option<Cluster>,
    #[serde(default)]
    training: Training,
    runs: Vec<RunFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunFile {
    name: String,
    transformer: Option<Transformer>,
    layers: Option<Vec<Layer>>,
    tensor_parallel: Option<usize>,
    batch: usize,
    /// Else that of the file.
    training: Option<Training>,
    /// What is left out is 1, no ZeRO, 1f1b, and no recomputation.
    layout: Constraints,
    measured: Measured,
    /// Whether numbers of the cluster were chosen so that this run is predicted.
    #[serde(default)]
    fitted: bool,
}

/// What was measured of a run: one of the first two.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Seconds of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// 10^12 floating point operations a second of a rank, counted as [`Prediction::flops`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teraflops: Option<f64>,
    /// Bytes of weights, gradients, the optimizer's state and activations, of the rank that has most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<f64>,
}

/// A run, measured and predicted.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The run's name.
    pub name: String,
    /// What was measured.
    pub measured: Measured,
    /// The same, predicted: seconds, or 10^12 operations a second.
    pub predicted: f64,
    /// How much more time is predicted than was measured, as a part of the latter.
    pub error: f64,
    /// How much more memory is predicted than was measured, as a part of the latter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_error: Option<f64>,
    /// Whether numbers of the cluster were chosen so that this run is predicted: no check of them.
    pub fitted: bool,
    /// All that is predicted.
    pub prediction: Prediction,
}

/// Where the numbers of a file of runs are from, and each run beside its prediction. `cluster` is
/// the text of a cluster's own JSON; without it, the file has one.
///
/// # Errors
/// As of [`Task::from_json`] and [`predict`]; [`Error::Run`] names the run.
pub fn compare(runs: &str, cluster: Option<&str>) -> Result<(String, Vec<Comparison>)> {
    let file: RunsFile = from_json(runs)?;
    file.training.check()?;
    let cluster = cluster_of(cluster, file.cluster)?;
    if file.runs.is_empty() {
        return Err(Error::field("runs", "[]", "give at least one run"));
    }
    let comparison = |run: RunFile| {
        let name = run.name.clone();
        let compared = compare_run(run, &cluster, file.training);
        compared.map_err(|error| Error::Run { name, error: Box::new(error) })
    };
    let comparisons = file.runs.into_iter().map(comparison).collect::<Result<_>>()?;
    Ok((file.source, comparisons))
}

fn compare_run(run: RunFile, cluster: &Cluster, training: Training) -> Result<Comparison> {
    let training = run.training.unwrap_or(training);
    training.check()?;
    run.layout.check()?;
    let model = model_of(run.transformer, run.layers, run.tensor_parallel, training.element)?;
    let (batch, cluster) = (run.batch, cluster.clone());
    let task = Task { model, batch, cluster, training, layout: run.layout };
    let Measured { seconds, teraflops, memory } = run.measured;
    for number in [seconds, teraflops, memory].into_iter().flatten() {
        positive("measured", number)?;
    }
    let prediction = predict(&task, &run.layout.filled())?;
    let (step, operations) = (prediction.time.step, prediction.flops / 1e12);
    let (predicted, ratio) = match (seconds, teraflops) {
        (Some(seconds), None) => (step, step / seconds),
        (None, Some(teraflops)) => (operations, teraflops / operations),
        (seconds, _) => {
            let given = if seconds.is_some() { "two speeds" } else { "without a speed" };
            return Err(Error::field("measured", given, "give `seconds` or `teraflops`"));
        }
    };
    let memory_error = memory.map(|measured| prediction.memory.total / measured - 1.0);
    let (name, measured, fitted) = (run.name, run.measured, run.fitted);
    let error = ratio - 1.0;
    Ok(Comparison { name, measured, predicted, error, memory_error, fitted, prediction })
}
