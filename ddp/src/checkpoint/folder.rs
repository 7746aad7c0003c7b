//! The folder of a training's checkpoints: `step-N` is a folder of files that is whole or not
//! there, whenever a process is killed or a machine loses its power.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use flow_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agree::from_rank_0;
use super::error::{CheckpointError, Result, WRITABLE};
use super::files::{Remover, create, lock, remove, remove_in_use, sync};

/// Locked by the one job that writes here.
const LOCK: &str = ".checkpoint.lock";
/// A checkpoint that is being written. One that is there at the start is of a killed job.
const PARTIAL: &str = ".checkpoint.partial";
/// Begins the name of what is being removed.
const REMOVED: &str = ".checkpoint.removed";
/// Followed by the name of a checkpoint that another one of the same step is about to replace.
const REPLACED: &str = ".checkpoint.replaced.";

/// The folder. Rank 0 looks for checkpoints, makes them whole and removes them, for all ranks.
pub struct Folder {
    path: PathBuf,
    group: ProcessGroup,
    /// A checkpoint has one of these files at least.
    marks: &'static [&'static str],
    /// The lock, which rank 0 has.
    lock: Option<File>,
    /// Removes old checkpoints.
    remover: Remover,
    /// The number of checkpoints that are kept.
    pub keep: usize,
    /// Whether this training knows of the checkpoints that were there before.
    read: bool,
    /// The steps of those that `latest` has found to be damaged.
    damaged: BTreeSet<usize>,
}

