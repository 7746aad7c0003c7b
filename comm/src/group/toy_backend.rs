//! A second back-end, for tests: the ranks, threads of one process, copy everything to a table that
//! they share. It is all that a process group needs, but buckets.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flow_kernels::{DType, ReduceOp};

use super::cuda::Cuda;
use super::parts::{NewGroup, Parts};
use super::{Mesh, ProcessGroup};
use crate::backend::{BufferView, Buffers, HostBackend};
use crate::collectives::segments::Segments;
use crate::descriptor::OpDescriptor;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::kind::Kind;
use crate::world::World;

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
}

impl Toy {
    fn new(failure: Arc<Failure>, tables: Arc<Mutex<HashMap<String, Arc<Table>>>>) -> Self {
        let table =
            Arc::clone(tables.lock().unwrap().entry(failure.core.name.clone()).or_default());
        Self { failure, tables, table, round: AtomicU64::new(0) }
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

    /// What all ranks contribute to a round.
    fn exchange(&self, own: Contribution) -> Result<Vec<Contribution>> {
        let (core, operation) = (&self.failure.core, own.operation);
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        let table = || self.table.contributions.lock().unwrap();
        table().insert((round, core.rank), own);
        let missing = || core.ranks_where(|rank| !table().contains_key(&(round, rank)));
        self.wait(&operation, &missing, || missing().is_empty())?;
        let all: Vec<_> = (0..core.size()).map(|rank| table()[&(round, rank)].clone()).collect();
        match all.iter().find(|other| !other.operation.agrees(&operation)) {
            Some(other) => {
                let detail = format!("{operation} here, {} there", other.operation);
                Err(self.failure.fail(Error::Mismatch { rank: core.world.rank, detail }))
            }
            None => Ok(all),
        }
    }
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
    fn collective(&self, mut operation: OpDescriptor, buffers: Buffers) -> Result<()> {
        let core = &self.failure.core;
        let (sequence, queued) = core.recorder.begin_collective();
        operation.sequence = sequence;
        self.failure.check_poison(&operation)?;
        core.recorder.begin(&operation.record(queued));
        let in_place = matches!(operation.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast);
        if operation.kind == Kind::AllToAllV {
            operation.count = 0; // each rank has its own
        }
        let data = read(if in_place { buffers.output } else { buffers.input });
        let counts = buffers.input_counts.to_vec();
        let all = self.exchange(Contribution { operation, data, counts })?;

        let (rank, size, root) = (core.rank, core.size(), operation.root as usize);
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

    fn send(&self, data: BufferView, _: DType, to: usize, tag: u32) -> Result<()> {
        self.failure.check_poison(&"send")?;
        let sender = self.failure.core.rank;
        let message = Message { sender, receiver: to, tag, data: read(data) };
        self.table.messages.lock().unwrap().push(message);
        Ok(())
    }

    fn recv(&self, data: BufferView, _: DType, from: Option<usize>, tag: u32) -> Result<usize> {
        let core = &self.failure.core;
        self.failure.check_poison(&"recv")?;
        let mut found = None;
        let missing = || from.map_or_else(|| core.ranks_where(|r| r != core.rank), |r| vec![r]);
        self.wait(&"recv", &missing, || {
            let mut messages = self.table.messages.lock().unwrap();
            let is_wanted = |message: &Message| {
                from.is_none_or(|from| message.sender == from)
                    && (message.receiver, message.tag) == (core.rank, tag)
            };
            let index = messages.iter().position(is_wanted);
            found = index.map(|index| messages.remove(index));
            found.is_some()
        })?;
        let message = found.expect("the wait is over because of it");
        data.write(0, message.data.as_ptr(), message.data.len());
        Ok(message.sender)
    }

    fn launch_bucket(&self, _: &Arc<Segments>, _: ReduceOp) -> Result<bool> {
        Err(self.failure.core.caller().argument("launch_bucket", "a toy has no buckets".into()))
    }

    fn progress_buckets(&self) -> Result<()> {
        Ok(())
    }

    fn finish_buckets(&self) -> Result<()> {
        Ok(())
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
            let failure = group.failure();
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
