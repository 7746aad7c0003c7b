//! The files of a checkpoint's shards: each rank writes its own, and reads what it needs of all.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use flow_ddp::checkpoint::layout::TensorFile;
use flow_ddp::checkpoint::parts::Part;
use flow_ddp::checkpoint::plan::Plan;
use flow_ddp::checkpoint::saved_file::SavedFile;
use flow_ddp::checkpoint::{CheckpointError, Result};
use tch::{Device, Kind, Tensor};

use super::index::{Index, Saved, Shard};
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
    /// Whether it is a plain tensor. Ranks may have others, and rank 0's is saved.
    pub is_plain: bool,
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
        if self.is_plain {
            return Ok(Saved::by_rank_0(dtype, &self.shape));
        }
        Ok(Saved::new(&self.name, dtype, &self.shape, &self.placement, &self.sbp))
    }

    /// Returns the shard of this rank as what it writes; None outside the placement.
    fn part(&self, shard: &Shard, rank: usize) -> Result<Option<Part>> {
        let Some((region, local)) = self.region(rank).zip(self.local.as_ref()) else {
            return Ok(None);
        };
        let unfit = |reason: String| CheckpointError::unfit("save", &self.name, reason);
        let size = local.size();
        let shape = region.shape();
        if region::shape(&size) != shape {
            return Err(unfit(format!("this rank has {size:?} of it, not {shape:?}")));
        }
        let mut own = local.detach();
        for (dim, (range, all)) in shard.region().0.iter().zip(&region.0).enumerate() {
            let start = (range.start - all.start) as i64;
            own = own
                .f_narrow(dim as i64, start, range.len() as i64)
                .map_err(|error| unfit(error.to_string()))?;
        }
        let size = own.size();
        Part::new(&self.name, &size, 0, own).map(Some).map_err(unfit)
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

/// Adds all ranks' files to the plan, and to this rank's what the index says that it saves. There is no file of a rank
/// that saves nothing.
///
/// # Errors
/// libtorch cannot give a tensor's bytes.
pub fn add_files(plan: &mut Plan, rank: usize, index: &Index, entries: &[Entry]) -> Result<()> {
    let shards = index.tensors.values().flat_map(|saved| &saved.shards);
    let writers: BTreeSet<usize> = shards.map(|shard| shard.rank).collect();
    for writer in writers {
        if writer == rank {
            add_own_file(plan, rank, index, entries)?;
        } else {
            plan.add(file_name(writer), Vec::new());
        }
    }
    Ok(())
}

fn add_own_file(plan: &mut Plan, rank: usize, index: &Index, entries: &[Entry]) -> Result<()> {
    let mut named = Vec::new();
    let mut parts = Vec::new();
    for entry in entries {
        let saved = &index.tensors[&entry.name];
        let Some(shard) = saved.shards.iter().find(|shard| shard.rank == rank) else { continue };
        let Some(part) = entry.part(shard, rank)? else { continue };
        named.push((entry.name.clone(), &saved.dtype[..], &shard.shape[..]));
        parts.push(part);
    }
    let unfit = |reason: String| CheckpointError::unfit("save", "its file", reason);
    let header = Header::of(named).map_err(unfit)?;
    let head = header.to_bytes().map_err(|error| unfit(error.to_string()))?;
    plan.add_tensors("rank", &[TensorFile { name: file_name(rank), header, head }], parts);
    Ok(())
}

/// Returns the names of the files that have what `rank` has of the entries.
///
/// # Errors
/// The checkpoint does not have all of it.
pub fn needed_files(index: &Index, entries: &[Entry], rank: usize) -> Result<BTreeSet<String>> {
    let mut needed = BTreeSet::new();
    for entry in entries {
        let Some((region, saved)) = entry.region(rank).zip(index.tensors.get(&entry.name)) else {
            continue;
        };
        needed.extend(saved.reads(&entry.name, &region)?.iter().map(|read| file_name(read.rank)));
    }
    Ok(needed)
}

/// Reads tensors of a checkpoint from its files.
pub struct Reader<'a> {
    path: &'a Path,
    index: &'a Index,
    /// The files that are in memory. Those of a folder are open while they are read from: there may be very many.
    in_memory: HashMap<PathBuf, SavedFile>,
    /// Of the files that were read from, by rank.
    headers: HashMap<usize, (Header, u64)>,
}

impl<'a> Reader<'a> {
    /// Makes a reader of the checkpoint `path`, which has this index, and these files in memory.
    pub fn new(path: &'a Path, index: &'a Index, in_memory: Vec<SavedFile>) -> Self {
        let in_memory = in_memory.into_iter().map(|file| (file.path.clone(), file)).collect();
        Self { path, index, in_memory, headers: HashMap::new() }
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
            return Err(CheckpointError::damaged(self.path, format!("it has no {name}")));
        };
        for read in saved.reads(name, region)? {
            let path = self.path.join(file_name(read.rank));
            let opened;
            let file = match self.in_memory.get(&path) {
                Some(file) => file,
                None => {
                    let found = File::open(&path);
                    let found = found.and_then(|file| SavedFile::whole(path.clone(), file));
                    opened = found.map_err(failed_to_read(&path))?;
                    &opened
                }
            };
            let (header, start) = match self.headers.entry(read.rank) {
                std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::hash_map::Entry::Vacant(new) => {
                    let head = |bytes: &mut [u8], start| file.read_exact_at(bytes, start);
                    let header = Header::read_by(file.length(), head);
                    new.insert(header.map_err(failed_to_read(&path))?)
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
            read_pieces(file, base, pieces, bytes).map_err(failed_to_read(&path))?;
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
fn read_pieces(file: &SavedFile, base: u64, pieces: Pieces, bytes: &mut [u8]) -> io::Result<()> {
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
