//! Buckets as a group reduces them; each rank checks its own part.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use flow_comm::{
    Buffer, DType, Error, ProcessGroup, ReduceOp, Segments, SharedBuffer, VirtualRanks, digest,
};

use crate::beside;
use crate::registry::{Job, Scenario, by_hand, in_process, launched, scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario("buckets_are_launched_once", pieces, &[launched(2), in_process(2), by_hand(&[1, 1])]),
    scenario("refused_buckets_leave_the_group_usable", refused, &[launched(2), by_hand(&[1, 1])]),
    scenario(
        "pieces_of_other_lengths_are_an_error",
        other_lengths,
        &[launched(2), in_process(2), by_hand(&[1, 1])],
    ),
    scenario("a_bucket_that_was_given_up_harms_nothing", aborted, &[launched(2), in_process(2)]),
    scenario("a_bucket_whose_rank_has_left_harms_nothing", left, &[launched(2), in_process(2)]),
    scenario(
        "ranks_get_parts_of_scattered_buckets",
        scattered,
        &[launched(2), launched(3), in_process(3), by_hand(&[1, 1]), by_hand(&[2, 3])],
    ),
    scenario("parts_of_buckets_that_are_refused", refused_parts, &[launched(2), by_hand(&[1, 1])]),
    scenario(
        "virtual_ranks_give_the_same_bits_on_any_ranks",
        virtual_ranks,
        &[
            launched(2),
            launched(5),
            in_process(1),
            in_process(4),
            by_hand(&[1, 1]),
            by_hand(&[1, 2]),
            by_hand(&[3, 2]),
            by_hand(&[1, 2, 1]),
        ],
    ),
    scenario("several_are_reduced_beside_each_other", several, THREE),
    scenario("they_come_after_collectives_that_were_started_before", in_turn, THREE),
];

/// On one node, over nodes, and in one process.
const THREE: &[Job] = &[launched(3), by_hand(&[2, 1]), in_process(3)];

/// Shared memory as a piece of a bucket, from this byte on.
struct Piece(SharedBuffer<f32>, usize);

impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0.bytes_mut()[self.1..]
    }
}

fn filled(group: &ProcessGroup, length: usize, value: f32) -> Result<SharedBuffer<f32>> {
    let mut buffer = group.alloc_shared(length)?;
    buffer.fill(value);
    Ok(buffer)
}

/// A bucket with all its pieces in place.
fn bucket(group: &ProcessGroup, lengths: &[usize], value: f32) -> Result<Arc<Segments>> {
    let segments = group.segments(0, DType::F32, lengths.to_vec())?;
    for (index, &length) in lengths.iter().enumerate() {
        ensure!(segments.set_piece(index, Piece(filled(group, length, value)?, 0)));
    }
    Ok(Arc::new(segments))
}

/// A bucket may be launched again as soon as it is finished and filled, and not before.
fn pieces(group: &ProcessGroup) -> Result<()> {
    for _ in 0..200 {
        let segments = bucket(group, &[1, 0, 70_000, 3], 1.0 + group.rank() as f32)?;
        ensure!(group.launch_bucket(&segments, ReduceOp::Sum)?);
        if group.rank() == 1 {
            // Rank 0 has not yet done its part, or has: only what is finished can be launched or
            // placed.
            let error =
                group.launch_bucket(&segments, ReduceOp::Sum).err().context("launched twice")?;
            ensure!(error.to_string().contains("is being reduced already"), "{error}");
            ensure!(!segments.set_piece(0, Piece(filled(group, 1, 9.0)?, 0)));
        }
        segments.wait(group)?;
        ensure!(group.launch_bucket(&segments, ReduceOp::Sum).is_err(), "its pieces are gone");
    }
    Ok(())
}

/// Memory of this rank's own for a part, which it sends when the bucket lets go of it.
struct Part(Vec<f32>, Sender<Vec<f32>>);

