//! The tensors of a checkpoint of either kind, or of a safetensors file: what tools look into.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use flow_ddp::checkpoint::layout::{Described, is_of};
use flow_ddp::checkpoint::safetensors::{dtype, size};
use flow_ddp::checkpoint::saved::SavedTensors;
use flow_ddp::checkpoint::saved_file::SavedFile;
use flow_ddp::checkpoint::sums::{check_files, read_checked};
use flow_ddp::checkpoint::{CheckpointError, MODEL, OPTIMIZER, Result, STATE};

use super::contents::{Contents, INDEX};
use super::shards::Reader;
use crate::region::Region;

/// The most bytes of elements that are in memory at once.
const BLOCK: usize = 16 << 20;

/// A checkpoint, or a file.
pub struct Opened {
    /// The tensors, by `model.` or `optimizer.` and their name; by their name alone if it is a file.
    pub tensors: BTreeMap<String, Described>,
    source: Source,
}

enum Source {
    /// Files with whole tensors, and what their names begin with here.
    Files(Vec<(String, SavedTensors)>),
    /// A sharded checkpoint.
    Shards(PathBuf, Box<Contents>),
}

impl Opened {
    /// Opens the checkpoint in a folder, or a file.
    ///
    /// # Errors
    /// There is none, or its headers are damaged.
    pub fn new(path: &Path) -> Result<Self> {
        if path.join(INDEX).exists() {
            let contents = Contents::read(path)?;
            contents.check_files(path)?;
            let saved = contents.index.tensors.iter();
            let tensors = saved
                .map(|(name, saved)| (name.clone(), (saved.dtype.clone(), saved.shape.clone())));
            let tensors = tensors.collect();
            return Ok(Self { tensors, source: Source::Shards(path.into(), Box::new(contents)) });
        }
        let files = if path.is_dir() {
            vec![
                (format!("{MODEL}."), of_stem(path, MODEL)?),
                (format!("{OPTIMIZER}."), of_stem(path, OPTIMIZER)?),
            ]
        } else {
            vec![(String::new(), SavedTensors::open(vec![open(path)?])?)]
        };
        let mut tensors = BTreeMap::new();
        for (prefix, saved) in &files {
            for (name, tensor) in saved.iter() {
                let shape = tensor.shape.iter().map(|&size| size as usize).collect();
                let dtype = dtype(tensor.kind).unwrap_or_default().to_owned();
                tensors.insert(format!("{prefix}{name}"), (dtype, shape));
            }
        }
        Ok(Self { tensors, source: Source::Files(files) })
    }

    /// Returns blocks of at most 16 MiB that follow each other row-major, and are all of a tensor. Each
    /// has the number of its first element.
    pub fn blocks(&self, name: &str) -> Vec<(usize, Region)> {
        let Some((dtype, shape)) = self.tensors.get(name) else { return Vec::new() };
        let limit = BLOCK / size(dtype, &[]).unwrap_or(1);
        let mut start = 0;
        let mut all = Vec::new();
        for block in blocks(&Region::all(shape), limit) {
            let elements = block.elements();
            all.push((start, block));
            start += elements;
        }
        all
    }

    /// Reads such a block into `bytes`, which gets its length.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub fn read(
        &self,
        name: &str,
        (start, block): &(usize, Region),
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let element = self.tensors.get(name).and_then(|(dtype, _)| size(dtype, &[]));
        bytes.resize(block.elements() * element.unwrap_or(1), 0);
        match &self.source {
            Source::Files(files) => {
                let found = files.iter().find_map(|(prefix, saved)| {
                    let own = name.strip_prefix(&prefix[..])?;
                    saved.get(own).map(|_| (saved, own))
                });
                let Some((saved, own)) = found else {
                    return Err(CheckpointError::unfit("read", name, "there is no such tensor"));
                };
                saved.read(own, *start, bytes)
            }
            Source::Shards(path, contents) => {
                Reader::new(path, &contents.index, Vec::new()).read(name, block, bytes)
            }
        }
    }
}

/// Checks that the files of the checkpoint in a folder have the sums that they were written with.
///
/// # Errors
/// A file is missing or damaged, or cannot be read.
pub fn verify(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    if path.join(INDEX).exists() {
        let contents = Contents::read(path)?;
        contents.check_files(path)?;
        return check_files(path, &contents.sums);
    }
    read_checked(path).map(|_| ())
}

/// Opens the files of a checkpoint that have the tensors of `stem`.
fn of_stem(folder: &Path, stem: &str) -> Result<SavedTensors> {
    let remedy = "give the folder of one checkpoint, as checkpoints/step-100, or a file";
    let failed = |error| CheckpointError::file("read", folder.join(STATE), remedy)(error);
    std::fs::metadata(folder.join(STATE)).map_err(failed)?;
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if is_of(stem, &name) {
            files.push(open(&path)?);
        }
    }
    SavedTensors::open(files)
}

fn open(path: &Path) -> Result<SavedFile> {
    let remedy =
        "give a safetensors file, or the folder of one checkpoint, as checkpoints/step-100";
    let opened = File::open(path).and_then(|file| SavedFile::whole(path.to_owned(), file));
    opened.map_err(CheckpointError::file("read", path, remedy))
}

/// Cuts a region into blocks of at most so many elements, which follow each other row-major.
fn blocks(region: &Region, limit: usize) -> Vec<Region> {
    let dim = region.0.iter().position(|range| range.len() > 1);
    let Some(dim) = dim.filter(|_| region.elements() > limit) else { return vec![region.clone()] };
    let range = region.0[dim].clone();
    let rows = (limit / (region.elements() / range.len())).max(1);
    let mut all = Vec::new();
    for start in range.clone().step_by(rows) {
        let mut block = region.clone();
        block.0[dim] = start..range.end.min(start + rows);
        all.extend(blocks(&block, limit));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_region_in_order() {
        let elements = |region: &Region| -> Vec<usize> {
            let strides = [15, 5, 1];
            let dims = region.0.iter().zip(strides);
            dims.fold(vec![0], |all, (range, stride)| {
                all.iter().flat_map(|at| range.clone().map(move |i| at + i * stride)).collect()
            })
        };
        for limit in 1..=31 {
            let blocks = blocks(&Region::all(&[2, 3, 5]), limit);
            assert!(blocks.iter().all(|block| block.elements() <= limit));
            let all: Vec<usize> = blocks.iter().flat_map(elements).collect();
            assert_eq!(all, (0..30).collect::<Vec<_>>());
            assert!(blocks.len() <= 30usize.div_ceil(limit) * 3, "{limit}: {}", blocks.len());
        }
        assert_eq!(blocks(&Region::all(&[]), 1), [Region::all(&[])]);
        assert_eq!(blocks(&Region::all(&[4, 0]), 1), [Region::all(&[4, 0])]);
    }
}
