//! Groups of threads, for Miri: it finds memory that two ranks use without an order between them, and
//! has an atomic load return any value that a processor with a weak memory model may.
//!
//! `scripts/memory-order` runs these tests there. Elsewhere they are quick, and find little.

use std::sync::Arc;
use std::time::Duration;

use flow_kernels::{DType, ReduceOp};

use super::cuda::Cuda;
use super::parts::{NewGroup, Parts};
use super::{ProcessGroup, group_of};
use crate::kind::Kind;
use crate::shm::arena::{Arena, Block};
use crate::shm::control::{PAYLOAD, SLOTS};
use crate::trace::{CAPACITY, Recorder, Start, ticks};
use crate::world::World;

/// The shared memory of a rank: its part in the control block, and some buffers.
const REGION: usize = 8 << 20;
/// Longer than any wait, also on Miri's clock, which runs with what it interprets.
const TIMEOUT: Duration = Duration::from_secs(3600);
/// Elements of f32 that travel in a round's payload, and that do not.
const SMALL: usize = 3;
const LARGE: usize = PAYLOAD / 4 + 5;

/// What groups call of the C library beyond what Miri knows.
#[cfg(miri)]
mod c_library {
    use std::ffi::{c_int, c_void};

    /// Processes of tests end as others do.
    #[unsafe(no_mangle)]
    extern "C" fn on_exit(_: *const c_void, _: *mut c_void) -> c_int {
        0
    }

    /// Nobody has ended.
    #[unsafe(no_mangle)]
    extern "C" fn ppoll(_: *mut c_void, _: u64, _: *const c_void, _: *const c_void) -> c_int {
        0
    }

    /// No advice is taken.
    #[unsafe(no_mangle)]
    extern "C" fn posix_madvise(_: *mut c_void, _: usize, _: c_int) -> c_int {
        22 // EINVAL
    }
}

/// Runs two ranks, each on a thread of its own.
fn ranks(run: impl Fn(&ProcessGroup) + Sync) {
    let arenas = Arena::of_threads(2, REGION);
    let worlds = World::of_threads(arenas, "threads", "here", false).unwrap();
    std::thread::scope(|scope| {
        for mut world in worlds {
            scope.spawn(|| {
                let rank = world.rank;
                // One polls for longer, the other is soon asleep.
                world.spin = rank == 0;
                let group = NewGroup::of_world(Arc::new(world), TIMEOUT);
                run(&group_of(Parts::new(group, "join").unwrap(), rank, Cuda::default()));
            });
        }
    });
}

/// Each slot serves twice: with the payload of its round, and staging buffers.
#[test]
fn rounds() {
    ranks(|group| {
        for round in 0..SLOTS + 2 {
            let mut sum = vec![(round * 2) as f32 + group.rank() as f32; SMALL];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [(round * 4 + 1) as f32; SMALL]);
        }
        for round in 0..3 {
            let mut sum = vec![(round * 2 + group.rank()) as f32; LARGE];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert!(sum.iter().all(|&sum| sum == (round * 4 + 1) as f32));
            let mut all = vec![0_u8; 2 * LARGE];
            group.all_gather(&vec![group.rank() as u8; LARGE], &mut all).unwrap();
            assert!(all.iter().enumerate().all(|(i, &from)| usize::from(from) == i / LARGE));
        }
    });
}

/// Memory that all ranks map is reduced where it is.
#[test]
fn shared_memory() {
    ranks(|group| {
        let mut shared = group.alloc_shared::<f32>(LARGE).unwrap();
        for round in 0..3 {
            shared.fill((round * 2 + group.rank()) as f32);
            group.all_reduce(&mut shared, ReduceOp::Sum).unwrap();
            assert!(shared.iter().all(|&sum| sum == (round * 4 + 1) as f32));
        }
    });
}

