//! Groups that go on when ranks have ended and others have come.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use flow_comm::env::Membership;
use flow_comm::nccl::Device;
use flow_comm::store::{Address, Server};
use flow_comm::{Error, ProcessGroup, ReduceOp, SharedBuffer};
use flow_harness::cli::until;
use flow_harness::{Process, TEST_TIMEOUT, assert_contains, free_port};
use rustix::process::{Signal, getpid, kill_process};

use crate::beside;
use crate::collectives::{OnGpu, check_type};
use crate::registry::{Scenario, Test, by_hand, in_process, launched, process, scenario};

pub const IN_PLACE: &[&str] = &["--elastic", "in-place", "--max-restarts", "6"];

pub const SCENARIOS: &[Scenario] = &[
    process("ranks_that_are_killed_are_replaced", random, &[launched(3).flags(IN_PLACE)])
        .checked_by(are_replaced),
    process(
        "without_restarts_the_job_goes_on_smaller",
        random,
        &[launched(4)
            .flags(&["--elastic", "in-place", "--min-workers", "1"])
            .env(&[("FLOW_TEST_LEFT", "1")])],
    )
    .checked_by(ends_well),
    process(
        "ranks_of_several_nodes_are_replaced",
        random,
        &[by_hand(&[2, 2]), by_hand(&[1, 1, 1]), by_hand(&[1, 2])],
    )
    .checked_by(are_replaced_by_hand),
    process("ranks_on_gpus_are_replaced", on_gpus, &[launched(3).flags(IN_PLACE).on_fake_cuda()])
        .checked_by(|test| ends_with(test, 3, 1)),
    process(
        "when_all_that_had_joined_have_ended_the_job_fails",
        nobody,
        &[launched(2).flags(IN_PLACE)],
    )
    .checked_by(all_have_ended),
    scenario("a_group_that_is_whole_goes_on_as_it_is", whole, &[launched(3), launched(1)]),
    scenario("a_rank_that_does_not_come_is_named", absent, &[launched(2)]),
    scenario("a_group_that_is_being_made_ends", being_made, &[launched(3)]),
    scenario("what_runs_beside_the_program_ends", under_way, &[launched(3)]),
    scenario("a_group_that_cannot_change_says_so", unchangeable, &[launched(2), by_hand(&[2])]),
    scenario("threads_cannot_change", |group| refused(group, "threads"), &[in_process(2)]),
];

/// The steps after which a process ends, if all are there and none is to be killed.
const STEPS: i64 = 24;
/// Each rank has so many elements of memory that all ranks see, beside what the groups need.
pub const ELEMENTS: usize = 4 << 20;

/// The rank that a process was started as, and the number of those before it.
pub fn seat() -> Result<[i64; 2]> {
    let number = |name| match std::env::var(name) {
        Ok(text) => text.parse().context("a number"),
        Err(_) => Ok(0_i64),
    };
    Ok([number("RANK")?, number("FLOW_REPLACEMENT")?])
}

/// The processes that kill themselves together, one set after the other. The second has the first rank,
/// which has made the shared memory; the last two have just come.
const VICTIMS: &[&[[i64; 2]]] = &[&[[1, 0]], &[[0, 0], [2, 0]], &[[1, 1]], &[[0, 1]]];

/// Returns those of the members that are to kill themselves next.
fn victims(members: &[&[i64]]) -> Vec<[i64; 2]> {
    let present = |victim: &[i64; 2]| members.iter().any(|member| member[..2] == victim[..]);
    let next = VICTIMS.iter().find(|victims| victims.iter().any(present));
    next.map(|victims| victims.iter().copied().filter(present).collect()).unwrap_or_default()
}

/// Kills this process in a random moment of the operations that follow.
fn kill_soon() {
    let delay = Duration::from_micros(u64::from(std::process::id()) * 7919 % 1500);
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::KILL);
    });
}

/// What a process keeps while groups change.
struct Program {
    seat: [i64; 2],
    step: i64,
    buffer: SharedBuffer<f32>,
}

enum Next {
    Step,
    /// Others wait to join.
    Grow,
    End,
}

