//! Shared memory of a job whose ranks change.

use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use flow_comm::store::{Address, Server};
use flow_comm::{MachineBuffer, ProcessGroup, ReduceOp, SharedBuffer};
use flow_harness::cli::until;
use flow_harness::{Process, TEST_TIMEOUT, assert_contains, free_port};
use rustix::process::{Signal, getpid, kill_process};

use crate::reconfigure::{ELEMENTS, IN_PLACE, ends_with, is_loss, machine_memory, seat};
use crate::registry::{Scenario, Test, by_hand, launched, process};

pub const SCENARIOS: &[Scenario] = &[
    process("a_job_takes_in_more_ranks", grows, &[by_hand(&[2])]).checked_by(takes_one_in),
    process("memory_of_before_stays_while_it_is_used", kept, &[launched(3).flags(IN_PLACE)])
        .checked_by(|test| ends_with(test, 3, 3)),
];

/// A third rank comes, for which the memory of the others has no region.
fn grows() -> Result<()> {
    let mut group = ProcessGroup::from_env()?;
    let first = group.arena().clone();
    let mut before = group.alloc_shared::<f32>(100_000)?;
    println!("joined");
    while group.world_size() < 3 {
        let mut waiting = [group.newcomers()? as i64];
        group.all_reduce(&mut waiting, ReduceOp::Max)?;
        if waiting[0] > 0 {
            group = group.reconfigure()?;
        }
    }
    for round in 0..3 {
        let mut after = group.alloc_shared::<f32>(100_000)?;
        ensure!(group.rank() == 2 || !Arc::ptr_eq(group.arena(), &first), "it is new memory");
        for buffer in [&mut before, &mut after] {
            buffer.fill((group.rank() + round) as f32);
            group.all_reduce(buffer, ReduceOp::Sum)?;
            ensure!(buffer.iter().all(|&element| element == (3 + 3 * round) as f32));
        }
        machine_memory(&group, round as i64)?;
        group = group.reconfigure()?;
    }
    println!("ends");
    Ok(group.barrier()?)
}

fn takes_one_in(test: &Test) {
    let address = Address::Tcp(format!("127.0.0.1:{}", free_port()));
    let _server = Server::start(&address, "token").unwrap();
    let start = |mut command: Command| {
        command.env("FLOW_STORE", address.to_string()).env("FLOW_TOKEN", "token");
        Process::start(command)
    };
    let mut processes: Vec<Process> = test.commands().into_iter().map(start).collect();
    processes[0].wait_for("joined\n");
    let mut third = test.commands().swap_remove(1);
    third.env("RANK", "2").env("WORLD_SIZE", "3").env("LOCAL_RANK", "2");
    third.env("LOCAL_WORLD_SIZE", "3").env("FLOW_REPLACEMENT", "1");
    processes.push(start(third));
    for process in processes {
        let output = process.finish_unless_silent(TEST_TIMEOUT).success();
        assert_contains(&output, &["ends\n", "passed"]);
    }
}

/// Ranks keep memory of those that end, and see it unchanged; what they have dropped is freed. Rank 1
/// ends before it has allocated anything, rank 0 after it has made memory that all use.
fn kept() -> Result<()> {
    const BYTES: usize = 64 << 20;
    let seat = seat()?;
    let mut group = ProcessGroup::from_env()?;
    let mut kept: Vec<(MachineBuffer, u8)> = Vec::new();
    let mut own = None;
    loop {
        let step = keep(&group, seat, BYTES, &mut kept, &mut own);
        for (buffer, value) in &kept {
            let is_same = buffer.part(0..BYTES).as_mut().iter().all(|byte| byte == value);
            ensure!(is_same, "{seat:?}: memory that begins with {value}");
        }
        match step {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) if is_loss(&error) => {}
            Err(error) => return Err(error),
        }
        group = group.reconfigure()?;
    }
    kept.clear();
    group.barrier()?;
    // What a rank has for others is free when these have dropped their groups of before, and it looks
    // next.
    for _ in 0..2 {
        group = group.reconfigure()?;
        group.barrier()?;
    }
    let file = group.arena().file().context("processes have a file")?;
    // The first rank's own is kept for what it allocates next.
    if group.rank() == 0 {
        until("the memory of those that have ended is free", || {
            let bytes = rustix::fs::fstat(file).map_or(0, |stat| stat.st_blocks as usize * 512);
            bytes - group.arena().usage().1 < 2 * BYTES
        });
    }
    println!("ends");
    Ok(group.barrier()?)
}

/// Makes memory in common, whose values are known, and ends if it is this process' turn. True when all
/// have ended whose turn it is.
fn keep(
    group: &ProcessGroup,
    seat: [i64; 2],
    bytes: usize,
    kept: &mut Vec<(MachineBuffer, u8)>,
    own: &mut Option<SharedBuffer<f32>>,
) -> Result<bool> {
    let mut all = vec![0; 2 * group.world_size()];
    group.all_gather(&seat, &mut all)?;
    let present = |victim: &[i64; 2]| all.chunks(2).any(|other| other == victim);
    let next = [[1, 0], [0, 0], [1, 1]].into_iter().find(|victim| present(victim));
    if group.world_size() < 3 {
        return Ok(false);
    }
    if next == Some([1, 0]) && seat == [1, 0] {
        kill_process(getpid(), Signal::KILL)?;
    }
    let buffer = group.alloc_on_machine(bytes)?;
    let value = kept.len() as u8 + 10 * seat[1] as u8 + 1;
    let mut values = [value as i64];
    group.broadcast(&mut values, 0)?;
    if group.rank() == 0 {
        buffer.part(0..bytes).as_mut().fill(values[0] as u8);
    }
    group.barrier()?;
    kept.push((buffer, values[0] as u8));
    // Live memory of a process that has come in another's place.
    let own = own.insert(group.alloc_shared::<f32>(ELEMENTS)?);
    own.fill(seat[0] as f32);
    group.barrier()?;
    if next == Some(seat) {
        kill_process(getpid(), Signal::KILL)?;
    }
    group.barrier()?;
    ensure!(own.iter().all(|&element| element == seat[0] as f32));
    Ok(next.is_none())
}
