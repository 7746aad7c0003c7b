//! Messages with tags, and from any rank; each rank checks its own part.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flow_comm::{Error, Lane, ProcessGroup, Work};

use crate::beside;
use crate::registry::{Scenario, by_hand, in_process, launched, mpirun, scenario};

/// Elements of messages that go in one part, in several, and in many.
const LENGTHS: [usize; 4] = [0, 9, 100_000, 700_000];

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "tags_are_received_in_any_order",
        out_of_order,
        &[launched(3), in_process(3), by_hand(&[2, 1]), mpirun(&[2, 1])],
    ),
    scenario(
        "a_message_that_is_passed_over_releases_its_sender",
        passed_over,
        &[launched(2), in_process(2), by_hand(&[1, 1])],
    ),
    scenario(
        "thousands_are_kept",
        many_kept,
        &[launched(2), in_process(2), by_hand(&[1, 1]), mpirun(&[1, 1])],
    ),
    scenario(
        "threads_receive_from_one_rank_at_once",
        threads,
        &[launched(2), in_process(2), by_hand(&[1, 1])],
    ),
    scenario(
        "asynchronous_receives_do_not_hold_up_others",
        asynchronous,
        &[launched(2), in_process(2), by_hand(&[1, 1]), mpirun(&[1, 1])],
    ),
    scenario(
        "messages_come_from_any_rank",
        any,
        &[
            launched(3),
            launched(4),
            in_process(4),
            by_hand(&[1, 2]),
            by_hand(&[2, 2]),
            mpirun(&[2, 2]),
        ],
    ),
    scenario(
        "ranks_are_served_in_turn",
        any_in_turn,
        &[launched(4), in_process(4), by_hand(&[2, 1])],
    ),
    scenario(
        "threads_receive_from_any_rank_beside_others",
        any_beside_others,
        &[launched(4), in_process(4), by_hand(&[1, 2, 1])],
    ),
    scenario(
        "a_message_from_any_rank_comes_though_others_leave",
        any_until_all_left,
        &[launched(3), in_process(3), by_hand(&[2, 1]), by_hand(&[1, 2])],
    ),
    scenario("alone_there_is_nobody_to_receive_from", alone, &[launched(1), in_process(1)]),
];

/// What is in the message number `number` with a tag: the same length, and other contents, for
/// each.
fn contents(length: usize, tag: u32, number: usize) -> Vec<i64> {
    (0..length)
        .map(|index| i64::from(tag) * 10_000 + 10 * number as i64 + (index % 7) as i64)
        .collect()
}

fn receive(
    group: &ProcessGroup,
    length: usize,
    from: usize,
    tag: u32,
    number: usize,
) -> Result<()> {
    let mut message = vec![0_i64; length];
    group.recv_with_tag(&mut message, from, tag)?;
    check(&message, length, tag, number)
}

fn check(message: &[i64], length: usize, tag: u32, number: usize) -> Result<()> {
    ensure!(
        message == contents(length, tag, number),
        "message {number} of {length} with tag {tag}: {:?}",
        message.first()
    );
    Ok(())
}

/// Rank 0 sends messages of equal size to all others, in ordinary and shared memory, that are
/// received in another order.
fn out_of_order(group: &ProcessGroup) -> Result<()> {
    let sent = [(5, 0), (3, 0), (u32::MAX, 0), (3, 1), (0, 0), (5, 1), (7, 0)];
    let received = [(3, 0), (7, 0), (0, 0), (5, 0), (3, 1), (5, 1), (u32::MAX, 0)];
    for length in LENGTHS {
        for shared in [false, true] {
            if group.rank() > 0 {
                received
                    .iter()
                    .try_for_each(|&(tag, number)| receive(group, length, 0, tag, number))?;
                continue;
            }
            for to in 1..group.world_size() {
                for (tag, number) in sent {
                    let data = contents(length, tag, number);
                    if shared {
                        let mut buffer = group.alloc_shared::<i64>(length)?;
                        buffer.copy_from_slice(&data);
                        group.send_with_tag(&buffer, to, tag)?;
                    } else {
                        group.send_with_tag(&data, to, tag)?;
                    }
                }
            }
        }
    }
    group.barrier()?;
    Ok(())
}

