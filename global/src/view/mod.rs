//! Jobs in the two views of OneFlow's documents, over the same model code.
//!
//! | | [`View::Consistent`] (the default) | [`View::Mirrored`] |
//! |---|---|---|
//! | a rank's model | its parts of one logical model | a copy |
//! | an input | one array, the logical batch: each rank takes its rows | an array for each rank |
//! | a result | one array: the logical result | an array for each rank |
//! | parallelism | what the variables' SBPs say: of data, of the model, or both | of data |
//! | in OneFlow | `consistent_view()`, `Numpy` | `mirrored_view()`, `ListNumpy` |
//!
//! In both views all ranks run the same program and give a job the same inputs. The loss may have
//! any number of elements, such as one for each sample. What is minimized is their sum, divided by
//! the number of elements on all ranks. So a mirrored job's results, one after the other, are the
//! result of the consistent job for the same batch and weights. This holds also if ranks have
//! batches of different lengths.
//!
//! ```no_run
//! use flow_global::view::{devices, Job, View};
//! use flow_tensor::{ProcessGroup, TensorCollectives};
//! use tch::nn::{self, Module, OptimizerConfig};
//! use tch::{Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = ProcessGroup::from_env()?;
//! let placement = devices(&group, 2)?; // an error if there are fewer
//! let vs = nn::VarStore::new(group.device());
//! let net = nn::linear(vs.root(), 784, 10, Default::default());
//! let optimizer = nn::Sgd::default().build(&vs, 0.1)?;
//! let mut train = Job::train(View::Consistent, &placement, &vs, optimizer, |inputs| {
//!     Ok(net.forward(&inputs[0]).cross_entropy_for_logits(&inputs[1]))
//! })?
//! .input("images", [100, 784], Kind::Float)
//! .input("labels", [100], Kind::Int64);
//! # let batches: Vec<[Tensor; 2]> = Vec::new();
//! for [images, labels] in batches {
//!     let loss = train.run([images, labels])?.whole()?;
//!     println!("{}", loss.double_value(&[]));
//! }
//! # Ok(()) }
//! ```

mod array;
mod job;
mod placeholder;
mod variables;

use flow_tensor::ProcessGroup;

pub use array::Array;
pub use job::Job;

use crate::error::{Error, Result};
use crate::placement::Placement;

/// The way in which a program sees batches and results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum View {
    /// Each rank has a copy of the model, and arrays of its own.
    Mirrored,
    /// There is one model and one array, whatever the number of ranks.
    #[default]
    Consistent,
}

/// Returns the first `count` ranks of a group, on one axis.
///
/// # Errors
/// There are fewer: both numbers.
pub fn devices(group: &ProcessGroup, count: usize) -> Result<Placement> {
    if count > group.world_size() {
        return Err(Error::Devices { asked: count, found: group.world_size() });
    }
    Placement::new(group, (0..count).collect::<Vec<_>>())
}
