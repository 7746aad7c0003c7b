//! Measured runs beside their predictions.

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::error::{Error, Result, positive};
use crate::layout::Constraints;
use crate::model::{Layer, Transformer};
use crate::prediction::{Prediction, predict};
use crate::task::{Task, cluster_of, from_json, model_of};
use crate::training::Training;

/// Measured runs on one cluster, in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunsFile {
    /// The source of the numbers.
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
    /// By default that of the file.
    training: Option<Training>,
    /// By default 1, no ZeRO, 1f1b, and no recomputation.
    layout: Constraints,
    measured: Measured,
    /// Whether numbers of the cluster were chosen so that this run is predicted.
    #[serde(default)]
    fitted: bool,
}

/// The measured numbers of a run. One of `seconds` and `teraflops` is given.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Seconds of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// 10^12 floating point operations a second of a rank, counted as [`Prediction::flops`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teraflops: Option<f64>,
    /// Bytes of weights, gradients, the optimizer's state and activations, on the rank that has most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<f64>,
}

/// A run, measured and predicted.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The run's name.
    pub name: String,
    /// The measured numbers.
    pub measured: Measured,
    /// The predicted number: seconds if these were measured, else 10^12 operations a second.
    pub predicted: f64,
    /// The predicted time over the measured one, minus 1.
    pub error: f64,
    /// The predicted memory over the measured one, minus 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_error: Option<f64>,
    /// Whether numbers of the cluster were fitted to this run, which then checks nothing.
    pub fitted: bool,
    /// The whole prediction.
    pub prediction: Prediction,
}

/// Predicts each run of a file. Returns the source of the measured numbers, and each run beside its
/// prediction. `cluster` is the text of a cluster's JSON; without it, the file has one.
///
/// # Errors
/// Those of [`Task::from_json`] and [`predict`]. [`Error::Run`] names the run.
pub fn compare(runs: &str, cluster: Option<&str>) -> Result<(String, Vec<Comparison>)> {
    let file: RunsFile = from_json(runs)?;
    file.training.check()?;
    let cluster = cluster_of(cluster, file.cluster)?;
    if file.runs.is_empty() {
        return Err(Error::field("runs", "[]", "give at least one run"));
    }
    let mut comparisons = Vec::new();
    for run in file.runs {
        let name = run.name.clone();
        let compared = compare_run(run, &cluster, file.training);
        comparisons.push(compared.map_err(|error| Error::Run { name, error: Box::new(error) })?);
    }
    Ok((file.source, comparisons))
}

fn compare_run(run: RunFile, cluster: &Cluster, training: Training) -> Result<Comparison> {
    let training = run.training.unwrap_or(training);
    training.check()?;
    run.layout.check()?;
    let model = model_of(run.transformer, run.layers, run.tensor_parallel, training.element)?;
    let task =
        Task { model, batch: run.batch, cluster: cluster.clone(), training, layout: run.layout };
    let Measured { seconds, teraflops, memory } = run.measured;
    for number in [seconds, teraflops, memory].into_iter().flatten() {
        positive("measured", number)?;
    }
    let prediction = predict(&task, &run.layout.filled())?;
    let (predicted, ratio) = match (seconds, teraflops) {
        (Some(seconds), None) => {
            let predicted = prediction.time.step;
            (predicted, predicted / seconds)
        }
        (None, Some(teraflops)) => {
            let predicted = prediction.flops / 1e12;
            (predicted, teraflops / predicted)
        }
        (seconds, _) => {
            let given = if seconds.is_some() { "two speeds" } else { "without a speed" };
            return Err(Error::field("measured", given, "give `seconds` or `teraflops`"));
        }
    };
    Ok(Comparison {
        name: run.name,
        measured: run.measured,
        predicted,
        error: ratio - 1.0,
        memory_error: memory.map(|measured| prediction.memory.total / measured - 1.0),
        fitted: run.fitted,
        prediction,
    })
}
