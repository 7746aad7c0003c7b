//! Groups whose ranks are threads of one process: all that a group offers, without starting
//! processes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::time::Duration;

use flow_comm::{
    Axis, Buffer, DType, Error, Mesh, P2pOp, ProcessGroup, ReduceOp, Segments, SharedBuffer,
};

/// Longer than any wait that is to succeed, on a loaded machine too.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Elements of data that goes through the payload, one chunk, and several chunks.
const COUNTS: [usize; 5] = [0, 1, 600, 20_000, 150_001];

/// Runs each rank on a thread of its own.
fn ranks<T: Send>(size: usize, run: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(size).unwrap();
    let run = &run;
    std::thread::scope(|scope| {
        let start = |group: ProcessGroup| {
            group.set_timeout(TIMEOUT);
            scope.spawn(move || run(group))
        };
        let threads: Vec<_> = groups.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Element `index` of a rank's data: small integers, so that sums are exact.
fn value(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 97) as f32
}

fn data(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(rank, index)).collect()
}

fn sum(ranks: usize, index: usize) -> f32 {
    (0..ranks).map(|rank| value(rank, index)).sum()
}

/// The memory that a rank passes to collectives.
fn buffer(group: &ProcessGroup, shared: bool, content: Vec<f32>) -> Box<dyn Slice> {
    if !shared {
        return Box::new(content);
    }
    let mut buffer = group.alloc_shared(content.len()).unwrap();
    buffer.copy_from_slice(&content);
    Box::new(buffer)
}

/// Ordinary or shared memory of numbers.
trait Slice: Buffer + AsMut<[f32]> {}
impl<B: Buffer + AsMut<[f32]>> Slice for B {}

/// Which ranks have their data in shared memory.
const PLACES: [fn(usize) -> bool; 3] = [|_| false, |_| true, |rank| rank % 2 == 0];

#[test]
fn collectives_are_right() {
    for size in 1..=4 {
        ranks(size, |group| {
            for (count, place) in COUNTS.into_iter().flat_map(|n| PLACES.map(|place| (n, place))) {
                let shared = place(group.rank());
                reductions(&group, count, shared);
                moves(&group, count, shared);
                uneven(&group, count, shared);
            }
            group.barrier().unwrap();
        });
    }
}

fn reductions(group: &ProcessGroup, count: usize, shared: bool) {
    let (rank, size) = (group.rank(), group.world_size());
    let expected: Vec<f32> = (0..count).map(|index| sum(size, index)).collect();

    let mut all = buffer(group, shared, data(rank, count));
    group.all_reduce(&mut *all, ReduceOp::Sum).unwrap();
    assert_eq!((*all).as_mut(), expected);

    let root = size - 1;
    let mut rooted = buffer(group, shared, data(rank, count));
    group.reduce(&mut *rooted, ReduceOp::Sum, root).unwrap();
    assert_eq!((*rooted).as_mut(), if rank == root { expected } else { data(rank, count) });

    let input = buffer(group, shared, data(rank, size * count));
    let mut block = vec![0.0; count];
    group.reduce_scatter(&*input, &mut block, ReduceOp::Sum).unwrap();
    assert!((0..count).all(|index| block[index] == sum(size, rank * count + index)));
}

fn moves(group: &ProcessGroup, count: usize, shared: bool) {
    let (rank, size) = (group.rank(), group.world_size());
    let root = size / 2;
    let mut content = buffer(group, shared, data(rank, count));
    group.broadcast(&mut *content, root).unwrap();
    assert_eq!((*content).as_mut(), data(root, count));

    let own = buffer(group, shared, data(rank, count));
    let everything: Vec<f32> = (0..size).flat_map(|rank| data(rank, count)).collect();
    let mut all = vec![0.0; size * count];
    group.all_gather(&*own, &mut all).unwrap();
    assert_eq!(all, everything);

    let mut gathered = (rank == root).then(|| vec![0.0; size * count]);
    group.gather(&*own, gathered.as_mut(), root).unwrap();
    assert_eq!(gathered, (rank == root).then_some(everything));

    let input = (rank == root).then(|| data(root, size * count));
    let mut block = buffer(group, shared, vec![0.0; count]);
    group.scatter(input.as_ref(), &mut *block, root).unwrap();
    assert_eq!((*block).as_mut(), &data(root, size * count)[rank * count..][..count]);

    let input = buffer(group, shared, data(rank, size * count));
    let mut exchanged = vec![0.0; size * count];
    group.all_to_all(&*input, &mut exchanged).unwrap();
    let blocks =
        (0..size).flat_map(|other| data(other, size * count)[rank * count..][..count].to_vec());
    assert_eq!(exchanged, blocks.collect::<Vec<_>>());
}

/// Rank r contributes r times as much: the first has nothing.
fn uneven(group: &ProcessGroup, count: usize, shared: bool) {
    let (rank, size) = (group.rank(), group.world_size());
    let counts: Vec<usize> = (0..size).map(|rank| rank * count).collect();
    let total = counts.iter().sum();
    let own = buffer(group, shared, data(rank, counts[rank]));
    let mut all = vec![0.0; total];
    group.all_gather_v(&*own, &mut all, &counts).unwrap();
    assert_eq!(all, (0..size).flat_map(|r| data(r, counts[r])).collect::<Vec<_>>());

    let input = buffer(group, shared, data(rank, total));
    let mut block = vec![0.0; counts[rank]];
    group.reduce_scatter_v(&*input, &mut block, &counts, ReduceOp::Sum).unwrap();
    let start: usize = counts[..rank].iter().sum();
    assert!(block.iter().enumerate().all(|(i, &x)| x == sum(size, start + i)));

    let received = vec![rank * count; size];
    let mut exchanged = vec![0.0; received.iter().sum()];
    group.all_to_all_v(&*input, &counts, &mut exchanged, &received).unwrap();
    let block = |other| data(other, total)[start..][..counts[rank]].to_vec();
    assert_eq!(exchanged, (0..size).flat_map(block).collect::<Vec<_>>());
}

#[test]
fn messages_find_their_receivers() {
    ranks(3, |group| {
        let (rank, size) = (group.rank(), group.world_size());
        for count in COUNTS {
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            let mut own = data(rank, count);
            let mut received = vec![0.0; count];
            let send = P2pOp::Send { data: &mut own, to: next };
            let recv = P2pOp::Recv { buffer: &mut received, from: previous };
            group.batch_send_recv(&mut [send, recv]).unwrap();
            assert_eq!(received, data(previous, count));
        }
        // In another order than they were sent, and from anybody.
        if rank == 0 {
            let mut received = [0_i64];
            for other in 1..size {
                group.recv_with_tag(&mut received, other, 2).unwrap();
                assert_eq!(received, [10 * other as i64 + 2]);
            }
            let mut senders: Vec<usize> =
                (1..size).map(|_| group.recv_any(&mut received, 1).unwrap()).collect();
            senders.sort_unstable();
            assert_eq!(senders, [1, 2]);
        } else {
            for tag in [1, 2] {
                group.send_with_tag(&[10 * rank as i64 + i64::from(tag)], 0, tag).unwrap();
            }
        }
    });
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

/// Places gradients of these lengths in a new bucket. Their results come from the receiver.
fn bucket(
    group: &ProcessGroup,
    number: u32,
    lengths: &[usize],
) -> (Arc<Segments>, Receiver<Vec<f32>>) {
    let (sender, results) = channel();
    let segments = group.segments(number, DType::F32, lengths.to_vec()).unwrap();
    for (index, &length) in lengths.iter().enumerate() {
        let mut gradient = group.alloc_shared(length).unwrap();
        gradient.copy_from_slice(&data(group.rank(), length));
        assert!(segments.set_piece(index, Gradient(gradient, sender.clone())));
    }
    (Arc::new(segments), results)
}

#[test]
fn buckets_are_reduced_beside_other_work() {
    const LENGTHS: [usize; 3] = [5_000, 0, 70_001];
    ranks(3, |group| {
        for _step in 0..20 {
            let buckets: Vec<_> = (0..3).map(|n| bucket(&group, n, &LENGTHS)).collect();
            for (segments, _) in &buckets {
                assert!(group.launch_bucket(segments, ReduceOp::Sum).unwrap());
                group.progress().unwrap();
            }
            for (segments, results) in buckets {
                group.wait_bucket(&segments).unwrap();
                for length in LENGTHS {
                    let expected: Vec<f32> = (0..length).map(|index| sum(3, index)).collect();
                    assert_eq!(results.recv().unwrap(), expected);
                }
            }
        }
    });
}

/// A hook may start a collective of its own before it launches its bucket.
#[test]
fn buckets_come_after_the_collectives_that_were_started_before() {
    ranks(3, |group| {
        for _step in 0..100 {
            let started = group.all_reduce_async(vec![1_i64], ReduceOp::Sum).unwrap();
            let (segments, results) = bucket(&group, 0, &[100]);
            assert!(group.launch_bucket(&segments, ReduceOp::Sum).unwrap());
            let after = group.all_reduce_async(vec![2_i64], ReduceOp::Sum).unwrap();
            assert_eq!((started.wait().unwrap(), after.wait().unwrap()), (vec![3], vec![6]));
            assert_eq!(results.recv().unwrap()[1], sum(3, 1));
        }
    });
}

#[test]
fn groups_and_meshes() {
    ranks(8, |world| {
        let rank = world.rank();
        let sub_group = world.new_group(&[4, 2, 7]).unwrap();
        assert_eq!(sub_group.is_some(), [2, 4, 7].contains(&rank));
        if let Some(group) = sub_group {
            assert_eq!(group.ranks(), [4, 2, 7]);
            let mut content = [rank as i64];
            group.broadcast(&mut content, 0).unwrap();
            assert_eq!(content, [4]);
        }
        let parity = world.split(Some(rank % 2), -(rank as i64)).unwrap().unwrap();
        assert_eq!(parity.ranks(), [[6, 4, 2, 0], [7, 5, 3, 1]][rank % 2]);

        let mesh = Mesh::new(&world, &[0, 1, 2, 3, 4, 5, 6, 7], &[2, 2, 2]).unwrap();
        let mesh = mesh.with_names(&["data", "pipeline", "tensor"]).unwrap();
        for (axis, stride) in [("data", 4), ("pipeline", 2), ("tensor", 1)] {
            let group = mesh.group(axis).unwrap();
            let first = rank - rank / stride % 2 * stride;
            assert_eq!(group.ranks(), [first, first + stride]);
            let mut sum = [rank as i64];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [(2 * first + stride) as i64]);
        }
        let plane = mesh.sub_mesh(&[Axis::Name("tensor"), Axis::Name("data")]).unwrap();
        assert_eq!((plane.shape(), plane.ranks()[0]), (&[2, 2][..], rank & 2));

        let pair = world.new_group_of(&[rank ^ 1, rank], &format!("pair {}", rank / 2));
        let order = if rank % 2 == 0 { [1, 0] } else { [0, 1] };
        // The members of a pair give different lists.
        assert!(matches!(pair, Err(Error::Mismatch { .. })), "{order:?}: {pair:?}");
        let pair = [rank & !1, rank | 1];
        let pair = world.new_group_of(&pair, &format!("ordered pair {}", rank / 2)).unwrap();
        let twin = pair.duplicate().unwrap();
        let mut counts = [[1_i64], [1]];
        pair.all_reduce(&mut counts[0], ReduceOp::Sum).unwrap();
        twin.all_reduce(&mut counts[1], ReduceOp::Sum).unwrap();
        assert_eq!(counts, [[2], [2]]);
    });
}

#[test]
fn ranks_that_disagree_get_an_error() {
    let errors = ranks(3, |group| {
        let mut data = vec![0_f32; if group.rank() == 1 { 20 } else { 10 }];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("all_reduce #0 (10 x f32, sum)"), "{error}");
        assert!(error.contains("all_reduce #0 (20 x f32, sum)"), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let outcomes = ranks(3, |group| {
        group.set_timeout(Duration::from_millis(300));
        let error = (group.rank() != 2).then(|| group.barrier().unwrap_err());
        (group, error)
    });
    // The first of the two to find out has the timeout as its error; the other gets it as the cause.
    let errors = outcomes.iter().filter_map(|(_, error)| error.as_ref());
    assert!(errors.clone().any(|error| matches!(error, Error::Timeout { .. })));
    for error in errors.map(Error::to_string) {
        assert!(error.contains("timed out") && error.contains("waited for rank 2"), "{error}");
    }
    for (group, _) in &outcomes {
        assert!(matches!(group.barrier(), Err(Error::Poisoned { .. })));
    }
}

#[test]
fn a_rank_that_leaves_is_an_error_for_the_others() {
    // By dropping its handle, by a panic, by aborting the group.
    let left = |error: &Error| match error {
        Error::PeerLost { peer, .. } => assert!(peer.contains("rank 1 "), "{peer}"),
        other => panic!("{other}"),
    };
    let wait = |group: &ProcessGroup| match group.rank() {
        0 => group.recv(&mut [0_i64], 1).unwrap_err(),
        _ => group.barrier().unwrap_err(),
    };
    ranks(3, |group| match group.rank() {
        1 => drop(group),
        _ => left(&wait(&group)),
    });
    ranks(3, |group| match group.rank() {
        1 => {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _member = group;
                panic!("on purpose");
            }));
            assert!(panicked.is_err());
        }
        _ => left(&wait(&group)),
    });
    ranks(3, |group| match group.rank() {
        1 => group.abort("on purpose"),
        _ => {
            let error = group.barrier().unwrap_err().to_string();
            assert!(error.contains("rank 1 aborted the group: on purpose"), "{error}");
        }
    });
}

/// Ranks of several jobs of a process do not mix.
#[test]
fn jobs_are_apart() {
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for job in 0..3_i64 {
            let total = &total;
            scope.spawn(move || {
                ranks(2, |group| {
                    let mut sum = [job];
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert_eq!(sum, [2 * job]);
                    total.fetch_add(1, Ordering::Relaxed);
                });
            });
        }
    });
    assert_eq!(total.into_inner(), 6);
    assert!(ProcessGroup::in_process(0).is_err());
}
