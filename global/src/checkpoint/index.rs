//! The index of a sharded checkpoint: which file has which region of which tensor. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use flow_comm::digest;
use flow_ddp::checkpoint::safetensors;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::region::{Region, regions, replica};
use crate::sbp::Sbp;

/// Each of the ranks that have the same part of a tensor saves so many bytes of it at least, or none.
const LEAST: usize = 1 << 20;

/// All tensors of a checkpoint, by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// The tensors.
    pub tensors: BTreeMap<String, Saved>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, Hash, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The type's name in safetensors: `F32`, `BF16`, ...
    pub dtype: String,
    /// The logical sizes.
    pub shape: Vec<usize>,
    /// Disjoint regions that are all of it.
    pub shards: Vec<Shard>,
}

/// A part of a tensor, which a file has under the tensor's name.
#[derive(Clone, Debug, Hash, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// The rank that has saved it: its file.
    pub rank: usize,
    /// The index at which it begins, for each dimension.
    pub start: Vec<usize>,
    /// Its sizes.
    pub shape: Vec<usize>,
}

impl Index {
    /// Checks that the shards are in their tensors, and together as large.
    ///
    /// # Errors
    /// What is wrong: the index is damaged, or of a later version.
    pub fn check(&self) -> std::result::Result<(), String> {
        for (name, saved) in &self.tensors {
            if safetensors::size(&saved.dtype, &saved.shape).is_none() {
                let dtype = &saved.dtype;
                let shape = &saved.shape;
                return Err(format!("{name} cannot be of type {dtype} and shape {shape:?}"));
            }
            let elements: usize = saved.shape.iter().product();
            if !saved.shards.iter().all(|shard| shard.is_inside(&saved.shape))
                || saved.shards.iter().map(Shard::elements).sum::<usize>() != elements
            {
                return Err(format!("the shards of {name} are not all of it"));
            }
        }
        Ok(())
    }
}

impl Shard {
    /// Returns whether it lies in a tensor of this shape.
    fn is_inside(&self, shape: &[usize]) -> bool {
        let mut bounds = self.start.iter().zip(&self.shape).zip(shape);
        self.start.len() == shape.len()
            && self.shape.len() == shape.len()
            && bounds.all(|((&start, &size), &all)| {
                start.checked_add(size).is_some_and(|end| end <= all)
            })
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the part of the tensor that it is.
    pub fn region(&self) -> Region {
        let bounds = self.start.iter().zip(&self.shape);
        Region(bounds.map(|(&start, &size)| start..start + size).collect())
    }
}

/// A read of a part of a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Read {
    /// The rank whose file it is in.
    pub rank: usize,
    /// The region of the shard.
    pub shard: Region,
    /// The part of the tensor that is needed.
    pub region: Region,
}

impl Saved {
    /// Describes a tensor of this layout: ranks that have the same save a share each, or, of a small one,
    /// one of them saves all: another one for other names. Partial values are to be reduced before.
    pub fn new(
        name: &str,
        dtype: &str,
        shape: &[usize],
        placement: &Placement,
        sbp: &[Sbp],
    ) -> Self {
        let element = safetensors::size(dtype, &[]).unwrap_or(1);
        let mut saved = Self { dtype: dtype.into(), shape: shape.to_vec(), shards: Vec::new() };
        for (position, region) in regions(placement, sbp, shape).into_iter().enumerate() {
            let (number, count) = replica(placement, sbp, position);
            let first = digest(name) as usize % count;
            let shares = (region.elements() * element / LEAST).clamp(1, count);
            let index = (number + count - first) % count;
            if index < shares {
                saved.add(placement.ranks()[position], &share(&region, shares, index));
            }
        }
        saved
    }

    /// Describes a tensor that rank 0 saves, whatever others have.
    pub fn by_rank_0(dtype: &str, shape: &[usize]) -> Self {
        let mut saved = Self { dtype: dtype.into(), shape: shape.to_vec(), shards: Vec::new() };
        saved.add(0, &Region::all(shape));
        saved
    }

    /// Adds what a rank saves.
    fn add(&mut self, rank: usize, region: &Region) {
        if region.elements() > 0 {
            let start = region.0.iter().map(|range| range.start).collect();
            self.shards.push(Shard { rank, start, shape: region.shape() });
        }
    }

    /// Returns the reads that make a region of the tensor.
    ///
    /// # Errors
    /// The shards do not have all of it: files of ranks are missing, or the index is damaged.
    pub fn reads(&self, name: &str, region: &Region) -> Result<Vec<Read>> {
        let mut reads = Vec::new();
        for shard in &self.shards {
            let held = shard.region();
            if let Some(region) = held.intersection(region) {
                reads.push(Read { rank: shard.rank, shard: held, region });
            }
        }
        let found: usize = reads.iter().map(|read| read.region.elements()).sum();
        if found == region.elements() {
            Ok(reads)
        } else {
            Err(Error::Shards { name: name.into(), found, needed: region.elements() })
        }
    }
}

