//! What groups promise beyond single collectives; each rank checks its own part.

use std::fmt::Debug;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flow_comm::env::{Membership, Rendezvous};
use flow_comm::{Error, ProcessGroup, ReduceOp, f16};
use flow_harness::net::{Agent, Net};

use crate::beside;
use crate::registry::{Scenario, Test, by_hand, launched, machines, scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "sub_groups_have_their_own_ranks_and_sequence",
        sub_groups,
        &[launched(5), by_hand(&[2, 3])],
    ),
    scenario(
        "different_lists_of_members_are_an_error_on_every_rank",
        different_lists,
        &[launched(3), by_hand(&[1, 2])],
    ),
    scenario(
        "worlds_of_different_names_do_not_mix",
        named_worlds,
        &[launched(3), by_hand(&[3]), by_hand(&[2, 1])],
    ),
    scenario(
        "worlds_live_side_by_side",
        two_worlds,
        &[launched(3), by_hand(&[3]), by_hand(&[1, 2])],
    ),
    scenario(
        "a_barrier_on_a_machine_waits_for_no_other",
        barrier_on_machine,
        &[launched(3), by_hand(&[2, 3]), by_hand(&[1, 1])],
    ),
    scenario("averages_of_halves_do_not_overflow", half_averages, &[by_hand(&[4, 1])]),
    scenario("more_rounds_than_slots_are_right", rounds, &[launched(16), by_hand(&[2, 2, 2])]),
    scenario("a_slow_link_that_is_gone_for_a_while_is_enough", rounds, &[machines(&[2, 2])])
        .checked_by(slow_link_is_enough),
];

/// Each machine's barriers wait for its ranks: in each round another machine goes last.
fn barrier_on_machine(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size();
    let locals = group.ranks_on_machine_of(group.rank());
    let rounds = group.alloc_on_machine(ranks)?;
    let own = group.local_index();
    for round in 0..200 {
        let first = round % ranks;
        if group.rank() == locals[0] && !locals.contains(&first) {
            group.recv(&mut [0_u8; 1], first)?;
        }
        rounds.part(own..own + 1).as_mut()[0] = round as u8;
        group.barrier_on_machine()?;
        let mut arrived = rounds.part(0..locals.len());
        ensure!(arrived.as_mut().iter().all(|&in_round| in_round == round as u8), "round {round}");
        if group.rank() == first {
            for other in (0..ranks).filter(|rank| !locals.contains(rank)) {
                if group.ranks_on_machine_of(other)[0] == other {
                    group.send(&[0_u8; 1], other)?;
                }
            }
        }
        group.barrier_on_machine()?;
    }
    Ok(())
}

