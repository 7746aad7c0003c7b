//! Checkpoints in the memory that flow-launch owns: the newest one that all ranks have together.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_comm::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::agree::{agree, exchange};
use super::error::{CheckpointError, Result};
use super::files::lock_file;
use super::memory::{Block, Generation, Held, Memory, Ready, Record, Stamp};
use super::saved_file::{Extent, SavedFile};
use super::sharers::{failed_to_receive, send};
use super::state::FORMAT;
use crate::model_check::gather_texts;

/// The variable with the path of this rank's memory, which flow-launch sets.
const VARIABLE: &str = "FLOW_CHECKPOINT_MEMORY";
/// The variable with the paths of the memory of all ranks that the same flow-launch has started.
const ALL: &str = "FLOW_CHECKPOINT_MEMORIES";
/// What the path leads to.
const TARGET: &str = "/memfd:flow-checkpoint (deleted)";
const REMEDY: &str = "start the job anew";
/// Stands for the folder of checkpoints in errors.
const NAME: &str = "flow-launch's memory";

/// This rank's part of the checkpoints in memory.
pub struct InMemory {
    /// The folder that they are written to as well.
    pub folder: Option<PathBuf>,
    /// Counts the saves.
    number: u64,
    /// Whether this training knows of the checkpoints that were there before.
    is_read: bool,
    /// The memory of all ranks that the same flow-launch has started.
    of_launcher: Vec<PathBuf>,
    /// The newest step of which [`latest`](Self::latest) has not found all parts, if it has found none that is whole
    /// and there was one.
    pub in_part: Option<usize>,
    /// Locked as long as this is there.
    _lock: File,
}

/// A checkpoint that is in the ranks' memories.
pub struct FoundInMemory {
    pub step: usize,
    /// The files.
    names: Vec<String>,
    /// All parts, the same on all ranks.
    parts: Vec<Place>,
    held: Held,
}

/// A part, as a rank tells the others of it.
#[derive(Serialize, Deserialize)]
struct Place {
    /// Who reads it for ranks on other machines.
    rank: usize,
    memory: PathBuf,
    /// Where the first block is. They lie side by side.
    start: u64,
    blocks: Vec<Block>,
}

/// Returns the name of a checkpoint in memory.
pub fn name(step: usize) -> PathBuf {
    Path::new(NAME).join(format!("step-{step}"))
}

/// Opens this rank's memory.
pub fn open() -> Result<(InMemory, Memory)> {
    let problem = match std::env::var_os(VARIABLE) {
        Some(path) if !path.is_empty() => {
            let all = std::env::var_os(ALL).unwrap_or_default();
            let all = std::env::split_paths(&all).filter(|path| !path.as_os_str().is_empty());
            return over(PathBuf::from(path), all.collect());
        }
        Some(_) => {
            "flow-launch could not make memory for them (RUST_LOG=info flow-launch says why); mend that"
        }
        None => "FLOW_CHECKPOINT_MEMORY is not set; start the program with flow-launch",
    };
    let reason = format!("{problem}, or open checkpoints in a folder");
    Err(CheckpointError::unfit("keep", "checkpoints in memory", reason))
}

/// Opens the memory at this path, of those that the same flow-launch has.
pub fn over(path: PathBuf, of_launcher: Vec<PathBuf>) -> Result<(InMemory, Memory)> {
    let remedy =
        "run the program where flow-launch runs, as its user, or keep checkpoints in a folder";
    let failed = CheckpointError::file("open the memory", &path, remedy);
    let opened =
        check_target(&path).and_then(|()| Ok((open_writable(&path)?, open_writable(&path)?)));
    let (file, lock) = opened.map_err(failed)?;
    lock_file(&lock, Path::new(NAME)).map_err(|error| match error {
        CheckpointError::Locked(_) => {
            let reason = "other checkpoints of this rank have the memory: drop them before";
            CheckpointError::unfit("keep", "checkpoints in memory", reason)
        }
        error => error,
    })?;
    let in_memory = InMemory {
        folder: None,
        number: 0,
        is_read: false,
        of_launcher,
        in_part: None,
        _lock: lock,
    };
    let memory = Memory::of(file, path);
    let failed = CheckpointError::file("read", &memory.path, REMEDY);
    memory.clear_others().map_err(failed)?;
    Ok((in_memory, memory))
}

