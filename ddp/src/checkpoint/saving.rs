//! A checkpoint whose files are there, and are to be filled: at once, or beside the training.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use flow_comm::{Background, ProcessGroup};

use super::agree::agree;
use super::error::{CheckpointError, Result};
use super::folder::Folder;
use super::plan::Plan;
use crate::fsdp::machine_memory::{MachineMemory, size};
use crate::model_check::gather_texts;

/// A checkpoint of which rank 0 has made the files.
pub struct Saving {
    pub plan: Plan,
    pub group: ProcessGroup,
    pub folder: Arc<Mutex<Folder>>,
    pub step: usize,
    /// The folder of the files.
    pub partial: PathBuf,
    /// The folder that they will be in.
    pub path: PathBuf,
}

impl Saving {
    /// Writes all ranks' parts, and makes the files the checkpoint. All ranks call this.
    pub fn finish(&self) -> Result<()> {
        let finished = self.try_finish();
        finished.inspect_err(|_| lock(&self.folder).abandon())
    }

    fn try_finish(&self) -> Result<()> {
        let is_first = self.group.rank() == 0;
        let written = self.plan.write(&self.partial, &self.path, is_first);
        let pieces = agree(&self.group, written)?;
        let texts = gather_texts(&self.group, &pieces)?;
        let finished =
            if is_first { self.plan.finish(&self.partial, &self.path, &texts) } else { Ok(()) };
        let finished = finished.and_then(|()| lock(&self.folder).commit(self.step));
        agree(&self.group, finished)
    }
}

/// Writes checkpoints beside the training, one at a time.
#[derive(Default)]
pub struct BackgroundWriter {
    /// Ranks meet in it while they train in others.
    group: Option<ProcessGroup>,
    /// The checkpoint that is being written. Its thread returns the memory of the copy.
    thread: Option<JoinHandle<(Result<()>, Vec<u8>)>>,
    /// Ranks wait for each other's disks there, while they train.
    background: Background,
    /// Where this rank's part is copied to. It is kept: new memory would have to be cleared by the kernel.
    memory: Vec<u8>,
    path: PathBuf,
}

impl BackgroundWriter {
    /// Copies this rank's parts of a checkpoint, and has a thread write them. No other is being written.
    /// All ranks call this.
    pub fn start(&mut self, mut saving: Saving) -> Result<()> {
        let group = match &self.group {
            Some(group) => Ok(group.clone()),
            None => saving.group.duplicate(),
        };
        let group = group.inspect_err(|_| lock(&saving.folder).abandon())?;
        self.group = Some(group.clone());
        let needed = saving.plan.bytes().saturating_sub(self.memory.capacity());
        let checked = check_memory(&saving.group, needed as u64);
        checked.inspect_err(|_| lock(&saving.folder).abandon())?;
        let (to_thread, checkpoint) = mpsc::channel::<Saving>();
        self.background = Background::default();
        let background = self.background.clone();
        let thread = thread::Builder::new().name("flow-checkpoint".into()).spawn(move || {
            let Ok(saving) = checkpoint.recv() else { return (Ok(()), Vec::new()) };
            background.enter();
            let finished = saving.finish();
            (finished, saving.plan.into_memory())
        });
        let thread = thread.map_err(CheckpointError::write(&saving.path));
        let copied = thread.and_then(|thread| {
            saving.plan.copy(std::mem::take(&mut self.memory))?;
            Ok(thread)
        });
        // Nobody changes what ranks have in common before all have copied it.
        let thread =
            agree(&saving.group, copied).inspect_err(|_| lock(&saving.folder).abandon())?;
        self.path.clone_from(&saving.path);
        saving.group = group;
        let _ = to_thread.send(saving); // the thread waits for it
        self.thread = Some(thread);
        Ok(())
    }

    /// Waits until the last checkpoint is whole. All ranks have an error if one has.
    pub fn wait(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.background.end();
        let Ok((finished, memory)) = thread.join() else {
            let reason = "the thread that wrote a checkpoint has panicked";
            self.group.iter().for_each(|group| group.abort(reason));
            let error = io::Error::other(reason);
            return Err(CheckpointError::write(&self.path)(error));
        };
        self.memory = memory;
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

/// Returns the error of a machine that has no room for the copies of its ranks, which need so many bytes on
/// this one. All ranks call this.
fn check_memory(group: &ProcessGroup, needed: u64) -> Result<()> {
    let mut all = vec![0_i64; group.world_size()];
    group.all_gather(&[needed as i64], &mut all)?;
    let ranks = group.ranks_on_machine_of(group.rank());
    let of_machine = ranks.into_iter().map(|rank| all[rank] as u64).sum();
    let available = MachineMemory::read().map_or(u64::MAX, |memory| memory.available);
    agree(group, check_room(of_machine, available))
}

fn check_room(needed: u64, available: u64) -> Result<()> {
    if needed <= available {
        return Ok(());
    }
    let reason = format!(
        "it needs {} on this machine, and {} are free: use save, which copies nothing",
        size(needed),
        size(available)
    );
    Err(CheckpointError::unfit("make", "a copy of the state", reason))
}

pub fn lock(folder: &Mutex<Folder>) -> MutexGuard<'_, Folder> {
    folder.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Begins a checkpoint of one file, which is there if `is_made`.
    fn begin(
        folder: &Arc<Mutex<Folder>>,
        group: &ProcessGroup,
        step: usize,
        is_made: bool,
    ) -> Saving {
        let mut plan = Plan::default();
        plan.add("file".to_owned(), step.to_string().into_bytes(), 0);
        let partial = agree(group, lock(folder).begin(step)).unwrap();
        let path = lock(folder).checkpoint(step);
        if is_made && group.rank() == 0 {
            plan.create(&partial, &path).unwrap();
        }
        group.barrier().unwrap();
        let group = group.clone();
        Saving { plan, group, folder: Arc::clone(folder), step, partial, path }
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
        check_room(5_000_000_000, 5_000_000_000).unwrap();
        let error = check_room(5_000_000_000, 4_000_000_000).unwrap_err().to_string();
        assert!(error.contains("needs 5.0 GB on this machine, and 4.0 GB are free"), "{error}");
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