impl Folder {
    /// Opens the folder `path`, which is made if it is missing, locked, and tidied up after a
    /// killed job. What has none of the files `marks` is no checkpoint, and stays as it is. All
    /// ranks call this.
    ///
    /// # Errors
    /// On all ranks, when rank 0 cannot write there, or another job does.
    pub fn open(path: &Path, group: &ProcessGroup, marks: &'static [&'static str]) -> Result<Self> {
        let path = path.to_owned();
        let group = group.clone();
        let lock = None;
        let remover = Remover::default();
        let keep = 2;
        let read = false;
        let damaged = BTreeSet::new();
        let mut folder = Self { path, group, marks, lock, remover, keep, read, damaged };
        let own = (folder.group.rank() == 0).then(|| folder.lock_and_tidy());
        from_rank_0(&folder.group, own)?;
        Ok(folder)
    }

    fn lock_and_tidy(&mut self) -> Result<()> {
        create(&self.path).map_err(CheckpointError::file(
            "make the folder",
            &self.path,
            WRITABLE,
        ))?;
        self.lock = Some(lock(&self.path, LOCK)?);
        self.tidy().map_err(CheckpointError::file("write to", &self.path, WRITABLE))
    }

    fn tidy(&self) -> io::Result<()> {
        remove(&self.path.join(PARTIAL))?;
        self.remove_rest()?;
        for entry in fs::read_dir(&self.path)? {
            let old = entry?;
            let name = old.file_name();
            if step_of(&name).is_some() && !self.is_checkpoint(&old.path())? {
                let path = old.path();
                let lacks = self.lacks();
                log::warn!("{} has no {lacks}: it is no checkpoint, and stays", path.display());
            }
            let Some(name) = name.to_str().and_then(|name| name.strip_prefix(REPLACED)) else {
                continue;
            };
            let path = self.path.join(name);
            if path.exists() {
                remove(&old.path())?;
            } else {
                fs::rename(old.path(), path)?;
            }
        }
        Ok(())
    }

    /// Removes what was being removed.
    fn remove_rest(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(REMOVED) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Returns the checkpoint of `step`, whether there is one or not.
    pub fn checkpoint(&self, step: usize) -> PathBuf {
        self.path.join(format!("step-{step}"))
    }

    /// Returns an empty folder, where the files of the checkpoint of `step` are to be written. On
    /// rank 0 it is there when this returns; on the others it may not be yet.
    ///
    /// # Errors
    /// On rank 0, when it cannot be made, or [`commit`](Self::commit) would replace what this
    /// training has not read.
    pub fn begin(&mut self, step: usize) -> Result<PathBuf> {
        let partial = self.path.join(PARTIAL);
        if self.lock.is_none() {
            return Ok(partial);
        }
        if !self.read && !self.steps()?.is_empty() {
            return Err(CheckpointError::Unread(self.path.clone()));
        }
        while let Some(&damaged) = self.damaged.first() {
            self.set_aside(damaged)?;
            self.damaged.pop_first();
        }
        let path = self.checkpoint(step);
        let is_there = path.try_exists().map_err(CheckpointError::write(&path))?;
        if is_there && !self.is_checkpoint(&path).map_err(CheckpointError::write(&path))? {
            return Err(CheckpointError::Foreign { lacks: self.lacks(), path });
        }
        // The space of what was removed is free before more is written.
        self.remover.wait();
        self.remove_rest()
            .and_then(|()| remove_in_use(&partial, &self.path.join(REMOVED)))
            .and_then(|()| fs::create_dir(&partial))
            .map_err(CheckpointError::write(path))?;
        Ok(partial)
    }

    /// Makes what was written since [`begin`](Self::begin), and flushed, the checkpoint of `step`,
    /// and removes those before the last few: their names at once, their files meanwhile. Rank 0 does;
    /// on the others nothing happens.
    ///
    /// # Errors
    /// On rank 0, when the disk refuses. The checkpoint of `step` that was there before is still
    /// there then, from the next `open` at the latest.
    pub fn commit(&mut self, step: usize) -> Result<()> {
        if self.lock.is_none() {
            return Ok(());
        }
        let path = self.checkpoint(step);
        let partial = self.path.join(PARTIAL);
        let replaced = sync(&partial).and_then(|()| self.replace(&path, &partial));
        replaced.map_err(CheckpointError::write(path))?;
        self.read = true;
        // Later ones are of a way that this training has not gone.
        let (kept, later): (Vec<_>, Vec<_>) =
            self.steps()?.into_iter().partition(|other| *other <= step);
        let old = later.into_iter().chain(kept.into_iter().skip(self.keep.max(1)));
        let removed = old.map(|step| self.hide(step)).collect::<Result<Vec<_>>>()?;
        self.remover.start(removed);
        Ok(())
    }

    /// Removes what was written since [`begin`](Self::begin), after a save has failed: on a full disk
    /// it would take the space that the next one needs. Rank 0 does; on the others nothing happens.
    /// Where ranks have lost each other, others may still be writing: they leave nothing there.
    pub fn abandon(&self) {
        let partial = self.path.join(PARTIAL);
        if self.lock.is_some()
            && let Err(error) = remove_in_use(&partial, &self.path.join(REMOVED))
        {
            // The next `begin` tries again.
            log::warn!("cannot remove {}: {error}", partial.display());
        }
    }

    /// Returns the newest checkpoint that is whole: its step, and what `read` has made of its
    /// folder. Rank 0 calls `read`, all ranks get it. None where there is no checkpoint at all. Of a
    /// checkpoint that is elsewhere, `elsewhere` is the step: then only later ones count. All ranks call
    /// this.
    ///
    /// # Errors
    /// On all ranks, when rank 0 cannot read the disk, finds damaged checkpoints only, or does not
    /// see what another rank sees. Also the errors of `read` that are not damage, for which the
    /// checkpoint before would serve.
    pub fn latest<T: Serialize + DeserializeOwned>(
        &mut self,
        elsewhere: Option<usize>,
        read: impl FnMut(&Path) -> Result<T>,
    ) -> Result<Option<(usize, T)>> {
        self.seen_by_rank_0()?;
        let own = self.lock.is_some().then(|| self.newest(elsewhere, read));
        let found = from_rank_0(&self.group, own)?;
        self.read = true;
        Ok(found)
    }

    fn newest<T>(
        &mut self,
        elsewhere: Option<usize>,
        mut read: impl FnMut(&Path) -> Result<T>,
    ) -> Result<Option<(usize, T)>> {
        let mut newest = None;
        self.damaged.clear();
        for step in self.steps()? {
            if elsewhere.is_some_and(|elsewhere| step <= elsewhere) {
                break;
            }
            let path = self.checkpoint(step);
            match read(&path) {
                Ok(read) => return Ok(Some((step, read))),
                Err(error) if error.is_damage() => {
                    log::warn!("the checkpoint {} is damaged: {error}", path.display());
                    self.damaged.insert(step);
                    newest.get_or_insert(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        let Some(newest) = newest.filter(|_| elsewhere.is_none()) else { return Ok(None) };
        Err(CheckpointError::AllDamaged { folder: self.path.clone(), newest })
    }

    /// A folder that each machine has for itself would let training start anew when another machine
    /// has rank 0.
    fn seen_by_rank_0(&self) -> Result<()> {
        let by_rank_0 = from_rank_0(&self.group, self.lock.as_ref().map(|_| self.steps()))?;
        let steps = match self.lock {
            Some(_) => by_rank_0,
            // Other ranks than 0 need not see the folder at all.
            None => self.list().unwrap_or_default(),
        };
        let own = steps.first().map_or(-1, |&step| step as i64);
        let mut newest = vec![-1i64; self.group.world_size()];
        self.group.all_gather(&[own], &mut newest)?;
        let Some(rank) = newest.iter().position(|&step| step > newest[0]) else { return Ok(()) };
        let seen = name_of(newest[rank]);
        let by_rank_0 = name_of(newest[0]);
        Err(CheckpointError::NotShared { path: self.path.clone(), rank, seen, by_rank_0 })
    }

    /// Returns the steps of the checkpoints, the newest first.
    fn steps(&self) -> Result<Vec<usize>> {
        let remedy = "see that it can be read";
        self.list().map_err(CheckpointError::file("read the folder", &self.path, remedy))
    }

    fn list(&self) -> io::Result<Vec<usize>> {
        let mut steps = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if let Some(step) = step_of(&entry.file_name())
                && self.is_checkpoint(&entry.path())?
            {
                steps.push(step);
            }
        }
        steps.sort_unstable_by_key(|&step| Reverse(step));
        Ok(steps)
    }

    /// Returns whether the folder is a checkpoint, whole or damaged.
    fn is_checkpoint(&self, folder: &Path) -> io::Result<bool> {
        for name in self.marks {
            match fs::metadata(folder.join(name)) {
                Ok(_) => return Ok(true),
                Err(error)
                    if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    fn lacks(&self) -> String {
        self.marks.join(" and no ")
    }

    /// Makes `new` the checkpoint `path`. After an error the old one is there, from the next `open`
    /// at the latest. If only the flush has failed, it may be the new one.
    fn replace(&self, path: &Path, new: &Path) -> io::Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let replaced = self.path.join(format!("{REPLACED}{name}"));
        let old = path.try_exists()?;
        if old {
            remove(&replaced)?;
            fs::rename(path, &replaced)?;
        }
        if let Err(error) = fs::rename(new, path) {
            if old {
                fs::rename(&replaced, path)?;
            }
            return Err(error);
        }
        sync(&self.path)?;
        if let Err(error) = remove(&replaced) {
            // The new one is there. `tidy` tries again.
            log::warn!("cannot remove {}: {error}", replaced.display());
        }
        Ok(())
    }

    /// Keeps the damaged checkpoint of `step` under another name.
    fn set_aside(&self, step: usize) -> Result<()> {
        let path = self.checkpoint(step);
        self.rename_aside(&path, step).map_err(CheckpointError::file("rename", &path, WRITABLE))
    }

    fn rename_aside(&self, path: &Path, step: usize) -> io::Result<()> {
        for number in 1.. {
            let number = if number == 1 { String::new() } else { format!(".{number}") };
            let aside = self.path.join(format!("step-{step}.damaged{number}"));
            if !aside.try_exists()? {
                fs::rename(path, aside)?;
                break;
            }
        }
        sync(&self.path)
    }

    /// Gives the checkpoint of `step` the name of what is being removed: half a checkpoint is never seen.
    fn hide(&self, step: usize) -> Result<PathBuf> {
        let path = self.checkpoint(step);
        let hidden = self.path.join(format!("{REMOVED}.step-{step}"));
        fs::rename(&path, &hidden).map_err(CheckpointError::file("remove", path, WRITABLE))?;
        Ok(hidden)
    }
}

/// Returns the name of a rank's newest checkpoint; -1 stands for none.
fn name_of(step: i64) -> String {
    if step < 0 { "none".to_owned() } else { format!("step-{step}") }
}

/// Returns the step in a checkpoint's name. Another program's may be `step-0100`.
fn step_of(name: &OsStr) -> Option<usize> {
    let number = name.to_str()?.strip_prefix("step-")?;
    number.parse().ok().filter(|step: &usize| number == step.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use tempfile::tempdir;

    use super::*;

    fn open(path: &Path) -> Folder {
        let group = ProcessGroup::in_process(1).unwrap().remove(0);
        Folder::open(path, &group, &["file"]).unwrap()
    }

    fn save(folder: &mut Folder, step: usize, text: &str) {
        fs::write(folder.begin(step).unwrap().join("file"), text).unwrap();
        folder.commit(step).unwrap();
    }

    fn latest(folder: &mut Folder) -> Option<(usize, String)> {
        folder.latest(None, |path| Ok(fs::read_to_string(path.join("file")).unwrap())).unwrap()
    }

    #[test]
    fn a_checkpoint_that_cannot_be_replaced_is_still_there() {
        let path = tempdir().unwrap();
        let mut folder = open(path.path());
        save(&mut folder, 7, "old");
        folder.replace(&folder.checkpoint(7), &path.path().join("is not there")).unwrap_err();
        assert_eq!(latest(&mut folder), Some((7, "old".into())));
    }

    #[test]
    fn a_checkpoint_is_replaced_even_if_the_old_one_cannot_be_removed() {
        let path = tempdir().unwrap();
        let mut folder = open(path.path());
        save(&mut folder, 7, "old");
        let fixed = |name: &str| path.path().join(name).join("fixed");
        fs::create_dir(fixed("step-7")).unwrap();
        fs::write(fixed("step-7").join("file"), "").unwrap();
        fs::set_permissions(fixed("step-7"), Permissions::from_mode(0o500)).unwrap();
        if File::create(fixed("step-7").join("other")).is_ok() {
            println!("SKIPPED: an old checkpoint that cannot be removed: root removes everything");
            return;
        }
        save(&mut folder, 7, "new");
        assert_eq!(latest(&mut folder), Some((7, "new".into())));
        drop(folder);
        let replaced = fixed(".checkpoint.replaced.step-7");
        fs::set_permissions(&replaced, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(latest(&mut open(path.path())), Some((7, "new".into())));
        assert!(!replaced.exists());
    }
}
