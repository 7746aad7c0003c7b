//! How a tensor's elements lie in memory.

use tch::Tensor;

/// Said of a tensor that [`overlaps`].
pub(crate) const OVERLAPS: &str = "has elements that share memory, as expand() makes them: use contiguous()";

/// Whether several of the tensor's elements may lie in the same place, so that it cannot be written to.
pub(crate) fn overlaps(tensor: &Tensor) -> bool {
    !tensor.is_contiguous() && may_overlap(&tensor.size(), &tensor.stride())
}

/// Whether a step along some dimension stays within what the dimensions of smaller steps reach.
fn may_overlap(shape: &[i64], strides: &[i64]) -> bool {
    let mut steps: Vec<(i64, i64)> =
        strides.iter().zip(shape).filter(|(_, &length)| length != 1).map(|(&s, &l)| (s, l)).collect();
    steps.sort_unstable();
    let mut reach = 0;
    let overlaps = |&(stride, length): &(i64, i64)| {
        let within = stride <= reach;
        reach += stride * (length - 1);
        within
    };
    !shape.contains(&0) && steps.iter().any(overlaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_that_share_memory_are_found() {
        let cases: [(&[i64], &[i64], bool); 9] = [
            (&[], &[], false),
            (&[2, 3], &[3, 1], false),
            (&[3, 2], &[1, 3], false),
            (&[2, 3], &[8, 2], false), // with gaps
            (&[4, 1], &[1, 0], false), // one step of no width is none
            (&[0, 3], &[0, 0], false), // nothing at all
            (&[3], &[0], true),
            (&[2, 3], &[0, 1], true),
            (&[3, 2], &[1, 1], true), // windows that overlap
        ];
        for (shape, strides, expected) in cases {
            assert_eq!(may_overlap(shape, strides), expected, "{shape:?} {strides:?}");
        }
    }
}