impl AsMut<[u8]> for Part {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0[..].bytes_mut()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.1.send(std::mem::take(&mut self.0));
    }
}

/// Returns the element at `index` of what a virtual rank adds: numbers whose sum depends on the order.
fn addend(case: usize, virtual_rank: usize, index: usize) -> f64 {
    let mixed = digest(&(case, virtual_rank, index));
    (mixed as i32 as f64) * 2f64.powi((mixed >> 32) as i32 % 60)
}

/// Returns an element of the sum of some virtual ranks, in their tree.
fn added(case: usize, ranks: &Range<usize>, sums: &[usize], index: usize) -> f64 {
    let mut waiting = Vec::new();
    for (virtual_rank, &sums) in ranks.clone().zip(sums) {
        let mut sum = addend(case, virtual_rank, index);
        for _ in 0..sums {
            sum += waiting.pop().unwrap_or(f64::NAN);
        }
        waiting.push(sum);
    }
    waiting[0]
}

/// Random numbers of virtual ranks, evenly and unevenly dealt out, have the sums and means of one rank.
fn virtual_ranks(group: &ProcessGroup) -> Result<()> {
    let lengths = vec![1, 0, 20_000, 70];
    for case in 0..12 {
        let count = group.world_size() + case % 6;
        let ranks =
            VirtualRanks::new(count, group.world_size()).map_err(|reason| anyhow!(reason))?;
        let own = ranks.of_rank(group.rank());
        let own_sums = VirtualRanks::sums(&own);
        let segments = group.virtual_segments(0, DType::F64, lengths.clone(), count)?;
        let (sender, receiver) = channel();
        for (index, &length) in lengths.iter().enumerate() {
            let mut piece = group.alloc_shared::<f64>(length)?;
            for (at, number) in piece.iter_mut().enumerate() {
                *number = added(case, &own, &own_sums, at);
            }
            ensure!(segments.set_piece(index, SentPiece(Some(piece), sender.clone())));
        }
        let op = if case % 2 == 0 { ReduceOp::Sum } else { ReduceOp::Avg };
        let segments = Arc::new(segments);
        ensure!(group.launch_bucket(&segments, op)?);
        segments.wait(group)?;
        let all = 0..count;
        let sums = VirtualRanks::sums(&all);
        for _ in &lengths {
            let reduced = receiver.recv_timeout(Duration::from_secs(60))?;
            for (at, number) in reduced.iter().enumerate() {
                let sum = added(case, &all, &sums, at);
                let expected = if op == ReduceOp::Avg { sum / count as f64 } else { sum };
                ensure!(
                    number.to_bits() == expected.to_bits(),
                    "{op} of {count} virtual ranks: element {at} is {number}, not {expected}"
                );
            }
        }
    }
    let refused = group.virtual_segments(0, DType::F32, lengths.clone(), group.world_size() - 1);
    let refused = refused.err().context("fewer than the ranks")?;
    ensure!(refused.to_string().contains("virtual_ranks("), "{refused}");
    let halves = group.virtual_segments(0, DType::BF16, lengths, group.world_size());
    ensure!(halves.err().context("bf16")?.to_string().contains("f32 or f64"));
    refuse_another_tree(group)
}

/// A bucket of virtual ranks is for sums and means of the group that has made it.
fn refuse_another_tree(group: &ProcessGroup) -> Result<()> {
    let segments = Arc::new(group.virtual_segments(0, DType::F32, vec![1], group.world_size())?);
    let refused = group.launch_bucket(&segments, ReduceOp::Max).err().context("a maximum")?;
    ensure!(refused.to_string().contains("sum or average it"), "{refused}");
    let Some(part) = group.new_group(&[0])? else { return Ok(()) };
    if group.world_size() > 1 {
        let refused = part.launch_bucket(&segments, ReduceOp::Sum).err().context("of a part")?;
        ensure!(refused.to_string().contains("of another group"), "{refused}");
    }
    Ok(())
}

