//! A checkpoint that is laid out, and is to be written: at once, or beside the training.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use flow_comm::{Background, ProcessGroup};

use super::agree::{agree, exchange};
use super::error::{CheckpointError, Result};
use super::folder::Folder;
use super::in_memory::{FoundInMemory, InMemory};
use super::memory::{Memory, Ready, Record};
use super::plan::Plan;
use crate::fsdp::machine_memory::size;
use crate::model_check::gather_texts;

/// A checkpoint that is laid out.
pub struct Saving {
    pub plan: Plan,
    pub group: ProcessGroup,
    pub step: usize,
    /// The folder that its files will be in.
    pub path: PathBuf,
    /// Where they are written; None if they are in memory only.
    pub files: Option<Partial>,
    pub last: LastFile,
}

/// Writes the last file of a checkpoint to the first folder, which is renamed to the second one after that. Only
/// rank 0 calls it. The texts are what each rank has written of the other files ([`pieces`](super::plan::pieces)).
pub type LastFile = Box<dyn FnMut(&Path, &Path, &[String]) -> Result<()> + Send>;

/// The files of a checkpoint, which rank 0 has made.
pub struct Partial {
    pub folder: Arc<Mutex<Folder>>,
    /// The folder of the files.
    pub path: PathBuf,
}

impl Saving {
    /// Writes all ranks' parts, and makes the files the checkpoint. All ranks call this.
    pub fn finish(&mut self) -> Result<()> {
        self.write().inspect_err(|_| self.abandon())
    }

    fn write(&mut self) -> Result<()> {
        let Some(files) = &self.files else { return Ok(()) };
        let written = self.plan.write(&files.path, &self.path);
        let pieces = agree(&self.group, written)?;
        let texts = gather_texts(&self.group, &pieces)?;
        let is_first = self.group.rank() == 0;
        let finished = if is_first { (self.last)(&files.path, &self.path, &texts) } else { Ok(()) };
        let finished = finished.and_then(|()| lock(&files.folder).commit(self.step));
        agree(&self.group, finished)
    }

    /// Removes the files.
    pub fn abandon(&self) {
        if let Some(files) = &self.files {
            lock(&files.folder).abandon();
        }
    }
}

/// A checkpoint that is copied.
struct Copied {
    saving: Saving,
    memory: Memory,
    /// What is to outlive this process, if the memory does.
    record: Option<Record>,
}

impl Copied {
    /// Makes the copies of all ranks a checkpoint in memory, and writes its files. All ranks call this.
    fn finish(&mut self) -> Result<()> {
        if let Some(record) = self.record.take() {
            self.keep(record).inspect_err(|_| self.saving.abandon())?;
        }
        self.saving.finish()
    }

    fn keep(&mut self, record: Record) -> Result<()> {
        let Saving { group, path, .. } = &self.saving;
        let failed = |error| CheckpointError::file("keep", path, "see that there is memory")(error);
        let sealed = agree(group, self.memory.seal(record).map_err(failed))?;
        // All ranks have all of it. Until all have committed it, the one before stays.
        agree(group, self.memory.commit(&sealed).map_err(failed))?;
        self.memory.keep(Some(sealed));
        Ok(())
    }
}

/// How it went to write a checkpoint, and the memory of the copy; None if there was no copy.
type Written = Option<(Result<()>, Memory)>;

/// Writes checkpoints beside the training, one at a time.
#[derive(Default)]
pub struct BackgroundWriter {
    /// Ranks meet in it while they train in others.
    group: Option<ProcessGroup>,
    /// The checkpoint that is being written.
    thread: Option<JoinHandle<Written>>,
    /// Ranks wait for each other's disks there, while they train.
    background: Background,
    /// Where this rank's part is copied to. It is kept: new memory would have to be cleared by the kernel.
    memory: Option<Memory>,
    /// Where copies are kept for a restarted job, if they are.
    pub in_memory: Option<InMemory>,
    path: PathBuf,
}

impl BackgroundWriter {
    /// Keeps copies for a restarted job.
    pub fn in_memory(in_memory: InMemory, memory: Memory) -> Self {
        let mut writer = Self::default();
        writer.in_memory = Some(in_memory);
        writer.memory = Some(memory);
        writer
    }

