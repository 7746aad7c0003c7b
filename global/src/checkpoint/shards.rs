//! The files of a checkpoint's shards: each rank writes its own, and reads what it needs of all.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use flow_ddp::checkpoint::sums::Piece;
use flow_ddp::checkpoint::write::write as write_pieces;
use flow_ddp::checkpoint::{CheckpointError, Result};
use tch::{Device, Kind, TchError, Tensor};

use super::index::{Index, Saved};
use crate::placement::Placement;
use crate::region::{self, Region, regions};
use crate::sbp::NdSbp;
use flow_ddp::checkpoint::safetensors::{Header, dtype, size};

/// Bytes between two pieces that are read along with them: less than a disk reads at once.
const GAP: usize = 4096;
/// The longest read of several pieces.
const SPAN: usize = 1 << 20;

/// A tensor to be saved or loaded, and what this rank has of it.
pub struct Entry {
    pub name: String,
    pub kind: Kind,
    /// The logical sizes.
    pub shape: Vec<usize>,
    pub placement: Placement,
    /// The SBP, which is not partial on any axis.
    pub sbp: NdSbp,
    /// The local; None on ranks outside the placement.
    pub local: Option<Tensor>,
}

impl Entry {
    /// Returns how the checkpoint's index has it.
    ///
    /// # Errors
    /// It cannot be saved: says what to do.
    pub fn saved(&self) -> Result<Saved> {
        region::check(&self.placement, &self.sbp, &self.shape)?;
        let Some(dtype) = dtype(self.kind) else {
            let reason = format!("it is of kind {:?}, which safetensors does not have", self.kind);
            return Err(CheckpointError::unfit("save", &self.name, reason));
        };
        Ok(Saved::new(dtype, &self.shape, &self.placement, &self.sbp))
    }

    /// Returns this rank's region; None outside the placement.
    pub fn region(&self, rank: usize) -> Option<Region> {
        let position = self.placement.position(rank)?;
        Some(regions(&self.placement, &self.sbp, &self.shape).swap_remove(position))
    }
}

/// Returns the name of a rank's file.
pub fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// Writes this rank's file into `folder`, with what the index says that it saves, and flushes it to
/// the disk. Returns its pieces: none if there is nothing to write, and no file. One tensor is copied
/// at a time, and only if it is not contiguous on the CPU.
///
/// # Errors
/// The file cannot be written; libtorch cannot give a tensor's bytes.
pub fn write(folder: &Path, rank: usize, index: &Index, entries: &[Entry]) -> Result<Vec<Piece>> {
    let path = folder.join(file_name(rank));
    let mut own = HashMap::new();
    let mut named = Vec::new();
    for entry in entries {
        let saved = &index.tensors[&entry.name];
        let shard = saved.shards.iter().find(|shard| shard.rank == rank);
        let Some((shard, local)) = shard.zip(entry.local.as_ref()) else { continue };
        named.push((entry.name.clone(), &saved.dtype[..], &shard.shape[..]));
        own.insert(&entry.name, local);
    }
    if named.is_empty() {
        return Ok(Vec::new());
    }
    let header =
        Header::of(named).map_err(|reason| CheckpointError::unfit("save", "its file", reason))?;
    File::create_new(&path).map_err(failed_to_write(&path))?;
    let head = header.to_bytes().map_err(failed_to_write(&path))?;
    let pieces = write_pieces(folder, folder, &[file_name(rank)], |pieces| {
        pieces.add(0, 0, &head)?;
        for (name, info) in header.in_order() {
            let plain = plain(own[name]).map_err(|error| unfit(name, error))?;
            let bytes = flow_autograd::bytes(&plain).map_err(|error| unfit(name, error))?;
            if Some(bytes.len()) != size(&info.dtype, &info.shape) {
                let reason =
                    format!("this rank has {:?} of it, not {:?}", plain.size(), info.shape);
                return Err(unfit(name, reason));
            }
            pieces.add(0, head.len() as u64 + info.data_offsets.0, bytes)?;
        }
        Ok(())
    })?;
    Ok(pieces.into_iter().map(|(_, piece)| piece).collect())
}

/// Returns the tensor in memory of the CPU without gaps.
fn plain(tensor: &Tensor) -> std::result::Result<Tensor, TchError> {
    let plain = tensor.detach().f_to_device(Device::Cpu)?;
    flow_autograd::resolved(&plain).unwrap_or(plain).f_contiguous()
}

fn unfit(name: &str, reason: impl ToString) -> CheckpointError {
    CheckpointError::unfit("save", name, reason.to_string())
}

fn failed_to_write(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let remedy = "see that the disk has space, and that all machines share it";
    CheckpointError::file("write", path, remedy)
}

/// Reads tensors of a checkpoint from its files.
pub struct Reader<'a> {
    folder: &'a Path,
    index: &'a Index,
    /// Of the files that were read from, by rank.
    headers: HashMap<usize, (Header, u64)>,
}

impl<'a> Reader<'a> {
    /// Makes a reader of the checkpoint in `folder`, which has this index.
    pub fn new(folder: &'a Path, index: &'a Index) -> Self {
        Self { folder, index, headers: HashMap::new() }
    }