/// In a container with other processes a path may lead to a file of theirs.
fn check_target(path: &Path) -> io::Result<()> {
    if fs::read_link(path)? == Path::new(TARGET) {
        return Ok(());
    }
    Err(io::ErrorKind::NotFound.into())
}

fn open_writable(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

impl InMemory {
    /// Checks that a save replaces nothing that this training has not read.
    pub fn check_read(&self, memory: &Memory) -> Result<()> {
        if self.is_read || self.generations(memory)?.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Unread(NAME.into()))
    }

    /// Returns the record of what `rank` has copied of a checkpoint with the files `names`, before which the ranks
    /// have told each other `all`.
    pub fn record(
        &mut self,
        rank: usize,
        all: &[Ready],
        step: usize,
        names: Vec<String>,
        blocks: Vec<Block>,
    ) -> Record {
        let holders = all.iter().filter(|ready| ready.holds).count();
        let before = all[..rank].iter().filter(|ready| ready.holds).count();
        let holder = all[rank].holds.then_some(before);
        let follows = all.iter().any(|ready| ready.follows);
        let nonce = all[0].nonce;
        self.number += 1;
        self.is_read = true;
        let number = self.number;
        let stamp = Stamp { format: FORMAT, step, number, nonce, holders, follows, names };
        let folder = self.folder.clone();
        Record { stamp, folder, holder, start: 0, blocks, sums: Vec::new() }
    }

    /// Returns a memory's generations of this training.
    fn generations(&self, memory: &Memory) -> Result<Vec<Generation>> {
        let found = memory.generations();
        let mut found = found.map_err(CheckpointError::file("read", &memory.path, REMEDY))?;
        found.retain(|Generation { record, .. }| {
            record.stamp.format == FORMAT && record.folder == self.folder
        });
        Ok(found)
    }

    /// Opens the memory of ranks that are not in the group, as they are lost or wait: those that this rank reads for
    /// all, as the first one of its flow-launch. All ranks call this.
    fn of_absent_ranks(&self, own: &Memory, group: &ProcessGroup) -> Result<Vec<Memory>> {
        let text = serde_json::to_string(&(&own.path, &self.of_launcher)).unwrap_or_default();
        let texts = gather_texts(group, &text)?;
        let mut present = BTreeSet::new();
        let mut first = None;
        // Another machine, or another flow-launch, has other memory by the same paths.
        for rank in group.ranks_on_machine_of(group.rank()) {
            let (path, of_launcher): (PathBuf, Vec<PathBuf>) =
                serde_json::from_str(&texts[rank]).unwrap_or_default();
            if of_launcher == self.of_launcher {
                present.insert(path);
                first.get_or_insert(rank);
            }
        }
        let mut absent = Vec::new();
        if first == Some(group.rank()) {
            let paths = self.of_launcher.iter().filter(|path| !present.contains(*path));
            for path in paths {
                match check_target(path).and_then(|()| File::open(path)) {
                    Ok(file) => absent.push(Memory::of(file, path.clone())),
                    Err(error) => log::warn!("{} cannot be read: {error}", path.display()),
                }
            }
        }
        Ok(absent)
    }

    /// Returns the newest checkpoint of which the ranks together have all parts, each with its sums. It
    /// stays until the next one is whole. Where ranks are missing that had parts of it, their machine's have these.
    /// All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when a memory cannot be read.
    pub fn latest(
        &mut self,
        memory: &mut Memory,
        group: &ProcessGroup,
    ) -> Result<Option<FoundInMemory>> {
        let absent = self.of_absent_ranks(memory, group)?;
        let own = agree(group, self.generations(memory))?;
        let of_absent: Result<Vec<_>> =
            absent.iter().map(|memory| Ok((memory, self.generations(memory)?))).collect();
        let of_absent = agree(group, of_absent)?;
        let all = own.iter().chain(of_absent.iter().flat_map(|(_, found)| found));
        let records: Vec<_> = all.map(|part| (&part.record.stamp, part.record.holder)).collect();
        let texts = gather_texts(group, &serde_json::to_string(&records).unwrap_or_default())?;
        let mut found: BTreeMap<(u64, u64), (Stamp, BTreeSet<usize>)> = BTreeMap::new();
        for text in texts {
            let of_rank: Vec<(Stamp, Option<usize>)> =
                serde_json::from_str(&text).unwrap_or_default();
            for (stamp, holder) in of_rank {
                let key = (stamp.number, stamp.nonce);
                found.entry(key).or_insert((stamp, BTreeSet::new())).1.extend(holder);
            }
        }
        self.number = found.keys().map(|(number, _)| *number).max().unwrap_or_default();
        self.is_read = true;
        self.in_part = None;
        memory.keep(None);
        for (stamp, holders) in found.into_values().rev() {
            if holders.len() < stamp.holders {
                log::warn!(
                    "the checkpoint {} is not whole: {} of {} ranks have their parts",
                    name(stamp.step).display(),
                    holders.len(),
                    stamp.holders
                );
                if stamp.follows {
                    self.in_part = self.in_part.or(Some(stamp.step));
                }
                continue;
            }
            let own = own.iter().find(|part| part.record.stamp == stamp);
            let mut parts: Vec<(&Memory, &Generation)> =
                own.iter().map(|part| (&*memory, *part)).collect();
            for (memory, found) in &of_absent {
                let found = found.iter().filter(|part| part.record.stamp == stamp);
                parts.extend(found.map(|part| (*memory, part)));
            }
            let mut are_whole = Ok(true);
            for (memory, part) in &parts {
                let is_whole = memory.is_whole(&part.record);
                let is_whole =
                    is_whole.map_err(CheckpointError::file("read", &memory.path, REMEDY));
                are_whole = are_whole.and_then(|are_whole| Ok(are_whole && is_whole?));
            }
            let mut all = vec![0_i64; group.world_size()];
            group.all_gather(&[i64::from(agree(group, are_whole)?)], &mut all)?;
            if let Some(rank) = all.iter().position(|&are_whole| are_whole == 0) {
                let name = name(stamp.step);
                log::warn!("the checkpoint {} is damaged on rank {rank}", name.display());
                continue;
            }
            let places: Vec<_> = parts
                .iter()
                .map(|(memory, part)| Place {
                    rank: group.rank(),
                    memory: memory.path.clone(),
                    start: part.record.start,
                    blocks: part.record.blocks.clone(),
                })
                .collect();
            memory.keep(own.cloned());
            self.in_part = None;
            let (_, places) = exchange(group, Ok(()), |()| places)?;
            return Ok(Some(FoundInMemory {
                step: stamp.step,
                names: stamp.names,
                parts: places.into_iter().flatten().collect(),
                held: memory.hold(),
            }));
        }
        Ok(None)
    }
}