/// A piece that is sent when the bucket lets go of it.
struct SentPiece(Option<SharedBuffer<f64>>, Sender<SharedBuffer<f64>>);

impl AsMut<[u8]> for SentPiece {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_mut().map(|piece| piece.bytes_mut()).unwrap_or_default()
    }
}

impl Drop for SentPiece {
    fn drop(&mut self) {
        if let Some(piece) = self.0.take() {
            let _ = self.1.send(piece);
        }
    }
}

/// Each rank gets the sums of its own parts of random pieces, and no other memory changes. Each machine parts
/// them otherwise.
fn scattered(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size();
    let mut state = 7_u64;
    let mut below = |limit: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % limit
    };
    for case in 0..60 {
        let mut lengths = Vec::new();
        let mut parts = Vec::new();
        for _ in 0..=below(5) {
            let length = [0, 1, below(300), 20_000 + below(50_000)][below(4)];
            // All ranks draw alike: where the part of each rank ends.
            let draws: Vec<usize> = (0..ranks).map(|_| below(length + 1)).collect();
            let on_machine = group.ranks_on_machine_of(group.rank());
            let mut ends: Vec<usize> = on_machine[1..].iter().map(|&rank| draws[rank]).collect();
            ends.sort_unstable();
            ends.insert(0, 0);
            ends.push(length);
            let own = group.local_index();
            parts.push(ends[own]..ends[own + 1]);
            lengths.push(length);
        }
        let element = |rank: usize, index: usize| ((rank + 1) * (index % 11 + case)) as f32;
        let segments = group.scattered_segments(3, DType::F32, lengths.clone(), parts.clone())?;
        let (sender, receiver) = channel();
        for (index, (&length, part)) in lengths.iter().zip(&parts).enumerate() {
            let mut piece = group.alloc_shared::<f32>(length)?;
            for (at, number) in piece.iter_mut().enumerate() {
                *number = element(group.rank(), at);
            }
            ensure!(segments.set_piece(index, Piece(piece, 0)));
            ensure!(segments.set_destination(index, Part(vec![-1.0; part.len()], sender.clone())));
        }
        let segments = Arc::new(segments);
        ensure!(group.launch_bucket(&segments, ReduceOp::Sum)?);
        segments.wait(group)?;
        for part in &parts {
            let reduced = receiver.recv_timeout(Duration::from_secs(60))?;
            for (number, at) in reduced.iter().zip(part.clone()) {
                let sum: f32 = (0..ranks).map(|rank| element(rank, at)).sum();
                ensure!(*number == sum, "case {case}: element {at} is {number}, not {sum}");
            }
            ensure!(reduced.len() == part.len(), "case {case}: {} of {part:?}", reduced.len());
        }
    }
    Ok(())
}

/// Parts that are none, destinations that do not fit, and ranks of which only some want parts.
fn refused_parts(group: &ProcessGroup) -> Result<()> {
    let parts = |lengths: &[usize], parts: &[[usize; 2]]| {
        let parts = parts.iter().map(|&[start, end]| start..end).collect();
        group.scattered_segments(0, DType::F32, lengths.to_vec(), parts)
    };
    for wrong in [&[[0, 5]][..], &[[0, 2], [2, 4]], &[]] {
        let error = parts(&[4], wrong).err().context("no such parts")?;
        ensure!(error.to_string().contains("not of pieces of the lengths [4]"), "{error}");
    }
    let segments = parts(&[4, 4], &[[0, 2], [0, 0]])?;
    let (sender, _receiver) = channel();
    let part = |length: usize| Part(vec![0.0; length], sender.clone());
    ensure!(!segments.set_destination(2, part(0)), "there is no piece 2");
    ensure!(!segments.set_destination(0, part(3)), "too long");
    for index in 0..2 {
        ensure!(segments.set_piece(index, Piece(filled(group, 4, 1.0)?, 0)));
    }
    let segments = Arc::new(segments);
    let error = group.launch_bucket(&segments, ReduceOp::Sum).err().context("no destination")?;
    ensure!(error.to_string().contains("not all its pieces are placed"), "{error}");
    ensure!(!bucket(group, &[4], 1.0)?.set_destination(0, part(4)), "all ranks get all");

    let segments = if group.rank() == 0 {
        ensure!(segments.set_destination(0, part(2)));
        segments
    } else {
        bucket(group, &[4, 4], 1.0)?
    };
    group.launch_bucket(&segments, ReduceOp::Sum)?;
    let error = group.finish_buckets().err().context("ranks do not agree")?;
    let text = error.to_string();
    ensure!(text.contains("all_reduce") && text.contains("reduce_scatter"), "{text}");
    Ok(())
}

