//! The planner's input: a model, a cluster, a batch, read from JSON.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::layout::{BATCHES, Constraints};
use crate::model::{Layer, Model, Transformer};
use crate::training::Training;

/// A training job for the planner: its model, batch, cluster and training.
///
/// ```
/// use flow_plan::{predict, search, Task, Constraints};
///
/// let text = r#"{
///     "transformer": {
///         "layers": 4, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 1024
///     },
///     "batch": 32,
///     "cluster": {
///         "ranks_per_node": 8, "memory": 80e9, "flops": 312e12, "memory_bandwidth": 2e12,
///         "matmul": { "peak_share": 0.75, "half_size": 100 },
///         "intra_node": { "bandwidth": 230e9, "latency": 5e-6 },
///         "inter_node": { "bandwidth": 25e9, "latency": 1e-5 }
///     }
/// }"#;
/// let task = Task::from_json(text, None)?;
/// let found = search(&task, 4, &Constraints::default(), 10)?;
/// let best = &found.best[0];
/// assert_eq!(best.layout.ranks(), 4);
/// assert_eq!(predict(&task, &best.layout)?.time.step, best.time.step);
/// # Ok::<(), flow_plan::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Task {
    /// The model.
    pub model: Model,
    /// Samples of a step.
    pub batch: usize,
    /// The machines.
    pub cluster: Cluster,
    /// The bytes of a parameter, and the overlap of communication.
    pub training: Training,
    /// Parts of the layout that are given.
    pub layout: Constraints,
}

/// A task in JSON. The model is the shape of a transformer, or a list of layers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskFile {
    transformer: Option<Transformer>,
    layers: Option<Vec<Layer>>,
    tensor_parallel: Option<usize>,
    batch: usize,
    cluster: Option<Cluster>,
    #[serde(default)]
    training: Training,
    #[serde(default)]
    layout: Constraints,
}

impl Task {
    /// Reads a task. `cluster` is the text of a cluster's JSON; without it, the task has one.
    ///
    /// # Errors
    /// [`Error::Json`] and [`Error::Field`] name the wrong field.
    pub fn from_json(model: &str, cluster: Option<&str>) -> Result<Self> {
        let file: TaskFile = from_json(model)?;
        let TaskFile { transformer, layers, tensor_parallel, batch, training, layout, .. } = file;
        training.check()?;
        layout.check()?;
        let cluster = cluster_of(cluster, file.cluster)?;
        let model = model_of(transformer, layers, tensor_parallel, training.element)?;
        if !BATCHES.contains(&batch) {
            let need = "give the samples of a step, 1 to 2^32";
            return Err(Error::field("batch", batch, need));
        }
        Ok(Self { model, batch, cluster, training, layout })
    }
}

/// Returns the cluster of the JSON `text`, or else `in_file`.
pub(crate) fn cluster_of(text: Option<&str>, in_file: Option<Cluster>) -> Result<Cluster> {
    let given = text.map(from_json).transpose()?;
    let Some(cluster) = given.or(in_file) else {
        let need = "give the machines in this file, or in one of their own";
        return Err(Error::field("cluster", "missing", need));
    };
    cluster.check()?;
    Ok(cluster)
}

/// Makes a model by its shape or by its layers, whichever is given.
pub(crate) fn model_of(
    transformer: Option<Transformer>,
    layers: Option<Vec<Layer>>,
    tensor_parallel: Option<usize>,
    element: f64,
) -> Result<Model> {
    match (transformer, layers, tensor_parallel) {
        (Some(shape), None, None) => Model::transformer(&shape, element),
        (None, Some(layers), most) => Model::new(&layers, most.unwrap_or(1)),
        (Some(_), None, Some(_)) => {
            let need = "leave it out: for a transformer it is the number of heads";
            Err(Error::field("tensor_parallel", "given", need))
        }
        (Some(_), Some(_), _) => {
            Err(Error::field("layers", "given beside `transformer`", "give one of the two"))
        }
        (None, None, _) => {
            Err(Error::field("transformer", "missing", "give `transformer` or `layers`"))
        }
    }
}

impl Cluster {
    /// Reads a cluster.
    ///
    /// # Errors
    /// [`Error::Json`] and [`Error::Field`] name the wrong field.
    pub fn from_json(text: &str) -> Result<Self> {
        cluster_of(Some(text), None)
    }
}

/// Reads JSON. An error names the field.
pub(crate) fn from_json<T: DeserializeOwned>(text: &str) -> Result<T> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let field = match error.path().to_string().as_str() {
            "." => "top level".to_owned(),
            path => path.to_owned(),
        };
        Error::Json { field, reason: error.into_inner() }
    })?;
    let end = deserializer.end();
    end.map_err(|reason| Error::Json { field: "after the end".into(), reason })?;
    Ok(value)
}
