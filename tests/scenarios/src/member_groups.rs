//! Groups that only their members make.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use flow_comm::env::{Membership, Rendezvous};
use flow_comm::store::Store;
use flow_comm::{Error, ProcessGroup, ReduceOp};
use flow_harness::{TEST_TIMEOUT, assert_contains};

use crate::beside;
use crate::groups::sum_of_ranks;
use crate::registry::{Scenario, Test, by_hand, launched, scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario("members_make_a_group", members, &[launched(5), by_hand(&[5]), by_hand(&[2, 3])]),
    scenario(
        "different_lists_of_those_who_make_a_group_are_an_error",
        members_differ,
        &[launched(3), by_hand(&[1, 2])],
    ),
    scenario(
        "a_member_that_does_not_come_is_named",
        members_absent,
        &[launched(3), by_hand(&[1, 1, 1])],
    ),
    scenario("a_group_leaves_no_keys", members_leave_no_keys, &[launched(2)]),
    scenario(
        "a_member_that_dies_is_named",
        |world| member_dies(world, false),
        &[by_hand(&[3]), by_hand(&[1, 1, 1])],
    )
    .checked_by(names_the_dead),
    scenario(
        "a_member_that_dies_after_its_answer_is_named",
        |world| member_dies(world, true),
        &[by_hand(&[3]), by_hand(&[1, 1, 1])],
    )
    .checked_by(names_the_dead),
    scenario(
        "a_member_that_dies_before_its_turn_is_named",
        member_dies_before_its_turn,
        &[by_hand(&[4]), by_hand(&[1, 1, 1, 1])],
    )
    .checked_by(names_the_dead_before_its_turn),
];