pub fn random() -> Result<()> {
    let mut group = ProcessGroup::from_env()?;
    let size: usize = match std::env::var("FLOW_TEST_LEFT") {
        Ok(left) => left.parse()?,
        Err(_) => std::env::var("WORLD_SIZE")?.parse()?,
    };
    let buffer = group.alloc_shared::<f32>(ELEMENTS)?;
    let mut program = Program { seat: seat()?, step: 0, buffer };
    loop {
        match program.step(&group, size) {
            Ok(Next::Step) => {}
            Ok(Next::End) => break,
            Ok(Next::Grow) => group = group.reconfigure()?,
            Err(error) => {
                let expected = error.downcast_ref::<Error>();
                if !matches!(expected, Some(Error::PeerLost { .. } | Error::Poisoned { .. })) {
                    return Err(error.context(format!("step {} of {group:?}", program.step)));
                }
                group = group.reconfigure()?;
            }
        }
    }
    if program.seat[1] > 0 {
        let error = ProcessGroup::from_env().expect_err("it has joined").to_string();
        assert_contains(&error, &["joins its running job once"]);
    }
    println!("seat {:?} ends after step {}", program.seat, program.step);
    Ok(())
}

impl Program {
    /// Checks all kinds of operations, of which a killed rank may fail any.
    fn step(&mut self, group: &ProcessGroup, size: usize) -> Result<Next> {
        let own = [self.seat[0], self.seat[1], self.step];
        let mut all = vec![0; 3 * group.world_size()];
        group.all_gather(&own, &mut all)?;
        let members: Vec<&[i64]> = all.chunks(3).collect();
        ensure!(members.is_sorted_by_key(|member| member[0]), "ranks keep their order: {all:?}");
        ensure!(members[group.rank()] == own, "{own:?} in {all:?} of {group:?}");
        // A step that one rank has completed is over.
        self.step = members.iter().map(|member| member[2]).max().unwrap_or(0);
        let mut waiting = [group.newcomers()? as i64];
        group.all_reduce(&mut waiting, ReduceOp::Max)?;
        if waiting[0] > 0 {
            return Ok(Next::Grow);
        }
        let victims = victims(&members);
        let is_whole = group.world_size() >= size;
        if self.step >= STEPS && is_whole && victims.is_empty() {
            self.check_memory(group)?;
            return Ok(Next::End);
        }
        if self.step % 3 == 2 && is_whole && victims.contains(&self.seat) {
            kill_soon();
        }
        self.reduce(group, &members)?;
        exchange(group, &members)?;
        subgroup(group, &members)?;
        machine_memory(group, self.step)?;
        group.barrier()?;
        self.step += 1;
        Ok(Next::Step)
    }

    /// Sums in memory that is shared, in memory that is not, and beside the program.
    fn reduce(&mut self, group: &ProcessGroup, members: &[&[i64]]) -> Result<()> {
        let step = self.step;
        let value = |member: &[i64], index: usize| {
            (member[0] * 31 + member[1] * 7 + step + index as i64 % 13) as f32
        };
        let own = members[group.rank()];
        let sum = |index| members.iter().map(|member| value(member, index)).sum::<f32>();
        let lengths = [1, 3000, 300_000];
        for len in lengths {
            let mut data: Vec<f32> = (0..len).map(|index| value(own, index)).collect();
            let beside = beside::all_reduce(group, data.clone(), ReduceOp::Sum)?;
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            let beside = beside.wait()?;
            for index in [0, len / 2, len - 1] {
                ensure!(data[index] == sum(index) && beside[index] == sum(index), "{index}");
            }
        }
        for (index, element) in self.buffer.iter_mut().enumerate() {
            *element = value(own, index);
        }
        group.all_reduce(&mut self.buffer, ReduceOp::Sum)?;
        for index in (0..ELEMENTS).step_by(997) {
            ensure!(self.buffer[index] == sum(index), "{index}: {}", self.buffer[index]);
        }
        Ok(())
    }

    /// The memory of those that were killed is free.
    fn check_memory(&self, group: &ProcessGroup) -> Result<()> {
        group.barrier()?;
        let Some(file) = group.arena().file() else { return Ok(()) };
        let bytes = rustix::fs::fstat(file)?.st_blocks as usize * 512;
        let used = group.local_world_size() * ELEMENTS * 4;
        ensure!(bytes < used + (48 << 20), "{bytes} bytes of shared memory, {used} used");
        Ok(group.barrier()?)
    }
}

/// Each rank sends to the next.
fn exchange(group: &ProcessGroup, members: &[&[i64]]) -> Result<()> {
    let size = group.world_size();
    let next = (group.rank() + 1) % size;
    let last = (group.rank() + size - 1) % size;
    if next == group.rank() {
        return Ok(());
    }
    let sent = beside::send(group, vec![members[group.rank()][0]; 20_000], next, 0)?;
    let mut received = vec![0; 20_000];
    group.recv(&mut received, last)?;
    ensure!(received.iter().all(|&element| element == members[last][0]));
    sent.wait()?;
    Ok(())
}

