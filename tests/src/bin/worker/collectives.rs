//! Compares every collective with a plain reference, over all types, reductions, sizes and kinds of
//! memory. Each rank of any number checks its own results.

use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;

use anyhow::{ensure, Result};
use flow_comm::{bf16, f16, Buffer, DType, Element, ProcessGroup, ReduceOp, SharedBuffer, Work};
use flow_tests::registry::{by_hand, launched, scenario, Scenario};

/// Bytes that ordinary memory is staged in at once.
const CHUNK: usize = 256 << 10;
/// Data up to this many bytes is reduced in rank order over all nodes; more of it by node.
const SMALL: usize = 4096;
/// More are of no use to this check.
const MAX_RANKS: usize = 16;

/// The node of each rank.
static NODES: OnceLock<Vec<u32>> = OnceLock::new();

pub const SCENARIOS: &[Scenario] = &[scenario(
    "all_are_right",
    all,
    &[
        launched(1),
        launched(2),
        launched(3),
        launched(4),
        launched(5),
        by_hand(&[1, 1]),
        by_hand(&[1, 1, 1, 1]),
        by_hand(&[2, 2]),
        by_hand(&[1, 2, 3]),
        by_hand(&[2, 1]),
    ],
)];

fn all(group: &ProcessGroup) -> Result<()> {
    ensure!(group.world_size() <= MAX_RANKS, "at most {MAX_RANKS} ranks can be checked");
    let node = std::env::var("GROUP_RANK").map_or(Ok(0), |node| node.parse::<i32>())?;
    let mut nodes = vec![0; group.world_size()];
    group.all_gather(&[node], &mut nodes)?;
    NODES.get_or_init(|| nodes.into_iter().map(|node| node as u32).collect());
    Grid::<f32>::run(group)?;
    Grid::<f64>::run(group)?;
    Grid::<f16>::run(group)?;
    Grid::<bf16>::run(group)?;
    Grid::<i32>::run(group)?;
    Grid::<i64>::run(group)?;
    Grid::<u8>::run(group)?;
    for count in [0, 3, 1000, 70_000] {
        overlapping::<f32>(group, count)?;
        overlapping::<u8>(group, count)?;
        crossing_messages::<f64>(group, count)?;
    }
    unaligned_parts(group)?;
    uneven_arguments(group)?;
    group.barrier()?;
    Ok(())
}

/// Where a rank's buffers lie.
#[derive(Clone, Copy, Debug)]
enum Place {
    Shared,
    Ordinary,
    /// Shared on some ranks, ordinary on others.
    Mixed,
}

#[derive(Debug)]
enum Memory<T: Element> {
    Shared(SharedBuffer<T>),
    Ordinary(Vec<T>),
}

impl<T: Element> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Shared(buffer) => buffer,
            Self::Ordinary(buffer) => buffer,
        }
    }
}

impl<T: Element> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Shared(buffer) => buffer,
            Self::Ordinary(buffer) => buffer,
        }
    }
}

impl<T: Element> Buffer for Memory<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn bytes(&self) -> &[u8] {
        (**self).bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        (**self).bytes_mut()
    }
}

/// A type whose reductions are known.
trait Reference: Element + PartialEq + std::fmt::Debug {
    fn value(seed: u64) -> Self;
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
    /// The average of `ranks` values, of which `sums` are parts.
    fn average(sums: &[Self], ranks: usize) -> Self;
    fn bits(self) -> u64;
}

