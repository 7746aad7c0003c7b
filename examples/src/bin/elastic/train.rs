//! The training, from wherever it goes on.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result};
use flow::ddp::{Error, SamplerState, Training};
use flow::prelude::*;
use serde::{Deserialize, Serialize};
use tch::nn::SequentialT;

use crate::options::Options;
use crate::task::Samples;

/// Where the training goes on when the ranks have changed.
#[derive(Default, Serialize, Deserialize)]
pub struct Progress {
    pub epoch: u64,
    /// The same for all virtual ranks; None at the beginning of an epoch.
    pub sampler: Option<SamplerState>,
    /// The losses of all steps, as text: JSON has no NaN.
    pub losses: Vec<String>,
    /// Whether no step is to follow.
    pub is_over: bool,
}

/// What a process keeps while the ranks change.
pub struct Trainer<'a> {
    options: &'a Options,
    vs: &'a nn::VarStore,
    train: Arc<Samples>,
    journal: Option<File>,
    /// The number of groups that this process has been in.
    groups: u32,
}

impl<'a> Trainer<'a> {
    pub fn new(options: &'a Options, vs: &'a nn::VarStore, train: Arc<Samples>) -> Result<Self> {
        let journal = options.journal.as_ref().map(open).transpose()?;
        Ok(Self { options, vs, train, journal, groups: 0 })
    }

    /// Begins in a group. If none of its ranks has done a step, they go on from the latest checkpoint.
    pub fn begin(
        &mut self,
        training: &mut Training<SequentialT, Progress>,
    ) -> Result<Option<Checkpoints>> {
        self.groups += 1;
        let Some(folder) = &self.options.checkpoint else { return Ok(None) };
        let mut checkpoints = Checkpoints::open(folder, training.group())?;
        let latest = checkpoints.latest::<Progress>()?;
        if let Some(checkpoint) = latest.filter(|_| training.steps() == 0) {
            let mut sampler = self.sampler(0)?;
            checkpoint.resume(self.vs, training.optimizer, &mut sampler)?;
            *training.state = checkpoint.state;
            training.state.is_over = self.is_last(training.state.losses.len());
        }
        Ok(Some(checkpoints))
    }

    /// Trains until the end of the epoch, from where its sampler is, or until the training is over.
    pub fn epoch(
        &mut self,
        training: &mut Training<SequentialT, Progress>,
        mut checkpoints: Option<&mut Checkpoints>,
    ) -> Result<()> {
        let mut samplers = Vec::new();
        for part in training.model.virtual_ranks() {
            let mut sampler = self.sampler(part)?;
            if let Some(position) = &training.state.sampler {
                sampler.resume(position)?;
            }
            sampler.set_epoch(training.state.epoch);
            samplers.push(sampler);
        }
        let mut loaders = Vec::new();
        for sampler in &samplers {
            let loader = DataLoader::new(&self.train, sampler, self.options.batch_size.get());
            loaders.push(loader.into_iter());
        }
        while !training.state.is_over {
            let batches: Option<Vec<_>> = loaders.iter_mut().map(Iterator::next).collect();
            let Some(batches) = batches else { break };
            let batches = batches.into_iter().collect::<Result<Vec<_>, _>>()?;
            let step = training.state.losses.len();
            let (loss, is_last) =
                training.step(|model, _| self.gradients(model, step, &batches))?;
            training.state.sampler = samplers.first().map(DistributedSampler::state);
            training.state.losses.push(loss.to_string());
            training.state.is_over = is_last;
            self.note(training, step)?;
            let steps = step + 1;
            if steps.is_multiple_of(self.options.checkpoint_every.get())
                && let Some(checkpoints) = &mut checkpoints
            {
                let Training { model, optimizer, state, .. } = training;
                checkpoints.save(steps, model, self.vs, *optimizer, &samplers[0], *state)?;
            }
        }
        Ok(())
    }

    /// Returns the sampler of a virtual rank.
    fn sampler(&self, part: usize) -> Result<DistributedSampler> {
        let Options { virtual_ranks, seed, .. } = self.options;
        let sampler =
            DistributedSampler::with_replicas(self.train.len(), virtual_ranks.get(), part)?;
        Ok(sampler.seed((*seed).into()))
    }

    /// Computes the gradients of this rank's parts of a step. Returns the mean loss of all parts, and
    /// whether the step is the last one.
    fn gradients(
        &self,
        model: &Ddp<SequentialT>,
        step: usize,
        batches: &[(Tensor, Tensor)],
    ) -> Result<(f64, bool), Error> {
        let mut own = Vec::new();
        for (part, (inputs, labels)) in model.virtual_ranks().zip(batches) {
            own.push(model.in_virtual_rank(part, step as u64, || {
                let loss = model.try_forward_t(inputs, true)?.cross_entropy_for_logits(labels);
                loss.f_backward().map_err(Error::from_backward)?;
                Ok::<_, Error>(loss.double_value(&[]))
            })?);
        }
        let is_last = self.is_last(step + 1);
        // In the order of the parts, whichever ranks have them.
        let group = model.group();
        let mut of_ranks = vec![0i64; 2 * group.world_size()];
        group.all_gather(&[own.len() as i64, is_last.into()], &mut of_ranks)?;
        let counts: Vec<usize> = of_ranks.chunks(2).map(|of_rank| of_rank[0] as usize).collect();
        let is_last = of_ranks.chunks(2).any(|of_rank| of_rank[1] == 1);
        let mut losses = vec![0.0; counts.iter().sum()];
        group.all_gather_v(&own, &mut losses, &counts)?;
        Ok((losses.iter().sum::<f64>() / losses.len() as f64, is_last))
    }

    /// Whether no step is to follow so many.
    fn is_last(&self, steps: usize) -> bool {
        let Options { steps: most, until, .. } = self.options;
        most.is_some_and(|most| steps >= most) || until.as_ref().is_some_and(|file| file.exists())
    }

    /// Writes into the journal that this rank has done a step.
    fn note(&mut self, training: &Training<SequentialT, Progress>, step: usize) -> Result<()> {
        let Some(file) = &mut self.journal else { return Ok(()) };
        let time = SystemTime::UNIX_EPOCH.elapsed()?.as_secs_f64();
        let ranks = training.group().world_size();
        let groups = self.groups;
        let line = format!("{time:.4} {step} {} {ranks} {groups}\n", std::process::id());
        Ok(file.write_all(line.as_bytes())?)
    }
}

fn open(path: &PathBuf) -> Result<File> {
    let file = File::options().create(true).append(true).open(path);
    file.with_context(|| format!("cannot write {}", path.display()))
}
