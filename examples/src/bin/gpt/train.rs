//! The training.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use flow::global::GlobalTensor;
use flow::global::checkpoint::{ShardedCheckpoint, ShardedCheckpoints};
use flow::global::lr_scheduler::LrScheduler;
use flow::prelude::{B, ReduceOp, Tensor, TensorCollectives, nn};
use flow_examples::options::{Options as Training, write_losses};
use serde::{Deserialize, Serialize};

use super::data::Text;
use super::job::Job;
use super::memory::Memory;
use super::model;
use super::options::Options;

/// The last part of the text, which `--validate-every` holds out: one of so many.
const HELD_OUT: usize = 20;

/// The part of a checkpoint beside the model and the optimizer.
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
    let Job { options, group, .. } = *job;
    let is_first = group.rank() == 0;
    let text = Texts::load(job)?;
    let mut state = job.resume(&text, latest)?;
    let first_step = state.losses.len() as u64;
    let last_step = options.stop_after.unwrap_or(u64::MAX).min(options.steps);
    if last_step == 0
        && let Some(checkpoints) = &mut checkpoints
    {
        job.optimizer.save(checkpoints, 0, &state)?;
    }

    let rates = rates(options);
    let mut in_steps = Duration::ZERO;
    for step in first_step..last_step {
        let start = Instant::now();
        let done = step + 1;
        job.optimizer.set_lr(rates.at(step));
        let loss = job.forward_backward(&text.train, step)?;
        if done == last_step {
            // Before the optimizer's step, which drops the gradients.
            job.show_memory()?;
        }
        let norm = job.optimizer.clip_grad_norm(options.clip, true)?;
        job.optimizer.step()?;
        state.losses.push(loss.to_string());
        in_steps += start.elapsed();

        if is_first && is_due(50, done, last_step) {
            let ms = 1e3 * in_steps.as_secs_f64() / (done - first_step) as f64;
            println!(
                "step {done}/{}: loss {loss:.4}, gradient norm {norm:.3}, {ms:.0} ms a step",
                options.steps
            );
        }
        if let (Some(every), Some(held_out)) = (options.validate_every, &text.held_out)
            && is_due(every.get(), done, last_step)
        {
            let loss = job.validate(held_out)?;
            if is_first {
                println!("step {done}/{}: validation loss {loss:.4}", options.steps);
            }
        }
        if let Some(checkpoints) = &mut checkpoints
            && is_due(options.checkpoint_every.get(), done, last_step)
        {
            job.optimizer.save(checkpoints, done as usize, &state)?;
        }
    }
    if is_first {
        write_losses(options.losses.as_deref(), &state.losses)?;
    }
    Ok(())
}

/// Returns whether something that is done every so many steps, and after the last, is due.
fn is_due(every: usize, done: u64, last_step: u64) -> bool {
    done.is_multiple_of(every as u64) || done == last_step
}

/// The text of a training.
struct Texts {
    checksum: u32,
    train: Text,
    held_out: Option<Text>,
}

impl Texts {
    /// Reads the text, and checks that batches can be made of it.
    fn load(job: &Job) -> Result<Self> {
        let options = job.options;
        let data_ranks = job.placement.shape()[0];
        let samples = options.batch_size / options.micro_batches;
        ensure!(
            samples % data_ranks as i64 == 0,
            "--dp {data_ranks} does not divide the {samples} samples of a micro-batch"
        );
        let mut train = Text::load(options.text.as_deref())?;
        let checksum = train.checksum();
        let held_out = options.validate_every.map(|_| train.split_off_part(HELD_OUT));
        train.check(options)?;
        if let Some(held_out) = &held_out {
            held_out.batches(options)?;
        }
        Ok(Self { checksum, train, held_out })
    }
}