/// With five ranks.
fn members(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    if rank >= 2 {
        let upper = world.new_group_of(&[4, 2, 3], "upper")?;
        let order = [4_usize, 2, 3];
        ensure!(
            upper.ranks() == order
                && upper.ranks()[upper.rank()] == rank
                && upper.world_size() == 3,
            "{upper:?}"
        );
        for round in 0..100 {
            let mut all = [0_i64; 3];
            upper.all_gather(&[rank as i64], &mut all)?;
            ensure!(all == [4, 2, 3], "{all:?}");
            let mut data = vec![rank as f32; 100_000];
            upper.broadcast(&mut data, round % 3)?;
            ensure!(data.iter().all(|&element| element == order[round % 3] as f32));
            upper.all_reduce(&mut data, ReduceOp::Sum)?;
            ensure!(data[99_999] == 3.0 * order[round % 3] as f32);
        }
        let sent = beside::send(&upper, vec![rank as i64; 50_000], (upper.rank() + 1) % 3, 0)?;
        let mut received = vec![0_i64; 50_000];
        upper.recv(&mut received, (upper.rank() + 2) % 3)?;
        ensure!(
            received[0] == order[(upper.rank() + 2) % 3] as i64 && sent.wait()?.len() == 50_000
        );
        // Of a group of a group: ranks are counted in that.
        if rank != 2 {
            let ends = upper.new_group_of(&[2, 0], "ends")?;
            ensure!(ends.ranks() == [3, 4] && sum_of_ranks(&ends)? == 7);
        }
        ensure!(upper.duplicate()?.ranks() == order);
    }
    // A key serves again, for the same ranks and for others; groups that share no rank may have the
    // same.
    for _ in 0..20 {
        ensure!(sum_of_ranks(&world.new_group_of(&[3, 1, 0, 4, 2], "all")?)? == 10);
        if rank < 4 {
            let pair = [[0, 1], [3, 2]][rank / 2];
            ensure!(sum_of_ranks(&world.new_group_of(&pair, "pair")?)? == [1, 5][rank / 2]);
        }
    }
    let alone = world.new_group_of(&[rank], "pair")?;
    ensure!(alone.ranks() == [rank] && sum_of_ranks(&alone)? == rank as i64);

    // By several threads, which begin in another order on each rank.
    std::thread::scope(|scope| {
        let make = |number: usize| {
            move || -> Result<()> {
                for _ in 0..5 {
                    let mut list = [0, 1, 2, 3, 4];
                    list.rotate_left(number % 5);
                    let group = world.new_group_of(&list, &format!("thread/{number}"))?;
                    ensure!(group.ranks() == list && sum_of_ranks(&group)? == 10);
                }
                Ok(())
            }
        };
        let threads: Vec<_> = (0..6).map(|index| scope.spawn(make((index + rank) % 6))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })?;

    let different = "must be different ranks from 0 to 4";
    let without_own = format!("must have this rank, {rank}, among them");
    for (list, reason) in [
        (&[][..], different),
        (&[rank, rank], different),
        (&[rank, 5], different),
        (&[(rank + 1) % 5], &without_own),
    ] {
        let error = world.new_group_of(list, "wrong").err().context("a bad list was accepted")?;
        let expected = format!("rank {rank}: new_group_of: {list:?} {reason}");
        ensure!(
            matches!(error, Error::Argument { .. }) && error.to_string() == expected,
            "{error}"
        );
    }
    ensure!(sum_of_ranks(world)? == 10);
    Ok(())
}

/// With three ranks, of which rank 1 comes first, or last, with another list.
fn members_differ(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    for (key, late) in [("first", [0, 2].contains(&rank)), ("last", rank == 1)] {
        if late {
            std::thread::sleep(Duration::from_millis(300));
        }
        let list: &[usize] = if rank == 1 { &[0, 1] } else { &[0, 1, 2] };
        let error = world.new_group_of(list, key).err().context("different lists were accepted")?;
        let text = error.to_string();
        // Rank 2 is not in rank 1's list, and learns of it all the same.
        ensure!(
            matches!(error, Error::Mismatch { .. })
                || rank == 2 && matches!(error, Error::System { .. }),
            "{error:?}"
        );
        ensure!(text.contains("[0, 1]") && text.contains("[0, 1, 2]"), "{text}");
        ensure!(
            text.contains("rank 1") && (text.contains("rank 0") || text.contains("rank 2")),
            "{text}"
        );
        world.barrier()?;
        // Whoever comes later learns of it, too.
        let again = world
            .new_group_of(&[0, 1, 2], key)
            .err()
            .context("the key of a failure was accepted")?
            .to_string();
        ensure!(again.contains("[0, 1]") && again.contains("[0, 1, 2]"), "{again}");
    }
    ensure!(sum_of_ranks(&world.new_group_of(&[2, 1, 0], "other")?)? == 3);
    Ok(())
}

/// With three ranks, of which one does not come.
fn members_absent(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    if rank != 1 {
        let before = world.arena().usage().0;
        let timeout = world.timeout();
        world.set_timeout(Duration::from_secs(1));
        let error = world.new_group_of(&[2, 1, 0], "key").err().context("nobody was missing")?;
        world.set_timeout(timeout);
        let text = error.to_string();
        let culprit =
            "new_group_of([2, 1, 0], \"key\") timed out after 1s: waited for rank 1 (pid ";
        ensure!(
            text.contains(culprit)
                && !text.contains("rank 2 (pid")
                && !text.contains("rank 0 (pid"),
            "{text}"
        );
        ensure!(world.arena().usage().0 == before, "its memory is not free");
    }
    world.barrier()?;
    let late = world
        .new_group_of(&[2, 1, 0], "key")
        .err()
        .context("the others have given up")?
        .to_string();
    ensure!(late.contains("timed out after 1s: waited for rank 1 (pid "), "{late}");
    ensure!(sum_of_ranks(&world.new_group_of(&[2, 1, 0], "new key")?)? == 3);
    Ok(())
}

/// With two ranks under flow-launch.
fn members_leave_no_keys(world: &ProcessGroup) -> Result<()> {
    let Rendezvous::Server { address, token } = Membership::from_env()?.rendezvous else {
        bail!("no store is served")
    };
    let store = Store::connect(&address, &token, world.timeout())?;
    let call = "world/0/group/0/call/key";
    let mut name = String::new();
    if world.rank() == 1 {
        let found = store.get(call, world.timeout())?;
        let found: serde_json::Value = serde_json::from_slice(&found)?;
        name = found["name"].as_str().context("a call has a name")?.into();
        store.wait(&[format!("world/0/group/{name}/answer/0")], world.timeout())?;
    }
    let group = world.new_group_of(&[1, 0], "key")?;
    ensure!(sum_of_ranks(&group)? == 1);
    for key in ["answer/0", "answer/1", "answers", "outcome", "heard"] {
        let left = store.try_get(&format!("world/0/group/{name}/{key}"))?;
        ensure!(left.is_none(), "{key} is left behind: {left:?}");
    }
    ensure!(store.try_get(call)?.is_none(), "the call is left behind");
    Ok(())
}

/// With three ranks, of which rank 2 says when it can be killed: when it has answered and rank 1
/// has not come yet, or before.
fn member_dies(world: &ProcessGroup, answers: bool) -> Result<()> {
    let rank = world.rank();
    if rank == 2 {
        let call = || world.new_group_of(&[0, 1, 2], "key").map(drop);
        std::thread::scope(|scope| {
            let _called = answers.then(|| scope.spawn(call));
            std::thread::sleep(Duration::from_millis(500));
            println!("waiting");
            std::thread::sleep(Duration::from_secs(3600));
        });
        bail!("nobody has killed this rank");
    }
    if rank == 1 && answers {
        std::thread::sleep(Duration::from_secs(2));
    }
    let before = world.arena().usage().0;
    let error = world.new_group_of(&[0, 1, 2], "key").err().context("nobody was missing")?;
    ensure!(matches!(error, Error::PeerLost { .. }), "{error:?}");
    ensure!(world.arena().usage().0 == before, "its memory is not free");
    println!("{error}");
    ensure!(sum_of_ranks(&world.new_group_of(&[1, 0], "the rest")?)? == 1);
    // Also where the group has failed.
    ensure!(world.barrier().is_err() && world.barrier().is_err());
    ensure!(sum_of_ranks(&world.new_group_of(&[0, 1], "the rest of a failed group")?)? == 1);
    Ok(())
}

fn names_the_dead(test: &Test) {
    let mut ranks = test.ranks();
    let mut victim = ranks.pop().expect("there are three");
    victim.wait_for("waiting");
    let culprit = format!("failed: rank 2 (pid {} on ", victim.pid());
    drop(victim);
    for rank in ranks {
        let said = rank.finish(TEST_TIMEOUT).success();
        assert_contains(&said, &["new_group_of([0, 1, 2], \"key\")", &culprit, " passed"]);
    }
}

/// With four ranks, of which rank 3 is killed when rank 2 says that it waits for it. Others have
/// the key all the time.
fn member_dies_before_its_turn(world: &ProcessGroup) -> Result<()> {
    match world.rank() {
        0 => {
            // Rank 1 comes when rank 2 has given up.
            std::thread::scope(|scope| -> Result<()> {
                let call = scope.spawn(|| world.new_group_of(&[0, 1], "key"));
                std::thread::sleep(Duration::from_millis(300));
                world.send(&[0_u8], 2)?;
                world.recv(&mut [0_u8], 2)?;
                world.send(&[0_u8], 1)?;
                call.join().expect("no thread panics")?;
                Ok(())
            })?;
        }
        1 => {
            world.recv(&mut [0_u8], 0)?;
            world.new_group_of(&[0, 1], "key")?;
        }
        2 => {
            world.recv(&mut [0_u8], 0)?;
            println!("waiting");
            let error = world.new_group_of(&[2, 3], "key").err().context("nobody was missing")?;
            ensure!(matches!(error, Error::PeerLost { .. }), "{error:?}");
            println!("{error}");
            world.send(&[0_u8], 0)?;
        }
        _ => loop {
            std::thread::sleep(Duration::from_secs(60));
        },
    }
    Ok(())
}

fn names_the_dead_before_its_turn(test: &Test) {
    let mut ranks = test.ranks();
    let victim = ranks.pop().expect("there are four");
    let mut waiting = ranks.pop().expect("there are four");
    waiting.wait_for("waiting");
    let culprit = format!("failed: rank 3 (pid {} on ", victim.pid());
    drop(victim);
    let said = waiting.finish(TEST_TIMEOUT).success();
    assert_contains(&said, &["new_group_of([2, 3], \"key\")", &culprit, " passed"]);
    ranks.into_iter().for_each(|rank| drop(rank.finish(TEST_TIMEOUT).success()));
}
