//! Checkpoints in the memory that flow-launch owns: the newest one that all ranks have together.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_comm::ProcessGroup;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::agree::agree;
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
    stamp: Stamp,
    /// This rank's part, and those of ranks that are gone which it reads for all.
    parts: Vec<Place>,
    pub held: Arc<Held>,
}

/// A part, as a rank tells the others of it.
#[derive(Serialize, Deserialize)]
struct Place {
    memory: PathBuf,
    record: Record,
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
    let reason = format!("{problem}, or keep checkpoints in a folder with Checkpoints::open");
    Err(CheckpointError::unfit("keep", "checkpoints in memory", reason))
}

fn over(path: PathBuf, of_launcher: Vec<PathBuf>) -> Result<(InMemory, Memory)> {
    let remedy =
        "run the program where flow-launch runs, as its user, or keep checkpoints in a folder";
    let failed = CheckpointError::file("open the memory", &path, remedy);
    let opened =
        check_target(&path).and_then(|()| Ok((open_writable(&path)?, open_writable(&path)?)));
    let (file, lock) = opened.map_err(failed)?;
    lock_file(&lock, Path::new(NAME)).map_err(|error| match error {
        CheckpointError::Locked(_) => {
            let reason = "another Checkpoints of this rank has the memory: drop that before";
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
            let places = parts.iter().map(|(memory, part)| Place {
                memory: memory.path.clone(),
                record: part.record.clone(),
            });
            let parts = places.collect();
            memory.keep(own.cloned());
            self.in_part = None;
            let held = Arc::new(memory.hold());
            return Ok(Some(FoundInMemory { step: stamp.step, stamp, parts, held }));
        }
        Ok(None)
    }
}

impl FoundInMemory {
    /// Opens the files of the checkpoint. What is in the memory of another machine is sent. All ranks call
    /// this.
    pub fn open(self, group: &ProcessGroup) -> Result<Vec<SavedFile>> {
        let texts = gather_texts(group, &serde_json::to_string(&self.parts).unwrap_or_default())?;
        let mut files: Vec<Vec<Extent>> = self.stamp.names.iter().map(|_| Vec::new()).collect();
        let name = name(self.step);
        for (rank, text) in texts.iter().enumerate() {
            let parts: Vec<Place> = serde_json::from_str(text).unwrap_or_default();
            for part in parts {
                let (file, mut at) = open_part(group, rank, &part, &name)?;
                for block in part.record.blocks {
                    let file = Arc::clone(&file);
                    let Block { start, length, .. } = block;
                    files[block.file].push(Extent { start, length, file, at });
                    at += block.length;
                }
            }
        }
        let mut opened = Vec::with_capacity(files.len());
        for (file, extents) in self.stamp.names.iter().zip(files) {
            let path = name.join(file);
            let file = SavedFile::of(path.clone(), extents);
            opened.push(
                file.ok_or_else(|| CheckpointError::damaged(path, "parts of it are missing"))?,
            );
        }
        Ok(opened)
    }
}

/// Opens a part that `rank` reads, or receives it from there. Returns where it begins in the file. All ranks call
/// this.
fn open_part(
    group: &ProcessGroup,
    rank: usize,
    part: &Place,
    name: &Path,
) -> Result<(Arc<File>, u64)> {
    let Place { memory, record } = part;
    let length = record.blocks.iter().map(|block| block.length).sum();
    let sharers = group.ranks_on_machine_of(rank);
    let sees = sharers.contains(&group.rank());
    let opened = if sees {
        check_target(memory).and_then(|()| File::open(memory))
    } else {
        memfd_create("checkpoint", MemfdFlags::CLOEXEC).map(File::from).map_err(io::Error::from)
    };
    let file = agree(group, opened.map_err(failed_to_receive(name)))?;
    let base = if sees { record.start } else { 0 };
    if sharers.len() < group.world_size() {
        let read = |bytes: &mut [u8], at| {
            file.read_exact_at(bytes, base + at).map_err(failed_to_receive(name))
        };
        let write = |bytes: &[u8], at| {
            if sees {
                return Ok(());
            }
            file.write_all_at(bytes, at).map_err(failed_to_receive(name))
        };
        send(group, rank, length, read, write)?;
    }
    Ok((Arc::new(file), base))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::agree::exchange;
    use super::*;

    /// A rank's part of what is saved at a step.
    fn part(rank: usize, step: usize) -> Vec<u8> {
        vec![(10 * step + rank) as u8; 3000 * rank]
    }

    /// Saves a step as far as this rank comes before all are killed: to 0, the begin of a copy, or to 4, the
    /// commit.
    fn save(
        (in_memory, memory): &mut (InMemory, Memory),
        group: &ProcessGroup,
        step: usize,
        stage: usize,
    ) {
        let bytes = part(group.rank(), step);
        let start = (0..group.rank()).map(|rank| part(rank, step).len() as u64).sum();
        let length = bytes.len() as u64;
        let blocks: Vec<_> =
            (length > 0).then_some(Block { file: 0, start, length }).into_iter().collect();
        let (_, all) = exchange(group, Ok(()), |()| memory.ready(length)).unwrap();
        let record = in_memory.record(group.rank(), &all, step, vec!["file".into()], blocks);
        if stage == 0 {
            return;
        }
        memory.begin(length).unwrap();
        memory.push(&bytes[..bytes.len() / 2]);
        if stage == 1 {
            return;
        }
        memory.push(&bytes[bytes.len() / 2..]);
        if stage == 2 {
            return;
        }
        let sealed = memory.seal(record).unwrap();
        if stage == 3 {
            return;
        }
        memory.commit(&sealed).unwrap();
        memory.keep(Some(sealed));
    }

    /// What the ranks find, read by each of them.
    fn found(
        (in_memory, memory): &mut (InMemory, Memory),
        group: &ProcessGroup,
    ) -> Option<(usize, Vec<u8>)> {
        let found = in_memory.latest(memory, group).unwrap()?;
        let step = found.step;
        let files = found.open(group).unwrap();
        assert_eq!((files.len(), &files[0].path), (1, &name(step).join("file")));
        let mut bytes = vec![0; files[0].length() as usize];
        files[0].read_exact_at(&mut bytes, 0).unwrap();
        Some((step, bytes))
    }

    fn in_group(memories: &[PathBuf], rank: impl Fn(&mut (InMemory, Memory), ProcessGroup) + Sync) {
        in_group_of(memories, memories, rank);
    }

    /// Runs ranks with these memories, of all that flow-launch has.
    fn in_group_of(
        memories: &[PathBuf],
        all: &[PathBuf],
        rank: impl Fn(&mut (InMemory, Memory), ProcessGroup) + Sync,
    ) {
        let groups = ProcessGroup::in_process(memories.len()).unwrap();
        thread::scope(|scope| {
            for (group, path) in groups.into_iter().zip(memories) {
                let rank = &rank;
                scope.spawn(move || rank(&mut over(path.clone(), all.to_vec()).unwrap(), group));
            }
        });
    }

    /// All ranks get as far as each may when one is killed, and start anew: some with other ranks.
    #[test]
    fn ranks_find_the_last_step_that_all_have_or_the_one_before() {
        let ranks = 3;
        let owners: Vec<_> = (0..ranks).map(|_| Memory::own().unwrap()).collect();
        let mut memories: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
        let whole = |step| (0..ranks).flat_map(|rank| part(rank, step)).collect::<Vec<u8>>();
        let mut last = None;
        let mut step = 0;
        // All combinations of stages that can be: none commits before all have sealed.
        for combination in 0..5_usize.pow(3) {
            let stages = [combination % 5, combination / 5 % 5, combination / 25];
            let least = stages.iter().min().copied().unwrap_or_default();
            if stages.contains(&4) && least < 3 {
                continue;
            }
            step += 1;
            let before = last;
            in_group(&memories, |own, group| {
                let expected = before.map(|step| (step, whole(step)));
                assert_eq!(found(own, &group), expected, "before step {step}");
                assert_eq!(own.0.in_part, None, "before step {step}");
                save(own, &group, step, stages[group.rank()]);
            });
            // Rank 0 has no bytes: it need not have committed.
            if stages[1] == 4 && stages[2] == 4 {
                last = Some(step);
            }
            // Ranks are others then, and may see it from elsewhere.
            let expected = last.map(|step| (step, whole(step)));
            memories.reverse();
            in_group(&memories, |own, group| assert_eq!(found(own, &group), expected));
            memories.reverse();
        }
        assert!(step > 25 && last.is_some());
        // Without a rank that has something there is nothing; without one that has not, there is all.
        in_group(&memories[..2], |own, group| {
            assert_eq!(found(own, &group), None);
            assert_eq!(own.0.in_part, last);
        });
        in_group(&memories[1..], |own, group| {
            assert_eq!(found(own, &group), last.map(|step| (step, whole(step))));
        });
    }

    #[test]
    fn what_missing_ranks_have_is_read_and_replaced_by_the_next_save() {
        let owners: Vec<_> = (0..4).map(|_| Memory::own().unwrap()).collect();
        let all: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
        let whole = |ranks, step| {
            let bytes = (0..ranks).flat_map(|rank| part(rank, step)).collect::<Vec<u8>>();
            Some((step, bytes))
        };
        in_group(&all, |own, group| save(own, &group, 1, 4));
        // Others are left each time, then fewer, and then all are there again.
        let first_two = all[..2].to_vec();
        let last_two = vec![all[3].clone(), all[2].clone()];
        let mut expected = whole(4, 1);
        for (index, present) in
            [first_two, last_two, all[1..].to_vec(), all.clone()].iter().enumerate()
        {
            let step = index + 2;
            in_group_of(present, &all, |own, group| {
                assert_eq!(found(own, &group), expected, "before step {step}");
                group.barrier().unwrap();
                save(own, &group, step, 4);
            });
            expected = whole(present.len(), step);
        }
        // The memory of a missing rank is damaged.
        in_group_of(&all[..3], &all, |own, group| {
            assert_eq!(found(own, &group), expected);
            group.barrier().unwrap();
            if group.rank() == 0 {
                let missing = over(all[3].clone(), vec![]).unwrap().1;
                let at = missing.generations().unwrap()[0].record.start;
                missing.file.write_all_at(b"x", at).unwrap();
            }
            group.barrier().unwrap();
            assert_eq!(found(own, &group), whole(3, 4));
        });
    }

    #[test]
    fn a_damaged_part_is_not_resumed_and_another_folders_is_not_seen() {
        let owners: Vec<_> = (0..3).map(|_| Memory::own().unwrap()).collect();
        let memories: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
        in_group(&memories, |own, group| {
            for step in [1, 2] {
                save(own, &group, step, 4);
                group.barrier().unwrap();
            }
        });
        in_group(&memories, |own, group| {
            let (in_memory, memory) = own;
            let error =
                in_memory.check_read(memory).map(|()| found(own, &group)).unwrap_err().to_string();
            assert!(error.contains("call latest first"), "{error}");
            own.0.folder = Some("folder".into());
            assert_eq!(found(own, &group), None);
            own.0.folder = None;
            assert_eq!(found(own, &group).unwrap().0, 2);
            group.barrier().unwrap();
            if group.rank() == 1 {
                let generations = own.1.generations().unwrap();
                let newest = generations.iter().find(|found| found.record.stamp.step == 2).unwrap();
                own.1.file.write_all_at(b"x", newest.record.start + 7).unwrap();
            }
            group.barrier().unwrap();
            assert_eq!(found(own, &group).unwrap().0, 1);
        });
    }

    /// As of flow_torch.checkpoint, which leaves a hole of a terabyte: nobody may fill that.
    #[test]
    fn what_another_program_has_left_takes_no_memory() {
        let owners: Vec<_> = (0..2).map(|_| Memory::own().unwrap()).collect();
        let memories: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
        owners.iter().for_each(|owner| owner.file.write_all_at(b"record", 1 << 40).unwrap());
        in_group(&memories, |own, group| {
            assert_eq!(found(own, &group), None);
            save(own, &group, 1, 4);
        });
        in_group(&memories, |own, group| assert_eq!(found(own, &group).unwrap().0, 1));
        assert!(owners.iter().all(|owner| owner.file.metadata().unwrap().len() < 1 << 20));
    }

    #[test]
    fn memory_that_is_not_the_launchers_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [file.path().to_owned(), "/proc/self/fd/0".into(), "/proc/0/fd/7".into()] {
            let error =
                over(path.clone(), vec![]).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(
                error.contains("cannot open the memory") && error.contains("flow-launch"),
                "{error}"
            );
        }
        let owner = Memory::own().unwrap();
        let _opened = over(owner.path.clone(), vec![]).unwrap();
    }
}
