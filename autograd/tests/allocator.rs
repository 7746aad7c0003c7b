//! The CPU allocator. It is one for the whole process, so the tests take turns.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::{Block, BlockAllocator, allocated_by, data_ptr, set_cpu_allocator};
use tch::{Device, Kind, Tensor};

const MIN_BYTES: usize = 64 << 10;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands out blocks of its own and knows which are in use.
#[derive(Default)]
struct Tracking {
    in_use: Arc<Mutex<BTreeSet<usize>>>,
    refuses: AtomicBool,
    panics: AtomicBool,
    misaligned: AtomicBool,
}

struct TrackedBlock {
    memory: Vec<u8>,
    start: usize,
    in_use: Arc<Mutex<BTreeSet<usize>>>,
}

impl AsMut<[u8]> for TrackedBlock {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..]
    }
}

impl Drop for TrackedBlock {
    fn drop(&mut self) {
        let address = self.as_mut().as_ptr().addr();
        assert!(self.in_use.lock().unwrap().remove(&address));
    }
}

impl BlockAllocator for Tracking {
    fn allocate(&self, bytes: usize) -> Option<Block> {
        assert!(bytes >= MIN_BYTES, "{bytes} bytes are below the limit");
        assert!(!self.panics.load(SeqCst), "an allocator that panics");
        if self.refuses.load(SeqCst) {
            return None;
        }
        let memory = vec![0; bytes + 128];
        let start =
            memory.as_ptr().align_offset(64) + if self.misaligned.load(SeqCst) { 32 } else { 0 };
        let mut block = TrackedBlock { memory, start, in_use: self.in_use.clone() };
        self.in_use.lock().unwrap().insert(block.as_mut().as_ptr().addr());
        Some(Box::new(block))
    }
}

impl Tracking {
    fn owns(&self, tensor: &Tensor) -> bool {
        self.in_use.lock().unwrap().contains(&data_ptr(tensor).addr())
    }

    fn in_use(&self) -> usize {
        self.in_use.lock().unwrap().len()
    }

    fn install() -> Arc<Self> {
        let allocator = Arc::new(Self::default());
        set_cpu_allocator(Some(allocator.clone()), MIN_BYTES).unwrap();
        allocator
    }
}

fn tensor(bytes: usize) -> Tensor {
    Tensor::ones([bytes as i64], (Kind::Uint8, Device::Cpu))
}

/// Whoever allocates: what lives at the end counts, and what was there before does not.
#[test]
fn allocated_bytes_are_counted() {
    let _turn = turn();
    let _allocator = Tracking::install();
    let before = tensor(2 * MIN_BYTES);
    let (kept, bytes) = allocated_by(|| {
        drop(before);
        let (small, large, gone) = (tensor(100), tensor(MIN_BYTES), tensor(3 * MIN_BYTES));
        drop(gone);
        [small, large]
    })
    .unwrap();
    assert_eq!(bytes, 100 + MIN_BYTES);
    assert_eq!(allocated_by(|| drop(kept)).unwrap().1, 0);
    set_cpu_allocator(None, 0).unwrap();
}

#[test]
fn large_tensors_only_come_from_the_allocator() {
    let _turn = turn();
    let allocator = Tracking::install();
    let (below, at, above) = (tensor(MIN_BYTES - 1), tensor(MIN_BYTES), tensor(10 * MIN_BYTES + 7));
    assert_eq!([&below, &at, &above].map(|tensor| allocator.owns(tensor)), [false, true, true]);
    assert_eq!(above.sum(Kind::Int64).int64_value(&[]), 10 * MIN_BYTES as i64 + 7);
    drop(tensor(0));

    let copy = at.copy();
    assert!(allocator.owns(&copy) && data_ptr(&copy) != data_ptr(&at));
    let mut grows = tensor(1);
    let _ = grows.resize_([2 * MIN_BYTES as i64]);
    assert!(allocator.owns(&grows));
    drop((below, at, above, copy, grows));
    assert_eq!(allocator.in_use(), 0);
    set_cpu_allocator(None, 0).unwrap();
    assert_eq!(Arc::strong_count(&allocator), 1);
}

