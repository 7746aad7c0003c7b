//! Adding up memory of several ranks: all at once, or in each node and then between nodes.

use std::ops::Range;

use flow_kernels::{DType, ReduceOp};

use crate::descriptor::OpDescriptor;

/// Reduces `count` elements at all of `from`, one for each rank, to all of `to`.
///
/// # Safety
///
/// All addresses are aligned and hold `count` elements. Nobody else writes the sources or uses the
/// destinations, each of which is one of the sources or apart from all.
pub unsafe fn reduce_all(
    operation: &OpDescriptor,
    from: &[*const u8],
    to: &[*mut u8],
    count: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { flow_kernels::reduce(operation.dtype, operation.reduce, from, to, count) }
}

/// Reduces as [`reduce_all`] does, over the members on one node of a group of `size` ranks.
///
/// # Safety
///
/// As for [`reduce_all`].
pub unsafe fn reduce_on_node(
    operation: &OpDescriptor,
    from: &[*const u8],
    to: &[*mut u8],
    count: usize,
    size: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { reduce_part(operation, from, to, count, size, is_divided_first(operation)) }
}

/// Reduces as [`reduce_all`] does, over the results of [`reduce_on_node`] on all nodes of a group
/// of `size` ranks.
///
/// # Safety
///
/// As for [`reduce_all`].
pub unsafe fn reduce_nodes(
    operation: &OpDescriptor,
    from: &[*const u8],
    to: &[*mut u8],
    count: usize,
    size: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { reduce_part(operation, from, to, count, size, !is_divided_first(operation)) }
}

/// Adds up as [`reduce_all`] does, in the order of a tree: see [`VirtualRanks::sums`](crate::VirtualRanks::sums).
/// An average is over so many `virtual_ranks`, if that is given; otherwise this is a sum.
///
/// # Safety
///
/// As for [`reduce_all`].
pub unsafe fn sum_in_tree(
    operation: &OpDescriptor,
    sums: &[usize],
    from: &[*const u8],
    to: &[*mut u8],
    count: usize,
    virtual_ranks: Option<usize>,
) {
    let over = virtual_ranks.filter(|_| operation.reduce == ReduceOp::Avg);
    // SAFETY: the caller's promise.
    unsafe { flow_kernels::sum_in_tree(operation.dtype, sums, from, to, count, over) }
}

/// # Safety
///
/// As for [`reduce_all`].
unsafe fn reduce_part(
    operation: &OpDescriptor,
    from: &[*const u8],
    to: &[*mut u8],
    count: usize,
    size: usize,
    divides: bool,
) {
    let dtype = operation.dtype;
    // SAFETY: the caller's promise.
    unsafe {
        match operation.reduce {
            ReduceOp::Avg if divides => flow_kernels::average(dtype, from, to, count, size),
            ReduceOp::Avg => flow_kernels::reduce(dtype, ReduceOp::Sum, from, to, count),
            reduce => flow_kernels::reduce(dtype, reduce, from, to, count),
        }
    }
}

/// Whether the operation is a mean of integers. It is exact, so it is not computed from the sums of
/// nodes, which may not fit the type.
pub fn is_mean_of_integers(operation: &OpDescriptor) -> bool {
    operation.reduce == ReduceOp::Avg
        && matches!(operation.dtype, DType::I32 | DType::I64 | DType::U8)
}

/// Whether an average is divided in each node, before the sum between nodes: a sum of
/// half-precision numbers might overflow.
pub fn is_divided_first(operation: &OpDescriptor) -> bool {
    operation.reduce == ReduceOp::Avg && matches!(operation.dtype, DType::F16 | DType::BF16)
}

/// Returns rank `rank`'s part of `count` elements: all parts but the last are whole cache lines.
pub fn slice(count: usize, ranks: usize, rank: usize, element: usize) -> Range<usize> {
    let line = (64 / element).max(1);
    let each = count.div_ceil(ranks).next_multiple_of(line);
    (rank * each).min(count)..((rank + 1) * each).min(count)
}

#[cfg(test)]
mod tests {
    use super::slice;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_cover_everything_once(
            count in 0usize..100_000,
            ranks in 1usize..40,
            element in prop::sample::select(vec![1usize, 2, 4, 8]),
        ) {
            let mut end = 0;
            for rank in 0..ranks {
                let part = slice(count, ranks, rank, element);
                prop_assert_eq!(part.start, end);
                end = part.end;
            }
            prop_assert_eq!(end, count);
        }
    }
}
