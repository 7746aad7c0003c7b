//! A tensor of numbers that lies in any way, on plain vectors.

pub mod models;
pub mod pytorch;
pub mod ranks;
pub mod tape;

use flow_global::boxing::plan::TensorLayout;
use flow_global::region::{Region, regions};
use flow_global::{B, P, S, Sbp};

/// A rank's part of a tensor, row-major.
pub type Local = Vec<i64>;

/// The indices of a region's elements in a tensor of this shape.
pub fn indices(region: &Region, shape: &[usize]) -> Vec<usize> {
    let dims = region.0.iter().zip(shape);
    dims.fold(vec![0], |indices, (range, &size)| {
        indices.iter().flat_map(|index| range.clone().map(move |at| index * size + at)).collect()
    })
}

/// Terms, or parts, of the tensor 1, 2, 3...
pub fn scatter(shape: &[usize], layout: TensorLayout) -> Vec<Local> {
    let parts = regions(layout.placement, layout.sbp, shape);
    let terms = |position: usize| -> usize {
        let coordinates = layout.placement.coordinates(position);
        let axes = layout.sbp.iter().zip(coordinates).zip(layout.placement.shape());
        axes.filter(|((sbp, _), _)| sbp.is_partial())
            .fold(0, |term, ((_, at), extent)| term * extent + at)
    };
    let count: usize = layout
        .sbp
        .iter()
        .zip(layout.placement.shape())
        .filter(|(sbp, _)| sbp.is_partial())
        .map(|(_, extent)| extent)
        .product();
    let value = |index: usize, term: usize| {
        let noise = |term: usize| ((index * 7 + term * 13) % 101) as i64;
        // All terms add up to index + 1.
        if term + 1 == count {
            index as i64 + 1 - (0..term).map(noise).sum::<i64>()
        } else {
            noise(term)
        }
    };
    parts
        .iter()
        .enumerate()
        .map(|(position, part)| {
            indices(part, shape).into_iter().map(|index| value(index, terms(position))).collect()
        })
        .collect()
}

/// The tensor that locals are.
pub fn gather(shape: &[usize], layout: TensorLayout, locals: &[Local]) -> Vec<i64> {
    let mut sum = vec![0; shape.iter().product()];
    let parts = regions(layout.placement, layout.sbp, shape);
    for (position, (part, local)) in parts.iter().zip(locals).enumerate() {
        let coordinates = layout.placement.coordinates(position);
        // Of ranks that have the same, the first counts; the others must agree.
        let mut first = coordinates.clone();
        layout.sbp.iter().zip(&mut first).filter(|(sbp, _)| **sbp == B).for_each(|(_, at)| *at = 0);
        if first == coordinates {
            indices(part, shape)
                .into_iter()
                .zip(local)
                .for_each(|(index, value)| sum[index] += value);
        } else {
            assert_eq!(local, &locals[layout.placement.position_at(&first)], "copies differ");
        }
    }
    sum
}

/// Every SBP of so many axes for a tensor of so many dimensions.
pub fn sbps(axes: usize, dims: usize) -> Vec<Vec<Sbp>> {
    let one: Vec<Sbp> = (0..dims).map(S).chain([B, P]).collect();
    (0..axes).fold(vec![vec![]], |all, _| {
        all.iter()
            .flat_map(|sbp: &Vec<Sbp>| one.iter().map(move |&last| [&sbp[..], &[last]].concat()))
            .collect()
    })
}
