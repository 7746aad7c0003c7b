//! Ranks that call different collectives. Each rank names its own call and one that differs,
//! whichever node that is on. A rank of another node that finds it first may be heard before what that
//! rank has called: then the error is that rank's.

use anyhow::Result;
use flow_comm::{Error, ProcessGroup, ReduceOp};
use flow_harness::assert_contains;

use super::report::{LARGE, THREE, report, said, sum};
use crate::beside;
use crate::registry::{Scenario, Test, by_hand, scenario};

const SUM: &str = "all_reduce #1 (4 x f32, sum)";

pub const SCENARIOS: &[Scenario] = &[
    scenario("different_operations_are_named", |g| either(g, sum, broadcast), THREE)
        .checked_by(|test| disagree(test, SUM, "broadcast #1 (4 x f32, root 0)")),
    scenario("a_new_group_and_a_barrier_are_named", |g| either(g, barrier, new_group), THREE)
        .checked_by(|test| disagree(test, "barrier #1", "new_group #1")),
    scenario("asynchronous_operations_are_named", |g| either(g, sum_async, barrier_async), THREE)
        .checked_by(|test| disagree(test, "all_reduce #1 (3 x u8, sum)", "barrier #1")),
    scenario("different_counts_are_named", |g| either(g, sum, |g| sum_of(g, 3)), THREE)
        .checked_by(|test| disagree(test, SUM, "all_reduce #1 (3 x f32, sum)")),
    scenario("a_much_larger_count_is_named", |g| either(g, sum, |g| sum_of(g, LARGE)), THREE)
        .checked_by(|test| disagree(test, SUM, "all_reduce #1 (200000 x f32, sum)")),
    scenario("a_much_smaller_count_is_named", much_gathered, THREE)
        .checked_by(|test| disagree(test, "all_gather #1 (200000 x u8)", "all_gather #1 (4 x u8)")),
    scenario("different_types_are_named", |g| either(g, sum, sum_of_integers), THREE)
        .checked_by(|test| disagree(test, SUM, "all_reduce #1 (4 x i32, sum)")),
    scenario("different_reductions_are_named", |g| either(g, sum, max), THREE)
        .checked_by(|test| disagree(test, SUM, "all_reduce #1 (4 x f32, max)")),
    scenario("different_roots_are_named", |g| either(g, broadcast, broadcast_of_1), THREE)
        .checked_by(|test| {
            disagree(test, "broadcast #1 (4 x f32, root 0)", "broadcast #1 (4 x f32, root 1)")
        }),
    scenario("a_failed_group_does_not_harm_its_parent", apart, &[by_hand(&[3]), by_hand(&[2, 1])])
        .checked_by(parent_works),
];

type Call = fn(&ProcessGroup) -> Result<(), Error>;

/// Rank 1 calls `odd`, the others `even`.
fn either(group: &ProcessGroup, even: Call, odd: Call) -> Result<()> {
    group.barrier()?;
    report(if group.rank() == 1 { odd(group) } else { even(group) }, group)
}

fn sum_of(group: &ProcessGroup, count: usize) -> Result<(), Error> {
    group.all_reduce(&mut vec![0.0_f32; count], ReduceOp::Sum)
}

fn sum_of_integers(group: &ProcessGroup) -> Result<(), Error> {
    group.all_reduce(&mut [0_i32; 4], ReduceOp::Sum)
}

fn max(group: &ProcessGroup) -> Result<(), Error> {
    group.all_reduce(&mut [0.0_f32; 4], ReduceOp::Max)
}

fn broadcast(group: &ProcessGroup) -> Result<(), Error> {
    group.broadcast(&mut [0.0_f32; 4], 0)
}

fn broadcast_of_1(group: &ProcessGroup) -> Result<(), Error> {
    group.broadcast(&mut [0.0_f32; 4], 1)
}

fn barrier(group: &ProcessGroup) -> Result<(), Error> {
    group.barrier()
}

fn new_group(group: &ProcessGroup) -> Result<(), Error> {
    group.new_group(&[0]).map(drop)
}

fn sum_async(group: &ProcessGroup) -> Result<(), Error> {
    beside::all_reduce(group, vec![0_u8; 3], ReduceOp::Sum)?.wait().map(drop)
}

fn barrier_async(group: &ProcessGroup) -> Result<(), Error> {
    beside::barrier(group)?.wait()
}

fn much_gathered(group: &ProcessGroup) -> Result<()> {
    let gather = |group: &ProcessGroup, count| {
        group.all_gather(&vec![0_u8; count], &mut vec![0_u8; count * group.world_size()])
    };
    group.barrier()?;
    report(gather(group, if group.rank() == 1 { 4 } else { LARGE }), group)
}

fn disagree(test: &Test, even: &str, odd: &str) {
    let nodes = test.job.nodes().len();
    let mut own = 0;
    for (rank, process) in test.ranks().into_iter().enumerate() {
        let said = said(process);
        if nodes > 1 && said[0].starts_with("Poisoned: ") {
            let [even, odd] = [format!(" called {even}"), format!("rank 1 called {odd}")];
            let prefix = format!("Poisoned: rank {rank}: ");
            assert_contains(&said[0], &[&prefix, "ranks disagree", &even, &odd]);
        } else {
            let sides = match rank {
                1 => format!("rank 1 called {odd}, rank 0 called {even};"),
                _ => format!("rank {rank} called {even}, rank 1 called {odd};"),
            };
            assert_contains(&said[0], &[&format!("Mismatch: rank {rank}: ranks disagree"), &sides]);
            own += 1;
        }
        assert_contains(&said[1], &["then Poisoned", "disagree"]);
    }
    assert!(own > 0, "some rank finds it");
}

fn apart(group: &ProcessGroup) -> Result<()> {
    let part = group.duplicate()?;
    part.barrier()?;
    let outcome = if part.rank() == 1 { broadcast(&part) } else { sum(&part) };
    sum(group)?;
    println!("the parent group works");
    report(outcome, &part)
}

fn parent_works(test: &Test) {
    for process in test.ranks() {
        let said = said(process);
        assert_eq!(said[0], "the parent group works");
        assert_contains(&said[1], &["ranks disagree"]);
    }
}
