//! What the others learn when a rank dies, leaves, hangs, or does something else; and that nothing
//! is left behind. A rank prints the kind and the text of the error that it gets, then those of the
//! next call.

mod disagreements;
mod joining;
mod launched;
mod lost;
mod messages;
mod timeouts;

use std::time::Duration;

use anyhow::Result;
use flow_comm::{Error, ProcessGroup, ReduceOp};
use flow_harness::{Process, DETECTION_LIMIT};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::registry::{by_hand, lines, File, Job, Test};

pub const FILES: [File; 6] = [
    ("failures::disagreements", disagreements::SCENARIOS),
    ("failures::joining", joining::SCENARIOS),
    ("failures::launched", launched::SCENARIOS),
    ("failures::lost", lost::SCENARIOS),
    ("failures::messages", messages::SCENARIOS),
    ("failures::timeouts", timeouts::SCENARIOS),
];

/// Three ranks, of which rank 1 fails: on one node, as a leader or not, and on nodes of their own.
const THREE: &[Job] = &[by_hand(&[3]), by_hand(&[2, 1]), by_hand(&[1, 2]), by_hand(&[1, 1, 1])];

/// Elements that go through staging buffers, in several chunks.
const LARGE: usize = 200_000;

/// Prints how it ended, and how the next call does.
fn report(outcome: Result<(), Error>, group: &ProcessGroup) -> Result<()> {
    match outcome {
        Ok(()) => println!("no error"),
        Err(error) => {
            println!("{}", describe(&error));
            match group.barrier() {
                Ok(()) => println!("then no error"),
                Err(error) => println!("then {}", describe(&error)),
            }
        }
    }
    Ok(())
}

/// The kind of the error, and its text.
fn describe(error: &Error) -> String {
    let kind = format!("{error:?}");
    let kind: String = kind.chars().take_while(|c| c.is_alphanumeric()).collect();
    format!("{kind}: {error}")
}

fn sum(group: &ProcessGroup) -> Result<(), Error> {
    group.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum)
}

fn sleep_until_killed() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

fn kill_myself() -> ! {
    let _ = kill(Pid::this(), Signal::SIGKILL);
    sleep_until_killed()
}

/// What ranks do over and over until it fails.
#[derive(Clone, Copy)]
enum Loop {
    Small,
    Shared,
    Ordinary,
    Gather,
    Async,
    Messages,
}

/// Prints `looping` when it has gone round three times. Rank 1 kills itself after `lives` rounds,
/// if given.
fn endless(group: &ProcessGroup, what: Loop, lives: Option<usize>) -> Result<()> {
    report(repeat(group, what, lives), group)
}

fn repeat(group: &ProcessGroup, what: Loop, lives: Option<usize>) -> Result<(), Error> {
    let mut shared = group.alloc_shared::<f32>(LARGE)?;
    let mut ordinary = vec![1.0_f32; LARGE];
    let mut gathered = vec![0.0_f32; LARGE * group.world_size()];
    let (next, previous) =
        ((group.rank() + 1) % group.world_size(), (group.rank() + group.world_size() - 1));
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
                ordinary = group.all_reduce_async(ordinary, ReduceOp::Avg)?.wait()?;
            }
            Loop::Messages => {
                let sent = group.send_async(ordinary, next)?;
                group.recv(&mut gathered[..LARGE], previous % group.world_size())?;
                ordinary = sent.wait()?;
            }
        }
    }
    Ok(())
}

/// Starts ranks, and waits until all of them loop.
fn looping(test: &Test) -> Vec<Process> {
    let mut ranks = test.ranks();
    ranks.iter_mut().for_each(|rank| rank.wait_for("looping"));
    ranks
}

/// What a rank printed that ended well, but for `looping` and `waiting`.
fn said(rank: Process) -> Vec<String> {
    let mut lines = lines(rank.finish(DETECTION_LIMIT));
    lines.retain(|line| line != "looping" && line != "waiting");
    lines
}
