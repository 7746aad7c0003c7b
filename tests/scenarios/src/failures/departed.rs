//! Ranks that leave, end or die while a rank on another node waits for them: neither is the leader of
//! its node, where nodes have two ranks.

use std::thread;
use std::time::Duration;

use anyhow::Result;
use flow_comm::{Error, ProcessGroup};
use flow_harness::assert_contains;

use super::report::{kill_myself, report, said, sleep_until_killed};
use crate::registry::{Job, Scenario, Test, by_hand, process};

const JOBS: &[Job] = &[by_hand(&[1, 2]), by_hand(&[2, 2])];

pub const SCENARIOS: &[Scenario] = &[
    // They have never exchanged a message.
    process("a_sender_that_has_left_is_named", || meet(Other::HasLeft, Wait::Recv), JOBS)
        .checked_by(|test| is_named(test, "recv from", LEFT)),
    process("a_receiver_that_has_left_is_named", || meet(Other::HasLeft, Wait::Send), JOBS)
        .checked_by(|test| is_named(test, "send to", LEFT)),
    process("a_sender_that_has_ended_is_named", || meet(Other::HasEnded, Wait::Recv), JOBS)
        .checked_by(|test| is_named(test, "recv from", LEFT)),
    process("a_sender_that_leaves_is_named", || meet(Other::Leaves, Wait::Recv), JOBS)
        .checked_by(|test| is_named(test, "recv from", LEFT)),
    process("a_receiver_that_leaves_is_named", || meet(Other::Leaves, Wait::Send), JOBS)
        .checked_by(|test| is_named(test, "send to", LEFT)),
    process("a_sender_that_ends_is_named", || meet(Other::Ends, Wait::Recv), JOBS)
        .checked_by(|test| is_named(test, "recv from", LEFT)),
    process("a_receiver_that_ends_is_named", || meet(Other::Ends, Wait::Send), JOBS)
        .checked_by(|test| is_named(test, "send to", LEFT)),
    process("a_sender_that_dies_is_named", || meet(Other::Dies, Wait::Recv), JOBS)
        .checked_by(|test| is_named(test, "recv from", "died")),
    process("a_receiver_that_dies_is_named", || meet(Other::Dies, Wait::Send), JOBS)
        .checked_by(|test| is_named(test, "send to", "died")),
    process("nobody_is_left_to_send_anything", desert, JOBS).checked_by(says_that_all_have_left),
    // They have.
    process("a_receiver_that_leaves_its_window_full", || meet(Other::Leaves, Wait::Window), JOBS)
        .checked_by(|test| is_named(test, "send to", LEFT)),
    process("a_receiver_that_dies_with_its_window_full", || meet(Other::Dies, Wait::Window), JOBS)
        .checked_by(|test| is_named(test, "send to", "died")),
];

const LEFT: &str = "has left the group";
/// Bytes that neither the kernel's buffers nor a window can hold.
const LARGE: usize = 64 << 20;
/// When the one waits, or the other has left.
const SOON: Duration = Duration::from_millis(500);

/// What the last rank does.
#[derive(Clone, Copy, PartialEq)]
enum Other {
    /// Before anybody waits for it, and all its groups.
    HasLeft,
    HasEnded,
    /// One of its groups.
    Leaves,
    Ends,
    Dies,
}

impl Other {
    fn is_late(self) -> bool {
        !matches!(self, Self::HasLeft | Self::HasEnded)
    }
}

/// What the last rank of the first node waits for.
#[derive(Clone, Copy, PartialEq)]
enum Wait {
    Recv,
    Send,
    /// To send more than the other's process keeps, which reads all that comes.
    Window,
}

impl Wait {
    fn run(self, group: &ProcessGroup, other: usize) -> Result<(), Error> {
        match self {
            Self::Recv => group.recv(&mut [0_u8; 9], other),
            Self::Send => group.send(&vec![1_u8; LARGE], other),
            Self::Window => {
                group.send(&[1_u8; 9], other)?;
                group.send(&vec![1_u8; LARGE], other)
            }
        }
    }
}

fn waiter(size: usize) -> usize {
    size / 2 - 1
}

fn meet(other: Other, wait: Wait) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let second = group.duplicate()?;
    let last = group.world_size() - 1;
    let waiter = waiter(group.world_size());
    if group.rank() == waiter {
        if !other.is_late() {
            thread::sleep(SOON);
        }
        return report(wait.run(&group, last), &group);
    }
    if group.rank() != last {
        sleep_until_killed();
    }
    let mut second = Some(second);
    if let Some(second) = second.take_if(|_| wait == Wait::Window) {
        group.recv(&mut [0_u8; 9], waiter)?;
        // Who waits for a message in one group reads those of all.
        thread::spawn(move || second.recv(&mut [0_u8; 9], waiter));
    }
    if other.is_late() {
        thread::sleep(SOON);
    }
    match other {
        Other::HasEnded | Other::Ends => return Ok(()),
        Other::Dies => kill_myself(),
        Other::HasLeft => drop((group, second)),
        Other::Leaves => drop(group),
    }
    sleep_until_killed()
}

fn desert() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.barrier()?;
    if group.rank() == waiter(group.world_size()) {
        return report(group.recv_any(&mut [0_u8; 9], 5).map(drop), &group);
    }
    thread::sleep(SOON);
    drop(group);
    sleep_until_killed()
}

fn says_that_all_have_left(test: &Test) {
    let mut ranks = test.ranks();
    let waiter = waiter(ranks.len());
    let said = said(ranks.remove(waiter));
    let operation = format!("PeerLost: rank {waiter}: recv from any rank (9 x u8, tag 5) failed: ");
    assert_contains(&said[0], &[&operation, "nobody is left to send it: rank ", LEFT]);
}

fn is_named(test: &Test, operation: &str, end: &str) {
    let mut ranks = test.ranks();
    let last = ranks.len() - 1;
    let waiter = waiter(ranks.len());
    let pid = ranks[last].pid();
    let said = said(ranks.remove(waiter));
    let operation = format!("PeerLost: rank {waiter}: {operation} rank {last} (");
    let other = format!("failed: rank {last} (pid {pid} on ");
    assert_contains(&said[0], &[&operation, &other, end]);
    assert_contains(&said[1], &["then Poisoned"]);
}
