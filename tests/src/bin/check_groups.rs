//! What groups promise beyond single collectives, one scenario by name; each rank checks its own
//! part.

use std::fmt::Debug;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use flow_comm::env::{Membership, Rendezvous};
use flow_comm::store::Store;
use flow_comm::{f16, Error, ProcessGroup, ReduceOp};

fn main() -> Result<()> {
    let scenario = std::env::args().nth(1).context("usage: check_groups SCENARIO")?;
    let group = ProcessGroup::from_env()?;
    match scenario.as_str() {
        "sub_groups" => sub_groups(&group)?,
        "different_lists" => different_lists(&group)?,
        "members" => members(&group)?,
        "members_differ" => members_differ(&group)?,
        "members_absent" => members_absent(&group)?,
        "member_dies" => member_dies(&group)?,
        "member_dies_before_its_turn" => member_dies_before_its_turn(&group)?,
        "members_leave_no_keys" => members_leave_no_keys(&group)?,
        "member_groups_come_and_go" => member_groups_come_and_go(&group)?,
        "named_worlds" => named_worlds(&group)?,
        "arguments" => arguments(&group)?,
        "groups_come_and_go" => groups_come_and_go(&group)?,
        "worlds_come_and_go" => worlds_come_and_go(&group)?,
        "two_worlds" => two_worlds(&group)?,
        "rounds" => rounds(&group)?,
        "half_averages" => half_averages(&group)?,
        _ => bail!("there is no scenario {scenario}"),
    }
    println!("{scenario} passed");
    Ok(())
}

/// The sum over the group of the members' ranks in the job.
fn sum_of_ranks(group: &ProcessGroup) -> Result<i64> {
    let mut sum = [group.ranks()[group.rank()] as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
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
            ensure!(upper.ranks() == [2, 3, 4] && upper.rank() == rank - 2);
            let mut data = vec![rank as f32; 100_000];
            upper.broadcast(&mut data, round % 3)?;
            ensure!(data.iter().all(|&element| element == (2 + round % 3) as f32));
        }
        if let Some(single) = &single {
            ensure!(sum_of_ranks(single)? == 1);
            single.barrier()?;
        }
    }

    // Ranks of a group of a group are counted in the latter.
    if let Some(upper) = &upper {
        let ends = upper.new_group(&[0, 2])?;
        ensure!(ends.is_some() == (rank != 3));
        if let Some(ends) = ends {
            ensure!(ends.ranks() == [2, 4] && sum_of_ranks(&ends)? == 6);
        }
    }

    // What is under way in one group does not hold up another.
    let twin = world.duplicate()?;
    ensure!(twin.ranks() == world.ranks());
    let slow = world.all_reduce_async(vec![1.0_f32; 300_000], ReduceOp::Sum)?;
    let fast = twin.all_reduce_async(vec![1_i32; 3], ReduceOp::Sum)?;
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
    ensure!(matches!(error, Error::Mismatch { .. }), "{error:?}");
    let other = if rank == 1 { 0 } else { 1 };
    let text = error.to_string();
    ensure!(
        text.contains(&format!(
            "rank {rank} called new_group with {list:?}, rank {other} with other"
        )),
        "{text}"
    );
    Ok(())
}

