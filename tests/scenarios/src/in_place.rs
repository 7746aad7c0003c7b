//! `flow-launch --elastic in-place`: ranks that hang, and jobs on several machines.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_harness::assert_contains;
use flow_harness::cli::{is_alive, until};
use rustix::process::{Signal, getpid, kill_process};

use crate::reconfigure::{is_loss, random, seat};
use crate::registry::{Scenario, Test, launched, machines, process};

const HANGS: &[&str] = &["--elastic", "in-place", "--max-restarts", "9", "--hang-timeout", "10"];
const IN_PLACE: &[&str] = &["--elastic", "in-place", "--max-restarts", "6"];
const COMES_BACK: &[&str] = &["--elastic", "in-place", "--min-workers", "1", "--max-restarts", "6"];
const SMALLER: &[&str] = &["--elastic", "in-place", "--min-workers", "1"];
const HANGS_SMALLER: &[&str] =
    &["--elastic", "in-place", "--min-workers", "1", "--hang-timeout", "10"];

pub const SCENARIOS: &[Scenario] = &[
    process(
        "ranks_that_hang_are_replaced",
        hang,
        &[launched(3).flags(HANGS), machines(&[1, 2]).flags(HANGS)],
    )
    .checked_by(hung_are_replaced),
    process("ranks_that_hang_together_end_the_job", hang_together, &[launched(3).flags(HANGS)])
        .checked_by(nobody_is_to_blame),
    process(
        "a_rank_that_hangs_in_a_smaller_group_is_killed",
        hang_when_smaller,
        &[launched(3).flags(HANGS_SMALLER)],
    )
    .checked_by(the_last_is_killed),
    process(
        "ranks_of_several_machines_are_replaced",
        random,
        &[machines(&[2, 1]).flags(IN_PLACE), machines(&[1, 1, 1]).flags(IN_PLACE)],
    )
    .checked_by(are_replaced),
    process(
        "the_others_go_on_without_a_machine",
        without_others,
        &[machines(&[1, 2]).flags(SMALLER), machines(&[1, 1, 1]).flags(SMALLER)],
    )
    .checked_by(goes_on_without),
    process(
        "a_machine_that_comes_back_takes_its_place",
        until_whole_again,
        &[machines(&[1, 2]).flags(COMES_BACK), machines(&[1, 1, 1]).flags(COMES_BACK)],
    )
    .checked_by(comes_back),
    process(
        "who_comes_when_the_others_end_has_nothing_to_do",
        end_without_another,
        &[launched(3).flags(IN_PLACE), machines(&[1, 2]).flags(IN_PLACE)],
    )
    .checked_by(ends_well),
];

/// The processes that stop in the middle of an operation, one after the other.
const STOPPED: [[i64; 2]; 2] = [[1, 0], [0, 0]];

/// What a process knows of itself and of one that hangs.
struct Program {
    seat: [i64; 2],
    /// The one that was to stop in the group before.
    stopped: i32,
}

/// Reduces until all that are to stop are replaced.
fn hang() -> Result<()> {
    let mut group = ProcessGroup::from_env()?;
    let mut program = Program { seat: seat()?, stopped: 0 };
    loop {
        match program.train(&group) {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) if is_loss(&error) => {}
            Err(error) => return Err(error),
        }
        group = group.reconfigure()?;
    }
    println!("seat {:?} ends", program.seat);
    Ok(())
}

