//! Ranks that do one thing over and over until it fails.

use anyhow::Result;
use flow_comm::{Error, ProcessGroup, ReduceOp};
use flow_harness::Process;

use super::report::{LARGE, kill_myself, report};
use crate::beside;
use crate::registry::Test;

/// What ranks do over and over until it fails.
#[derive(Clone, Copy)]
pub enum Loop {
    Small,
    Shared,
    Ordinary,
    Gather,
    Async,
    Messages,
}

/// Prints `looping` when it has gone round three times. Rank 1 kills itself after `lives` rounds,
/// if given.
pub fn endless(group: &ProcessGroup, what: Loop, lives: Option<usize>) -> Result<()> {
    report(repeat(group, what, lives), group)
}

fn repeat(group: &ProcessGroup, what: Loop, lives: Option<usize>) -> Result<(), Error> {
    let mut shared = group.alloc_shared::<f32>(LARGE)?;
    let mut ordinary = vec![1.0_f32; LARGE];
    let mut gathered = vec![0.0_f32; LARGE * group.world_size()];
    let next = (group.rank() + 1) % group.world_size();
    let previous = group.rank() + group.world_size() - 1;
    for round in 0.. {
        if round == 3 {
            println!("looping");
        }
        if lives == Some(round) && group.rank() == 1 {
            kill_myself();
        }
        match what {
            Loop::Small => group.all_reduce(&mut ordinary[..7], ReduceOp::Avg)?,
            Loop::Shared => group.all_reduce(&mut shared, ReduceOp::Avg)?,
            Loop::Ordinary => group.all_reduce(&mut ordinary, ReduceOp::Avg)?,
            Loop::Gather => group.all_gather(&ordinary, &mut gathered)?,
            Loop::Async => {
                ordinary = beside::all_reduce(group, ordinary, ReduceOp::Avg)?.wait()?;
            }
            Loop::Messages => {
                let sent = beside::send(group, ordinary, next, 0)?;
                group.recv(&mut gathered[..LARGE], previous % group.world_size())?;
                ordinary = sent.wait()?;
            }
        }
    }
    Ok(())
}

/// Starts ranks, and waits until all of them loop.
pub fn looping(test: &Test) -> Vec<Process> {
    let mut ranks = test.ranks();
    ranks.iter_mut().for_each(|rank| rank.wait_for("looping"));
    ranks
}