/// What cannot be reduced is refused, and the group stays usable.
fn refused(group: &ProcessGroup) -> Result<()> {
    let segments = group.segments(0, DType::F32, vec![4, 4])?;
    ensure!(!segments.set_piece(2, Piece(filled(group, 8, 0.0)?, 0)), "there is no piece 2");
    ensure!(!segments.set_piece(0, Piece(filled(group, 8, 0.0)?, 1)), "not aligned");
    ensure!(!segments.set_piece(0, Piece(filled(group, 4, 0.0)?, 4)), "too short");
    ensure!(!segments.set_piece(0, vec![0_u8; 16]), "not shared");
    ensure!(segments.set_piece(0, Piece(filled(group, 4, 0.0)?, 0)));
    let not_all = group
        .launch_bucket(&Arc::new(segments), ReduceOp::Sum)
        .err()
        .context("piece 1 is missing")?;
    ensure!(not_all.to_string().contains("not all its pieces are placed"), "{not_all}");

    for lengths in [vec![usize::MAX, 1], vec![1 << 62], vec![1 << 61, 1 << 61]] {
        ensure!(group.segments(0, DType::F32, lengths.clone()).is_err(), "{lengths:?}");
    }
    for length in [usize::MAX, usize::MAX - 3, usize::MAX / 2, 1 << 60] {
        ensure!(group.alloc_shared::<u8>(length).is_err(), "{length}");
    }

    let elsewhere = ProcessGroup::from_env()?;
    let error = group
        .launch_bucket(&bucket(&elsewhere, &[9], 1.0)?, ReduceOp::Sum)
        .err()
        .context("of another job")?;
    ensure!(
        matches!(error, Error::Argument { .. }) && error.to_string().contains("segments()"),
        "{error}"
    );
    let mut sum = [1.0_f32];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum == [2.0]);
    Ok(())
}

/// Pieces of other lengths are an error, though together they are as long.
fn other_lengths(group: &ProcessGroup) -> Result<()> {
    let lengths: &[usize] = if group.rank() == 0 { &[16, 4096] } else { &[4096, 16] };
    let segments = bucket(group, lengths, 1.0)?;
    let others: Vec<_> = (0..64).map(|_| filled(group, 16, 1.0)).collect::<Result<_>>()?;
    group.launch_bucket(&segments, ReduceOp::Sum)?;
    let error = group.finish_buckets().err().context("other lengths were accepted")?;
    ensure!(error.to_string().contains("with pieces of other lengths"), "{error}");
    ensure!(others.iter().all(|other| other.iter().all(|&element| element == 1.0)));
    Ok(())
}

fn aborted(world: &ProcessGroup) -> Result<()> {
    let cause = "the loss is not finite";
    given_up(world, Some(cause), &format!("rank 1 aborted the group: {cause}"))
}

fn left(world: &ProcessGroup) -> Result<()> {
    given_up(world, None, "has left the group")
}

