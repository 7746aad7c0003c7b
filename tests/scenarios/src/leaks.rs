//! Groups and worlds that come and go leak nothing.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;

use crate::groups::use_all;
use crate::registry::{Scenario, by_hand, launched, scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario("a_thousand_groups", groups_come_and_go, &[launched(2), by_hand(&[1, 1])]),
    scenario("five_hundred_groups_of_their_members", member_groups_come_and_go, &[launched(2)]),
    scenario("a_hundred_messages_that_nobody_receives", left_behind, &[by_hand(&[1, 1])]),
    scenario(
        "two_hundred_worlds",
        worlds_come_and_go,
        &[launched(2), by_hand(&[2]), by_hand(&[1, 1])],
    ),
];

/// What a leak would show in.
#[derive(Debug)]
struct Resources {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    /// KiB, shared memory included.
    resident: usize,
}

impl Resources {
    fn of_this_process() -> Result<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident
            .and_then(|text| text.trim().strip_suffix(" kB"))
            .context("no VmRSS")?
            .parse()?;
        Ok(Self {
            descriptors: fs::read_dir("/proc/self/fd")?.count(),
            threads: fs::read_dir("/proc/self/task")?.count(),
            mappings: fs::read_to_string("/proc/self/maps")?.lines().count(),
            resident,
        })
    }

    /// Whether that is more than what `times` repetitions may add that lose nothing.
    fn have_grown_since(&self, before: &Self, times: usize) -> bool {
        // The group that they are made from gets a descriptor when it sleeps for the first time.
        self.descriptors > before.descriptors + times / 100
            || self.threads > before.threads
            // The allocator takes areas of its own for as many threads as were ever there at once.
            || self.mappings > before.mappings + times / 5
            || self.resident > before.resident + (16 << 10)
    }
}

fn groups_come_and_go(world: &ProcessGroup) -> Result<()> {
    come_and_go(1000, || use_all(&world.duplicate()?))
}

fn member_groups_come_and_go(world: &ProcessGroup) -> Result<()> {
    come_and_go(500, || use_all(&world.new_group_of(&[1, 0], "key")?))
}

/// They have come when the receiver drops the group.
fn left_behind(world: &ProcessGroup) -> Result<()> {
    let message = vec![1_u8; 20 << 20];
    come_and_go(100, || {
        let group = world.duplicate()?;
        if group.rank() == 1 {
            group.send(&message, 0)?;
        }
        Ok(world.barrier()?)
    })
}

fn worlds_come_and_go(_: &ProcessGroup) -> Result<()> {
    come_and_go(200, || use_all(&ProcessGroup::from_env()?))
}

fn come_and_go(times: usize, once: impl Fn() -> Result<()>) -> Result<()> {
    (0..times / 10).try_for_each(|_| once())?;
    let before = Resources::of_this_process()?;
    (0..times).try_for_each(|_| once())?;
    // A thread that has been joined shows for a moment yet; the store closes a connection once the
    // other rank has.
    let begin = Instant::now();
    let mut after = Resources::of_this_process()?;
    while after.have_grown_since(&before, times) && begin.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
        after = Resources::of_this_process()?;
    }
    ensure!(!after.have_grown_since(&before, times), "leaked: {before:?} became {after:?}");
    Ok(())
}
