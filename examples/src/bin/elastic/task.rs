//! A model, and the samples that it learns.

use std::sync::Arc;

use anyhow::Result;
use flow::prelude::*;
use flow_examples::images::{Images, Pixels};
use flow_examples::lenet::lenet;
use flow_examples::{fashion, text};
use tch::nn::{Optimizer, SequentialT};

use crate::gpt::{Pieces, gpt};
use crate::options::{Model, Options};

/// Samples, and the class of each, or of each of its parts.
pub type Samples = dyn Dataset<Batch = (Tensor, Tensor)>;

/// A model, and the samples that it learns.
pub struct Task {
    pub net: SequentialT,
    pub optimizer: Optimizer,
    pub train: Arc<Samples>,
    /// The images whose classes the model is to tell after each epoch.
    pub test: Option<Arc<Images>>,
}

impl Task {
    /// Makes the model, with its variables in `vs`, and reads the samples.
    pub fn new(options: &Options, vs: &nn::VarStore) -> Result<Self> {
        match options.model {
            Model::Lenet => {
                let folder = options.data.clone().unwrap_or_else(fashion::default_folder);
                let (train, test) = Images::load(&folder, Pixels::Standardized)?;
                let net = lenet(&vs.root());
                let sgd = nn::sgd(0.9, 0.0, 0.0, false);
                let optimizer = sgd.build(vs, options.lr.unwrap_or(0.02))?;
                Ok(Self { net, optimizer, train, test: Some(test) })
            }
            Model::Gpt => {
                let train = Pieces::new(text::read(options.text.as_deref())?)?;
                let net = gpt(&vs.root(), options.width);
                let optimizer = nn::AdamW::default().build(vs, options.lr.unwrap_or(0.001))?;
                Ok(Self { net, optimizer, train: Arc::new(train), test: None })
            }
        }
    }
}
