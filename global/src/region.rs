//! Regions: the part of a logical tensor that a rank has.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::sbp::Sbp;

/// A part of a tensor: a range of each dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region(pub Vec<Range<usize>>);

impl Region {
    /// Returns all of a tensor of this shape.
    pub fn all(shape: &[usize]) -> Self {
        Self(shape.iter().map(|&size| 0..size).collect())
    }

    /// Returns the sizes of its dimensions.
    pub fn shape(&self) -> Vec<usize> {
        self.0.iter().map(ExactSizeIterator::len).collect()
    }

    /// Returns the number of elements; a tensor without dimensions has one.
    pub fn elements(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).product()
    }

    /// Returns the part that both regions have; None if there is none.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let both = self.0.iter().zip(&other.0).map(|(one, other)| {
            let both = one.start.max(other.start)..one.end.min(other.end);
            (!both.is_empty()).then_some(both)
        });
        Some(Self(both.collect::<Option<_>>()?))
    }

    /// Returns part `index` of `parts` along a dimension.
    pub fn part(&self, dim: usize, parts: usize, index: usize) -> Self {
        let mut region = self.clone();
        let range = &self.0[dim];
        let part = part(range.len(), parts, index);
        region.0[dim] = range.start + part.start..range.start + part.end;
        region
    }
}

/// Returns whether a position is the first of those that have the same region: it answers for that.
pub fn is_first(placement: &Placement, sbp: &[Sbp], position: usize) -> bool {
    sbp.iter()
        .zip(placement.coordinates(position))
        .all(|(&sbp, at)| sbp != Sbp::Broadcast || at == 0)
}

/// Returns which of the positions that have the same region a position is, and how many they are.
pub fn replica(placement: &Placement, sbp: &[Sbp], position: usize) -> (usize, usize) {
    let mut number = 0;
    let mut count = 1;
    let coordinates = placement.coordinates(position);
    for ((&sbp, &extent), at) in sbp.iter().zip(placement.shape()).zip(coordinates) {
        if sbp == Sbp::Broadcast {
            number = number * extent + at;
            count *= extent;
        }
    }
    (number, count)
}

/// Returns part `index` of `parts` of `total` elements: the first `total % parts` have one more, as
/// OneFlow's BalancedSplitter and torch's `tensor_split` cut.
pub fn part(total: usize, parts: usize, index: usize) -> Range<usize> {
    let each = total / parts;
    let rest = total % parts;
    let start = index * each + index.min(rest);
    start..start + each + usize::from(index < rest)
}

/// Converts libtorch's sizes to `usize`.
pub fn shape(sizes: &[i64]) -> Vec<usize> {
    sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect()
}

/// Checks that there is an SBP for each axis of a placement, and a dimension for each split.
///
/// # Errors
/// What is missing.
pub fn check(placement: &Placement, sbp: &[Sbp], shape: &[usize]) -> Result<()> {
    if sbp.len() != placement.axes() {
        return Err(Error::Axes {
            placement: placement.to_string(),
            axes: placement.axes(),
            given: sbp.len(),
            sbp: sbp.to_vec(),
        });
    }
    match sbp.iter().filter_map(|sbp| sbp.dim()).find(|&dim| dim >= shape.len()) {
        Some(dim) => Err(Error::Dimension { dim, shape: shape.to_vec() }),
        None => Ok(()),
    }
}

/// Returns the region that each position of a placement has of a tensor of this shape. Axes split
/// one after the other, each what the one before has left.
pub fn regions(placement: &Placement, sbp: &[Sbp], shape: &[usize]) -> Vec<Region> {
    (0..placement.ranks().len())
        .map(|position| {
            let coordinates = placement.coordinates(position);
            let axes = sbp.iter().zip(placement.shape()).zip(coordinates);
            axes.fold(Region::all(shape), |region, ((sbp, &extent), index)| match sbp.dim() {
                Some(dim) => region.part(dim, extent, index),
                None => region,
            })
        })
        .collect()
}

/// Returns whether regions follow each other as the rows of a whole.
pub fn are_rows(parts: &[Option<Region>], whole: &Region) -> bool {
    let Some((rows, others)) = whole.0.split_first() else { return false };
    let end = parts.iter().flatten().try_fold(rows.start, |start, part| {
        (part.0[0].start == start && part.0[1..] == *others).then_some(part.0[0].end)
    });
    end == Some(rows.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sbp::{B, P, S};

    #[test]
    fn parts_are_balanced() {
        let parts =
            |total, count| -> Vec<_> { (0..count).map(|i| part(total, count, i)).collect() };
        assert_eq!(parts(20, 6), [0..4, 4..8, 8..11, 11..14, 14..17, 17..20]);
        assert_eq!(parts(2, 3), [0..1, 1..2, 2..2]);
        assert_eq!(parts(0, 2), [0..0, 0..0]);
    }

    #[test]
    fn axes_split_what_the_axes_before_have_left() {
        let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
        let shapes = |sbp: &[Sbp], shape: &[usize]| -> Vec<_> {
            regions(&mesh, sbp, shape).iter().map(Region::shape).collect()
        };
        assert_eq!(shapes(&[S(0), S(0)], &[25, 2]), [[7, 2], [6, 2], [6, 2], [6, 2]]);
        assert_eq!(shapes(&[S(0), S(1)], &[3, 3]), [[2, 2], [2, 1], [1, 2], [1, 1]]);
        assert_eq!(shapes(&[P, B], &[3, 3]), [[3, 3]; 4]);
        assert_eq!(shapes(&[B, B], &[]), vec![Vec::<usize>::new(); 4]);
    }

    #[test]
    fn sbps_that_do_not_fit_are_errors() {
        let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
        let error = check(&mesh, &[B], &[4]).unwrap_err().to_string();
        let expected = "the placement [[0, 1], [2, 3]] has 2 axes, but 1 SBPs are given: [B]";
        assert_eq!(error, expected);
        let error = check(&mesh, &[B, S(2)], &[4, 5]).unwrap_err().to_string();
        assert_eq!(error, "S(2) needs a dimension 2, but the tensor has the shape [4, 5]");
        check(&mesh, &[S(1), P], &[4, 5]).unwrap();
    }
}
