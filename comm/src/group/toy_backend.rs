//! A second back-end, for tests: the ranks, threads of one process, copy everything to a table that
//! they share. It shows what a back-end needs. It has every operation, but all reductions are sums
//! of i64, whatever type and operation they are called with.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flow_kernels::{DType, ReduceOp};

use super::cuda::Cuda;
use super::parts::{NewGroup, Parts};
use super::{Mesh, ProcessGroup};
use crate::backend::{BucketLaunch, BufferView, Buffers, HostBackend, LaunchedBucket};
use crate::buffer::{Buffer, SharedBuffer};
use crate::descriptor::{MessageDescriptor, OpDescriptor};
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::kind::Kind;
use crate::shm::segments::Segments;
use crate::world::World;

const NAME: &str = "toy";
/// How many buckets may be under way.
const MAX_BUCKETS: usize = 2;

/// What the ranks of one group share.
#[derive(Default)]
struct Table {
    /// By round and rank.
    contributions: Mutex<HashMap<(u64, usize), Contribution>>,
    /// The oldest first.
    messages: Mutex<Vec<Message>>,
}

struct Message {
    sender: usize,
    receiver: usize,
    tag: u32,
    data: Vec<u8>,
}

#[derive(Clone)]
struct Contribution {
    operation: OpDescriptor,
    data: Vec<u8>,
    counts: Vec<usize>,
}

struct Toy {
    failure: Arc<Failure>,
    /// By the names of the groups.
    tables: Arc<Mutex<HashMap<String, Arc<Table>>>>,
    table: Arc<Table>,
    round: AtomicU64,
    /// The launched buckets and their rounds, the oldest first.
    buckets: Mutex<VecDeque<(u64, LaunchedBucket)>>,
}

impl Toy {
    fn new(failure: Arc<Failure>, tables: Arc<Mutex<HashMap<String, Arc<Table>>>>) -> Self {
        let table =
            Arc::clone(tables.lock().unwrap().entry(failure.core.name.clone()).or_default());
        let (round, buckets) = (AtomicU64::new(0), Mutex::default());
        Self { failure, tables, table, round, buckets }
    }

    /// Waits until `is_over`, for these ranks.
    fn wait(
        &self,
        operation: &dyn std::fmt::Display,
        missing: &dyn Fn() -> Vec<usize>,
        mut is_over: impl FnMut() -> bool,
    ) -> Result<()> {
        let lost = || self.failure.find_lost_peer(missing);
        self.failure.wait_until(operation, missing, &lost, &mut |time| {
            std::thread::sleep(time.min(Duration::from_millis(1)));
            Ok(is_over())
        })
    }

    /// Puts what this rank contributes to the next round on the table.
    fn contribute(&self, own: Contribution) -> u64 {
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        self.table.contributions.lock().unwrap().insert((round, self.failure.core.rank), own);
        round
    }

    /// The ranks that have not yet contributed to a round.
    fn missing(&self, round: u64) -> Vec<usize> {
        let contributions = self.table.contributions.lock().unwrap();
        self.failure.core.ranks_where(|rank| !contributions.contains_key(&(round, rank)))
    }

    /// What all ranks contribute to a round, once they have.
    fn contributions(&self, round: u64, operation: &OpDescriptor) -> Result<Vec<Contribution>> {
        let (core, missing) = (&self.failure.core, || self.missing(round));
        self.wait(operation, &missing, || missing().is_empty())?;
        let table = self.table.contributions.lock().unwrap();
        let all: Vec<_> = (0..core.size()).map(|rank| table[&(round, rank)].clone()).collect();
        drop(table);
        match all.iter().find(|other| !other.operation.agrees(operation)) {
            Some(other) => {
                Err(self.mismatch(format!("{operation} here, {} there", other.operation)))
            }
            None => Ok(all),
        }
    }

    fn mismatch(&self, detail: String) -> Error {
        self.failure.fail(Error::Mismatch { rank: self.failure.core.world.rank, detail })
    }