/// A sub-group of the first and the last rank.
fn subgroup(group: &ProcessGroup, members: &[&[i64]]) -> Result<()> {
    let last = group.world_size() - 1;
    let ranks: &[usize] = if last > 0 { &[last, 0] } else { &[0] };
    let Some(ends) = group.new_group(ranks)? else { return Ok(()) };
    let mut sum = [members[group.rank()][0]];
    ends.all_reduce(&mut sum, ReduceOp::Sum)?;
    let expected = if last > 0 { members[last][0] + members[0][0] } else { members[0][0] };
    ensure!(sum[0] == expected, "{sum:?}");
    Ok(())
}

/// Memory that the ranks of a machine have in common.
pub fn machine_memory(group: &ProcessGroup, step: i64) -> Result<()> {
    let buffer = group.alloc_on_machine(50_000)?;
    ensure!(buffer.part(0..50_000).as_mut().iter().all(|&byte| byte == 0), "zeros at first");
    group.barrier()?;
    if group.local_index() == 0 {
        buffer.part(0..50_000).as_mut().fill(step as u8);
    }
    group.barrier()?;
    ensure!(buffer.part(0..50_000).as_mut().iter().all(|&byte| byte == step as u8));
    Ok(())
}

fn are_replaced(test: &Test) {
    let finished = test.launcher().finish_unless_silent(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let ends = |text: &str| finished.stdout.lines().filter(|line| line.contains(text)).count();
    assert_eq!((ends("ends after step"), ends(" passed")), (3, 3), "{finished:?}");
    let said: Vec<&str> =
        finished.stderr.lines().filter(|line| line.contains("is started again alone")).collect();
    assert_eq!(said.len(), 5, "{finished:?}");
    assert_contains(said[0], &["rank 1 ", "SIGKILL", "(1 of 6)"]);
}

fn ends_well(test: &Test) {
    let finished = test.launcher().finish_unless_silent(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.matches("ends after step").count(), 1, "{finished:?}");
    assert_contains(&finished.stderr, &["the job goes on with 1 worker"]);
}

/// The ranks find each other in a store of the test, which starts another process for each that is
/// killed.
fn are_replaced_by_hand(test: &Test) {
    let address = Address::Tcp(format!("127.0.0.1:{}", free_port()));
    let _server = Server::start(&address, "token").unwrap();
    let start = |rank: usize, replacement: i64| {
        let mut command: Command = test.commands().swap_remove(rank);
        command.env("FLOW_STORE", address.to_string()).env("FLOW_TOKEN", "token");
        command.env("FLOW_REPLACEMENT", replacement.to_string());
        Process::start(command)
    };
    let ranks = test.job.nodes().iter().sum();
    let mut processes: Vec<Process> = (0..ranks).map(|rank| start(rank, 0)).collect();
    for &[rank, replacement] in VICTIMS.iter().copied().flatten() {
        let rank = rank as usize;
        until("the process is killed", || processes[rank].has_ended());
        processes[rank] = start(rank, replacement + 1);
    }
    for process in processes {
        let output = process.finish_unless_silent(TEST_TIMEOUT).success();
        assert_contains(&output, &["ends after step", "passed"]);
    }
}

/// Rank 0 waits for one that reconfigures.
fn being_made(group: &ProcessGroup) -> Result<()> {
    if group.rank() == 0 {
        let error = group.new_group_of(&[0, 1], "pair").expect_err("rank 1 does not come");
        assert_contains(&error.to_string(), &["another rank reconfigures the job"]);
        ensure!(matches!(error, Error::Poisoned { .. }), "{error:?}");
    }
    Ok(group.reconfigure()?.barrier()?)
}

fn whole(group: &ProcessGroup) -> Result<()> {
    let mut group = group.clone();
    let size = group.world_size();
    for round in 0..30 {
        let changed = group.reconfigure()?;
        ensure!(changed.world_size() == size && changed.rank() == group.rank(), "{changed:?}");
        ensure!(changed.arena().own_region() == group.arena().own_region());
        let mut sum = [round];
        changed.all_reduce(&mut sum, ReduceOp::Sum)?;
        ensure!(sum[0] == round * size as i64);
        let error = group.barrier().expect_err("the group before has ended");
        assert_contains(&error.to_string(), &["reconfigures the job"]);
        group = changed;
    }
    Ok(())
}

/// Rank 1 comes only when rank 0 has given up once.
fn absent(group: &ProcessGroup) -> Result<()> {
    // Of another join, which goes on.
    let beside = ProcessGroup::join_named(&Membership::from_env()?, "beside", TEST_TIMEOUT)?;
    if group.rank() == 0 {
        let Err(error) = group.with_timeout(Duration::from_millis(700)).reconfigure() else {
            bail!("rank 1 does not come")
        };
        let text = error.to_string();
        assert_contains(&text, &["rank 0: reconfigure timed out after 700ms", "process 1 (pid "]);
    }
    beside.barrier()?;
    let changed = group.reconfigure()?;
    ensure!(changed.world_size() == 2 && changed.timeout() == group.timeout());
    Ok(changed.barrier()?)
}

/// Rank 0 does not take part in operations that the others have begun.
fn under_way(group: &ProcessGroup) -> Result<()> {
    let half = group.new_group(&[1, 2])?;
    let mut pending = Vec::new();
    if group.rank() > 0 {
        pending.push(beside::all_reduce(group, vec![1.0_f32; 100_000], ReduceOp::Sum)?);
    }
    if let Some(half) = half.filter(|_| group.rank() == 1) {
        pending.push(beside::all_reduce(&half, vec![1.0_f32; 100_000], ReduceOp::Sum)?);
    }
    let changed = group.reconfigure()?;
    for work in pending {
        ensure!(work.wait().is_err());
    }
    Ok(changed.barrier()?)
}

fn unchangeable(group: &ProcessGroup) -> Result<()> {
    let part = group.new_group(&[group.world_size() - 1])?;
    if let Some(part) = part {
        refused(&part, "reconfigure the group of all ranks")?;
    }
    if std::env::var_os("FLOW_STORE").is_none() {
        refused(group, "start it with flow-launch")?;
    }
    Ok(())
}

fn refused(group: &ProcessGroup, why: &str) -> Result<()> {
    let error = group.reconfigure().expect_err("it cannot change").to_string();
    assert_contains(&error, &["reconfigure: ", why]);
    Ok(group.barrier()?)
}

/// Rank 1 ends while the others reduce on GPUs, and all use their GPUs anew.
fn on_gpus() -> Result<()> {
    let mut group = ProcessGroup::from_env()?;
    loop {
        let device = group.use_cuda()?;
        let done = reduce_on(&group, &device);
        let seats = seats(&group);
        let is_whole = matches!(&seats, Ok(seats) if seats.len() == 6 && !seats.contains(&-1));
        if done.is_ok() && is_whole {
            println!("ends");
            return Ok(());
        }
        group = group.reconfigure()?;
    }
}

/// The ranks and how many processes had them before; -1 for the rank that is to end.
fn seats(group: &ProcessGroup) -> Result<Vec<i64>> {
    let seat = seat()?;
    let own = if seat == [1, 0] { [-1, -1] } else { seat };
    let mut all = vec![0; 2 * group.world_size()];
    group.all_gather(&own, &mut all)?;
    Ok(all)
}

fn reduce_on(group: &ProcessGroup, device: &Arc<Device>) -> Result<()> {
    let check = OnGpu::new(group, device)?;
    check_type::<_, f32>(&check, &[1000])?;
    if seat()? == [1, 0] {
        kill_process(getpid(), Signal::KILL)?;
    }
    check_type::<_, f32>(&check, &[1000])
}

pub fn ends_with(test: &Test, ranks: usize, replaced: usize) {
    let finished = test.launcher().finish_unless_silent(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.matches("ends\n").count(), ranks, "{finished:?}");
    assert_eq!(finished.stderr.matches("is started again alone").count(), replaced, "{finished:?}");
}

/// Whether a rank was lost, in this operation or before.
pub fn is_loss(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<Error>();
    matches!(error, Some(Error::PeerLost { .. } | Error::Poisoned { .. }))
}

/// Rank 1 ends, and then rank 0, before it takes in another.
fn nobody() -> Result<()> {
    let seat = seat()?;
    let group = ProcessGroup::from_env()?;
    if seat == [0, 0] {
        until("another waits to join", || group.newcomers().is_ok_and(|count| count > 0));
    }
    kill_process(getpid(), Signal::KILL)?;
    bail!("a process that is killed ends")
}

fn all_have_ended(test: &Test) {
    let finished = test.launcher().finish_unless_silent(TEST_TIMEOUT);
    // The failure is that of the last one that had joined; nobody is started in its place.
    assert_eq!(finished.code, Some(137), "{finished:?}");
    assert_eq!(finished.stderr.matches("is started again alone").count(), 1, "{finished:?}");
    let (_, report) = finished.stderr.rsplit_once("rank 0 (").unwrap();
    assert_contains(report, &["was killed by signal 9 (SIGKILL)"]);
}