    /// Reads what `rank` has of a tensor into its local: one copy, and only if that is not
    /// contiguous on the CPU.
    ///
    /// # Errors
    /// As [`read`](Self::read); libtorch cannot write the local.
    pub fn load(&mut self, entry: &mut Entry, rank: usize) -> Result<()> {
        let region = entry.region(rank);
        let Some((region, local)) = region.zip(entry.local.as_mut()) else { return Ok(()) };
        if let Ok(bytes) = flow_autograd::bytes_mut(local) {
            return self.read(&entry.name, &region, bytes);
        }
        let shape: Vec<i64> = region.shape().iter().map(|&size| size as i64).collect();
        let mut read = Tensor::empty(&shape[..], (entry.kind, Device::Cpu));
        let bytes = flow_autograd::bytes_mut(&mut read)
            .map_err(|error| CheckpointError::unfit("load", &entry.name, error.to_string()))?;
        self.read(&entry.name, &region, bytes)?;
        tch::no_grad(|| local.f_copy_(&read))
            .map_err(|error| CheckpointError::unfit("load", &entry.name, error.to_string()))?;
        Ok(())
    }

    /// Reads a region of a tensor, row-major, into as many bytes as it has.
    ///
    /// # Errors
    /// The checkpoint does not have the tensor; a file is missing or damaged.
    pub fn read(&mut self, name: &str, region: &Region, bytes: &mut [u8]) -> Result<()> {
        let Some(saved) = self.index.tensors.get(name) else {
            return Err(CheckpointError::damaged(self.folder, format!("it has no {name}")));
        };
        for read in saved.reads(name, region)? {
            let path = self.folder.join(file_name(read.rank));
            let file = File::open(&path).map_err(failed_to_read(&path))?;
            let (header, start) = match self.headers.entry(read.rank) {
                std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::hash_map::Entry::Vacant(new) => {
                    new.insert(Header::read(&file).map_err(failed_to_read(&path))?)
                }
            };
            let shape = read.shard.shape();
            let found = header.tensors.get(name);
            let fitting = found.filter(|info| info.dtype == saved.dtype && info.shape == shape);
            let Some(info) = fitting else {
                let reason = format!("it has no {name} of {} {shape:?}", saved.dtype);
                return Err(CheckpointError::damaged(path, reason));
            };
            let base = *start + info.data_offsets.0;
            let element = size(&saved.dtype, &[]).unwrap_or_default();
            let pieces = Pieces::new(&read.region, &read.shard, region, element);
            read_pieces(&file, base, pieces, bytes).map_err(failed_to_read(&path))?;
        }
        Ok(())
    }
}

/// Makes the error of reading a file of a checkpoint.
fn failed_to_read(path: &PathBuf) -> impl FnOnce(io::Error) -> CheckpointError + '_ {
    move |error| match error.kind() {
        ErrorKind::UnexpectedEof => CheckpointError::damaged(path, "its end is missing"),
        ErrorKind::InvalidData => CheckpointError::damaged(path, error),
        _ => {
            let remedy = "see that all files of the checkpoint are there, for all machines";
            CheckpointError::file("read", path, remedy)(error)
        }
    }
}

/// The pieces of a part of two regions that are contiguous in both, in the order of the elements.
/// It has where each piece begins in each, in bytes.
struct Pieces {
    /// Of each dimension with several pieces: their number, and how far apart they are.
    dims: Vec<(usize, usize, usize)>,
    start: (usize, usize),
    /// The length of all.
    length: usize,
    range: std::ops::Range<usize>,
}

impl Pieces {
    fn new(part: &Region, from: &Region, to: &Region, element: usize) -> Self {
        let mut steps = (element, element);
        let mut length = element;
        let mut start = (0, 0);
        let mut dims = Vec::new();
        let mut is_contiguous = true;
        for (part, (from, to)) in part.0.iter().zip(from.0.iter().zip(&to.0)).rev() {
            start.0 += (part.start - from.start) * steps.0;
            start.1 += (part.start - to.start) * steps.1;
            if is_contiguous {
                length *= part.len()
            } else {
                dims.push((part.len(), steps.0, steps.1))
            }
            is_contiguous &= part == from && part == to;
            steps.0 *= from.len();
            steps.1 *= to.len();
        }
        let range = 0..dims.iter().map(|(count, ..)| count).product();
        Self { dims, start, length, range }
    }
}

impl Iterator for Pieces {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let mut rest = self.range.next()?;
        let (mut from, mut to) = self.start;
        // The innermost dimension first.
        for (count, from_step, to_step) in &self.dims {
            from += rest % count * from_step;
            to += rest % count * to_step;
            rest /= count;
        }
        Some((from, to))
    }
}

/// Copies pieces from the file, where the first byte of all is at `base`, into `bytes`.
fn read_pieces(file: &File, base: u64, pieces: Pieces, bytes: &mut [u8]) -> io::Result<()> {
    let length = pieces.length;
    let mut pieces = pieces.peekable();
    let mut near = Vec::new();
    let mut span = Vec::new();
    while let Some((start, to)) = pieces.next() {
        let mut end = start + length;
        near.clear();
        while let Some(next) =
            pieces.next_if(|(from, _)| from - end <= GAP && from + length - start <= SPAN)
        {
            end = next.0 + length;
            near.push(next);
        }
        if near.is_empty() {
            file.read_exact_at(&mut bytes[to..to + length], base + start as u64)?;
            continue;
        }
        span.resize(end - start, 0);
        file.read_exact_at(&mut span, base + start as u64)?;
        for (from, to) in std::iter::once((start, to)).chain(near.iter().copied()) {
            bytes[to..to + length].copy_from_slice(&span[from - start..][..length]);
        }
    }
    Ok(())
}