impl Program {
    /// True at the end; false if another waits to join.
    fn train(&mut self, group: &ProcessGroup) -> Result<bool> {
        let size = group.world_size();
        let mut all = vec![0; 3 * size];
        group.all_gather(&[self.seat[0], self.seat[1], std::process::id() as i64], &mut all)?;
        // What was stopped is gone, and cannot wake up. (A process has another number on another
        // machine.)
        ensure!(self.stopped == 0 || !is_alive(self.stopped), "process {} lives", self.stopped);
        let mut steps = 0;
        loop {
            let mut waiting = [group.newcomers()? as i64];
            group.all_reduce(&mut waiting, ReduceOp::Max)?;
            if waiting[0] > 0 {
                return Ok(false);
            }
            let mut data = vec![group.rank() as f32; 100_000];
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            let expected = (size * (size - 1) / 2) as f32;
            ensure!(data.iter().all(|&element| element == expected), "a sum of {size} ranks");
            steps += 1;
            if size < 3 || steps < 10 {
                continue;
            }
            let next = STOPPED.iter().find_map(|victim| {
                all.chunks(3).find(|member| &member[..2] == victim).map(|member| member.to_vec())
            });
            let Some(next) = next else { return Ok(true) };
            if next[..2] == self.seat {
                stop_soon();
            } else if group.local_world_size() == size {
                self.stopped = next[2] as i32;
            }
        }
    }
}

/// Stops this process in a random moment of the operations that follow.
fn stop_soon() {
    let delay = Duration::from_micros(u64::from(std::process::id()) * 7919 % 1500);
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::STOP);
    });
}

fn hung_are_replaced(test: &Test) {
    let Some(finished) = test.finish() else { return };
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.matches(" ends\n").count(), 3, "{finished:?}");
    let killed = |rank| {
        format!("rank {rank} is killed: the others have waited for it as long as --hang-timeout")
    };
    assert_contains(&finished.stderr, &[&killed(1), "SIGKILL", "(1 of 9)", &killed(0)]);
}

/// Two of three ranks stop.
fn hang_together() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.barrier()?;
    if group.rank() > 0 {
        kill_process(getpid(), Signal::STOP)?;
    }
    Ok(group.barrier()?)
}

fn nobody_is_to_blame(test: &Test) {
    let Some(finished) = test.finish() else { return };
    assert_eq!(finished.code, Some(124), "{finished:?}");
    let why =
        "as --hang-timeout is 10 s; as there is no one rank that all others wait for, the job ends";
    assert_contains(&finished.stderr, &["ranks 1-2 are in no collective", why]);
}

/// Rank 0 ends. Then rank 2 stops, and rank 1 makes a group of both.
fn hang_when_smaller() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let [number, _] = seat()?;
    group.barrier()?;
    if number == 0 {
        kill_process(getpid(), Signal::KILL)?;
    }
    let error = group.barrier().expect_err("rank 0 is lost").into();
    ensure!(is_loss(&error), "{error:#}");
    let group = group.reconfigure()?;
    group.barrier()?;
    if number == 2 {
        kill_process(getpid(), Signal::STOP)?;
    }
    let Err(error) = group.new_group(&[0, 1]) else { bail!("rank 2 takes part") };
    let error = error.into();
    ensure!(is_loss(&error), "{error:#}");
    ensure!(group.reconfigure()?.world_size() == 1);
    println!("rank {number} ends");
    Ok(())
}

fn the_last_is_killed(test: &Test) {
    let Some(finished) = test.finish() else { return };
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.matches(" ends\n").count(), 1, "{finished:?}");
    let killed = "rank 2 is killed: the others have waited for it as long as --hang-timeout";
    assert_contains(&finished.stderr, &[killed, "; the job goes on with 1 worker\n"]);
}

fn are_replaced(test: &Test) {
    let Some(finished) = test.finish() else { return };
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.matches("ends after step").count(), 3, "{finished:?}");
    let replaced = finished.stderr.matches("is started again alone").count();
    assert_eq!(replaced, 5, "{finished:?}");
    assert_contains(&finished.stderr, &["(1 of 6)", "(5 of 6)"]);
}

