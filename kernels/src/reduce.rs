//! Reduction of any number of buffers into any number of buffers.

use std::array::from_fn;

use half::{bf16, f16};

use crate::number::{Arithmetic, Number, Widen};
use crate::types::{DType, ReduceOp};

/// Elements handled at once: few enough that the accumulators of all but the widest types stay in
/// registers.
const TILE: usize = 64;

/// How many numbers may wait for their sum at a time. A balanced tree of 65,536 sources has as many.
const DEPTH: usize = 17;

/// Writes `op` over `sources` to every destination, element by element: `destination[i] =
/// sources[0][i] op sources[1][i] op ...`, in the order of `sources`.
///
/// | | `f32`, `f64` | `f16`, `bf16` | `i32`, `i64`, `u8` |
/// |---|---|---|---|
/// | `Sum`, `Product` | in their own type | in `f32`, rounded once at the end | wrapping |
/// | `Avg` | the sum divided by the number of sources | likewise | the same, truncated |
/// | `Min`, `Max` | NaN if any source is NaN | likewise | |
///
/// Without sources nothing is written.
///
/// # Safety
///
/// - Each source must be readable and each destination writable for `count` elements of `dtype`,
///   and aligned to `dtype.size()`. More alignment is not needed.
/// - A destination may be the same pointer as a source or another destination (reduction in place),
///   and must not overlap any of them otherwise.
/// - No other thread may write the sources or access the destinations meanwhile.
pub unsafe fn reduce(
    dtype: DType,
    op: ReduceOp,
    sources: &[*const u8],
    destinations: &[*mut u8],
    count: usize,
) {
    // SAFETY: `detect` returns a set that this CPU has; the rest is the caller's promise.
    unsafe {
        reduce_with(
            InstructionSet::detect(),
            dtype,
            op,
            Buffers { sources, destinations, count, ranks: sources.len(), sums: &[] },
        )
    }
}

/// Reduces as [`reduce`] by [`ReduceOp::Avg`] does, where the sources are themselves sums, of
/// `ranks` numbers together: the quotient is taken by that.
///
/// # Safety
///
/// As for [`reduce`].
pub unsafe fn average(
    dtype: DType,
    sources: &[*const u8],
    destinations: &[*mut u8],
    count: usize,
    ranks: usize,
) {
    let buffers = Buffers { sources, destinations, count, ranks, sums: &[] };
    // SAFETY: as in `reduce`.
    unsafe { reduce_with(InstructionSet::detect(), dtype, ReduceOp::Avg, buffers) }
}

/// Adds up as [`reduce`] by [`ReduceOp::Sum`] does, in the order of a tree: once source `i` is read, the
/// last two numbers that are not added up yet are replaced by their sum, `sums[i]` times. So `[0, 1, 1, 1]`
/// is `((a + b) + c) + d`, and `[0, 1, 0, 2]` is `(a + b) + (c + d)`. The result is divided by `ranks`, if
/// that is given.
///
/// # Panics
///
/// There are not two numbers to add, or more than 17 at a time wait for their sum.
///
/// # Safety
///
/// As for [`reduce`].
pub unsafe fn sum_in_tree(
    dtype: DType,
    sums: &[usize],
    sources: &[*const u8],
    destinations: &[*mut u8],
    count: usize,
    ranks: Option<usize>,
) {
    // From left to right there are no sums that wait.
    let is_in_order = sums.iter().skip(1).all(|&sums| sums == 1);
    let sums = if is_in_order { &[] } else { sums };
    let op = if ranks.is_some() { ReduceOp::Avg } else { ReduceOp::Sum };
    let ranks = ranks.unwrap_or(1);
    let buffers = Buffers { sources, destinations, count, ranks, sums };
    // SAFETY: as in `reduce`.
    unsafe { reduce_with(InstructionSet::detect(), dtype, op, buffers) }
}

/// The instruction sets that the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstructionSet {
    /// The instruction set that the compiler targets anyway.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// Chooses the best one of this CPU. The standard library caches the answers.
    #[inline]
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return InstructionSet::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return InstructionSet::Avx2;
            }
        }
        InstructionSet::Baseline
    }
}

