//! What the files of failures share: how ranks fail, what they print, and how a test reads that.

use std::time::Duration;

use anyhow::Result;
use flow_comm::{Error, ProcessGroup, ReduceOp};
use flow_harness::{DETECTION_LIMIT, Process};
use rustix::process::{Signal, getpid, kill_process};

use crate::registry::{Job, by_hand, lines};

/// Three ranks, of which rank 1 fails: on one node, as a leader or not, and on nodes of their own.
pub const THREE: &[Job] = &[by_hand(&[3]), by_hand(&[2, 1]), by_hand(&[1, 2]), by_hand(&[1, 1, 1])];

/// Elements that go through staging buffers, in several chunks.
pub const LARGE: usize = 200_000;

/// Prints how it ended, and how the next call does.
pub fn report(outcome: Result<(), Error>, group: &ProcessGroup) -> Result<()> {
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
pub fn describe(error: &Error) -> String {
    let kind = format!("{error:?}");
    let kind: String = kind.chars().take_while(|c| c.is_alphanumeric()).collect();
    format!("{kind}: {error}")
}

pub fn sum(group: &ProcessGroup) -> Result<(), Error> {
    group.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum)
}

pub fn sleep_until_killed() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

pub fn kill_myself() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    sleep_until_killed()
}

/// What a rank printed that ended well, but for `looping` and `waiting`.
pub fn said(rank: Process) -> Vec<String> {
    let mut lines = lines(rank.finish(DETECTION_LIMIT));
    lines.retain(|line| line != "looping" && line != "waiting");
    lines
}