/// Reduces until one is left, and a while alone.
fn without_others() -> Result<()> {
    let mut group = ProcessGroup::from_env()?;
    println!("joined");
    let mut alone = 0;
    while alone < 10 {
        let mut data = vec![1.0_f32; 100_000];
        match group.all_reduce(&mut data, ReduceOp::Sum) {
            Ok(()) => ensure!(data.iter().all(|&sum| sum == group.world_size() as f32)),
            Err(error) => {
                let error = error.into();
                ensure!(is_loss(&error), "{error:#}");
                group = group.reconfigure()?;
                println!("{} left", group.world_size());
            }
        }
        alone += usize::from(group.world_size() == 1);
    }
    Ok(())
}

/// The last agent is killed, then one loses its power, if there are so many.
fn goes_on_without(test: &Test) {
    let Some((net, mut agents)) = test.machines() else { return };
    for (agent, ranks) in agents.iter().zip(test.job.nodes()) {
        until("all have joined", || agent.stdout().matches("joined\n").count() == ranks);
    }
    while agents.len() > 1 {
        let agent = agents.pop().expect("it is there");
        if agents.len() == 1 {
            net.power_off(1);
        } else {
            agent.signal(Signal::KILL);
        }
        let left: usize = test.job.nodes()[..agents.len()].iter().sum();
        agents[0].until_says(&[&format!("{left} left")]);
        agent.finish();
    }
    let finished = agents.remove(0).finish();
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_contains(&finished.stderr, &["node1", "was lost", "; the job goes on with 1 worker\n"]);
    net.until_nothing_is_left();
}

/// Reduces until all ranks are there, others than at the start among them.
fn until_whole_again() -> Result<()> {
    let size: usize = std::env::var("WORLD_SIZE")?.parse()?;
    let seat = seat()?;
    let mut group = ProcessGroup::from_env()?;
    println!("joined as {seat:?}");
    loop {
        match reduce_in(&group, seat) {
            Ok(seats) => {
                if group.world_size() == size && seats.chunks(2).any(|seat| seat[1] > 0) {
                    break;
                }
                if group.newcomers()? == 0 {
                    continue;
                }
            }
            Err(error) => ensure!(is_loss(&error), "{error:#}"),
        }
        group = group.reconfigure()?;
    }
    println!("ends with {size}");
    Ok(())
}

fn reduce_in(group: &ProcessGroup, seat: [i64; 2]) -> Result<Vec<i64>> {
    let mut seats = vec![0; 2 * group.world_size()];
    group.all_gather(&seat, &mut seats)?;
    let mut data = vec![seat[0] as f32; 100_000];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    let expected: i64 = seats.chunks(2).map(|seat| seat[0]).sum();
    ensure!(data.iter().all(|&sum| sum == expected as f32), "{seats:?}");
    Ok(seats)
}

/// The agent of the last machine is killed, and started again.
fn comes_back(test: &Test) {
    let Some((net, mut agents)) = test.machines() else { return };
    for (agent, ranks) in agents.iter().zip(test.job.nodes()) {
        until("all have joined", || agent.stdout().matches("joined").count() == ranks);
    }
    let last = agents.len() - 1;
    let lost = agents.remove(last);
    lost.signal(Signal::KILL);
    lost.finish();
    agents.push(net.start(last, &test.commands()[last]));
    for (agent, ranks) in agents.into_iter().zip(test.job.nodes()) {
        let finished = agent.finish();
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert_eq!(finished.stdout.matches("ends with 3").count(), ranks, "{finished:?}");
        assert_contains(&finished.stderr, &["started again on node"]);
    }
    net.until_nothing_is_left();
}

/// Rank 1 ends in the last step. The others do not take in another.
fn end_without_another() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.barrier()?;
    if group.rank() == 1 {
        kill_process(getpid(), Signal::KILL)?;
    }
    until("another waits", || group.newcomers().is_ok_and(|count| count > 0));
    println!("rank {} ends", group.rank());
    Ok(())
}

fn ends_well(test: &Test) {
    let Some(finished) = test.finish() else { return };
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.matches(" ends\n").count(), 2, "{finished:?}");
    assert_contains(&finished.stderr, &["the others have ended well; rank 1 had not joined"]);
}