    /// Reduces the launched buckets in their order, those that all ranks have launched, or all.
    fn reduce_buckets(&self, wait: bool) -> Result<()> {
        let mut buckets = self.buckets.lock().unwrap();
        while let Some((round, bucket)) = buckets.front() {
            if !wait && !self.missing(*round).is_empty() {
                return self.failure.check_poison(&bucket.operation);
            }
            let result = sum(&self.contributions(*round, &bucket.operation)?);
            let mut result = &result[..];
            for piece in pieces(&bucket.segments) {
                let (own, rest) = result.split_at(piece.bytes);
                piece.write(0, own.as_ptr(), own.len());
                result = rest;
            }
            bucket.finish();
            buckets.pop_front();
        }
        Ok(())
    }
}

/// A rank's pieces of a bucket.
fn pieces(segments: &Segments) -> impl Iterator<Item = BufferView> + '_ {
    let pieces = segments.pieces().into_iter().zip(&segments.lengths);
    pieces.map(|(data, &length)| BufferView { data, bytes: length * segments.dtype.size() })
}

fn read(view: BufferView) -> Vec<u8> {
    if view.bytes == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's memory, for the length of its call.
    unsafe { std::slice::from_raw_parts(view.data, view.bytes) }.to_vec()
}

/// The sums of all ranks' numbers.
fn sum(all: &[Contribution]) -> Vec<u8> {
    let number = |bytes: &[u8]| i64::from_ne_bytes(bytes.try_into().unwrap());
    let element = |index: usize| -> i64 {
        all.iter().map(|other| number(&other.data[index * 8..][..8])).sum()
    };
    (0..all[0].data.len() / 8).flat_map(|index| element(index).to_ne_bytes()).collect()
}

impl HostBackend for Toy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn collective(&self, mut operation: OpDescriptor, buffers: Buffers) -> Result<()> {
        let core = &self.failure.core;
        let in_place = matches!(operation.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast);
        if operation.kind == Kind::AllToAllV {
            operation.count = 0; // each rank has its own
        }
        let data = read(if in_place { buffers.output } else { buffers.input });
        let counts = buffers.input_counts.to_vec();
        let round = self.contribute(Contribution { operation, data, counts });
        let all = self.contributions(round, &operation)?;

        let (rank, size, root) = (core.rank, core.size(), operation.root as usize);
        if operation.kind == Kind::AllToAllV {
            let sent: Vec<usize> = all.iter().map(|other| other.counts[rank]).collect();
            if sent != buffers.output_counts {
                let expected = buffers.output_counts;
                return Err(self.mismatch(format!("{sent:?} elements come, not {expected:?}")));
            }
        }
        let concat = || all.iter().flat_map(|other| other.data.clone()).collect();
        // This rank's block of data that has one for each rank.
        let block = |data: &[u8], counts: &[usize]| match counts {
            [] => data[rank * data.len() / size..(rank + 1) * data.len() / size].to_vec(),
            counts => {
                let element = operation.dtype.size();
                let start: usize = counts[..rank].iter().sum();
                data[start * element..][..counts[rank] * element].to_vec()
            }
        };
        let result: Vec<u8> = match operation.kind {
            Kind::AllReduce => sum(&all),
            Kind::Reduce if rank == root => sum(&all),
            Kind::Broadcast => all[root].data.clone(),
            Kind::AllGather | Kind::AllGatherV | Kind::NewGroup => concat(),
            Kind::Gather if rank == root => concat(),
            Kind::Scatter => block(&all[root].data, &[]),
            Kind::ReduceScatter | Kind::ReduceScatterV => block(&sum(&all), buffers.input_counts),
            Kind::AllToAll | Kind::AllToAllV => {
                all.iter().flat_map(|other| block(&other.data, &other.counts)).collect()
            }
            _ => return Ok(()),
        };
        if !result.is_empty() {
            buffers.output.write(0, result.as_ptr(), result.len());
        }
        Ok(())
    }

    fn read_peers(
        &self,
        operation: OpDescriptor,
        data: BufferView,
        _lengths: &[usize],
        reader: &mut dyn FnMut(&[*const u8]),
    ) -> Result<bool> {
        let contribution = Contribution { operation, data: read(data), counts: Vec::new() };
        let round = self.contribute(contribution);
        let all = self.contributions(round, &operation)?;
        reader(&all.iter().map(|other| other.data.as_ptr()).collect::<Vec<_>>());
        Ok(true)
    }

    fn send(&self, data: BufferView, what: &MessageDescriptor, to: usize) -> Result<()> {
        let sender = self.failure.core.rank;
        let message = Message { sender, receiver: to, tag: what.tag, data: read(data) };
        self.table.messages.lock().unwrap().push(message);
        Ok(())
    }

    fn recv(
        &self,
        data: BufferView,
        what: &MessageDescriptor,
        from: Option<usize>,
    ) -> Result<usize> {
        let core = &self.failure.core;
        let mut found = None;
        let missing = || from.map_or_else(|| core.ranks_where(|r| r != core.rank), |r| vec![r]);
        self.wait(what, &missing, || {
            let mut messages = self.table.messages.lock().unwrap();
            let is_wanted = |message: &Message| {
                from.is_none_or(|from| message.sender == from)
                    && (message.receiver, message.tag) == (core.rank, what.tag)
            };
            let index = messages.iter().position(is_wanted);
            found = index.map(|index| messages.remove(index));
            found.is_some()
        })?;
        let message = found.expect("the wait is over because of it");
        data.write(0, message.data.as_ptr(), message.data.len());
        Ok(message.sender)
    }

    fn launch_bucket(&self, launch: BucketLaunch) -> Result<bool> {
        let mut buckets = self.buckets.lock().unwrap();
        if buckets.len() == MAX_BUCKETS {
            return Ok(false);
        }
        let bucket = launch.begin();
        let data = pieces(&bucket.segments).flat_map(read).collect();
        let (operation, counts) = (bucket.operation, Vec::new());
        buckets.push_back((self.contribute(Contribution { operation, data, counts }), bucket));
        Ok(true)
    }

    fn progress_buckets(&self) -> Result<()> {
        self.reduce_buckets(false)
    }

    fn finish_buckets(&self) -> Result<()> {
        self.reduce_buckets(true)
    }

    fn new_group(&self, failure: Arc<Failure>, _: &str) -> Result<Arc<dyn HostBackend>> {
        Ok(Arc::new(Toy::new(failure, Arc::clone(&self.tables))))
    }
}

