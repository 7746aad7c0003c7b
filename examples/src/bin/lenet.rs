//! LeNet on Fashion-MNIST in the two views of OneFlow's documents, by the same model code.
//!
//!     flow-launch --nproc_per_node 2 lenet --view consistent
//!     flow-launch --nproc_per_node 2 lenet --view mirrored

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use flow::global::view::Job;
use flow::prelude::*;
use flow_examples::{fashion, program, views};

/// Trains LeNet on Fashion-MNIST in one of two views.
#[derive(Parser)]
struct Args {
    /// How the program sees batches
    #[arg(long)]
    view: views::Seen,
    /// The part of the hidden features that is dropped in training. Ranks drop other features in
    /// the mirrored view than in the consistent one; with 0 both views have equal losses
    #[arg(long, value_name = "RATE", default_value = "0.5")]
    dropout: f64,
    #[command(flatten)]
    options: views::Options,
}

struct LeNet {
    conv1: nn::Conv2D,
    conv2: nn::Conv2D,
    hidden: nn::Linear,
    outlayer: nn::Linear,
}

impl LeNet {
    fn new(path: nn::Path) -> Self {
        let same = nn::ConvConfig { padding: 2, ..Default::default() };
        Self {
            conv1: nn::conv2d(&path / "conv1", 1, 32, 5, same),
            conv2: nn::conv2d(&path / "conv2", 32, 64, 5, same),
            hidden: nn::linear(&path / "hidden", 64 * 7 * 7, 512, Default::default()),
            outlayer: nn::linear(
                &path / "outlayer",
                512,
                fashion::CLASSES as i64,
                Default::default(),
            ),
        }
    }

    fn forward(&self, images: &Tensor, dropout: Option<f64>) -> Tensor {
        let pool1 = self.conv1.forward(images).relu().max_pool2d_default(2);
        let pool2 = self.conv2.forward(&pool1).relu().max_pool2d_default(2);
        let mut hidden = self.hidden.forward(&pool2.flatten(1, -1)).relu();
        if let Some(rate) = dropout.filter(|&rate| rate > 0.0) {
            hidden = hidden.dropout(rate, true);
        }
        self.outlayer.forward(&hidden)
    }
}

fn main() -> ExitCode {
    program::run("lenet", run)
}

fn run(args: &Args) -> Result<()> {
    let view = args.view.into();
    let setting = args.options.setting()?;
    let placement = &setting.placement;
    let mut vs = nn::VarStore::new(setting.device);
    let net = LeNet::new(vs.root());
    args.options.first_weights(&mut vs)?;
    let optimizer = nn::Sgd::default().build(&vs, args.options.lr)?;

    let train_job = Job::train(view, placement, &vs, optimizer, |inputs| {
        Ok(views::losses(&net.forward(&inputs[0], Some(args.dropout)), &inputs[1]))
    })?;
    args.options.train(train_job, view, &setting)?;

    let predict_job =
        Job::predict(view, placement, &vs, |inputs| Ok(net.forward(&inputs[0], None)))?;
    args.options.test(predict_job, view, &setting)
}
