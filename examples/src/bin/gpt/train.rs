//! The training.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{ensure, Result};
use flow::global::checkpoint::{ShardedCheckpoint, ShardedCheckpoints};
use flow::global::lr_scheduler::LrScheduler;
use flow::global::GlobalTensor;
use flow::prelude::{nn, ReduceOp, Tensor, TensorCollectives, B};
use flow_examples::options::{write_losses, Options as Training};
use serde::{Deserialize, Serialize};

use super::data::Text;
use super::job::Job;
use super::memory::Memory;
use super::model;
use super::options::Options;

/// The last part of the text, which `--validate-every` holds out: one of so many.
const HELD_OUT: usize = 20;

/// What a checkpoint has beside the model and the optimizer.
#[derive(Clone, Serialize, Deserialize)]
pub struct State {
    pub hyperparameters: Vec<(String, String)>,
    lr_decay_steps: u64,
    /// The loss of each step, as text: JSON has no NaN.
    losses: Vec<String>,
}

/// Trains, from the checkpoint on if there is one.
pub fn train(
    job: &mut Job,
    mut checkpoints: Option<ShardedCheckpoints>,
    latest: Option<ShardedCheckpoint<State>>,
) -> Result<()> {
    let (options, group) = (job.options, job.group);
    let is_first = group.rank() == 0;
    let (data_ranks, samples) =
        (job.placement.shape()[0], options.batch_size / options.micro_batches);
    ensure!(
        samples % data_ranks as i64 == 0,
        "--dp {data_ranks} does not divide the {samples} samples of a micro-batch"
    );
    let mut text = Text::load(options.text.as_deref())?;
    let checksum = text.checksum();
    let held_out = options.validate_every.map(|_| text.split_off_part(HELD_OUT));
    text.check(options)?;
    held_out.as_ref().map(|held_out| held_out.batches(options)).transpose()?;
    let mut state = State {
        hyperparameters: options.hyperparameters(checksum),
        lr_decay_steps: options.lr_decay_steps(),
        losses: Vec::new(),
    };
    let mut decay_before = state.lr_decay_steps;
    if let Some(saved) = latest {
        Training::check_hyperparameters(&saved.state.hyperparameters, &state.hyperparameters)?;
        job.optimizer.resume(&saved)?;
        decay_before = saved.state.lr_decay_steps;
        state.losses = saved.state.losses;
    }
    let first_step = state.losses.len() as u64;
    let last_step = options.stop_after.unwrap_or(u64::MAX).min(options.steps);
    let said = job.describe()?;
    if is_first {
        println!("{said}");
        if first_step > 0 {
            println!("going on after step {first_step}");
        }
        let decay = state.lr_decay_steps;
        if decay != decay_before {
            println!(
                "the learning rate now falls until step {decay}, not {decay_before} as before: \
                 --lr-decay-steps {decay_before} keeps that"
            );
        }
    }
    if let Some(checkpoints) = checkpoints.as_mut().filter(|_| last_step == 0) {
        job.optimizer.save(checkpoints, 0, &state)?;
    }

    let before = first_step * options.micro_batches as u64;
    job.micro_batches.iter().for_each(|count| count.store(before, Ordering::Relaxed));
    let rates = rates(options);
    let mut start = Instant::now();
    for step in first_step..last_step {
        job.optimizer.set_lr(rates.at(step));
        let loss = job.forward_backward(&text, step)?;
        let memory = (step + 1 == last_step).then(|| Memory::most(job)).transpose()?;
        let norm = job.optimizer.clip_grad_norm(options.clip, true)?;
        job.optimizer.step()?;
        state.losses.push(loss.to_string());

        let done = step + 1;
        if is_first && (done.is_multiple_of(50) || done == last_step) {
            let per_step = start.elapsed().as_secs_f64() / (done - first_step) as f64;
            println!(
                "step {done}/{}: loss {loss:.4}, gradient norm {norm:.3}, {:.0} ms a step",
                options.steps,
                1e3 * per_step
            );
        }
        if let Some(memory) = memory.filter(|_| is_first) {
            println!("{memory}");
        }
        let is_due = |every: usize| done.is_multiple_of(every as u64) || done == last_step;
        let validate = options.validate_every.filter(|every| is_due(every.get()));
        if let Some(held_out) = held_out.as_ref().filter(|_| validate.is_some()) {
            let began = Instant::now();
            let loss = job.validate(held_out)?;
            if is_first {
                println!("step {done}/{}: validation loss {loss:.4}", options.steps);
            }
            // Steps are timed without.
            start += began.elapsed();
        }
        let every = options.checkpoint_every.get();
        if let Some(checkpoints) = checkpoints.as_mut().filter(|_| is_due(every)) {
            job.optimizer.save(checkpoints, done as usize, &state)?;
        }
    }
    if is_first {
        write_losses(options.losses.as_deref(), &state.losses)?;
    }
    Ok(())
}