impl FoundInMemory {
    /// Returns what stands for its folder.
    pub fn path(&self) -> PathBuf {
        name(self.step)
    }

    /// Opens those of its files whose names this rank `needs`. What another machine has of them goes to all machines
    /// once, if one needs it; those whose ranks need it keep it. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when a memory cannot be read, or a machine has no room for what it keeps.
    pub fn open(
        &self,
        group: &ProcessGroup,
        needs: impl Fn(&str) -> bool,
    ) -> Result<Vec<SavedFile>> {
        let needed = (0..self.names.len()).filter(|&file| needs(&self.names[file]));
        let (_, needed) = exchange(group, Ok(()), |()| needed.collect::<BTreeSet<_>>())?;
        let received = Arc::new(self.open_received(group)?);
        let own = &needed[group.rank()];
        let mut extents: BTreeMap<usize, Vec<Extent>> =
            own.iter().map(|&file| (file, Vec::new())).collect();
        let mut end = 0;
        let is_needed = |block: &Block| needed.iter().any(|files| files.contains(&block.file));
        for part in self.parts.iter().filter(|part| part.blocks.iter().any(is_needed)) {
            let is_here = group.ranks_on_machine_of(part.rank).contains(&group.rank());
            let (file, mut at) = if is_here {
                let opened = check_target(&part.memory).and_then(|()| File::open(&part.memory));
                (opened.map(Arc::new), part.start)
            } else {
                (Ok(Arc::clone(&received)), end)
            };
            let file = agree(group, file.map_err(failed_to_receive(&self.path())))?;
            self.send(group, part, &needed, (&file, at))?;
            for block in &part.blocks {
                let Block { start, length, .. } = *block;
                if let Some(extents) = extents.get_mut(&block.file) {
                    extents.push(Extent { start, length, file: Arc::clone(&file), at });
                }
                at += length;
                end += length;
            }
        }
        let files = extents.into_iter().map(|(file, extents)| {
            let path = self.path().join(&self.names[file]);
            let damaged = CheckpointError::damaged(&path, "parts of it are missing");
            SavedFile::of(path, extents).ok_or(damaged)
        });
        agree(group, files.collect())
    }