    /// Returns the newest checkpoint in memory. All ranks call this.
    pub fn latest(&mut self, group: &ProcessGroup) -> Result<Option<FoundInMemory>> {
        match (&mut self.in_memory, &mut self.memory) {
            (None, _) => Ok(None),
            (Some(_), None) => agree(group, Err(without_memory(PANICKED))),
            (Some(in_memory), Some(memory)) => in_memory.latest(memory, group),
        }
    }

    /// Returns the newest step of which [`latest`](Self::latest) has not found all parts in memory.
    pub fn in_part(&self) -> Option<usize> {
        self.in_memory.as_ref()?.in_part
    }

    /// Copies this rank's parts of a checkpoint, and has a thread write them. No other is being written.
    /// All ranks call this.
    pub fn start(&mut self, mut saving: Saving) -> Result<()> {
        let begun = self.copy(&mut saving);
        let (to_thread, record) = begun.inspect_err(|_| saving.abandon())?;
        self.path.clone_from(&saving.path);
        if let (Some(group), Some(memory)) = (&self.group, self.memory.take()) {
            saving.group = group.clone();
            let _ = to_thread.send(Copied { saving, memory, record }); // the thread waits for it
        }
        Ok(())
    }

    /// Copies this rank's parts. Returns where the thread waits for the copy, and its record.
    fn copy(&mut self, saving: &mut Saving) -> Result<(Sender<Copied>, Option<Record>)> {
        let group = &saving.group;
        if self.group.is_none() {
            self.group = Some(group.duplicate()?);
        }
        self.background = Background::default();
        let background = self.background.clone();
        let bytes = saving.plan.bytes();
        let (memory, all) = exchange(group, self.memory(), |memory| memory.ready(bytes))?;
        check_memory(group, &all)?;
        let (to_thread, copied) = mpsc::channel::<Copied>();
        let thread = thread::Builder::new().name("flow-checkpoint".into()).spawn(move || {
            background.enter();
            let mut copied = copied.recv().ok()?;
            let finished = copied.finish();
            Some((finished, copied.memory))
        });
        let thread = thread.map_err(CheckpointError::write(&saving.path));
        let copied = thread.and_then(|thread| {
            saving.plan.copy(memory)?;
            Ok(thread)
        });
        // Nobody changes what ranks have in common before all have copied it.
        let thread = agree(group, copied)?;
        let record = self.in_memory.as_mut().map(|in_memory| {
            let Saving { plan, step, .. } = saving;
            in_memory.record(
                group.rank(),
                &all,
                *step,
                plan.names().to_vec(),
                plan.copied().to_vec(),
            )
        });
        self.thread = Some(thread);
        Ok((to_thread, record))
    }

    /// Returns the memory for a copy, which replaces nothing that this training has not read.
    fn memory(&mut self) -> Result<&mut Memory> {
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None if self.in_memory.is_some() => return Err(without_memory(PANICKED)),
            None => Memory::own().map_err(without_memory)?,
        };
        let memory = self.memory.insert(memory);
        if let Some(in_memory) = &self.in_memory {
            in_memory.check_read(memory)?;
        }
        Ok(memory)
    }

    /// Waits until the last checkpoint is whole. All ranks have an error if one has.
    pub fn wait(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.background.end();
        let Ok(Some((finished, memory))) = thread.join() else {
            let reason = "the thread that wrote a checkpoint has panicked";
            self.group.iter().for_each(|group| group.abort(reason));
            let error = io::Error::other(reason);
            return Err(CheckpointError::write(&self.path)(error));
        };
        self.memory = Some(memory);
        finished
    }
}

impl Drop for BackgroundWriter {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            log::error!("a checkpoint was not saved: {error}");
        }
    }
}

/// Why there is no memory for a copy.
const PANICKED: &str = "the thread that wrote one has panicked; start the job anew";

/// Makes the error that there is no memory for a copy.
fn without_memory(reason: impl ToString) -> CheckpointError {
    CheckpointError::unfit("make", "a copy of the state", reason)
}

