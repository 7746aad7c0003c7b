//! One plain safetensors file of a sharded checkpoint.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use flow_ddp::checkpoint::{CheckpointError, Result, files};

use super::contents::{Contents, MODEL};
use super::safetensors::{Header, size};
use super::shards::Reader;
use crate::region::Region;

/// The most bytes of elements that are in memory at once.
const BLOCK: usize = 16 << 20;

/// Writes the model of the checkpoint in the folder `checkpoint` to the file `out`, whole or not at
/// all, with the names of its variables: PyTorch's `safetensors` and tch's
/// `VarStore::load` read it. The model need not fit into memory.
///
/// # Errors
/// A file of the checkpoint is missing or damaged; `out` cannot be written.
pub fn merge(checkpoint: impl AsRef<Path>, out: impl AsRef<Path>) -> Result<()> {
    let checkpoint = checkpoint.as_ref();
    let out = out.as_ref();
    let contents = Contents::read(checkpoint)?;
    contents.check_files(checkpoint)?;
    files::write_whole(out, |partial| write(&contents, checkpoint, partial, out))
}

fn write(contents: &Contents, checkpoint: &Path, partial: &Path, out: &Path) -> Result<()> {
    let mut file = File::create(partial).map_err(CheckpointError::write(out))?;
    let tensors = contents.index.tensors.iter();
    let named = tensors.filter_map(|(name, saved)| {
        Some((name.strip_prefix(MODEL)?.to_owned(), &saved.dtype[..], &saved.shape[..]))
    });
    let header = Header::of(named);
    let mut header = header.map_err(|reason| CheckpointError::damaged(checkpoint, reason))?;
    // Some of PyTorch's users ask for it.
    header.metadata.insert("format".into(), "pt".into());
    let head = header.to_bytes().map_err(CheckpointError::write(out))?;
    file.write_all(&head).map_err(CheckpointError::write(out))?;
    let mut reader = Reader::new(checkpoint, &contents.index);
    let mut bytes = Vec::new();
    for (name, info) in header.in_order() {
        let element = size(&info.dtype, &[]).unwrap_or_default();
        for block in blocks(&Region::all(&info.shape), BLOCK / element.max(1)) {
            bytes.resize(block.elements() * element, 0);
            reader.read(&format!("{MODEL}{name}"), &block, &mut bytes)?;
            file.write_all(&bytes).map_err(CheckpointError::write(out))?;
        }
    }
    Ok(())
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
