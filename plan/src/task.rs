//! What is planned: a model, a cluster, a batch, read from JSON.

use serde::de::DeserializeOwned;
use serde::Deserialize;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::layout::Wanted;
use crate::model::{Layer, Model, Transformer};
use crate::training::Training;

/// What is planned.
///
/// ```
/// use flow_plan::{predict, search, Task, Wanted};
///
/// let text = r#"{
///     "transformer": { "layers": 4, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 1024 },
///     "batch": 32,
///     "cluster": {
///         "ranks_per_node": 8, "memory": 80e9, "flops": 312e12, "memory_bandwidth": 2e12,
///         "matmul": { "peak_share": 0.75, "half_size": 100 },
///         "intra_node": { "bandwidth": 230e9, "latency": 5e-6 },
///         "inter_node": { "bandwidth": 25e9, "latency": 1e-5 }
///     }
/// }"#;
/// let task = Task::from_json(text, None)?;
/// let plans = search(&task, 4, &Wanted::default(), 10)?;
/// let best = &plans.best[0];
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
    /// How the training is done.
    pub training: Training,
    /// Parts of the layout that are given.
    pub layout: Wanted,
}

/// A model in JSON: its shape as a transformer, or its layers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskFile {
    #[serde(default)]
    transformer: Option<Transformer>,
    #[serde(default)]
    layers: Option<Vec<Layer>>,
    /// Tensor parallelism of `layers` must divide this; 1 if left out.
    #[serde(default)]
    tensor_parallel: Option<usize>,
    batch: usize,
    #[serde(default)]
    cluster: Option<Cluster>,
    #[serde(default)]
    training: Training,
    #[serde(default)]
    layout: Wanted,
}

impl Task {
    /// Reads a model with batch, cluster, training and layout. `cluster` is the text of a cluster's
    /// own JSON; without it, the model has one.
    ///
    /// # Errors
    /// [`Error::Json`] and [`Error::Field`], which name the field.
    pub fn from_json(model: &str, cluster: Option<&str>) -> Result<Self> {
        let file: TaskFile = from_json(model)?;
        file.training.check()?;
        let cluster = match cluster {
            Some(text) => Some(Cluster::from_json(text)?),
            None => file.cluster,
        };
        let Some(cluster) = cluster else {
            let need = "give the machines in the model's file, or in one of their own";
            return Err(Error::Field { field: "cluster", value: "missing".into(), need });
        };
        cluster.check()?;
        let model = match (file.transformer, file.layers) {
            (Some(shape), None) => {
                if file.tensor_parallel.is_some() {
                    let need = "leave it out: it is the number of heads of a transformer";
                    let value = "given".into();
                    return Err(Error::Field { field: "tensor_parallel", value, need });
                }
                Model::transformer(&shape, file.training.element)?
            }
            (None, Some(layers)) => Model::new(&layers, file.tensor_parallel.unwrap_or(1))?,
            (given, _) => {
                let value = if given.is_some() { "given beside layers" } else { "missing" };
                let need = "give either `transformer` or `layers`";
                return Err(Error::Field { field: "transformer", value: value.into(), need });
            }
        };
        if file.batch == 0 {
            let need = "give the samples of a step";
            return Err(Error::Field { field: "batch", value: "0".into(), need });
        }
        let TaskFile { batch, training, layout, .. } = file;
        Ok(Self { model, batch, cluster, training, layout })
    }
}

impl Cluster {
    /// Reads a cluster.
    ///
    /// # Errors
    /// [`Error::Json`] and [`Error::Field`], which name the field.
    pub fn from_json(text: &str) -> Result<Self> {
        let cluster: Self = from_json(text)?;
        cluster.check()?;
        Ok(cluster)
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
