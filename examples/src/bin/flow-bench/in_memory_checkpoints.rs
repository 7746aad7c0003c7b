//! Saving a model and its Adam, trained by `Fsdp`, in flow-launch's memory: how long the training stalls, beside a
//! copy of as many bytes in memory. Both take turns.

use anyhow::Result;
use clap::Args;
use flow_ddp::{Checkpoints, ProcessGroup};
use serde_json::json;

use crate::checkpoints::{Trained, timed};
use crate::timing::{median, milliseconds};

#[derive(Args)]
pub struct Options {
    /// The size of the model and the optimizer's state, in MB
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    megabytes: u32,
    /// How often each is measured
    #[arg(long, default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    tch::set_num_threads(1);
    let Trained { vs, model, optimizer, sampler, bytes } = Trained::new(options.megabytes, &group)?;
    let state = vec![1_u8; bytes / group.world_size()];
    let mut memory = vec![0_u8; state.len()];
    let mut checkpoints = Checkpoints::in_memory(&group)?;
    // The first copies are into new memory.
    for step in 0..2 {
        memory.fill(1);
        checkpoints.save(step, &model, &vs, &optimizer, &sampler, &())?;
    }
    let mut copies = Vec::new();
    let mut stalls = Vec::new();
    for step in 2..2 + options.rounds as usize {
        copies.push(timed(&group, || {
            memory.copy_from_slice(&state);
            Ok(())
        })?);
        stalls.push(timed(&group, || {
            Ok(checkpoints.async_save(step, &model, &vs, &optimizer, &sampler, &())?)
        })?);
        checkpoints.wait()?;
    }
    if group.rank() > 0 {
        return Ok(());
    }
    let rounds = stalls.iter().zip(&copies);
    let mut ratios: Vec<f64> = rounds.map(|(stall, copy)| stall.div_duration_f64(*copy)).collect();
    ratios.sort_by(f64::total_cmp);
    let [low, high] = [1, 3].map(|quarter| ratios[quarter * (ratios.len() - 1) / 4]);
    let [copy, stall] = [&mut copies, &mut stalls].map(|times| milliseconds(median(times)));
    let megabytes = options.megabytes;
    let ratio = stall / copy;
    if options.json {
        let line = json!({
            "bench": "in-memory-checkpoints", "megabytes": megabytes, "ranks": group.world_size(),
            "copy_ms": copy, "stall_ms": stall, "ratio": ratio, "quartiles": [low, high],
        });
        println!("{line}");
    } else {
        println!(
            "{megabytes} MB: {stall:.1} ms to begin to save in memory, {ratio:.2} times a copy ({copy:.1} ms; half \
             of the rounds {low:.2} to {high:.2})"
        );
    }
    Ok(())
}