/// The memory of one reduction; the pointers are `T`'s where a function has a type parameter `T`.
#[derive(Clone, Copy)]
struct Buffers<'a> {
    sources: &'a [*const u8],
    destinations: &'a [*mut u8],
    count: usize,
    /// The number of elements that an average is over.
    ranks: usize,
    /// The tree in which sources are combined: see [`sum_in_tree`]. Empty: from left to right.
    sums: &'a [usize],
}

/// # Safety
///
/// As for [`reduce`], and the CPU must have `set`.
unsafe fn reduce_with(set: InstructionSet, dtype: DType, op: ReduceOp, buffers: Buffers) {
    // SAFETY: the type matches `dtype`; the rest is the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => reduce_elements::<f32>(set, op, buffers),
            DType::F64 => reduce_elements::<f64>(set, op, buffers),
            DType::F16 => reduce_elements::<f16>(set, op, buffers),
            DType::BF16 => reduce_elements::<bf16>(set, op, buffers),
            DType::I32 => reduce_elements::<i32>(set, op, buffers),
            DType::I64 => reduce_elements::<i64>(set, op, buffers),
            DType::U8 => reduce_elements::<u8>(set, op, buffers),
        }
    }
}

/// # Safety
///
/// As for [`reduce_with`], with elements of type `T`.
unsafe fn reduce_elements<T: Arithmetic>(set: InstructionSet, op: ReduceOp, buffers: Buffers) {
    let ranks = buffers.ranks;
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            ReduceOp::Sum => run::<T, T::Accumulator, _>(set, Sum, buffers),
            ReduceOp::Product => run::<T, T::Accumulator, _>(set, Product, buffers),
            ReduceOp::Min => run::<T, T::Accumulator, _>(set, Min, buffers),
            ReduceOp::Max => run::<T, T::Accumulator, _>(set, Max, buffers),
            ReduceOp::Avg => match T::Mean::exact_reciprocal(ranks) {
                Some(reciprocal) => run::<T, T::Mean, _>(set, SumTimes(reciprocal), buffers),
                None => run::<T, T::Mean, _>(set, SumOver(T::Mean::from_count(ranks)), buffers),
            },
        }
    }
}

/// The way in which accumulators of type `A` are combined.
trait Operation<A: Number>: Copy {
    fn combine(self, left: A, right: A) -> A;

    /// Turns the last accumulator into the result.
    #[inline(always)]
    fn finish(self, total: A) -> A {
        total
    }
}

macro_rules! operation {
    ($name:ident, $combine:ident) => {
        #[derive(Clone, Copy)]
        struct $name;

        impl<A: Number> Operation<A> for $name {
            #[inline(always)]
            fn combine(self, left: A, right: A) -> A {
                left.$combine(right)
            }
        }
    };
    ($name:ident, $combine:ident, then $finish:ident) => {
        #[derive(Clone, Copy)]
        struct $name<A>(A);

        impl<A: Number> Operation<A> for $name<A> {
            #[inline(always)]
            fn combine(self, left: A, right: A) -> A {
                left.$combine(right)
            }

            #[inline(always)]
            fn finish(self, total: A) -> A {
                total.$finish(self.0)
            }
        }
    };
}

operation!(Sum, add);
operation!(Product, multiply);
operation!(Min, minimum);
operation!(Max, maximum);
operation!(SumTimes, add, then multiply);
operation!(SumOver, add, then divide);

/// # Safety
///
/// As for [`reduce_with`], with elements of type `T`.
unsafe fn run<T: Widen<A>, A: Number, O: Operation<A>>(
    set: InstructionSet,
    operation: O,
    buffers: Buffers,
) {
    // SAFETY: the caller's promise, which includes that the CPU has `set`.
    unsafe {
        match set {
            InstructionSet::Baseline => run_here::<T, A, O>(operation, buffers),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => run_avx2::<T, A, O>(operation, buffers),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => run_avx512::<T, A, O>(operation, buffers),
        }
    }
}

/// # Safety
///
/// As for [`reduce`], with elements of type `T`, on a CPU with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn run_avx2<T: Widen<A>, A: Number, O: Operation<A>>(operation: O, buffers: Buffers) {
    // SAFETY: the caller's promise.
    unsafe { run_here::<T, A, O>(operation, buffers) }
}

