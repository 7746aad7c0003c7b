//! Messages that do not come, or come in another form, and those that come all the same.

use std::time::Duration;

use anyhow::Result;
use flow_comm::{Error, ProcessGroup};
use flow_harness::{DETECTION_LIMIT, assert_contains};
use rustix::process::Signal;

use super::report::{kill_myself, report, said, sleep_until_killed};
use crate::registry::{Job, Scenario, Test, by_hand, machines, process, scenario, signal};

/// On one node, and on several.
const TWO: &[Job] = &[by_hand(&[2]), by_hand(&[1, 1])];
const THREE: &[Job] = &[by_hand(&[3]), by_hand(&[1, 2])];

pub const SCENARIOS: &[Scenario] = &[
    scenario("a_killed_sender_is_named", |group| wait(group, From::One), THREE)
        .checked_by(|test| names_the_killed(test, From::One)),
    scenario("a_killed_sender_among_any_is_named", |group| wait(group, From::Any), THREE)
        .checked_by(|test| names_the_killed(test, From::Any)),
    scenario("a_message_that_does_not_come_is_named", |group| late(group, From::One), THREE)
        .checked_by(|test| names_the_late(test, From::One)),
    scenario("a_message_of_any_that_does_not_come_is_named", |group| late(group, From::Any), THREE)
        .checked_by(|test| names_the_late(test, From::Any)),
    process("a_message_outlives_its_sender", then_exit, TWO).checked_by(outlives),
    process("a_kept_message_outlives_its_sender_and_no_other_is_waited_for", left_behind, TWO)
        .checked_by(kept_outlives),
    scenario("a_message_of_any_rank_comes_though_another_has_died", beside_death, THREE)
        .checked_by(comes_beside_death),
    process(
        "a_dead_sender_among_any_is_named_where_another_has_left",
        left_and_dead,
        &[by_hand(&[4]), by_hand(&[1, 3])],
    )
    .checked_by(names_the_dead),
    process("a_message_comes_though_others_leave", past, &[by_hand(&[1, 2])])
        .checked_by(comes_past),
    process("a_message_of_a_rank_that_has_ended_is_not_waited_for", of_ended, &[machines(&[2, 2])])
        .checked_by(names_the_ended),
    scenario("another_length_is_named_on_both_sides", too_long, &[by_hand(&[1, 1])])
        .checked_by(names_both_lengths),
    scenario("another_type_is_named_with_its_tag", |group| of_other_type(group, From::One), TWO)
        .checked_by(names_both_types),
    scenario("another_type_among_any_is_named", |group| of_other_type(group, From::Any), TWO)
        .checked_by(names_both_types),
    scenario("another_type_of_a_kept_message_is_named", of_other_type_kept, TWO)
        .checked_by(names_both_types),
];

/// Whom rank 0 receives a message with tag 5 from.
#[derive(Clone, Copy)]
enum From {
    One,
    Any,
}

impl From {
    fn receive(self, group: &ProcessGroup) -> Result<(), Error> {
        match self {
            Self::Any => group.recv_any(&mut [0_u8; 9], 5).map(drop),
            Self::One => group.recv_with_tag(&mut [0_u8; 9], 1, 5),
        }
    }

    fn operation(self) -> &'static str {
        match self {
            Self::One => "rank 0: recv from rank 1 (9 x u8, tag 5) ",
            Self::Any => "rank 0: recv from any rank (9 x u8, tag 5) ",
        }
    }
}

const RECEIVED: &str = "received [7, 7, 7, 7, 7, 7, 7, 7, 7]";

fn wait(group: &ProcessGroup, from: From) -> Result<()> {
    println!("waiting");
    if group.rank() > 0 {
        sleep_until_killed();
    }
    report(from.receive(group), group)
}

/// All have joined before one is killed: else others on its node could not join, and end as well.
fn names_the_killed(test: &Test, from: From) {
    let mut ranks = test.ranks();
    ranks.iter_mut().for_each(|rank| rank.wait_for("waiting"));
    signal(&ranks[1], Signal::KILL);
    let said = said(ranks.remove(0));
    let victim = format!("failed: rank 1 (pid {} on ", ranks[0].pid());
    assert_contains(&said[0], &["PeerLost: ", from.operation(), &victim, "died"]);
    assert_contains(&said[1], &["then Poisoned"]);
}

