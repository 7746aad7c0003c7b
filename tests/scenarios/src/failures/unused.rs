//! Ranks that go before their group was ever used: over nodes, its members may have no connection
//! by then.

use std::time::Duration;

use anyhow::{Context, Result};
use flow_comm::ProcessGroup;
use flow_harness::assert_contains;

use super::report::{kill_myself, report, said, sleep_until_killed, sum};
use crate::registry::{Job, Scenario, Test, by_hand, scenario};

const NODES: &[Job] = &[by_hand(&[2, 1]), by_hand(&[1, 1, 1])];

const DIED: &str = "PeerLost: ";
const LEFT: &str = "has left the group";
const ABORTED: &str = "rank 1 aborted the group: the data ran out";

pub const SCENARIOS: &[Scenario] = &[
    scenario("a_rank_that_has_died_is_named", |world| goes(world, Way::Dies, First::Goes), NODES)
        .checked_by(|test| names_who_went(test, DIED)),
    scenario("a_rank_that_dies_is_named", |world| goes(world, Way::Dies, First::Waits), NODES)
        .checked_by(|test| names_who_went(test, DIED)),
    scenario("a_rank_that_has_left_is_named", |world| goes(world, Way::Leaves, First::Goes), NODES)
        .checked_by(|test| names_who_went(test, LEFT)),
    scenario("a_rank_that_leaves_is_named", |world| goes(world, Way::Leaves, First::Waits), NODES)
        .checked_by(|test| names_who_went(test, LEFT)),
    scenario("an_earlier_abort_is_named", |world| goes(world, Way::Aborts, First::Goes), NODES)
        .checked_by(|test| names_who_went(test, ABORTED)),
    scenario("a_later_abort_is_named", |world| goes(world, Way::Aborts, First::Waits), NODES)
        .checked_by(|test| names_who_went(test, ABORTED)),
];

/// How rank 1 goes.
#[derive(Clone, Copy)]
enum Way {
    Dies,
    Leaves,
    Aborts,
}

/// What comes first: rank 1 goes, or rank 2 begins to wait for it.
#[derive(Clone, Copy, PartialEq)]
enum First {
    Goes,
    Waits,
}

/// Rank 1 goes from a group of ranks 1 and 2, in which rank 2 waits. No process ends but by death.
fn goes(world: &ProcessGroup, way: Way, first: First) -> Result<()> {
    let part = world.new_group(&[1, 2])?;
    if world.rank() == 0 {
        sleep_until_killed();
    }
    let part = part.context("this rank is a member")?;
    let is_first = (world.rank() == 1) == (first == First::Goes);
    if !is_first {
        std::thread::sleep(Duration::from_millis(500));
    }
    if world.rank() == 2 {
        return report(sum(&part), &part);
    }
    match way {
        Way::Dies => kill_myself(),
        Way::Leaves => drop(part),
        Way::Aborts => part.abort("the data ran out"),
    }
    sleep_until_killed()
}

fn names_who_went(test: &Test, how: &str) {
    let mut ranks = test.ranks();
    let waiting = ranks.pop().expect("there are three");
    let said = said(waiting);
    assert_contains(&said[0], &["rank 2: all_reduce #0", "rank 1", how]);
    assert_contains(&said[1], &["then Poisoned"]);
}
