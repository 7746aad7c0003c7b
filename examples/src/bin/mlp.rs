//! The MLP of OneFlow's documents in their two views. It is data parallel in the mirrored one, and
//! hybrid parallel in the consistent one. There its hidden layer is split over the ranks (model
//! parallelism), and its last layer is on every rank (data parallelism).
//!
//!     flow-launch --nproc_per_node 2 mlp --view mirrored
//!     flow-launch --nproc_per_node 2 mlp --view consistent

use std::cell::Cell;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use flow::global::view::Job;
use flow::prelude::*;
use flow_examples::images::SIDE;
use flow_examples::views::{self, Seen, Setting};
use flow_examples::{fashion, program};

/// Trains an MLP on Fashion-MNIST.
#[derive(Parser)]
struct Args {
    /// How the program sees batches; in the consistent view the hidden layer is model parallel
    #[arg(long)]
    view: Seen,
    #[command(flatten)]
    options: views::Options,
}

fn main() -> ExitCode {
    program::run("mlp", run)
}

fn run(args: &Args) -> Result<()> {
    let options = &args.options;
    let setting = options.setting()?;
    let placement = &setting.placement;
    let mut vs = nn::VarStore::new(setting.device);
    let path = vs.root();
    let mlp = Mlp {
        dense1: nn::linear(&path / "dense1", (SIDE * SIDE) as i64, 512, Default::default()),
        dense2: nn::linear(&path / "dense2", 512, fashion::CLASSES as i64, Default::default()),
        view: args.view,
        setting: &setting,
        shown: Cell::new(false),
    };
    options.first_weights(&mut vs)?;

    if args.view == Seen::Consistent {
        // A row of a weight makes one output: each rank has some of the hidden features.
        global::distribute(&vs, placement, |name, _| {
            if name.starts_with("dense1") { vec![S(0)] } else { vec![B] }
        })?;
    }
    let optimizer = nn::Sgd::default().build(&vs, options.lr)?;

    let view = args.view.into();
    let train_job = Job::train(view, placement, &vs, optimizer, |inputs| {
        Ok(views::losses(&mlp.forward(&inputs[0])?, &inputs[1]))
    })?;
    options.train(train_job, view, &setting)?;
    let predict_job = Job::predict(view, placement, &vs, |inputs| mlp.forward(&inputs[0]))?;
    options.test(predict_job, view, &setting)
}

struct Mlp<'a> {
    dense1: nn::Linear,
    dense2: nn::Linear,
    view: Seen,
    setting: &'a Setting,
    /// Whether the SBPs have been printed.
    shown: Cell<bool>,
}

impl Mlp<'_> {
    fn forward(&self, images: &Tensor) -> global::Result<Tensor> {
        let Setting { placement, group, .. } = self.setting;
        let images = images.flatten(1, -1);
        if self.view == Seen::Mirrored {
            return Ok(self.dense2.forward(&self.dense1.forward(&images).relu()));
        }
        // Every rank computes its features of all images, and then the classes of some images.
        let images = images.to_global(placement, [B])?;
        let hidden = self.dense1.forward(&images).relu();
        let rows = hidden.to_global(placement, [S(0)])?;
        let logits = self.dense2.forward(&rows);
        if group.rank() == 0 && !self.shown.replace(true) {
            println!(
                "images {:?}, hidden {:?} -> {:?}, logits {:?}",
                images.sbp()?,
                hidden.sbp()?,
                rows.sbp()?,
                logits.sbp()?
            );
        }
        Ok(logits)
    }
}
