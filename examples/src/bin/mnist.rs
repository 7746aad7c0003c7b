//! LeNet on Fashion-MNIST, trained on any number of ranks.
//!
//!     flow-launch --nproc_per_node 2 mnist
//!     flow-launch --nproc_per_node 2 mnist --checkpoint FOLDER    # and again, to resume

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use flow::ddp::SamplerState;
use flow::prelude::*;
use flow_examples::images::{Images, Pixels};
use flow_examples::lenet::{accuracy, lenet, on};
use flow_examples::options::{Options, write_losses};
use flow_examples::progress::Progress;
use flow_examples::{fashion, program};
use serde::{Deserialize, Serialize};
use tch::nn::SequentialT;

/// The part of a checkpoint beside the model, the optimizer and the sampler.
#[derive(Clone, Default, Serialize, Deserialize)]
struct State {
    /// The options and data that the trained weights depend on.
    hyperparameters: Vec<(String, String)>,
    /// The loss of each step, as text: JSON has no NaN.
    losses: Vec<String>,
    /// How many losses belong to earlier epochs.
    before: usize,
}

fn main() -> ExitCode {
    program::run("mnist", run)
}

fn run(args: &Options) -> Result<()> {
    let options = &args.training;
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(options.device)?;
    let is_first = group.rank() == 0;
    if is_first {
        write_losses(options.losses.as_deref(), &[])?;
        if let Some(file) = &args.save {
            fs::write(file, "").with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    let folder = args.data.clone().unwrap_or_else(fashion::default_folder);
    let (train, test) = Images::load(&folder, Pixels::Standardized)?;

    tch::manual_seed(options.seed.into());
    // The CPU's random numbers are the first weights on all devices.
    let mut vs = nn::VarStore::new(Device::Cpu);
    let net = lenet(&vs.root());
    vs.set_device(device);
    if args.double {
        vs.set_kind(Kind::Double);
    }
    let model = Ddp::new(net, &vs, &group)?;
    let optimizer = nn::sgd(options.momentum, 0.0, 0.0, false).build(&vs, options.lr)?;
    let sampler = DistributedSampler::new(train.len(), &group).seed(options.seed.into());
    let state = State { hyperparameters: args.hyperparameters(&train), ..Default::default() };
    let mut training = Training { args, vs, model, optimizer, sampler, state, checkpoints: None };
    if let Some(folder) = &args.checkpoint {
        training.resume(Checkpoints::open(folder, &group)?)?;
    }

    let start_epoch = training.sampler.epoch().max(1) as usize;
    let steps = training.steps(&train, start_epoch);
    for epoch in start_epoch..=options.epochs.get() {
        if training.state.losses.len() == training.state.before && training.state.before >= steps {
            break; // all steps are done, and all epochs with losses are reported
        }
        let start = Instant::now();
        let loss = training.epoch(&train, epoch, steps)?;
        let accuracy = 100.0 * accuracy(&training.model, &training.vs, &test, options.workers)?;
        if is_first {
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "epoch {epoch}: loss {loss:.4}, test accuracy {accuracy:.2} %, {seconds:.1} s"
            );
        }
    }
    if is_first {
        if let Some(file) = &args.save {
            training.vs.save(file).with_context(|| format!("cannot write {}", file.display()))?;
        }
        write_losses(options.losses.as_deref(), &training.state.losses)?;
    }
    Ok(())
}

/// A rank's part of the training.
struct Training<'a> {
    args: &'a Options,
    vs: nn::VarStore,
    model: Ddp<SequentialT>,
    optimizer: nn::Optimizer,
    sampler: DistributedSampler,
    state: State,
    checkpoints: Option<Checkpoints>,
}

impl Training<'_> {
    /// Goes on from the latest checkpoint, if there is one.
    fn resume(&mut self, mut checkpoints: Checkpoints) -> Result<()> {
        let latest = checkpoints.latest::<State>()?;
        self.checkpoints = Some(checkpoints);
        let Some(saved) = latest else { return Ok(()) };
        Options::check_hyperparameters(&saved.state.hyperparameters, &self.state.hyperparameters)?;
        saved.resume(&self.vs, &mut self.optimizer, &mut self.sampler)?;
        self.state = saved.state;
        if self.model.group().rank() == 0 {
            let SamplerState { epoch, taken, samples, .. } = self.sampler.state();
            println!("going on in epoch {epoch} after {taken} of {samples} images");
        }
        Ok(())
    }

    /// Returns the steps of a whole epoch.
    fn batches(&self, train: &Images) -> usize {
        let ranks = self.model.group().world_size();
        train.len().div_ceil(ranks * self.args.training.batch_size.get())
    }

    /// Returns the steps of all epochs. The first one may be resumed in its middle, and steps that
    /// are done may be those of another number of ranks.
    fn steps(&self, train: &Arc<Images>, start_epoch: usize) -> usize {
        let options = &self.args.training;
        let later_epochs = options.epochs.get().saturating_sub(start_epoch);
        DataLoader::new(train, &self.sampler, options.batch_size.get())
            .len()
            .saturating_add(self.batches(train).saturating_mul(later_epochs))
            .saturating_add(self.state.losses.len())
            .min(options.steps.unwrap_or(usize::MAX))
    }

    /// Trains until the end of an epoch, or until all steps are done. Returns the epoch's mean loss.
    fn epoch(&mut self, train: &Arc<Images>, epoch: usize, steps: usize) -> Result<f64> {
        let options = &self.args.training;
        let group = self.model.group().clone();
        let batches = self.batches(train);
        self.sampler.set_epoch(epoch as u64);
        let loader = DataLoader::new(train, &self.sampler, options.batch_size.get())
            .workers(options.workers);
        let end = self.state.losses.len() + loader.len(); // of the epoch
        let last = end.min(steps);
        let progress = Progress::new(group.rank() == 0, epoch, batches);
        for batch in loader.into_iter().take(last.saturating_sub(self.state.losses.len())) {
            let (images, labels) = on(&self.vs, batch?);
            self.optimizer.set_lr(options.lr_at(self.state.losses.len(), steps));
            // As `cross_entropy_for_logits`, which is in single precision whatever the model is in.
            let logits = self.model.forward_t(&images, true);
            let loss = logits.log_softmax(-1, self.vs.kind()).nll_loss(&labels);
            self.optimizer.try_backward_step(&loss)?;

            let mut loss = [loss.double_value(&[])];
            group.all_reduce(&mut loss, ReduceOp::Avg)?;
            self.state.losses.push(loss[0].to_string());
            let step = self.state.losses.len();
            progress.step(batches - (end - step), loss[0]);
            if step.is_multiple_of(self.args.checkpoint_every.get()) || step == last {
                self.save(step)?;
            }
        }
        progress.finish();

        let losses = &self.state.losses[self.state.before..];
        let sum: f64 = losses.iter().map(|loss| loss.parse::<f64>()).sum::<Result<_, _>>()?;
        let mean = sum / losses.len() as f64;
        self.state.before = self.state.losses.len();
        Ok(mean)
    }

    fn save(&mut self, step: usize) -> Result<()> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let Self { vs, model, optimizer, sampler, state, .. } = self;
        Ok(checkpoints.save(step, model, vs, optimizer, sampler, state)?)
    }
}