    /// Opens memory for what other machines send: that of the first rank of this machine. All ranks call this.
    fn open_received(&self, group: &ProcessGroup) -> Result<File> {
        let path = self.path();
        let own = Memory::own().map_err(failed_to_receive(&path));
        let (_own, all) = exchange(group, own, |memory| memory.path.clone())?;
        let first = &all[group.ranks_on_machine_of(group.rank())[0]];
        let opened = check_target(first).and_then(|()| open_writable(first));
        agree(group, opened.map_err(failed_to_receive(&path)))
    }

    /// Sends the blocks of a part to machines that do not have it, and whose ranks need them. `needed` has the files
    /// that each rank needs. The part begins there in the file, or is to be written there. All ranks call this.
    fn send(
        &self,
        group: &ProcessGroup,
        part: &Place,
        needed: &[BTreeSet<usize>],
        (file, begin): (&File, u64),
    ) -> Result<()> {
        let path = self.path();
        let has_part = group.ranks_on_machine_of(part.rank);
        let here = group.ranks_on_machine_of(group.rank());
        let is_receiver = here[0] == group.rank() && !has_part.contains(&group.rank());
        let need = |ranks: &[usize], block: &Block| {
            ranks.iter().any(|&rank| needed[rank].contains(&block.file))
        };
        let others: Vec<usize> =
            (0..group.world_size()).filter(|rank| !has_part.contains(rank)).collect();
        let is_sent = |block: &Block| need(&others, block);
        let mut start = begin;
        for blocks in part.blocks.chunk_by(|one, other| is_sent(one) == is_sent(other)) {
            let length = blocks.iter().map(|block| block.length).sum();
            if is_sent(&blocks[0]) {
                let keeps = is_receiver && blocks.iter().any(|block| need(&here, block));
                let read = |bytes: &mut [u8], at| {
                    file.read_exact_at(bytes, start + at).map_err(failed_to_receive(&path))
                };
                let write = |bytes: &[u8], at| {
                    if !keeps {
                        return Ok(());
                    }
                    file.write_all_at(bytes, start + at).map_err(failed_to_receive(&path))
                };
                send(group, part.rank, length, read, write)?;
            }
            start += length;
        }
        Ok(())
    }

    /// Checks that nothing has been saved over what was read.
    ///
    /// # Errors
    /// Two checkpoints were saved since this was found.
    pub fn check_held(&self) -> Result<()> {
        if self.held.may_be_replaced() {
            let reason = "two checkpoints were saved since latest has returned it";
            return Err(CheckpointError::damaged(self.path(), reason));
        }
        Ok(())
    }
}