/// Runs each rank of a group on the toy on a thread of its own.
fn ranks(size: usize, run: impl Fn(ProcessGroup) + Sync) {
    let (tables, run) = (Arc::default(), &run);
    std::thread::scope(|scope| {
        for world in World::in_process(size).unwrap() {
            let group = NewGroup::of_world(Arc::new(world), Duration::from_secs(60));
            let failure = group.failure(NAME);
            let core = Arc::clone(&failure.core);
            let backend = Arc::new(Toy::new(Arc::clone(&failure), Arc::clone(&tables)));
            let rank = core.rank;
            let group = ProcessGroup::of(Parts { core, failure, backend }, rank, Cuda::default());
            scope.spawn(move || run(group));
        }
    });
}

#[test]
fn a_group_runs_on_another_back_end() {
    for size in 1..=4 {
        ranks(size, |group| {
            let (rank, n) = (group.rank() as i64, size as i64);
            let own = [10 * rank, 10 * rank + 1];
            let mut data = own;
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            let triangle = n * (n - 1) / 2;
            assert_eq!(data, [10 * triangle, 10 * triangle + n]);
            group.broadcast(&mut data, size - 1).unwrap();
            let mut all = vec![0; 2 * size];
            group.all_gather(&own, &mut all).unwrap();
            assert_eq!(all, (0..n).flat_map(|r| [10 * r, 10 * r + 1]).collect::<Vec<_>>());
            let input: Vec<i64> = (0..n).map(|to| 100 * rank + to).collect();
            let mut exchanged = vec![0; size];
            group.all_to_all(&input, &mut exchanged).unwrap();
            assert_eq!(exchanged, (0..n).map(|from| 100 * from + rank).collect::<Vec<_>>());
            let mut block = [0];
            group.reduce_scatter(&input, &mut block, ReduceOp::Sum).unwrap();
            assert_eq!(block, [100 * triangle + n * rank]);
            group.scatter((rank == 0).then_some(&input), &mut block, 0).unwrap();
            assert_eq!(block, [rank]);
            let counts: Vec<usize> = (0..size).collect();
            let mut uneven = vec![0; size * (size - 1) / 2];
            group.all_gather_v(&vec![rank; group.rank()], &mut uneven, &counts).unwrap();
            assert_eq!(uneven, (0..n).flat_map(|r| vec![r; r as usize]).collect::<Vec<_>>());
            group.all_reduce_async(vec![1_i64], ReduceOp::Sum).unwrap().wait().unwrap();
            group.barrier().unwrap();
        });
    }
}

