//! Where the checkpoints of a training are: in a folder, in memory that outlives this process, or in both.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use flow_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agree::agree;
use super::error::{CheckpointError, Result};
use super::folder::Folder;
use super::in_memory::{self, FoundInMemory, InMemory};
use super::memory::Memory;
use super::saving::{BackgroundWriter, Partial, Saving, lock};

/// Where the checkpoints of a training are.
pub struct Storage {
    group: ProcessGroup,
    /// A checkpoint in the folder has one of these files at least.
    marks: &'static [&'static str],
    folder: Option<Arc<Mutex<Folder>>>,
    /// How many the folder keeps, if that is chosen.
    keep: Option<usize>,
    writer: BackgroundWriter,
}

/// A checkpoint that is whole.
pub enum Found<T> {
    /// Its folder, and what was read there.
    InFolder(PathBuf, T),
    InMemory(FoundInMemory),
}

impl Storage {
    /// Opens the checkpoints in `folder`, which is made if it is missing. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when rank 0 cannot write there, or another job does.
    pub fn in_folder(
        folder: &Path,
        group: &ProcessGroup,
        marks: &'static [&'static str],
    ) -> Result<Self> {
        Self::new(group, marks, BackgroundWriter::default()).and_folder(folder)
    }

    /// Takes this rank's memory, [opened](in_memory::open). All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when a rank has none.
    pub fn in_memory(
        opened: Result<(InMemory, Memory)>,
        group: &ProcessGroup,
        marks: &'static [&'static str],
    ) -> Result<Self> {
        let (in_memory, memory) = agree(group, opened)?;
        Ok(Self::new(group, marks, BackgroundWriter::in_memory(in_memory, memory)))
    }

    fn new(group: &ProcessGroup, marks: &'static [&'static str], writer: BackgroundWriter) -> Self {
        Self { group: group.clone(), marks, folder: None, keep: None, writer }
    }

    /// Has checkpoints in a folder, too. All ranks call this.
    ///
    /// # Errors
    /// Those of [`in_folder`](Self::in_folder).
    pub fn and_folder(mut self, path: &Path) -> Result<Self> {
        let mut folder = Folder::open(path, &self.group, self.marks)?;
        folder.keep = self.keep.unwrap_or(folder.keep);
        self.folder = Some(Arc::new(Mutex::new(folder)));
        if let Some(in_memory) = &mut self.writer.in_memory {
            let absolute = std::path::absolute(path);
            in_memory.folder = Some(absolute.unwrap_or_else(|_| path.to_owned()));
        }
        Ok(self)
    }

    /// Keeps the last `count` checkpoints in the folder.
    pub fn keep(&mut self, count: usize) {
        self.keep = Some(count);
        if let Some(folder) = &self.folder {
            lock(folder).keep = count;
        }
    }

    /// Whether checkpoints are in memory.
    pub fn has_memory(&self) -> bool {
        self.writer.in_memory.is_some()
    }

    /// Returns the folder of the checkpoint of `step`, or what stands for it.
    pub fn path(&self, step: usize) -> PathBuf {
        match &self.folder {
            Some(folder) => lock(folder).checkpoint(step),
            None => in_memory::name(step),
        }
    }

    /// Returns where the files of the checkpoint of `step` are to be written, if there is a folder. All ranks call
    /// this.
    ///
    /// # Errors
    /// On all ranks, those of [`Folder::begin`].
    pub fn begin(&self, step: usize) -> Result<Option<Partial>> {
        let Some(folder) = &self.folder else { return Ok(None) };
        let begun = lock(folder).begin(step);
        let path = agree(&self.group, begun)?;
        Ok(Some(Partial { folder: Arc::clone(folder), path }))
    }

    /// Removes what was written since [`begin`](Self::begin).
    pub fn abandon(&self) {
        self.folder.iter().for_each(|folder| lock(folder).abandon());
    }

    /// Makes a checkpoint whole. No other is being written. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when one of them cannot write it; those before it are then still there.
    pub fn save(&mut self, mut saving: Saving) -> Result<()> {
        if !self.has_memory() {
            return saving.finish();
        }
        self.writer.start(saving)?;
        self.wait()
    }

    /// Copies a checkpoint, and has a thread write it. No other is being written. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when a machine has too little memory.
    pub fn start(&mut self, saving: Saving) -> Result<()> {
        self.writer.start(saving)
    }

    /// Waits until the checkpoint that was [started](Self::start) is whole. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, when it could not be written; those before it are then still there.
    pub fn wait(&mut self) -> Result<()> {
        self.writer.wait()
    }

    /// Returns the newest checkpoint that is whole: of the folder, what `read` makes of it on rank 0. None where there
    /// is none at all. All ranks call this.
    ///
    /// # Errors
    /// On all ranks, those of [`Folder::latest`]. A memory cannot be read. The ranks have changed, and parts of the
    /// one that is left in memory are gone.
    pub fn latest<T: Serialize + DeserializeOwned>(
        &mut self,
        read: impl FnMut(&Path) -> Result<T>,
    ) -> Result<Option<Found<T>>> {
        if let Err(error) = self.wait() {
            log::warn!("a checkpoint was not saved: {error}");
        }
        let in_memory = self.writer.latest(&self.group)?;
        let step_in_memory = in_memory.as_ref().map(|found| found.step);
        let in_folder = match &self.folder {
            Some(folder) => lock(folder).latest(step_in_memory, read)?,
            None => None,
        };
        match (in_folder, in_memory) {
            (Some((step, read)), _) => Ok(Some(Found::InFolder(self.path(step), read))),
            (None, Some(found)) => Ok(Some(Found::InMemory(found))),
            (None, None) => match self.writer.in_part() {
                // Workers may come that have the other parts: to begin anew would replace what is left.
                Some(step) if self.group.epoch() > 0 => Err(CheckpointError::PartsMissing { step }),
                _ => Ok(None),
            },
        }
    }
}