#[test]
fn gradients_are_born_in_the_allocator() {
    let _turn = turn();
    let weight = Tensor::ones([256, 256], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let allocator = Tracking::install();
    weight.matmul(&weight).sum(Kind::Float).backward();
    assert!(allocator.owns(&weight.grad()) && !allocator.owns(&weight));
    set_cpu_allocator(None, 0).unwrap();
    flow_autograd::set_grad(&weight, None).unwrap();
    assert_eq!(allocator.in_use(), 0);
}

/// oneDNN frees its memory by address alone.
#[test]
fn convolutions_work() {
    let _turn = turn();
    let options = (Kind::Float, Device::Cpu);
    let weight = Tensor::randn([64, 32, 5, 5], options).set_requires_grad(true);
    let images = Tensor::randn([50, 32, 12, 12], options);
    let gradient = || {
        images
            .conv2d::<Tensor>(&weight, None, [1, 1], [0, 0], [1, 1], 1)
            .square()
            .sum(Kind::Float)
            .backward();
        let gradient = weight.grad();
        flow_autograd::set_grad(&weight, None).unwrap();
        gradient
    };
    let expected = gradient();
    let allocator = Tracking::install();
    assert!(gradient().allclose(&expected, 1e-4, 1e-4, false));
    assert_eq!(allocator.in_use(), 0);
    set_cpu_allocator(None, 0).unwrap();
}

#[test]
fn blocks_go_back_where_they_came_from() {
    let _turn = turn();
    let first = Tracking::install();
    let from_first = tensor(MIN_BYTES);
    let second = Tracking::install();
    let from_second = tensor(MIN_BYTES);
    assert!(first.owns(&from_first) && second.owns(&from_second));
    set_cpu_allocator(None, MIN_BYTES).unwrap();
    let from_neither = tensor(MIN_BYTES);
    assert!(!first.owns(&from_neither) && !second.owns(&from_neither));
    assert_eq!((first.in_use(), second.in_use()), (1, 1));

    let (first_in_use, alive) = (first.in_use.clone(), Arc::downgrade(&first));
    drop(first); // its block outlives it
    assert!(alive.upgrade().is_none());
    drop(from_first);
    assert!(first_in_use.lock().unwrap().is_empty());
    drop((from_second, from_neither));
    assert_eq!(second.in_use(), 0);
}

#[test]
fn what_the_allocator_cannot_give_libtorch_does() {
    let _turn = turn();
    let allocator = Tracking::install();
    for failure in [&allocator.refuses, &allocator.misaligned, &allocator.panics] {
        failure.store(true, SeqCst);
        let tensor = tensor(MIN_BYTES);
        assert_eq!(allocator.in_use(), 0);
        assert_eq!(tensor.sum(Kind::Int64).int64_value(&[]), MIN_BYTES as i64);
        failure.store(false, SeqCst);
    }
    assert!(allocator.owns(&tensor(MIN_BYTES)));
    set_cpu_allocator(None, 0).unwrap();
}

#[test]
fn threads_share_and_free_each_others_blocks() {
    let _turn = turn();
    let allocator = Tracking::install();
    let (sender, receiver) = std::sync::mpsc::channel::<Tensor>();
    let makers: Vec<_> = (0..4)
        .map(|maker| {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for index in 0..50 {
                    sender.send(tensor(MIN_BYTES + 1000 * maker + index)).unwrap();
                }
            })
        })
        .collect();
    drop(sender);
    let replacer = std::thread::spawn(|| {
        for _ in 0..100 {
            set_cpu_allocator(None, 0).unwrap();
            Tracking::install();
        }
    });
    for tensor in receiver {
        assert_eq!(tensor.sum(Kind::Int64).int64_value(&[]), tensor.numel() as i64);
    }
    for thread in makers {
        thread.join().unwrap();
    }
    replacer.join().unwrap();
    assert_eq!(allocator.in_use(), 0);
    set_cpu_allocator(None, 0).unwrap();
}