/// More parts than may be on their way, whole messages in shared memory, and one that is kept.
#[test]
fn messages() {
    const LENGTHS: [usize; 4] = [SMALL, 300_000, 0, LARGE];
    ranks(|group| {
        if group.rank() == 0 {
            for (tag, length) in (0..).zip(LENGTHS) {
                group.send_with_tag(&vec![tag as u8; length], 1, tag).unwrap();
            }
            let mut shared = group.alloc_shared::<u8>(LARGE).unwrap();
            shared.fill(7);
            group.send(&shared, 1).unwrap();
            shared.fill(8);
            group.send_with_tag(&shared, 1, 9).unwrap();
        } else {
            for tag in [0, 2, 1, 3_u32] {
                let mut bytes = vec![9_u8; LENGTHS[tag as usize]];
                assert_eq!(group.recv_any(&mut bytes, tag).unwrap(), 0);
                assert_eq!(bytes, vec![tag as u8; bytes.len()]);
            }
            for (value, tag) in [(7, 0), (8, 9)] {
                let mut bytes = vec![0_u8; LARGE];
                group.recv_with_tag(&mut bytes, 0, tag).unwrap();
                assert_eq!(bytes, [value; LARGE]);
            }
        }
    });
}

/// Two threads of a rank wait for messages of one sender: whoever opens the queue takes for both.
#[test]
fn queues() {
    const COUNT: u8 = 4;
    ranks(|group| {
        if group.rank() == 0 {
            for index in 0..COUNT {
                for tag in [1, 2] {
                    group.send_with_tag(&vec![index; SMALL], 1, tag).unwrap();
                }
            }
            return;
        }
        std::thread::scope(|scope| {
            for tag in [1, 2] {
                scope.spawn(move || {
                    for index in 0..COUNT {
                        let mut bytes = vec![0_u8; SMALL];
                        group.recv_any(&mut bytes, tag).unwrap();
                        assert_eq!(bytes, [index; SMALL]);
                    }
                });
            }
        });
    });
}

/// A piece of a bucket, which the group drops when it has been reduced to this sum.
struct Piece(Block, f32);

impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_mut()
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let sum = self.1.to_ne_bytes();
        assert_eq!(self.as_mut()[..4], sum);
    }
}

/// Each rank reduces its share of a bucket that both have launched.
#[test]
fn buckets() {
    const LENGTHS: [usize; 2] = [SMALL, LARGE];
    ranks(|group| {
        let segments = Arc::new(group.segments(0, DType::F32, LENGTHS.to_vec()).unwrap());
        for round in 0..2 {
            for (index, length) in LENGTHS.into_iter().enumerate() {
                let mut block = group.arena().allocate(length * 4).unwrap();
                let own = (round * 2 + group.rank()) as f32;
                block.as_mut()[..4].copy_from_slice(&own.to_ne_bytes());
                assert!(segments.set_piece(index, Piece(block, (round * 4 + 1) as f32)));
            }
            assert!(group.launch_bucket(&segments, ReduceOp::Sum).unwrap());
            segments.wait(group).unwrap();
        }
    });
}

/// A reader of the ring finds whole records, whatever two writers put into it meanwhile.
#[test]
fn flight_recorder() {
    const COUNT: u64 = CAPACITY as u64 + 8;
    let recorder = &Recorder::new("group".into(), "shm", false);
    let record = |sequence| {
        let id = recorder.start(&Start {
            kind: Kind::AllReduce,
            sequence,
            bytes: 2 * sequence,
            bucket: None,
            is_cuda: false,
            queued: None,
        });
        let later = ticks() + (1 << 30);
        recorder.finish_at(id, later, later);
    };
    std::thread::scope(|scope| {
        let writers =
            [0, 1].map(|first| scope.spawn(move || (first..COUNT).step_by(2).for_each(record)));
        while !writers.iter().all(|writer| writer.is_finished()) {
            for record in recorder.records() {
                assert_eq!(record.bytes, 2 * record.sequence);
                assert!(record.done.is_none_or(|done| done == record.started), "{record:?}");
            }
        }
    });
}

/// A rank learns why the other gives the group up.
#[test]
fn failure() {
    ranks(|group| {
        if group.rank() == 0 {
            group.abort("of a reason");
        } else {
            let error = group.barrier().unwrap_err().to_string();
            assert!(error.contains("rank 0 aborted the group: of a reason"), "{error}");
        }
    });
}