/// Messages with another tag come all the time.
fn late(group: &ProcessGroup, from: From) -> Result<()> {
    let outcome = match group.rank() {
        0 => {
            group.set_timeout(Duration::from_secs(1));
            from.receive(group)
        }
        1 => loop {
            if let Err(error) = group.send_with_tag(&vec![1_u8; 300_000], 0, 4) {
                break Err(error);
            }
        },
        _ => sleep_until_killed(),
    };
    report(outcome, group)
}

fn names_the_late(test: &Test, from: From) {
    let mut ranks = test.ranks();
    let pid = ranks[1].pid();
    let late = format!("timed out after 1s: waited for rank 1 (pid {pid} on ");
    assert_contains(&said(ranks.remove(0))[0], &["Timeout: ", from.operation(), &late]);
    let sending = "rank 1: send to rank 0 (300000 x u8, tag 4) failed";
    assert_contains(&said(ranks.remove(0))[0], &[sending, from.operation(), &late]);
}

fn then_exit() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    if group.rank() == 0 {
        return Ok(group.send(&vec![7_u8; 9], 1)?);
    }
    std::thread::sleep(Duration::from_millis(300));
    let mut message = [0_u8; 9];
    let result = group.recv(&mut message, 0);
    println!("received {message:?}");
    report(result.and_then(|()| group.recv(&mut message, 0)), &group)
}

/// Rank 1 leaves, which is no reason not to wait for the others. Rank 2 dies.
fn left_and_dead() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.barrier()?;
    match group.rank() {
        0 => report(From::Any.receive(&group), &group),
        1 => Ok(()),
        2 => kill_myself(),
        _ => sleep_until_killed(),
    }
}

fn names_the_dead(test: &Test) {
    let mut ranks = test.ranks();
    let victim = format!("failed: rank 2 (pid {} on ", ranks[2].pid());
    let said = said(ranks.remove(0));
    assert_contains(&said[0], &["PeerLost: ", From::Any.operation(), &victim]);
}

fn outlives(test: &Test) {
    let mut ranks = test.ranks();
    let receiver = ranks.remove(1);
    let sender = ranks.remove(0).finish(DETECTION_LIMIT);
    let pid = sender.pid;
    sender.success();
    let said = said(receiver);
    assert_eq!(said[0], RECEIVED);
    assert_contains(
        &said[1],
        &["PeerLost: rank 1: recv from rank 0 (9 x u8) failed: rank 0", &format!("(pid {pid} on ")],
    );
}

fn left_behind() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    if group.rank() == 1 {
        return Ok(group.send_with_tag(&[7_u8; 9], 0, 4)?);
    }
    std::thread::sleep(Duration::from_millis(300));
    let mut message = [0_u8; 9];
    let result = group.recv_any(&mut message, 4);
    println!("received {message:?}");
    report(result.and_then(|_| From::One.receive(&group)), &group)
}

fn kept_outlives(test: &Test) {
    let mut ranks = test.ranks();
    let sender = ranks.remove(1).finish(DETECTION_LIMIT);
    let said = said(ranks.remove(0));
    assert_eq!(said[0], RECEIVED);
    let peer = format!("failed: rank 1 (pid {} on ", sender.pid);
    let operation = From::One.operation();
    assert_contains(&said[1], &["PeerLost: ", operation, &peer, "has left the group"]);
}

