//! Text that a trained model makes.

use std::io::{Write, stdout};

use anyhow::{Result, bail, ensure};
use flow::global::checkpoint::ShardedCheckpoint;
use flow::prelude::*;
use flow_examples::options::Options as Training;

use super::job::Job;
use super::options::SIZES;
use super::train::State;

/// Prints the prompt, and byte after byte what the checkpoint's model draws to follow.
pub fn print(job: &mut Job, latest: Option<&ShardedCheckpoint<State>>, prompt: &str) -> Result<()> {
    let Job { options, group, .. } = *job;
    ensure!(!prompt.is_empty(), "--sample needs some text to go on with");
    let Some(checkpoint) = latest else {
        bail!("there is no checkpoint to take the model from; train one first")
    };
    let saved = &checkpoint.state.hyperparameters;
    let here = options.hyperparameters(0);
    Training::check_hyperparameters(&saved[..SIZES.min(saved.len())], &here[..SIZES])?;
    job.optimizer.resume(checkpoint)?;

    let context = options.context as usize;
    let _no_grad = tch::no_grad_guard();
    tch::manual_seed(options.seed as i64);
    let mut bytes = prompt.as_bytes().to_vec();
    show(group, &bytes)?;
    for _ in 0..options.sample_bytes {
        let seen = &bytes[bytes.len().saturating_sub(context)..];
        let last = seen.len() as i64 - 1;
        // What follows the last byte changes nothing before it.
        let mut tokens: Vec<i64> = seen.iter().map(|&byte| i64::from(byte)).collect();
        tokens.resize(context, 0);
        let tokens = Tensor::from_slice(&tokens).view([1, -1]).to_device(group.device());
        let mut inputs = Vec::new();
        if job.pipeline.needs_inputs() {
            inputs.push(global::distribute_tensor(&tokens, &job.placement, [B, B])?);
        }
        let mut next = [0u8];
        if let Some(logits) = job.pipeline.forward(&inputs)? {
            let logits = logits[0].to_sbp([B, B])?.to_local()?.to(Device::Cpu);
            let logits = logits.select(0, 0).select(0, last).to_kind(Kind::Double);
            let likely = (logits / options.temperature).softmax(-1, Kind::Double);
            next[0] = likely.multinomial(1, false).int64_value(&[0]) as u8;
        }
        group.broadcast(&mut next, job.last_rank)?;
        bytes.extend(next);
        show(group, &next)?;
    }
    show(group, b"\n")
}

/// Rank 0 prints the bytes at once.
fn show(group: &ProcessGroup, bytes: &[u8]) -> Result<()> {
    if group.rank() == 0 {
        stdout().write_all(bytes)?;
        stdout().flush()?;
    }
    Ok(())
}