/// # Safety
///
/// As for [`reduce`], with elements of type `T`, on a CPU with these parts of AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<T: Widen<A>, A: Number, O: Operation<A>>(operation: O, buffers: Buffers) {
    // SAFETY: the caller's promise.
    unsafe { run_here::<T, A, O>(operation, buffers) }
}

/// # Safety
///
/// As for [`reduce`], with elements of type `T`.
#[inline(always)]
unsafe fn run_here<T: Widen<A>, A: Number, O: Operation<A>>(operation: O, buffers: Buffers) {
    // SAFETY: the caller's promise; both calls together cover each element once.
    unsafe {
        if buffers.sums.is_empty() {
            let tiled = run_tiles::<T, A, O, TILE>(operation, buffers, 0);
            run_tiles::<T, A, O, 1>(operation, buffers, tiled);
        } else {
            let tiled = run_tree_tiles::<T, A, O, TILE>(operation, buffers, 0);
            run_tree_tiles::<T, A, O, 1>(operation, buffers, tiled);
        }
    }
}

/// Reduces from element `start` on in tiles of `N`, and returns where fewer than `N` elements are
/// left.
///
/// # Safety
///
/// As for [`reduce`], with elements of type `T`.
#[inline(always)]
unsafe fn run_tiles<T: Widen<A>, A: Number, O: Operation<A>, const N: usize>(
    operation: O,
    buffers: Buffers,
    mut start: usize,
) -> usize {
    let Some((first, others)) = buffers.sources.split_first() else { return buffers.count };
    while buffers.count - start >= N {
        // SAFETY: the tile lies within `count` elements. No destination, which may be the same
        // memory, is written before all of its sources were read.
        unsafe {
            let tile = |source: &*const u8| &*source.cast::<T>().add(start).cast::<[T; N]>();
            let mut accumulators: [A; N] = from_fn(|i| tile(first)[i].widen());
            for other in others {
                let other = tile(other);
                for (accumulator, &element) in accumulators.iter_mut().zip(other) {
                    *accumulator = operation.combine(*accumulator, element.widen());
                }
            }
            let result: [T; N] = from_fn(|i| T::narrow(operation.finish(accumulators[i])));
            for destination in buffers.destinations {
                destination.cast::<T>().add(start).cast::<[T; N]>().write(result);
            }
        }
        start += N;
    }
    start
}

/// Reduces as [`run_tiles`] does, in the order of the tree `buffers.sums`.
///
/// # Safety
///
/// As for [`reduce`], with elements of type `T`.
#[inline(always)]
unsafe fn run_tree_tiles<T: Widen<A>, A: Number, O: Operation<A>, const N: usize>(
    operation: O,
    buffers: Buffers,
    mut start: usize,
) -> usize {
    let Some(first) = buffers.sources.first() else { return buffers.count };
    if buffers.count - start < N {
        return start;
    }
    let load = |source: &*const u8, start: usize| -> [A; N] {
        // SAFETY: the caller's promise; the tile from `start` on lies within `count` elements.
        let tile = unsafe { &*source.cast::<T>().add(start).cast::<[T; N]>() };
        from_fn(|i| tile[i].widen())
    };
    let add = |sum: &mut [A; N], other: &[A; N]| {
        for (sum, &other) in sum.iter_mut().zip(other) {
            *sum = operation.combine(*sum, other);
        }
    };
    let mut waiting = [load(first, start); DEPTH];
    while buffers.count - start >= N {
        let mut count = 0;
        for (source, &sums) in buffers.sources.iter().zip(buffers.sums) {
            let tile = load(source, start);
            if sums == 0 {
                waiting[count] = tile;
                count += 1;
                continue;
            }
            add(&mut waiting[count - 1], &tile);
            for _ in 1..sums {
                count -= 1;
                let last = waiting[count];
                add(&mut waiting[count - 1], &last);
            }
        }
        let result: [T; N] = from_fn(|i| T::narrow(operation.finish(waiting[0][i])));
        for destination in buffers.destinations {
            // SAFETY: the caller's promise. No destination, which may be the same memory as a source,
            // is written before all sources were read.
            unsafe { destination.cast::<T>().add(start).cast::<[T; N]>().write(result) };
        }
        start += N;
    }
    start
}

#[cfg(test)]
mod tests;