/// The sum over the group of the members' ranks in the job.
pub fn sum_of_ranks(group: &ProcessGroup) -> Result<i64> {
    let mut sum = [group.ranks()[group.rank()] as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}

/// Uses every part of a group: payloads, staging buffers, messages, threads.
pub fn use_all(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let size = group.world_size();
    ensure!(sum_of_ranks(group)? == (0..size as i64).sum::<i64>());
    let reduced = beside::all_reduce(group, vec![1.0_f32; 100_000], ReduceOp::Sum)?;
    let sent = beside::send(group, vec![rank as u8; 5000], (rank + 1) % size, 0)?;
    let mut received = group.alloc_shared::<u8>(5000)?;
    group.recv(&mut received, (rank + size - 1) % size)?;
    ensure!(received.iter().all(|&from| usize::from(from) == (rank + size - 1) % size));
    ensure!(sent.wait()?.len() == 5000 && reduced.wait()?[99_999] == size as f32);
    Ok(())
}

/// With five ranks.
fn sub_groups(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    ensure!(world.ranks() == [0, 1, 2, 3, 4], "{world:?}");

    let even = world.new_group(&[0, 2, 4])?;
    let upper = world.new_group(&[4, 2, 3])?;
    let single = world.new_group(&[1])?;
    ensure!(
        even.is_some() == rank.is_multiple_of(2)
            && upper.is_some() == (rank >= 2)
            && single.is_some() == (rank == 1)
    );
    for round in 0..200 {
        if let Some(even) = &even {
            ensure!(even.ranks() == [0, 2, 4] && even.rank() == rank / 2 && even.world_size() == 3);
            ensure!(sum_of_ranks(even)? == 6);
        }
        ensure!(sum_of_ranks(world)? == 10);
        if let Some(upper) = &upper {
            ensure!(upper.ranks() == [4, 2, 3] && upper.ranks()[upper.rank()] == rank);
            let mut data = vec![rank as f32; 100_000];
            upper.broadcast(&mut data, round % 3)?;
            ensure!(data.iter().all(|&element| element == [4, 2, 3][round % 3] as f32));
        }
        if let Some(single) = &single {
            ensure!(sum_of_ranks(single)? == 1);
            single.barrier()?;
        }
    }

    // Ranks of a group of a group are counted in the latter.
    if let Some(upper) = &upper {
        let ends = upper.new_group(&[0, 2])?;
        ensure!(ends.is_some() == (rank != 2));
        if let Some(ends) = ends {
            ensure!(ends.ranks() == [4, 3] && sum_of_ranks(&ends)? == 7);
        }
    }

    // What is under way in one group does not hold up another.
    let twin = world.duplicate()?;
    ensure!(twin.ranks() == world.ranks());
    let slow = beside::all_reduce(world, vec![1.0_f32; 300_000], ReduceOp::Sum)?;
    let fast = beside::all_reduce(&twin, vec![1_i32; 3], ReduceOp::Sum)?;
    ensure!(sum_of_ranks(&twin)? == 10);
    ensure!(fast.wait()? == [5; 3] && slow.wait()?.iter().all(|&element| element == 5.0));

    for (list, what) in [(vec![1, 1], "[1, 1]"), (vec![0, 5], "[0, 5]"), (vec![], "[]")] {
        let error = world.new_group(&list).err().context("a bad list was accepted")?;
        ensure!(matches!(error, Error::Argument { .. }), "{error:?}");
        let expected =
            format!("rank {rank}: new_group: {what} must be different ranks from 0 to 4");
        ensure!(error.to_string() == expected, "{error}");
    }
    ensure!(sum_of_ranks(world)? == 10);
    Ok(())
}

/// With three ranks.
fn different_lists(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    let list = if rank == 1 { [0, 1] } else { [0, 2] };
    let error = world.new_group(&list).err().context("different lists were accepted")?;
    let text = error.to_string();
    let is_right = match error {
        Error::Mismatch { .. } => text.contains(&differing_lists(rank)),
        // A rank of another node has found it first, and was heard first.
        Error::Poisoned { is_mismatch: true, .. } => {
            (0..3).any(|rank| text.contains(&differing_lists(rank)))
        }
        _ => false,
    };
    ensure!(is_right, "{error:?}");
    Ok(())
}

/// What `different_lists` is to say on a rank.
fn differing_lists(rank: usize) -> String {
    let (list, other) = if rank == 1 { ([0, 1], 0) } else { ([0, 2], 1) };
    format!("rank {rank} called new_group with {list:?}, rank {other} with other")
}

/// With three ranks, which join other things before.
fn named_worlds(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    let own = Membership::from_env()?;
    let join = |name: &str| ProcessGroup::join_named(&own, name, world.timeout());
    let alone = Membership {
        rank: 0,
        world_size: 1,
        local_rank: 0,
        local_world_size: 1,
        node: None,
        rendezvous: Rendezvous::None,
    };
    for _ in 0..rank {
        ensure!(sum_of_ranks(&ProcessGroup::join(&alone, world.timeout())?)? == 0);
        ensure!(sum_of_ranks(&ProcessGroup::join_named(&alone, "own", world.timeout())?)? == 0);
    }
    // Two of them, as ranks of their own.
    if rank > 0 && own.local_world_size == 3 {
        let rank = rank - 1;
        let size = 2;
        let pair = Membership {
            rank,
            world_size: size,
            local_rank: rank,
            local_world_size: size,
            ..own.clone()
        };
        let pair = ProcessGroup::join_named(&pair, "pair", world.timeout())?;
        ensure!(pair.rank() == rank && sum_of_ranks(&pair)? == 1);
    }
    let all = join("all")?;
    let again = join("all")?;
    let other = join("all/0")?;
    for group in [&again, &other, world, &all] {
        ensure!(
            sum_of_ranks(group)? == 3
                && sum_of_ranks(&group.new_group_of(&[1, 2, 0], "key")?)? == 3
        );
    }
    // At the same time, in another order on each rank.
    let names = ["a", "b", "c"];
    let use_one = |index: usize| sum_of_ranks(&join(names[(index + rank) % 3])?);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|index| scope.spawn(move || use_one(index))).collect();
        threads.into_iter().try_for_each(|thread| {
            ensure!(thread.join().expect("no thread panics")? == 3);
            Ok(())
        })
    })
}

/// Two groups of all ranks, joined one after the other, live side by side.
fn two_worlds(first: &ProcessGroup) -> Result<()> {
    let second = ProcessGroup::from_env()?;
    use_all(&second)?;
    use_all(first)?;
    drop(second);
    let third = ProcessGroup::from_env()?;
    use_all(first)?;
    use_all(&third)
}

/// Of numbers whose sum is more than a half number can be.
fn half_averages(group: &ProcessGroup) -> Result<()> {
    let mut data = vec![f16::from_f32(20_000.0); 8000];
    group.all_reduce(&mut data, ReduceOp::Avg)?;
    ensure!(data.iter().all(|element| element.to_f32() == 20_000.0), "{} and so on", data[0]);
    Ok(())
}

/// More rounds than a group has slots for, in all ways in which data moves.
fn rounds(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let size = group.world_size();
    let same = |what: &str, got: &dyn Debug, right: bool| {
        ensure!(right, "{what}: rank {rank} of {size} got {got:?}");
        Ok(())
    };
    let mut shared = group.alloc_shared::<i64>(2000)?;
    for round in 0..100_i64 {
        let all: i64 = (0..size as i64).sum::<i64>() + round * size as i64;
        let mut small = [rank as i64 + round];
        group.all_reduce(&mut small, ReduceOp::Sum)?;
        same("small", &small, small == [all])?;
        shared.fill(rank as i64 + round);
        group.all_reduce(&mut shared, ReduceOp::Sum)?;
        same("shared", &shared[0], shared.iter().all(|&element| element == all))?;
        if round % 10 == 0 {
            let mut large = vec![rank as i64 + round; 40_000];
            group.all_reduce(&mut large, ReduceOp::Sum)?;
            same("large", &large[0], large.iter().all(|&element| element == all))?;
        }
    }
    Ok(())
}

fn slow_link_is_enough(test: &Test) {
    let mut commands = test.commands().into_iter();
    let Some(net) = Net::new(2) else { return };
    if !net.slow(1, "20mbit") {
        return;
    }
    let agents = [0, 1].map(|node| net.start(node, &commands.next().expect("there are two")));
    thread::sleep(Duration::from_secs(2));
    net.cut(1);
    thread::sleep(Duration::from_secs(2));
    net.restore(1);
    for finished in agents.map(Agent::finish) {
        assert_eq!(finished.success(), format!("{} passed\n", test.name).repeat(2));
    }
}