/// With five ranks: groups that only their members make.
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
        let sent = upper.send_async(vec![rank as i64; 50_000], (upper.rank() + 1) % 3)?;
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

    for list in [&[][..], &[rank, rank], &[rank, 5], &[(rank + 1) % 5]] {
        let error = world.new_group_of(list, "wrong").err().context("a bad list was accepted")?;
        let expected = format!(
            "rank {rank}: new_group_of: {list:?} must be different ranks from 0 to 4, this one ({rank}) among them"
        );
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
        // Rank 2 is not in rank 1's list, and hears of it all the same.
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
        // Whoever comes later hears of it, too.
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

/// With three ranks, of which rank 2 says when it can be killed.
fn member_dies(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    // It has answered, and rank 1 has not come yet; then it has not answered.
    let answers = std::env::args().nth(2).as_deref() == Some("answered");
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
        let (rank, size) = (rank - 1, 2);
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
    let (again, other) = (join("all")?, join("all/0")?);
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

/// With two ranks.
fn arguments(group: &ProcessGroup) -> Result<()> {
    let (rank, other) = (group.rank(), 1 - group.rank());
    let refused = |operation: &str, reason: &str, result: Result<(), Error>| {
        let Err(error) = result else { bail!("{operation} accepted what it should not: {reason}") };
        ensure!(matches!(error, Error::Argument { .. }), "{error:?}");
        let expected = format!("rank {rank}: {operation}: {reason}");
        ensure!(error.to_string() == expected, "{error:?} and not {expected:?}");
        ensure!(sum_of_ranks(group)? == 1, "after {expected}");
        Ok(())
    };
    let mut four = [0.0_f32; 4];
    let mut five = [0.0_f32; 5];
    let no_rank = "2 is not a rank: it must be 0 to 1";
    refused("broadcast", &format!("root {no_rank}"), group.broadcast(&mut four, 2))?;
    refused("reduce", &format!("root {no_rank}"), group.reduce(&mut four, ReduceOp::Sum, 2))?;
    refused("gather", &format!("root {no_rank}"), group.gather(&[1], None::<&mut [i32; 2]>, 2))?;
    refused("scatter", &format!("root {no_rank}"), group.scatter(None::<&[i32; 2]>, &mut [1], 2))?;
    refused("send", &format!("peer {no_rank}"), group.send(&four, 2))?;
    refused("recv", &format!("peer {no_rank}"), group.recv(&mut four, 2))?;

    let itself = format!("rank {rank} is this rank itself: a peer is another one");
    refused("send", &itself, group.send(&four, rank))?;
    refused("recv", &itself, group.recv(&mut four, rank))?;
    refused("send", &itself, group.send_async(vec![1_u8], rank)?.wait().map(drop))?;

    let lengths = |input, output, right| {
        format!("input of {input} and output of {output} elements do not fit: output must be {right} elements")
    };
    refused("all_gather", &lengths(4, 5, 8), group.all_gather(&four, &mut five))?;
    refused(
        "reduce_scatter",
        &lengths(4, 5, 2),
        group.reduce_scatter(&four, &mut five, ReduceOp::Sum),
    )?;
    refused("all_to_all", &lengths(4, 5, 4), group.all_to_all(&four, &mut five))?;
    let odd = "5 elements cannot be divided into 2 equal blocks";
    refused("all_to_all", odd, group.all_to_all(&five.clone(), &mut five))?;
    refused("gather", &lengths(4, 5, 8), group.gather(&four, Some(&mut five), rank))?;
    refused("scatter", &lengths(4, 5, 2), group.scatter(Some(&four), &mut five, rank))?;

    let types = "input is f32 but output is i32: they must be alike";
    refused("all_gather", types, group.all_gather(&four, &mut [0_i32; 8]))?;
    refused("reduce_scatter", types, group.reduce_scatter(&four, &mut [0_i32; 2], ReduceOp::Sum))?;
    refused("all_to_all", types, group.all_to_all(&four, &mut [0_i32; 4]))?;

    let side = |root: usize, what: &str| {
        format!("the root (rank {root}), and no other rank, gives the {what}")
    };
    refused("gather", &side(rank, "output"), group.gather(&four, None::<&mut [f32; 8]>, rank))?;
    refused("gather", &side(other, "output"), group.gather(&four, Some(&mut [0.0_f32; 8]), other))?;
    refused("scatter", &side(rank, "input"), group.scatter(None::<&[f32; 8]>, &mut four, rank))?;
    refused(
        "scatter",
        &side(other, "input"),
        group.scatter(Some(&[0.0_f32; 8]), &mut four, other),
    )?;

    let error =
        group.alloc_shared::<f64>(1 << 50).err().context("8 PiB were allocated")?.to_string();
    let expected = format!(
        "rank {rank}: alloc_shared failed: no room for {} x f64 in this rank's region",
        1_u64 << 50
    );
    ensure!(error == expected, "{error}");
    ensure!(group.alloc_shared::<f64>(usize::MAX).is_err());
    Ok(())
}

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

    fn have_grown_since(&self, before: &Self) -> bool {
        self.descriptors > before.descriptors
            || self.threads > before.threads
            // The allocator may take or join a few areas of its own.
            || self.mappings > before.mappings + 8
            || self.resident > before.resident + (16 << 10)
    }
}

/// Uses every part of a group: payloads, staging buffers, messages, threads.
fn use_all(group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    ensure!(sum_of_ranks(group)? == (0..size as i64).sum::<i64>());
    let reduced = group.all_reduce_async(vec![1.0_f32; 100_000], ReduceOp::Sum)?;
    let sent = group.send_async(vec![rank as u8; 5000], (rank + 1) % size)?;
    let mut received = group.alloc_shared::<u8>(5000)?;
    group.recv(&mut received, (rank + size - 1) % size)?;
    ensure!(received.iter().all(|&from| usize::from(from) == (rank + size - 1) % size));
    ensure!(sent.wait()?.len() == 5000 && reduced.wait()?[99_999] == size as f32);
    Ok(())
}

fn groups_come_and_go(world: &ProcessGroup) -> Result<()> {
    come_and_go(1000, || use_all(&world.duplicate()?))
}

fn member_groups_come_and_go(world: &ProcessGroup) -> Result<()> {
    come_and_go(500, || use_all(&world.new_group_of(&[1, 0], "key")?))
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
    while after.have_grown_since(&before) && begin.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
        after = Resources::of_this_process()?;
    }
    ensure!(!after.have_grown_since(&before), "leaked: {before:?} became {after:?}");
    Ok(())
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
    let (rank, size) = (group.rank(), group.world_size());
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