/// Returns the error of a machine that has no room for the copies of its ranks: the same on all ranks, none of which
/// has taken any of the memory yet.
fn check_memory(group: &ProcessGroup, all: &[Ready]) -> Result<()> {
    let mut checked = BTreeSet::new();
    for rank in 0..group.world_size() {
        let ranks = group.ranks_on_machine_of(rank);
        if !checked.insert(ranks[0]) {
            continue;
        }
        let mut needed = 0;
        let mut available = u64::MAX;
        for rank in ranks {
            needed += all[rank].grows;
            available = available.min(all[rank].available);
        }
        check_room(rank, needed, available)?;
    }
    Ok(())
}

fn check_room(rank: usize, needed: u64, available: u64) -> Result<()> {
    if needed <= available {
        return Ok(());
    }
    let reason = format!(
        "it needs {} on the machine of rank {rank}, and {} are free: open the checkpoints in a folder and use save, which copies nothing",
        size(needed),
        size(available)
    );
    Err(CheckpointError::unfit("make", "a copy of the state", reason))
}

/// Returns the error of a save, or else that of the one before. If both have one, that of the one before is a
/// warning in the log.
pub fn saved_after(before: Result<()>, saved: Result<()>) -> Result<()> {
    if saved.is_err() {
        if let Err(error) = before {
            log::warn!("a checkpoint was not saved: {error}");
        }
        return saved;
    }
    before
}

pub fn lock(folder: &Mutex<Folder>) -> MutexGuard<'_, Folder> {
    folder.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::plan::write_sums;
    use super::*;

    /// Begins a checkpoint of one file, which is there if `is_made`.
    fn begin(
        folder: &Arc<Mutex<Folder>>,
        group: &ProcessGroup,
        step: usize,
        is_made: bool,
    ) -> Saving {
        let mut plan = Plan::new(group.rank() == 0);
        plan.add("file".to_owned(), step.to_string().into_bytes());
        let partial = agree(group, lock(folder).begin(step)).unwrap();
        let path = lock(folder).checkpoint(step);
        if is_made && group.rank() == 0 {
            plan.create(&partial, &path, "").unwrap();
        }
        group.barrier().unwrap();
        let group = group.clone();
        let files = Some(Partial { folder: Arc::clone(folder), path: partial });
        let names = plan.names().to_vec();
        let last: LastFile =
            Box::new(move |partial, path, pieces| write_sums(partial, path, &names, pieces));
        Saving { plan, group, step, path, files, last }
    }

    fn train(group: &ProcessGroup, path: &Path) {
        let folder = Folder::open(path, group, &["file"]).unwrap();
        let folder = Arc::new(Mutex::new(folder));
        let mut writer = BackgroundWriter::default();
        for (step, is_made) in [(1, true), (2, false), (3, true)] {
            writer.start(begin(&folder, group, step, is_made)).unwrap();
            let done = writer.wait();
            let file = path.join(format!("step-{step}/file"));
            if is_made {
                done.unwrap();
                assert_eq!(std::fs::read(file).unwrap(), step.to_string().into_bytes());
            } else {
                let error = done.unwrap_err().to_string();
                assert!(error.contains("step-2/file: No such file"), "{error}");
                let is_left = path.join(".checkpoint.partial").exists();
                assert!(group.rank() > 0 || !is_left, "what was written is left");
            }
            group.barrier().unwrap();
        }
        assert!(path.join("step-1").exists());
        // One that nobody waits for is finished by the drop.
        writer.start(begin(&folder, group, 4, true)).unwrap();
        drop(writer);
        assert!(path.join("step-4/file").exists());
    }

    #[test]
    fn a_copy_without_room_is_an_error() {
        check_room(1, 5_000_000_000, 5_000_000_000).unwrap();
        let error = check_room(1, 5_000_000_000, 4_000_000_000).unwrap_err().to_string();
        assert!(
            error.contains("needs 5.0 GB on the machine of rank 1, and 4.0 GB are free"),
            "{error}"
        );
    }

    #[test]
    fn a_failure_is_told_to_all_ranks_and_the_next_checkpoint_is_written() {
        let path = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for group in ProcessGroup::in_process(2).unwrap() {
                let path = path.path();
                scope.spawn(move || train(&group, path));
            }
        });
    }
}