/// Rank 1, whose turn is the first, has died when rank 0 asks for a message of any rank; rank 2's is
/// there.
fn beside_death(group: &ProcessGroup) -> Result<()> {
    match group.rank() {
        1 => {
            group.send_with_tag(&[i64::from(std::process::id())], 0, 3)?;
            group.recv(&mut [0_u8], 0)?;
            kill_myself();
        }
        2 => {
            group.send_with_tag(&[7_u8; 9], 0, 5)?;
            group.send_with_tag(&[0_u8], 0, 3)?;
            sleep_until_killed();
        }
        _ => {}
    }
    let mut pid = [0_i64];
    group.recv_with_tag(&mut [0_u8], 2, 3)?;
    group.recv_with_tag(&mut pid, 1, 3)?;
    group.send(&[0_u8], 1)?;
    let status = format!("/proc/{}/stat", pid[0]);
    while std::fs::read_to_string(&status).is_ok_and(|status| !status.contains(") Z ")) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut message = [0_u8; 9];
    let result = group.recv_any(&mut message, 5);
    println!("received {message:?}");
    report(result.and_then(|_| From::Any.receive(group)), group)
}

fn comes_beside_death(test: &Test) {
    let mut ranks = test.ranks();
    let said = said(ranks.remove(0));
    assert_eq!(said[0], RECEIVED);
    let victim = format!("failed: rank 1 (pid {} on ", ranks[0].pid());
    assert_contains(&said[1], &["PeerLost: ", From::Any.operation(), &victim, "died"]);
}

/// Rank 2 waits for a message of rank 0 while rank 1 leaves: only the sender matters.
fn past() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    match group.rank() {
        0 => {
            std::thread::sleep(Duration::from_secs(1));
            report(group.send(&[7_u8; 9], 2), &group)
        }
        1 => Ok(()),
        _ => {
            let mut message = [0_u8; 9];
            let result = group.recv(&mut message, 0);
            println!("received {message:?}");
            report(result, &group)
        }
    }
}

fn comes_past(test: &Test) {
    let lines: Vec<_> = test.ranks().into_iter().map(said).collect();
    assert_eq!(lines[2][..2], [RECEIVED, "no error"]);
}

/// A rank that has never sent anything has ended.
fn of_ended() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    if group.rank() > 0 {
        return Ok(());
    }
    report(group.recv(&mut [0_u8; 9], group.world_size() - 1), &group)
}

fn names_the_ended(test: &Test) {
    let Some((_net, agents)) = test.machines() else { return };
    let mut outputs = agents.into_iter().map(|agent| agent.finish().success());
    let first = outputs.next().expect("there are two machines");
    assert_contains(&first, &["PeerLost: rank 0: recv from rank 3", "ended with exit code 0"]);
    outputs.for_each(drop);
}

/// The receiver serves the store, and ends at once. The message is longer than what a receiver reads
/// ahead (32 MiB): of a shorter one the sender may have sent all before it learns anything.
fn too_long(group: &ProcessGroup) -> Result<()> {
    report(
        match group.rank() {
            0 => group.recv(&mut [0_u8; 9], 1),
            _ => group.send(&vec![7_u8; 64 << 20], 0),
        },
        group,
    )
}

fn names_both_lengths(test: &Test) {
    for process in test.ranks() {
        let sides = "rank 1 sends 67108864 x u8, rank 0 receives 9 x u8";
        assert_contains(&said(process)[0], &[sides]);
    }
}

fn send_other_type(group: &ProcessGroup) -> Result<(), Error> {
    let sent = group.send_with_tag(&[1.0_f32; 5], 0, 5);
    sent.and_then(|()| group.send_with_tag(&[7_u8; 9], 0, 4))
}

fn of_other_type(group: &ProcessGroup, from: From) -> Result<()> {
    report(if group.rank() == 1 { send_other_type(group) } else { from.receive(group) }, group)
}

/// It has come before rank 0 asks for it.
fn of_other_type_kept(group: &ProcessGroup) -> Result<()> {
    if group.rank() == 1 {
        return report(send_other_type(group), group);
    }
    let kept = group.recv_with_tag(&mut [0_u8; 9], 1, 4);
    report(kept.and_then(|()| From::One.receive(group)), group)
}

fn names_both_types(test: &Test) {
    let mut ranks = test.ranks();
    let sides = "rank 1 sends 5 x f32, rank 0 receives 9 x u8, both with tag 5";
    assert_contains(&said(ranks.remove(0))[0], &["Mismatch: rank 0: ", sides]);
}