/// Two ranks. A message in shared memory that is passed over is copied, and its sender is released.
fn passed_over(group: &ProcessGroup) -> Result<()> {
    const LENGTH: usize = 1_000_000;
    if group.rank() == 0 {
        let mut buffer = group.alloc_shared::<i64>(LENGTH)?;
        for tag in 1..5 {
            buffer.fill(i64::from(tag));
            group.send_with_tag(&buffer, 1, tag)?;
        }
        buffer.fill(9);
        // Types and lengths are compared for messages that are asked for only.
        group.send_with_tag(&[2.5_f64; 3], 1, 5)?;
        return group.barrier().map_err(Into::into);
    }
    let mut last = [0.0_f64; 3];
    group.recv_with_tag(&mut last, 0, 5)?;
    ensure!(last == [2.5; 3], "{last:?}");
    for tag in [3, 1, 4, 2] {
        let mut message = vec![0; LENGTH];
        group.recv_with_tag(&mut message, 0, tag)?;
        ensure!(
            message.iter().all(|&element| element == i64::from(tag)),
            "tag {tag}: {} and so on",
            message[0]
        );
    }
    group.barrier()?;
    Ok(())
}

/// Two ranks.
fn many_kept(group: &ProcessGroup) -> Result<()> {
    const COUNT: u32 = 20_000;
    if group.rank() == 0 {
        (0..COUNT).try_for_each(|tag| group.send_with_tag(&[i64::from(tag); 3], 1, tag))?;
    } else {
        for tag in (0..COUNT).rev() {
            let mut message = [0; 3];
            group.recv_with_tag(&mut message, 0, tag)?;
            ensure!(message == [i64::from(tag); 3], "tag {tag}: {message:?}");
        }
    }
    group.barrier()?;
    Ok(())
}

/// Two ranks. Threads of one receive from the other, each with its tag; the other sends the tags in
/// changing order.
fn threads(group: &ProcessGroup) -> Result<()> {
    const TAGS: u32 = 6;
    const ROUNDS: usize = 40;
    let length = |tag: u32, round: usize| LENGTHS[(tag as usize + round) % 3];
    if group.rank() == 0 {
        for round in 0..ROUNDS {
            for index in 0..TAGS {
                let tag = (index * 5 + round as u32) % TAGS;
                let data = contents(length(tag, round), tag, round);
                if index % 2 == 0 {
                    group.send_with_tag(&data, 1, tag)?;
                } else {
                    let mut buffer = group.alloc_shared::<i64>(data.len())?;
                    buffer.copy_from_slice(&data);
                    group.send_with_tag(&buffer, 1, tag)?;
                }
            }
        }
    } else {
        let receive_all = |tag| {
            (0..ROUNDS).try_for_each(|round| receive(group, length(tag, round), 0, tag, round))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..TAGS).map(|tag| scope.spawn(move || receive_all(tag))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
        })?;
    }
    group.barrier()?;
    Ok(())
}

/// Two ranks. What waits for one tag does not hold up another.
fn asynchronous(group: &ProcessGroup) -> Result<()> {
    let start = |tag| -> Result<Work<Vec<i64>>, Error> { beside::recv(group, vec![0; 9], 0, tag) };
    if group.rank() == 0 {
        for tag in [2, 3, 1] {
            beside::send(group, contents(9, tag, 0), 1, tag)?.wait()?;
            // The other says that it has it before the next is sent.
            group.recv(&mut [0_u8], 1)?;
        }
        for tag in 0..500 {
            drop(beside::send(group, contents(9, tag, 1), 1, tag)?);
        }
    } else {
        let [one, two] = [start(1)?, start(2)?];
        let any = group.start(Lane::FromAny(3), "recv_any", |group| {
            let mut buffer = vec![0; 9];
            let from = group.recv_any(&mut buffer, 3)?;
            Ok((buffer, from))
        })?;
        check(&two.wait()?, 9, 2, 0)?;
        group.send(&[0_u8], 0)?;
        let (three, from) = any.wait()?;
        ensure!(from == 0, "tag 3 came from rank {from}");
        check(&three, 9, 3, 0)?;
        group.send(&[0_u8], 0)?;
        check(&one.wait()?, 9, 1, 0)?;
        group.send(&[0_u8], 0)?;
        // Threads are not kept for tags that are no longer waited for.
        for tag in (0..500).rev() {
            check(&start(tag)?.wait()?, 9, tag, 1)?;
        }
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        ensure!(threads < 30, "{threads} threads");
    }
    group.barrier()?;
    Ok(())
}