/// Rank 1 gives its bucket up when both have launched theirs, saying why or not, and rank 0 learns
/// of it late.
fn given_up(world: &ProcessGroup, cause: Option<&str>, named: &str) -> Result<()> {
    let group = world.duplicate()?;
    // So many pieces that the table of their places is several pages.
    let mut lengths = vec![1; 5000];
    lengths.push(1 << 20);
    let others = filled(world, 1 << 22, 1.0)?;
    let segments = bucket(&group, &lengths, 1.0)?;
    world.barrier()?;
    ensure!(group.launch_bucket(&segments, ReduceOp::Sum)?);
    world.barrier()?;
    if group.rank() == 1 {
        cause.inspect(|cause| group.abort(cause));
        drop(segments);
        drop(group);
        world.barrier()?;
    } else {
        world.barrier()?;
        let deadline = Instant::now() + Duration::from_secs(20);
        let error = loop {
            match group.progress() {
                Err(error) => break error,
                Ok(()) => ensure!(Instant::now() < deadline, "the group goes on without rank 1"),
            }
        };
        ensure!(error.to_string().contains(named), "{error}");
        let records = group.flight_recorder();
        let launched = records.iter().find(|record| record.bucket == Some(0));
        ensure!(launched.is_some_and(|bucket| bucket.has_failed), "{records:?}");
        ensure!(others.iter().all(|&element| element == 1.0), "other memory was overwritten");
    }
    world.barrier()?;
    Ok(())
}

/// A gradient in shared memory. Its bucket drops it when it is reduced: that sends the result.
struct Gradient(SharedBuffer<f32>, Sender<Vec<f32>>);

impl AsMut<[u8]> for Gradient {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl Drop for Gradient {
    fn drop(&mut self) {
        let _ = self.1.send(self.0.to_vec());
    }
}

/// Element `index` of a rank's gradients: small integers, so that sums are exact.
fn element(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 97) as f32
}

/// The sum of three ranks' gradients of this length.
fn sums(length: usize) -> Vec<f32> {
    (0..length).map(|index| (0..3).map(|rank| element(rank, index)).sum()).collect()
}

/// A bucket of gradients, whose results come from the receiver.
fn gradients(
    group: &ProcessGroup,
    number: u32,
    lengths: &[usize],
) -> Result<(Arc<Segments>, Receiver<Vec<f32>>)> {
    let (sender, results) = channel();
    let segments = group.segments(number, DType::F32, lengths.to_vec())?;
    for (index, &length) in lengths.iter().enumerate() {
        let mut gradient = group.alloc_shared(length)?;
        let own: Vec<f32> = (0..length).map(|index| element(group.rank(), index)).collect();
        gradient.copy_from_slice(&own);
        ensure!(segments.set_piece(index, Gradient(gradient, sender.clone())));
    }
    Ok((Arc::new(segments), results))
}

fn several(group: &ProcessGroup) -> Result<()> {
    const LENGTHS: [usize; 3] = [5_000, 0, 70_001];
    for _step in 0..20 {
        let buckets: Vec<_> =
            (0..3).map(|number| gradients(group, number, &LENGTHS)).collect::<Result<_>>()?;
        for (segments, _) in &buckets {
            ensure!(group.launch_bucket(segments, ReduceOp::Sum)?);
            group.progress()?;
        }
        for (segments, results) in buckets {
            segments.wait(group)?;
            for length in LENGTHS {
                ensure!(results.recv()? == sums(length), "{length} elements");
            }
        }
    }
    Ok(())
}

/// A hook may start a collective of its own before it launches its bucket.
fn in_turn(group: &ProcessGroup) -> Result<()> {
    for _step in 0..100 {
        let started = beside::all_reduce(group, vec![1_i64], ReduceOp::Sum)?;
        let (segments, results) = gradients(group, 0, &[100])?;
        ensure!(group.launch_bucket(&segments, ReduceOp::Sum)?);
        let after = beside::all_reduce(group, vec![2_i64], ReduceOp::Sum)?;
        ensure!((started.wait()?, after.wait()?) == (vec![3], vec![6]));
        segments.wait(group)?;
        ensure!(results.recv()? == sums(100));
    }
    Ok(())
}