/// Returns share `index` of a region: along the first dimension that can be divided almost equally, or else
/// the first of the longest. Along the first of all a share lies in one piece, and is copied once.
fn share(region: &Region, shares: usize, index: usize) -> Region {
    let shape = region.shape();
    let is_equal = |&size: &usize| size % shares == 0 || size >= 64 * shares;
    let longest = (0..shape.len()).max_by_key(|&dim| (shape[dim], Reverse(dim)));
    match shape.iter().position(is_equal).or(longest) {
        Some(dim) => region.part(dim, shares, index),
        None => region.clone(), // of one element, which nobody shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sbp::{B, S};

    fn layouts() -> Vec<(Placement, Vec<Sbp>)> {
        let line = Placement::of([2, 0, 1]).unwrap();
        let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
        let sbps = [B, S(0), S(1)];
        let pairs = sbps.iter().flat_map(|&one| sbps.map(move |other| vec![one, other]));
        let on_mesh = pairs.map(|sbp| (mesh.clone(), sbp));
        sbps.iter().map(|&sbp| (line.clone(), vec![sbp])).chain(on_mesh).collect()
    }

    /// Saved under one layout and read under another: every element comes once.
    #[test]
    fn every_element_is_read_once() {
        for shape in [[4, 6], [5, 3], [2, 1], [0, 4]] {
            for (saved_on, saved_as) in layouts() {
                let saved = Saved::new("w", "F32", &shape, &saved_on, &saved_as);
                let total: usize =
                    saved.shards.iter().map(|s| s.shape.iter().product::<usize>()).sum();
                assert_eq!(total, shape.iter().product::<usize>(), "{saved_as:?}: saved once");
                for (placement, sbp) in layouts() {
                    for region in regions(&placement, &sbp, &shape) {
                        let reads = saved.reads("w", &region).unwrap();
                        let mut seen: Vec<(usize, usize)> = reads
                            .iter()
                            .flat_map(|read| {
                                let columns = read.region.0[1].clone();
                                read.region.0[0]
                                    .clone()
                                    .flat_map(move |i| columns.clone().map(move |j| (i, j)))
                            })
                            .collect();
                        seen.sort_unstable();
                        let columns = region.0[1].clone();
                        let expected: Vec<_> = region.0[0]
                            .clone()
                            .flat_map(|i| columns.clone().map(move |j| (i, j)))
                            .collect();
                        assert_eq!(seen, expected);
                    }
                }
            }
        }
    }

    /// What ranks have in common they write together: all of it once, and nobody much more than another.
    #[test]
    fn what_replicas_have_is_shared() {
        for count in 1..=7 {
            let ranks = Placement::of((0..count).collect::<Vec<_>>()).unwrap();
            for shape in [&[][..], &[0, 9], &[1], &[1, 5], &[700, 3001], &[3, 1 << 21], &[8 << 20]]
            {
                let saved = Saved::new("w", "F32", shape, &ranks, &[B]);
                let elements: Vec<_> = saved.shards.iter().map(Shard::elements).collect();
                let all: usize = shape.iter().product();
                assert_eq!(elements.iter().sum::<usize>(), all, "{shape:?} on {count}");
                let one = Index { tensors: [("w".to_owned(), saved.clone())].into() };
                one.check().unwrap();
                let mut writers: Vec<_> = saved.shards.iter().map(|shard| shard.rank).collect();
                writers.sort_unstable();
                writers.dedup();
                assert_eq!(writers.len(), elements.len(), "a rank has one shard of a tensor");
                let shares = if all == 0 { 0 } else { (4 * all / LEAST).clamp(1, count) };
                assert_eq!(elements.len(), shares, "{shape:?} on {count}");
                if let (Some(least), Some(most)) = (elements.iter().min(), elements.iter().max()) {
                    assert!(most * 100 <= least * 102, "{shape:?}: {elements:?}");
                }
            }
        }
        // Small tensors are not all one rank's.
        let ranks = Placement::of([0, 1, 2, 3]).unwrap();
        let mut counts = [0; 4];
        for number in 0..400 {
            let saved = Saved::new(&format!("layer{number}.bias"), "F32", &[16], &ranks, &[B]);
            counts[saved.shards[0].rank] += 1;
        }
        assert!(counts.iter().all(|&count| count > 50), "{counts:?}");
    }

    #[test]
    fn of_equal_dimensions_the_first_is_shared() {
        for (shape, shared) in [([3, 3], 0), ([5, 3], 0), ([3, 5], 1)] {
            let whole = Region::all(&shape);
            let share = share(&whole, 2, 0);
            let is_whole = [0, 1].map(|dim| share.0[dim] == whole.0[dim]);
            assert_eq!(is_whole, [shared != 0, shared != 1], "{shape:?}");
        }
    }

    #[test]
    fn a_missing_shard_is_an_error() {
        let line = Placement::of([0, 1]).unwrap();
        let mut saved = Saved::new("w", "F32", &[4, 2], &line, &[S(0)]);
        saved.shards.pop();
        let error = saved.reads("layer.weight", &Region::all(&[4, 2])).unwrap_err().to_string();
        let expected =
            "the checkpoint has 4 of 8 elements of layer.weight; are files of ranks missing?";
        assert_eq!(error, expected);
        assert_eq!(saved.reads("layer.weight", &Region(vec![0..2, 0..2])).unwrap().len(), 1);
    }

    #[test]
    fn the_index_is_json() {
        let line = Placement::of([0, 1]).unwrap();
        let saved = Saved::new("b", "F32", &[3], &line, &[S(0)]);
        let index = Index { tensors: [("b".to_owned(), saved)].into() };
        let text = serde_json::to_string(&index).unwrap();
        assert!(
            text.contains(
                r#""b":{"dtype":"F32","shape":[3],"shards":[{"rank":0,"start":[0],"shape":[2]}"#
            ),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Index>(&text).unwrap(), index);
    }
}
