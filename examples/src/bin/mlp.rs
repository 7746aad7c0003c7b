//! The MLP of OneFlow's documents in their two views: data parallel in the mirrored one; hybrid
//! parallel in the consistent one, its hidden layer split over the ranks (model parallelism), and its
//! last layer on every rank (data parallelism).
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
use flow_examples::{
    fashion,
    views::{self, Seen},
};

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
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match run(&flow_examples::arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mlp: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(&Args { view, ref options }: &Args) -> Result<()> {
    let setting = options.setting()?;
    let placement = &setting.placement;
    let mut vs = nn::VarStore::new(setting.device);
    let path = vs.root();
    let dense1 = nn::linear(&path / "dense1", (SIDE * SIDE) as i64, 512, Default::default());
    let dense2 = nn::linear(&path / "dense2", 512, fashion::CLASSES as i64, Default::default());
    options.first_weights(&mut vs)?;

    if view == Seen::Consistent {
        // A row of a weight makes one output: each rank has some of the hidden features.
        global::distribute(&vs, placement, |name, _| match name.starts_with("dense1") {
            true => vec![S(0)],
            false => vec![B],
        })?;
    }
    let optimizer = nn::Sgd::default().build(&vs, options.lr)?;

    let shown = Cell::new(false);
    let mlp = |images: &Tensor| {
        if view == Seen::Mirrored {
            let hidden = dense1.forward(&images.flatten(1, -1)).relu();
            return Ok(dense2.forward(&hidden));
        }
        // Every rank computes its features of all images, and then the classes of some images.
        let images = images.flatten(1, -1).to_global(placement, [B])?;
        let hidden = dense1.forward(&images).relu();
        let rows = hidden.to_global(placement, [S(0)])?;
        let logits = dense2.forward(&rows);
        if setting.group.rank() == 0 && !shown.replace(true) {
            let sbps = [&images, &hidden, &rows, &logits].map(|tensor| tensor.sbp());
            let [images, hidden, rows, logits] = sbps;
            println!(
                "images {:?}, hidden {:?} -> {:?}, logits {:?}",
                images?, hidden?, rows?, logits?
            );
        }
        global::Result::Ok(logits)
    };

    let view = view.into();
    let train_job = Job::train(view, placement, &vs, optimizer, |inputs| {
        Ok(views::losses(&mlp(&inputs[0])?, &inputs[1]))
    })?;
    options.train(train_job, view, &setting)?;
    let predict_job = Job::predict(view, placement, &vs, |inputs| mlp(&inputs[0]))?;
    options.test(predict_job, view, &setting)
}
