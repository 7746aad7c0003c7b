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

/// What was measured of a run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measured {
    /// Seconds of a step.
    Seconds(f64),
    /// 10^12 floating point operations a second of a rank, counted as [`Prediction::flops`].
    Teraflops(f64),
}

/// A run, measured and predicted.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The run's name.
    pub name: String,
    /// What was measured.
    pub measured: Measured,
    /// The same, predicted.
    pub predicted: f64,
    /// How much more time is predicted than was measured, as a part of the latter.
    pub error: f64,
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
    let (Measured::Seconds(number) | Measured::Teraflops(number)) = run.measured;
    positive("measured", number)?;
    let prediction = predict(&task, &run.layout.filled())?;
    let (predicted, error) = match run.measured {
        Measured::Seconds(seconds) => (prediction.time.step, prediction.time.step / seconds),
        Measured::Teraflops(teraflops) => {
            let predicted = prediction.flops / 1e12;
            (predicted, teraflops / predicted)
        }
    };
    let (name, measured, fitted) = (run.name, run.measured, run.fitted);
    Ok(Comparison { name, measured, predicted, error: error - 1.0, fitted, prediction })
}