impl Job<'_> {
    /// What ranks have of the model, and of the optimizer's state, as elements of parameters.
    fn describe(&self) -> Result<String> {
        let own = |vs: &nn::VarStore| -> Result<i64> {
            let elements = |one: &Tensor| Ok(one.detach().to_local()?.numel() as i64);
            vs.trainable_variables().iter().map(elements).sum()
        };
        let mut most = [own(&self.vs)?, own(self.optimizer.shards())?];
        self.group.all_reduce(&mut most, ReduceOp::Max)?;
        let all: usize = self.vs.trainable_variables().iter().map(Tensor::numel).sum();
        let (ranks, [parameters, state]) = (self.group.world_size(), most);
        let &[dp, tp] = self.placement.shape() else { return Ok(String::new()) };
        Ok(format!(
            "--dp {dp} --tp {tp} --pp {}: of {all} parameters a rank has at most {parameters}, and \
             the optimizer's state of {state}",
            ranks / dp / tp
        ))
    }

    /// Computes the gradients of a step. Returns the loss.
    fn forward_backward(&mut self, text: &Text, step: u64) -> Result<f64> {
        let options = self.options;
        let batch = match self.needs_batch() {
            true => Vec::from(text.batch(&self.placement, options, step, self.group.device())?),
            false => Vec::new(),
        };
        let inputs = batch.get(..1).unwrap_or_default();
        let loss = self.pipeline.step(inputs, |logits, micro_batch| {
            let targets = micro_batch.of(&batch[1]);
            model::loss(&logits[0], &targets).unwrap_or_else(|error| panic!("{error}"))
        })?;
        self.on_all_ranks(loss)
    }

    /// The mean loss of a text, cut into pieces; without what does not fill a batch.
    fn validate(&mut self, text: &Text) -> Result<f64> {
        let batches = text.batches(self.options)?;
        let mut sum = 0.0;
        for number in 0..batches {
            let device = self.group.device();
            let batch = match self.needs_batch() {
                true => Vec::from(text.pieces(&self.placement, self.options, number, device)?),
                false => Vec::new(),
            };
            let logits = self.pipeline.forward(batch.get(..1).unwrap_or_default())?;
            let loss = logits.map(|logits| tch::no_grad(|| model::loss(&logits[0], &batch[1])));
            sum += self.on_all_ranks(loss.transpose()?)?;
        }
        Ok(sum / batches as f64)
    }

    fn needs_batch(&self) -> bool {
        self.pipeline.needs_inputs() || self.pipeline.needs_targets()
    }

    /// The loss, which the ranks of the last stage have.
    fn on_all_ranks(&self, loss: Option<Tensor>) -> Result<f64> {
        let mut number = [0.0];
        if let Some(loss) = loss {
            number[0] = loss.to_sbp([B, B])?.to_local()?.f_double_value(&[])?;
        }
        self.group.broadcast(&mut number, self.last_rank)?;
        Ok(number[0])
    }
}

/// The learning rate of each step: up in a straight line, then down along half a cosine.
fn rates(options: &Options) -> LrScheduler {
    let steps = options.lr_decay_steps();
    let cosine = LrScheduler::Cosine { base: options.lr, steps, alpha: 0.1 };
    LrScheduler::LinearWarmUp { steps: steps / 10, start: 0.05, then: Box::new(cosine) }
}