impl Job<'_> {
    /// Takes over a checkpoint, if there is one, and says what is trained from which step on.
    fn resume(&mut self, text: &Texts, latest: Option<ShardedCheckpoint<State>>) -> Result<State> {
        let options = self.options;
        let decay = options.lr_decay_steps();
        let mut state = State {
            hyperparameters: options.hyperparameters(text.checksum),
            lr_decay_steps: decay,
            losses: Vec::new(),
        };
        let mut decay_before = decay;
        if let Some(saved) = latest {
            Training::check_hyperparameters(&saved.state.hyperparameters, &state.hyperparameters)?;
            self.optimizer.resume(&saved)?;
            decay_before = saved.state.lr_decay_steps;
            state.losses = saved.state.losses;
        }
        let first_step = state.losses.len() as u64;
        for count in &self.micro_batches {
            count.store(first_step * options.micro_batches as u64, Ordering::Relaxed);
        }
        let description = self.describe()?;
        if self.group.rank() != 0 {
            return Ok(state);
        }
        println!("{description}");
        if first_step > 0 {
            println!("going on after step {first_step}");
        }
        if decay != decay_before {
            println!(
                "the learning rate now falls until step {decay}, not {decay_before} as before: \
                 --lr-decay-steps {decay_before} keeps that"
            );
        }
        Ok(state)
    }

    fn show_memory(&self) -> Result<()> {
        let memory = Memory::most(self)?;
        if self.group.rank() == 0 {
            println!("{memory}");
        }
        Ok(())
    }

    /// Says what ranks have of the model, and of the optimizer's state, as elements of parameters.
    fn describe(&self) -> Result<String> {
        let mut most = [local_elements(&self.vs)?, local_elements(self.optimizer.shards())?];
        self.group.all_reduce(&mut most, ReduceOp::Max)?;
        let [parameters, state] = most;
        let all: usize = self.vs.trainable_variables().iter().map(Tensor::numel).sum();
        let ranks = self.group.world_size();
        let &[dp, tp] = self.placement.shape() else { return Ok(String::new()) };
        let pp = ranks / dp / tp;
        let fsdp = if self.options.fsdp { " --fsdp" } else { "" };
        Ok(format!(
            "--dp {dp} --tp {tp} --pp {pp}{fsdp}: of {all} parameters a rank has at most \
             {parameters}, and the optimizer's state of {state}"
        ))
    }

    /// Computes the gradients of a step. Returns the loss.
    fn forward_backward(&mut self, text: &Text, step: u64) -> Result<f64> {
        let options = self.options;
        let mut batch = Vec::new();
        if self.needs_batch() {
            batch.extend(text.batch(&self.placement, options, step, self.group.device())?);
        }
        let inputs = batch.get(..1).unwrap_or_default();
        let loss = self.pipeline.step(inputs, |logits, micro_batch| {
            let targets = micro_batch.of(&batch[1]);
            model::loss(&logits[0], &targets).unwrap_or_else(|error| panic!("{error}"))
        })?;
        self.on_all_ranks(loss)
    }

    /// Computes the mean loss of a text, cut into pieces; without what does not fill a batch.
    fn validate(&mut self, text: &Text) -> Result<f64> {
        let batches = text.batches(self.options)?;
        let mut sum = 0.0;
        for number in 0..batches {
            let device = self.group.device();
            let mut batch = Vec::new();
            if self.needs_batch() {
                batch.extend(text.pieces(&self.placement, self.options, number, device)?);
            }
            let logits = self.pipeline.forward(batch.get(..1).unwrap_or_default())?;
            let loss = logits.map(|logits| tch::no_grad(|| model::loss(&logits[0], &batch[1])));
            sum += self.on_all_ranks(loss.transpose()?)?;
        }
        Ok(sum / batches as f64)
    }

    fn needs_batch(&self) -> bool {
        self.pipeline.needs_inputs() || self.pipeline.needs_targets()
    }

    /// Gives all ranks the loss, which the ranks of the last stage have.
    fn on_all_ranks(&self, loss: Option<Tensor>) -> Result<f64> {
        let mut number = [0.0];
        if let Some(loss) = loss {
            number[0] = loss.to_sbp([B, B])?.to_local()?.f_double_value(&[])?;
        }
        self.group.broadcast(&mut number, self.last_rank)?;
        Ok(number[0])
    }
}

/// Returns the elements that this rank has of trainable variables.
fn local_elements(vs: &nn::VarStore) -> Result<i64> {
    let mut elements = 0;
    for variable in vs.trainable_variables() {
        elements += variable.detach().to_local()?.numel() as i64;
    }
    Ok(elements)
}

/// Returns the learning rate of each step: up in a straight line, then down along half a cosine.
fn rates(options: &Options) -> LrScheduler {
    let steps = options.lr_decay_steps();
    let cosine = LrScheduler::Cosine { base: options.lr, steps, alpha: 0.1 };
    LrScheduler::LinearWarmUp { steps: steps / 10, start: 0.05, then: Box::new(cosine) }
}