#[test]
fn another_back_end_compares_the_counts_of_all_to_all_v() {
    ranks(2, |group| {
        // Each rank sends 1 element to each; rank 0 expects 2 of rank 1.
        let expected = [1, 2 - group.rank()];
        let mut output = vec![0_i64; expected.iter().sum()];
        let result = group.all_to_all_v(&[1_i64, 2], &[1, 1], &mut output, &expected);
        if group.rank() == 0 {
            assert!(matches!(result, Err(Error::Mismatch { rank: 0, .. })), "{result:?}");
        }
    });
}

#[test]
fn another_back_end_has_sub_groups_messages_and_failures() {
    ranks(4, |group| {
        let rank = group.rank();
        let mesh = Mesh::new(&group, &[3, 2, 1, 0], &[2, 2]).unwrap();
        let mut sum = [rank as i64];
        mesh.group(0).unwrap().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [[2, 4, 2, 4][rank]]);
        let mut received = [0_i64];
        group.send_with_tag(&[rank as i64], (rank + 1) % 4, 7).unwrap();
        assert_eq!(group.recv_any(&mut received, 7).unwrap(), (rank + 3) % 4);
        assert_eq!(received, [((rank + 3) % 4) as i64]);
        group.barrier().unwrap();
        if rank == 2 {
            return;
        }
        let error = group.barrier().unwrap_err();
        assert!(
            matches!(&error, Error::PeerLost { peer, .. } if peer.contains("rank 2 ")),
            "{error}"
        );
    });
}

/// A piece of a bucket, which tells when it is over.
struct Piece(SharedBuffer<i64>, Sender<Vec<i64>>);

impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let _ = self.1.send(self.0.to_vec());
    }
}

#[test]
fn another_back_end_has_buckets() {
    ranks(3, |group| {
        let rank = group.rank() as i64;
        let bucket = |number: u32, lengths: &[usize], results: &Sender<Vec<i64>>| {
            let segments = group.segments(number, DType::I64, lengths.to_vec()).unwrap();
            for (index, &length) in lengths.iter().enumerate() {
                let mut piece = group.alloc_shared(length).unwrap();
                piece.fill(100 * i64::from(number) + 10 * index as i64 + rank);
                assert!(segments.set_piece(index, Piece(piece, results.clone())));
            }
            Arc::new(segments)
        };
        let (sender, results) = channel();
        let first = bucket(1, &[5, 0, 2], &sender);
        assert!(group.launch_bucket(&first, ReduceOp::Sum).unwrap());
        let again = group.launch_bucket(&first, ReduceOp::Sum).unwrap_err();
        assert!(again.to_string().contains("is being reduced already"), "{again}");
        let other = Piece(group.alloc_shared(5).unwrap(), channel().0);
        assert!(!first.set_piece(0, other), "it is under way all the same");
        let second = bucket(2, &[1], &sender);
        assert!(group.launch_bucket(&second, ReduceOp::Sum).unwrap());
        let third = bucket(3, &[1], &sender);
        assert!(!group.launch_bucket(&third, ReduceOp::Sum).unwrap(), "two are under way");
        group.progress().unwrap();
        group.wait_bucket(&second).unwrap();
        assert!(group.launch_bucket(&third, ReduceOp::Sum).unwrap());
        // A collective comes after them.
        let mut sum = [1_i64];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3]);
        assert!(third.finished().is_some());
        let reduced: Vec<_> = results.try_iter().collect();
        assert_eq!(reduced, [vec![303; 5], vec![], vec![363; 2], vec![603], vec![903]]);
        assert!(group.launch_bucket(&first, ReduceOp::Sum).is_err(), "its pieces are gone");

        let records = group.flight_recorder();
        let recorded: Vec<_> =
            records.iter().map(|r| (r.sequence, r.operation, r.bucket)).collect();
        let bucket = |number| (u64::from(number) - 1, "all_reduce", Some(number));
        assert_eq!(recorded, [bucket(1), bucket(2), bucket(3), (3, "all_reduce", None)]);
        assert!(records.iter().all(|record| record.backend == "toy" && record.done.is_some()));
        assert_eq!(group.sequence(), 4);
    });
}