/// All but rank 0 send to it, as soon as they can.
fn any(group: &ProcessGroup) -> Result<()> {
    const ROUNDS: usize = 100;
    let rank = group.rank();
    let senders = group.world_size() - 1;
    let length = |rank: usize, round: usize| LENGTHS[(rank + round / 30) % 3];
    if rank > 0 {
        for round in 0..ROUNDS {
            // The receiver knows neither from whom the next message comes, nor how long it is.
            group.send_with_tag(&[length(rank, round) as i64, rank as i64], 0, 7)?;
            group.send_with_tag(&contents(length(rank, round), rank as u32, round), 0, 8)?;
        }
        return group.barrier().map_err(Into::into);
    }
    let mut rounds = vec![0; senders + 1];
    for _ in 0..senders * ROUNDS {
        let mut announced = [0_i64; 2];
        let from = group.recv_any(&mut announced, 7)?;
        let round = rounds[from];
        rounds[from] += 1;
        ensure!(
            announced == [length(from, round) as i64, from as i64],
            "rank {from}, round {round}: {announced:?}"
        );
        let mut message = vec![0; announced[0] as usize];
        group.recv_with_tag(&mut message, from, 8)?;
        check(&message, length(from, round), from as u32, round)?;
    }
    ensure!(rounds[1..].iter().all(|&count| count == ROUNDS), "{rounds:?}");
    group.barrier()?;
    Ok(())
}

/// Where several ranks have messages, they are served in turn.
fn any_in_turn(group: &ProcessGroup) -> Result<()> {
    const ROUNDS: usize = 20;
    let rank = group.rank();
    let size = group.world_size();
    if rank > 0 {
        (0..ROUNDS)
            .try_for_each(|round| group.send_with_tag(&contents(9, rank as u32, round), 0, 7))?;
        group.send_with_tag(&[0_u8], 0, 8)?;
        return group.barrier().map_err(Into::into);
    }
    // Of each rank the last message first: all others have come.
    (1..size).try_for_each(|from| group.recv_with_tag(&mut [0_u8], from, 8))?;
    for round in 0..ROUNDS {
        let mut turn = Vec::new();
        for _ in 1..size {
            let mut message = vec![0; 9];
            let from = group.recv_any(&mut message, 7)?;
            check(&message, 9, from as u32, round)?;
            turn.push(from);
        }
        turn.sort_unstable();
        ensure!(turn.iter().copied().eq(1..size), "round {round}: {turn:?}");
    }
    group.barrier()?;
    Ok(())
}

/// Threads that receive from any rank, with two tags, and from each rank, with two others.
fn any_beside_others(group: &ProcessGroup) -> Result<()> {
    const ROUNDS: usize = 60;
    let rank = group.rank();
    let senders = group.world_size() - 1;
    let length = |tag: u32, round: usize| if tag < 2 { 9 } else { LENGTHS[round % 3] };
    if rank > 0 {
        for round in 0..ROUNDS {
            for tag in [3, 0, 1, 2] {
                group.send_with_tag(&contents(length(tag, round), tag, round), 0, tag)?;
            }
        }
        return group.barrier().map_err(Into::into);
    }
    std::thread::scope(|scope| {
        let any = move |tag: u32| -> Result<()> {
            let mut rounds = vec![0; senders + 1];
            for _ in 0..senders * ROUNDS {
                let mut message = vec![0; 9];
                let from = group.recv_any(&mut message, tag)?;
                check(&message, 9, tag, rounds[from])?;
                rounds[from] += 1;
            }
            Ok(())
        };
        let from_each = move |from: usize, tag| -> Result<()> {
            (0..ROUNDS).try_for_each(|round| receive(group, length(tag, round), from, tag, round))
        };
        let mut threads: Vec<_> = [0, 1].map(|tag| scope.spawn(move || any(tag))).into();
        for from in 1..=senders {
            threads.extend([2, 3].map(|tag| scope.spawn(move || from_each(from, tag))));
        }
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;
    group.barrier()?;
    Ok(())
}

/// Three ranks: rank 1 leaves at once, rank 2 after it has sent.
fn any_until_all_left(group: &ProcessGroup) -> Result<()> {
    match group.rank() {
        0 => {
            let mut message = [0_u8; 9];
            let from = group.recv_any(&mut message, 4)?;
            ensure!((from, message) == (2, [7; 9]), "{from}: {message:?}");
            let error = group.recv_any(&mut message, 4).err().context("a message from nobody")?;
            let text = error.to_string();
            ensure!(matches!(error, Error::PeerLost { .. }), "{error:?}");
            ensure!(
                text.contains(
                    "recv from any rank (9 x u8, tag 4) failed: nobody is left to send it: rank "
                ),
                "{text}"
            );
            ensure!(text.contains("has left the group"), "{text}");
        }
        // Leaves.
        1 => {}
        _ => {
            std::thread::sleep(Duration::from_millis(700));
            group.send_with_tag(&[7_u8; 9], 0, 4)?;
        }
    }
    Ok(())
}

/// One rank.
fn alone(group: &ProcessGroup) -> Result<()> {
    let error = group.recv_any(&mut [0_u8; 9], 4).err().context("a message from nobody")?;
    ensure!(
        error.to_string() == "rank 0: recv_any: there is no other rank in the group",
        "{error}"
    );
    Ok(())
}