macro_rules! float_reference {
    ($($float:ty as $wide:ty: $lift:expr, $lower:expr;)*) => {$(
        impl Reference for $float {
            fn value(seed: u64) -> Self {
                $lower((seed % 4001) as $wide / 1000.0 - 2.0)
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = values.iter().map(|&value| $lift(value));
                let both = |combine: fn($wide, $wide) -> $wide| wide.reduce(combine).unwrap();
                $lower(match op {
                    ReduceOp::Sum => both(|a, b| a + b),
                    ReduceOp::Avg => both(|a, b| a + b) / values.len() as $wide,
                    ReduceOp::Product => both(|a, b| a * b),
                    ReduceOp::Min => both(<$wide>::min),
                    ReduceOp::Max => both(<$wide>::max),
                })
            }

            fn average(sums: &[Self], ranks: usize) -> Self {
                let sum = sums.iter().map(|&sum| $lift(sum)).reduce(|a, b| a + b).unwrap();
                $lower(sum / ranks as $wide)
            }

            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    )*};
}

float_reference! {
    f32 as f32: |value: f32| value, |value: f32| value;
    f64 as f64: |value: f64| value, |value: f64| value;
    f16 as f32: f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32;
}

macro_rules! integer_reference {
    ($($integer:ty),*) => {$(
        impl Reference for $integer {
            fn value(seed: u64) -> Self {
                seed as $integer
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = || values.iter().map(|&value| i128::from(value));
                match op {
                    ReduceOp::Sum => wide().sum::<i128>() as $integer,
                    ReduceOp::Avg => (wide().sum::<i128>() / values.len() as i128) as $integer,
                    ReduceOp::Product => values.iter().fold(1, |product, &value| product.wrapping_mul(value)),
                    ReduceOp::Min => *values.iter().min().unwrap(),
                    ReduceOp::Max => *values.iter().max().unwrap(),
                }
            }

            fn average(_: &[Self], _: usize) -> Self {
                unreachable!("averages of integers are exact")
            }

            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}

integer_reference!(i32, i64, u8);

/// Element `index` of rank `rank`'s input, the same in every process (the finaliser of
/// MurmurHash3).
fn value<T: Reference>(rank: usize, index: usize) -> T {
    let mut seed = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index as u64;
    seed = (seed ^ seed >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    seed = (seed ^ seed >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    T::value(seed ^ seed >> 33)
}

fn reduced<T: Reference>(op: ReduceOp, size: usize, index: usize) -> T {
    let mut values = [T::value(0); MAX_RANKS];
    values[..size].iter_mut().enumerate().for_each(|(rank, to)| *to = value(rank, index));
    T::reduce(op, &values[..size])
}

/// As [`reduced`], as all_reduce does it for `count` elements: in each node first where they are
/// many.
fn all_reduced<T: Reference>(op: ReduceOp, size: usize, count: usize, index: usize) -> T {
    let exact = op == ReduceOp::Avg && matches!(T::DTYPE, DType::I32 | DType::I64 | DType::U8);
    let nodes = NODES.get().map_or(&[0_u32][..], |nodes| nodes);
    if count * T::DTYPE.size() <= SMALL || exact || nodes.iter().all(|node| *node == nodes[0]) {
        return reduced(op, size, index);
    }
    let divided_first = matches!(T::DTYPE, DType::F16 | DType::BF16);
    let (mut sums, mut firsts) = ([T::value(0); MAX_RANKS], 0);
    for (rank, node) in nodes.iter().enumerate() {
        if nodes[..rank].contains(node) {
            continue;
        }
        let (mut values, mut members) = ([T::value(0); MAX_RANKS], 0);
        for member in (rank..size).filter(|&other| nodes[other] == *node) {
            values[members] = value(member, index);
            members += 1;
        }
        sums[firsts] = match op {
            ReduceOp::Avg if divided_first => T::average(&values[..members], size),
            ReduceOp::Avg => T::reduce(ReduceOp::Sum, &values[..members]),
            _ => T::reduce(op, &values[..members]),
        };
        firsts += 1;
    }
    match op {
        ReduceOp::Avg if divided_first => T::reduce(ReduceOp::Sum, &sums[..firsts]),
        ReduceOp::Avg => T::average(&sums[..firsts], size),
        _ => T::reduce(op, &sums[..firsts]),
    }
}

fn check<T: Reference>(case: &str, got: &[T], expected: impl Fn(usize) -> T) -> Result<()> {
    let wrong =
        got.iter().enumerate().find(|&(index, element)| element.bits() != expected(index).bits());
    if let Some((index, element)) = wrong {
        anyhow::bail!("{case}: element {index} is {element:?} and not {:?}", expected(index));
    }
    Ok(())
}

/// All collectives on buffers of one length in one kind of memory.
struct Grid<'a, T> {
    group: &'a ProcessGroup,
    count: usize,
    place: Place,
    /// A rank that differs from case to case.
    root: usize,
    element: std::marker::PhantomData<T>,
}

impl<'a, T: Reference> Grid<'a, T> {
    fn run(group: &'a ProcessGroup) -> Result<()> {
        let mut root = 0;
        for count in [0, 1, 3, 1000, CHUNK / T::DTYPE.size() + 1] {
            for place in [Place::Shared, Place::Ordinary, Place::Mixed] {
                root = (root + 1) % group.world_size();
                let grid = Self { group, count, place, root, element: std::marker::PhantomData };
                for op in
                    [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max]
                {
                    grid.reductions(op)?;
                }
                grid.movements()?;
                grid.uneven()?;
                grid.messages()?;
                group.barrier()?;
            }
        }
        Ok(())
    }

    fn case(&self, operation: &str) -> String {
        let (rank, size) = (self.group.rank(), self.group.world_size());
        let Self { count, place, root, .. } = self;
        format!(
            "{operation} of {count} x {}, {place:?}, root {root}, rank {rank} of {size}",
            T::DTYPE
        )
    }

    /// A buffer that begins as `content` says. `flip` swaps who has shared memory where it is
    /// mixed.
    fn memory(&self, len: usize, flip: usize, content: impl Fn(usize) -> T) -> Result<Memory<T>> {
        let shared = match self.place {
            Place::Shared => true,
            Place::Ordinary => false,
            Place::Mixed => (self.group.rank() + self.root + flip).is_multiple_of(2),
        };
        let content = (0..len).map(content);
        if !shared {
            return Ok(Memory::Ordinary(content.collect()));
        }
        let mut buffer = self.group.alloc_shared(len)?;
        buffer.iter_mut().zip(content).for_each(|(to, from)| *to = from);
        Ok(Memory::Shared(buffer))
    }

    fn own(&self, len: usize) -> Result<Memory<T>> {
        let rank = self.group.rank();
        self.memory(len, 0, |index| value(rank, index))
    }

    fn blank(&self, len: usize) -> Result<Memory<T>> {
        self.memory(len, 1, |_| T::value(0))
    }

    /// Whether all ranks hold the same bits.
    fn agree(&self, case: &str, data: &[T]) -> Result<()> {
        let hash = data
            .iter()
            .fold(7_i64, |hash, element| hash.wrapping_mul(31).wrapping_add(element.bits() as i64));
        let mut hashes = vec![0; self.group.world_size()];
        self.group.all_gather(&[hash], &mut hashes)?;
        ensure!(hashes.iter().all(|&other| other == hash), "{case}: ranks hold different bits");
        Ok(())
    }

    fn reductions(&self, op: ReduceOp) -> Result<()> {
        let Self { group, count, root, .. } = *self;
        let (rank, size) = (group.rank(), group.world_size());

        let case = self.case(&format!("all_reduce {op}"));
        let mut data = self.own(count)?;
        group.all_reduce(&mut data, op)?;
        check(&case, &data, |index| all_reduced(op, size, count, index))?;
        self.agree(&case, &data)?;

        let case = self.case(&format!("reduce {op}"));
        let mut data = self.own(count)?;
        group.reduce(&mut data, op, root)?;
        check(&case, &data, |index| {
            if rank == root {
                reduced(op, size, index)
            } else {
                value(rank, index)
            }
        })?;

        let case = self.case(&format!("reduce_scatter {op}"));
        let (input, mut output) = (self.own(size * count)?, self.blank(count)?);
        group.reduce_scatter(&input, &mut output, op)?;
        check(&case, &output, |index| reduced(op, size, rank * count + index))?;
        check(&case, &input, |index| value(rank, index))
    }

    fn movements(&self) -> Result<()> {
        let Self { group, count, root, .. } = *self;
        let (rank, size) = (group.rank(), group.world_size());

        let case = self.case("broadcast");
        let mut data = self.own(count)?;
        group.broadcast(&mut data, root)?;
        check(&case, &data, |index| value(root, index))?;
        self.agree(&case, &data)?;

        let case = self.case("all_gather");
        let (input, mut output) = (self.own(count)?, self.blank(size * count)?);
        group.all_gather(&input, &mut output)?;
        check(&case, &output, |index| value(index / count, index % count))?;
        self.agree(&case, &output)?;

        let case = self.case("gather");
        let mut output = (rank == root).then(|| self.blank(size * count)).transpose()?;
        group.gather(&input, output.as_mut(), root)?;
        check(&case, output.as_deref().unwrap_or_default(), |index| {
            value(index / count, index % count)
        })?;

        let case = self.case("scatter");
        let input = (rank == root).then(|| self.own(size * count)).transpose()?;
        let mut output = self.blank(count)?;
        group.scatter(input.as_ref(), &mut output, root)?;
        check(&case, &output, |index| value(root, rank * count + index))?;

        let case = self.case("all_to_all");
        let (input, mut output) = (self.own(size * count)?, self.blank(size * count)?);
        group.all_to_all(&input, &mut output)?;
        check(&case, &output, |index| value(index / count, rank * count + index % count))
    }

    /// A count that differs from block to block: none, a part or all of this grid's.
    fn uneven_count(&self, block: usize) -> usize {
        match (block + self.root) % 3 {
            0 => 0,
            1 => self.count,
            _ => self.count / 2 + 1,
        }
    }

    fn uneven(&self) -> Result<()> {
        let Self { group, .. } = *self;
        let (rank, size) = (group.rank(), group.world_size());
        let counts: Vec<usize> = (0..size).map(|rank| self.uneven_count(rank)).collect();
        let total = counts.iter().sum();

        let case = self.case("all_gather_v");
        let (input, mut output) = (self.own(counts[rank])?, self.blank(total)?);
        group.all_gather_v(&input, &mut output, &counts)?;
        check(&case, &output, |index| {
            let (from, index) = block_of(&counts, index);
            value(from, index)
        })?;
        self.agree(&case, &output)?;

        let start: usize = counts[..rank].iter().sum();
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
            let case = self.case(&format!("reduce_scatter_v {op}"));
            let (input, mut output) = (self.own(total)?, self.blank(counts[rank])?);
            group.reduce_scatter_v(&input, &mut output, &counts, op)?;
            check(&case, &output, |index| reduced(op, size, start + index))?;
            check(&case, &input, |index| value(rank, index))?;
        }

        let case = self.case("all_to_all_v");
        let sent = |from: usize| -> Vec<usize> {
            (0..size).map(|to| self.uneven_count(from * size + to + from)).collect()
        };
        let received: Vec<usize> = (0..size).map(|from| sent(from)[rank]).collect();
        let input = self.own(sent(rank).iter().sum())?;
        let mut output = self.blank(received.iter().sum())?;
        group.all_to_all_v(&input, &sent(rank), &mut output, &received)?;
        check(&case, &output, |index| {
            let (from, index) = block_of(&received, index);
            value(from, sent(from)[..rank].iter().sum::<usize>() + index)
        })
    }

    fn messages(&self) -> Result<()> {
        let Self { group, count, .. } = *self;
        let (rank, size) = (group.rank(), group.world_size());

        let case = self.case("send and recv, all pairs");
        let data = self.own(count)?;
        for from in 0..size {
            for to in (0..size).filter(|&to| to != from) {
                if rank == from {
                    group.send(&data, to)?;
                } else if rank == to {
                    let mut received = self.blank(count)?;
                    group.recv(&mut received, from)?;
                    check(&case, &received, |index| value(from, index))?;
                }
            }
        }

        if size > 1 {
            let case = self.case("send and recv, ring");
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            let sending = group.send_async(data, next)?;
            let mut received = self.blank(count)?;
            group.recv(&mut received, previous)?;
            check(&case, &received, |index| value(previous, index))?;
            check(&case, &sending.wait()?, |index| value(rank, index))?;
        }
        Ok(())
    }
}

/// Which of several blocks in a row has an element, and at which position.
fn block_of(counts: &[usize], mut index: usize) -> (usize, usize) {
    for (block, &count) in counts.iter().enumerate() {
        if index < count {
            return (block, index);
        }
        index -= count;
    }
    unreachable!("the index is in one of the blocks")
}

/// What uneven collectives refuse, with the group usable after it.
fn uneven_arguments(group: &ProcessGroup) -> Result<()> {
    let (size, fitting) = (group.world_size(), vec![1; group.world_size()]);
    let refused = |result: flow_comm::Result<()>, reason: &str| {
        let error = result.expect_err("refused").to_string();
        ensure!(error.contains(reason) && !error.contains('\n'), "{error}");
        Ok(())
    };
    let mut all = vec![0_i32; size];
    let few = &fitting[1..];
    refused(group.all_gather_v(&[1], &mut all, few), "counts has")?;
    refused(group.all_gather_v(&[1, 2], &mut all, &fitting), "input has 2 elements")?;
    refused(group.all_gather_v(&[1_i64], &mut all, &fitting), "must be alike")?;
    let result = group.reduce_scatter_v(&all, &mut [0, 0], &fitting, ReduceOp::Sum);
    refused(result, "output has 2 elements, its counts say 1")?;
    let mut output = vec![0; size];
    refused(group.all_to_all_v(&all, few, &mut output, &fitting), "input_counts has")?;
    refused(group.all_to_all_v(&all, &vec![usize::MAX; size], &mut output, &fitting), "sum up")?;
    let gathered = group.all_gather_v_async([7_i32], all, fitting.clone())?.wait()?.1;
    let reduced =
        group.reduce_scatter_v_async(gathered.clone(), [0], fitting.clone(), ReduceOp::Sum)?;
    ensure!(reduced.wait()?.1 == [7 * size as i32]);
    let exchanged = group.all_to_all_v_async(gathered, fitting.clone(), output, fitting)?;
    ensure!(exchanged.wait()?.1 == vec![7; size]);
    Ok(())
}

/// Every collective started before any is waited for, with blocking ones in between.
fn overlapping<T: Reference>(group: &ProcessGroup, count: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    let root = size - 1;
    let at_root = |present: bool, len: usize| present.then(|| own::<T>(rank, len));
    let blank = |len: usize| vec![T::value(0); len];
    let shared = |len: usize| -> Result<SharedBuffer<T>> {
        let mut buffer = group.alloc_shared(len)?;
        buffer.iter_mut().enumerate().for_each(|(index, to)| *to = value(rank, index));
        Ok(buffer)
    };

    let all_reduce = group.all_reduce_async(own::<T>(rank, count), ReduceOp::Sum)?;
    let all_reduce_in_place = group.all_reduce_async(shared(count)?, ReduceOp::Max)?;
    let reduce = group.reduce_async(own::<T>(rank, count), ReduceOp::Min, root)?;
    let broadcast = group.broadcast_async(own::<T>(rank, count), root)?;
    let all_gather = group.all_gather_async(shared(count)?, blank(size * count))?;

    let mut between = own::<T>(rank, count);
    group.all_reduce(&mut between, ReduceOp::Product)?;
    check("blocking all_reduce between", &between, |index| {
        all_reduced(ReduceOp::Product, size, count, index)
    })?;

    let reduce_scatter =
        group.reduce_scatter_async(own::<T>(rank, size * count), blank(count), ReduceOp::Avg)?;
    let all_to_all = group.all_to_all_async(own::<T>(rank, size * count), blank(size * count))?;
    let gather =
        group.gather_async(own::<T>(rank, count), at_root(rank == root, size * count), root)?;
    let scatter = group.scatter_async(at_root(rank == root, size * count), blank(count), root)?;
    let barrier = group.barrier_async()?;

    group.barrier()?;
    barrier.wait()?;
    check("scatter_async", &scatter.wait()?.1, |index| value(root, rank * count + index))?;
    let gathered = gather.wait()?.1.unwrap_or_default();
    check("gather_async", &gathered, |index| value(index / count, index % count))?;
    check("all_to_all_async", &all_to_all.wait()?.1, |i| {
        value(i / count, rank * count + i % count)
    })?;
    let scattered = reduce_scatter.wait()?.1;
    check("reduce_scatter_async", &scattered, |index| {
        reduced(ReduceOp::Avg, size, rank * count + index)
    })?;
    check("all_gather_async", &all_gather.wait()?.1, |index| value(index / count, index % count))?;
    check("broadcast_async", &broadcast.wait()?, |index| value(root, index))?;
    let kept =
        |index| if rank == root { reduced(ReduceOp::Min, size, index) } else { value(rank, index) };
    check("reduce_async", &reduce.wait()?, kept)?;
    let in_place = all_reduce_in_place.wait()?;
    check("all_reduce_async, shared", &in_place, |index| {
        all_reduced(ReduceOp::Max, size, count, index)
    })?;
    check("all_reduce_async", &all_reduce.wait()?, |index| {
        all_reduced(ReduceOp::Sum, size, count, index)
    })
}

/// Every rank sends to and receives from every other at once, in shared and ordinary memory;
/// messages between two ranks keep their order.
fn crossing_messages<T: Reference>(group: &ProcessGroup, count: usize) -> Result<()> {
    let rank = group.rank();
    let others: Vec<usize> = (0..group.world_size()).filter(|&other| other != rank).collect();
    let mut received: Vec<(usize, Work<Vec<T>>)> = Vec::new();
    let mut sent: Vec<Work<Memory<T>>> = Vec::new();
    for &other in &others {
        received.push((other, group.recv_async(vec![T::value(0); count], other)?));
    }
    for &other in &others {
        let mut first = group.alloc_shared(count)?;
        first.copy_from_slice(&own::<T>(rank, count));
        sent.push(group.send_async(Memory::Shared(first), other)?);
        sent.push(group.send_async(Memory::Ordinary(own::<T>(rank + 100, count)), other)?);
    }
    let mut all = own::<T>(rank, count);
    group.all_reduce(&mut all, ReduceOp::Sum)?;
    for &other in &others {
        let mut second = vec![T::value(0); count];
        group.recv(&mut second, other)?;
        check("recv after recv_async", &second, |index| value(other + 100, index))?;
    }
    for (other, work) in received {
        check("recv_async", &work.wait()?, |index| value(other, index))?;
    }
    sent.into_iter().try_for_each(|work| work.wait().map(drop))?;
    Ok(())
}

/// Parts of shared buffers that begin at a different, odd place on every rank.
fn unaligned_parts(group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    let (count, start) = (50_001, 1 + 3 * rank);
    let mut data = group.alloc_shared::<f32>(start + count + 5)?;
    data[start..start + count].copy_from_slice(&own::<f32>(rank, count));
    group.all_reduce(&mut data[start..start + count], ReduceOp::Sum)?;
    check("all_reduce of a part", &data[start..start + count], |index| {
        all_reduced(ReduceOp::Sum, size, count, index)
    })?;
    let around = data[..start].iter().chain(&data[start + count..]);
    ensure!(
        around.into_iter().all(|&element| element == 0.0),
        "all_reduce of a part wrote beside it"
    );
    Ok(())
}

fn own<T: Reference>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| value(rank, index)).collect()
}
