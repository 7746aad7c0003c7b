//! `flow-launch top`, as it shows the job that a rank is in.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use flow_comm::{ProcessGroup, ReduceOp, trace};
use flow_harness::cli::until;
use flow_harness::{TEST_TIMEOUT, program};
use rustix::process::{Signal, getpid, getppid, kill_process};
use serde_json::Value;

use crate::reconfigure::seat;
use crate::registry::{Scenario, launched, machines, process, scenario};

const IN_PLACE: &[&str] = &["--elastic", "in-place", "--max-restarts", "1"];
const STEPS: u64 = 3;

/// Its scenarios.
pub const SCENARIOS: &[Scenario] = &[
    scenario("ranks_wait_for_who_is_not_there", wait, &[launched(3), machines(&[1, 2])]),
    scenario("ranks_wait_for_who_has_begun_nothing", begin_nothing, &[launched(2)]),
    scenario("a_rank_that_receives_is_shown", receive, &[launched(2)]),
    scenario("a_forked_process_is_not_shown", beside_a_child, &[launched(2)]),
    process(
        "a_lost_rank_costs_the_time_to_the_next_step",
        recover,
        &[launched(2).flags(IN_PLACE), machines(&[1, 1]).flags(IN_PLACE)],
    ),
];

/// Returns what `flow-launch top` shows of this rank's job, once all nodes answer in time.
pub fn shown() -> Result<Value> {
    until_shown("all nodes answer", |_| true)
}

fn look() -> Result<Value> {
    let launcher = getppid().context("flow-launch has started this")?;
    let mut top = Command::new(program("flow-launch"));
    let output = top.args(["top", "--json", "--once", &launcher.to_string()]).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Looks until what all nodes show is as it is to be.
fn until_shown(what: &str, is_right: impl Fn(&Value) -> bool) -> Result<Value> {
    let begin = Instant::now();
    loop {
        let view = look()?;
        if view["silent"] == serde_json::json!([]) && is_right(&view) {
            return Ok(view);
        }
        ensure!(begin.elapsed() < TEST_TIMEOUT, "it never shows that {what}: {view}");
    }
}

fn step(group: &ProcessGroup) -> flow_comm::Result<()> {
    group.all_reduce(&mut [1.0_f32; 1000], ReduceOp::Sum)?;
    trace::end_step();
    Ok(())
}

/// The others begin an operation in which rank 0 is not, and it looks at them.
fn wait(group: &ProcessGroup) -> Result<()> {
    // Far more than are kept.
    for _ in 0..1000 {
        group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
    }
    for _ in 0..STEPS {
        step(group)?;
    }
    if group.rank() == 0 {
        let view = until_shown("the others wait for rank 0", |view| {
            (1..3).all(|rank| view["ranks"][rank]["waits_for"] == serde_json::json!([0]))
        })?;
        check(&view)?;
    }
    group.broadcast(&mut [group.rank() as u8], 0)?;
    Ok(())
}

fn check(view: &Value) -> Result<()> {
    let ranks = view["ranks"].as_array().context("ranks")?;
    ensure!(ranks.len() == 3, "{view}");
    for (rank, shown) in ranks.iter().enumerate() {
        let is_right = shown["rank"] == rank
            && shown["state"] == "running"
            && shown["steps"] == STEPS
            && shown["restarts"] == 0
            && shown["host"].is_string();
        ensure!(is_right, "{shown}");
        for (field, most) in [
            ("step_seconds", 600.0),
            ("since_step_seconds", 600.0),
            ("uptime_seconds", 600.0),
            ("communication", 1.0),
            ("memory_bytes", 1e12),
            ("cpu_seconds", 1e5),
        ] {
            let value = shown[field].as_f64().with_context(|| format!("{field} in {shown}"))?;
            ensure!((0.0..=most).contains(&value), "{field} in {shown}");
        }
        let operation = &shown["operation"];
        if rank == 0 {
            let is_over = operation["name"] == "all_reduce" && operation["is_under_way"] == false;
            ensure!(is_over && shown["waits_for"] == serde_json::json!([]), "{shown}");
            ensure!(shown["pid"] == std::process::id(), "{shown}");
        } else {
            let waits = operation["name"] == "broadcast" && operation["is_under_way"] == true;
            let number = ranks[0]["operation"]["sequence"].as_u64().context("a number")? + 1;
            ensure!(waits && operation["sequence"] == number, "{shown}");
        }
    }
    Ok(())
}

/// Rank 1 begins the first operation of the group, and rank 0 looks at it.
fn begin_nothing(group: &ProcessGroup) -> Result<()> {
    if group.rank() == 0 {
        until_shown("rank 1 waits for rank 0", |view| {
            let shown = &view["ranks"][1];
            shown["operation"]["name"] == "all_reduce"
                && shown["waits_for"] == serde_json::json!([0])
        })?;
    }
    Ok(group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?)
}

/// Rank 1 waits for a message after a collective, and rank 0 looks at it.
fn receive(group: &ProcessGroup) -> Result<()> {
    group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
    if group.rank() == 1 {
        group.recv(&mut [0_u8], 0)?;
        return Ok(());
    }
    until_shown("rank 1 receives", |view| {
        let operation = &view["ranks"][1]["operation"];
        operation["name"] == "recv"
            && operation["is_under_way"] == true
            && operation["is_collective"] == false
    })?;
    Ok(group.send(&[0_u8], 1)?)
}

/// A forked child, which joins no group, leaves its parent's records alone; one that makes a group has
/// records of its own.
fn beside_a_child(group: &ProcessGroup) -> Result<()> {
    use nix::sys::wait::{WaitStatus, wait};
    use nix::unistd::{ForkResult, fork};

    step(group)?;
    // SAFETY: the child uses nothing but what a forked child of a rank may.
    match unsafe { fork() }? {
        ForkResult::Child => {
            trace::end_step();
            std::process::exit(0);
        }
        ForkResult::Parent { child } => {
            ensure!(wait()? == WaitStatus::Exited(child, 0));
        }
    }
    step(group)?;
    let view = shown()?;
    let own = &view["ranks"][group.rank()];
    ensure!(own["steps"] == 2 && own["pid"] == std::process::id(), "{own}");
    Ok(group.barrier()?)
}

/// Rank 1 is lost, and another comes in its place.
fn recover() -> Result<()> {
    let seat = seat()?;
    let mut group = ProcessGroup::from_env()?;
    if !group.is_newcomer() {
        step(&group)?;
        if seat == [1, 0] {
            kill_process(getpid(), Signal::KILL)?;
        }
        while step(&group).is_ok() {}
        until("another waits to join", || group.newcomers().is_ok_and(|count| count > 0));
        group = group.reconfigure()?;
    }
    step(&group)?;
    // Else the other rank's step may not be over.
    group.barrier()?;
    if group.rank() == 0 {
        let view = shown()?;
        let changes = view["changes"].as_array().context("changes")?;
        let loss = changes.iter().find(|change| {
            change["what"].as_str().is_some_and(|what| {
                what.starts_with("rank 1 ") && what.ends_with("another is started in its place")
            })
        });
        let loss = loss.with_context(|| format!("no loss in {view}"))?;
        let cost = loss["cost_seconds"].as_f64().with_context(|| format!("no cost: {view}"))?;
        let ago = loss["seconds_ago"].as_f64().context("a time")?;
        ensure!(0.0 < cost && cost <= ago, "{loss}");
        ensure!(view["ranks"][1]["restarts"] == 1 && view["ranks"][1]["steps"] == 1, "{view}");
    }
    Ok(group.barrier()?)
}
