//! The folder of checkpoints, as rank 0 sees it: `step-N` is a folder of files that is whole or not
//! there, whenever a process is killed or a machine loses its power.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::error::CheckpointError;

type Result<T> = std::result::Result<T, CheckpointError>;

/// Says what is in a checkpoint.
pub const INDEX: &str = "index.json";
/// Locked by the one job that writes here.
const LOCK: &str = ".checkpoint.lock";
/// A checkpoint that is being written. One that is there at the start is of a killed job.
const PARTIAL: &str = ".checkpoint.partial";
/// A checkpoint that is being removed.
const REMOVED: &str = ".checkpoint.removed";
/// Followed by the name of a checkpoint that another one of the same step is about to replace.
const REPLACED: &str = ".checkpoint.replaced.";
/// How long a job that is being stopped may still hold the lock: longer than flow-launch waits
/// before it kills.
const STOPPING: Duration = Duration::from_secs(10);

const WRITABLE: &str = "see that the disk has space and the folder can be written";

/// The folder, locked until this is dropped or the process ends.
pub struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    /// Makes the folder if it is missing, locks it, and tidies up after a killed job.
    pub fn open(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).map_err(CheckpointError::file(
            "make the folder",
            path,
            WRITABLE,
        ))?;
        let folder = Self { path: path.to_owned(), _lock: lock(path)? };
        folder.tidy().map_err(CheckpointError::file("write to", path, WRITABLE))?;
        Ok(folder)
    }

    fn tidy(&self) -> io::Result<()> {
        for name in [PARTIAL, REMOVED] {
            remove(&self.path.join(name))?;
        }
        for entry in fs::read_dir(&self.path)? {
            let old = entry?;
            let name = old.file_name();
            let Some(name) = name.to_str().and_then(|name| name.strip_prefix(REPLACED)) else {
                continue;
            };
            match self.path.join(name) {
                path if path.exists() => remove(&old.path())?,
                path => fs::rename(old.path(), path)?,
            }
        }
        Ok(())
    }

    /// The steps of the checkpoints, the newest first.
    pub fn steps(&self) -> Result<Vec<usize>> {
        let list = || {
            let mut steps = Vec::new();
            for entry in fs::read_dir(&self.path)? {
                let entry = entry?;
                let step = step_of(&entry.file_name());
                steps.extend(step.filter(|_| entry.path().join(INDEX).exists()));
            }
            steps.sort_unstable_by_key(|&step| Reverse(step));
            Ok(steps)
        };
        list().map_err(CheckpointError::file(
            "read the folder",
            &self.path,
            "see that it can be read",
        ))
    }

    /// Makes [`partial`] an empty folder, which all ranks then fill for the checkpoint of `step`.
    pub fn begin(&self, step: usize) -> Result<()> {
        let (path, partial) = (checkpoint(&self.path, step), partial(&self.path));
        if path.exists() && !path.join(INDEX).exists() {
            return Err(CheckpointError::Foreign(path));
        }
        remove(&partial)
            .and_then(|()| fs::create_dir(&partial))
            .map_err(CheckpointError::file("write", partial, WRITABLE))
    }

    /// Adds the index to what the ranks have written, and makes it the checkpoint of `step`. After
    /// an error the one that was there before is still there, from the next `open` at the latest.
    pub fn commit(&self, step: usize, index: &[u8]) -> Result<()> {
        let path = checkpoint(&self.path, step);
        let commit = || {
            let partial = partial(&self.path);
            let mut file = File::create(partial.join(INDEX))?;
            file.write_all(index)?;
            file.sync_all()?;
            sync(&partial)?;
            let replaced = self.path.join(format!("{REPLACED}step-{step}"));
            if path.try_exists()? {
                remove(&replaced)?;
                fs::rename(&path, &replaced)?;
            }
            fs::rename(&partial, &path)?;
            sync(&self.path)?;
            remove(&replaced)
        };
        commit().map_err(CheckpointError::file("write", path.clone(), WRITABLE))
    }

    /// Keeps the damaged checkpoint of `step` under another name.
    pub fn set_aside(&self, step: usize) -> Result<()> {
        let path = checkpoint(&self.path, step);
        let mut names = (1..).map(|number| match number {
            1 => format!("step-{step}.damaged"),
            number => format!("step-{step}.damaged.{number}"),
        });
        let free = names.find(|name| !self.path.join(name).exists()).unwrap_or_default();
        fs::rename(&path, self.path.join(free))
            .and_then(|()| sync(&self.path))
            .map_err(CheckpointError::file("rename", path, WRITABLE))
    }

    /// Removes the checkpoint of `step`.
    pub fn remove(&self, step: usize) -> Result<()> {
        let (path, removed) = (checkpoint(&self.path, step), self.path.join(REMOVED));
        // Under another name first: half a checkpoint is never seen.
        remove(&removed)
            .and_then(|()| fs::rename(&path, &removed))
            .and_then(|()| remove(&removed))
            .map_err(CheckpointError::file("remove", path, WRITABLE))
    }
}

/// The checkpoint of `step`, whether there is one or not.
pub fn checkpoint(folder: &Path, step: usize) -> PathBuf {
    folder.join(format!("step-{step}"))
}

/// Where ranks write before a checkpoint is whole.
pub fn partial(folder: &Path) -> PathBuf {
    folder.join(PARTIAL)
}

/// The step in a checkpoint's name. Another program's may be `step-0100`.
fn step_of(name: &OsStr) -> Option<usize> {
    let number = name.to_str()?.strip_prefix("step-")?;
    number.parse().ok().filter(|step: &usize| number == step.to_string())
}

fn lock(folder: &Path) -> Result<File> {
    let lock = File::create(folder.join(LOCK))
        .map_err(CheckpointError::file("write to", folder, WRITABLE))?;
    let end = Instant::now() + STOPPING;
    while let Err(error) = lock.try_lock() {
        match error {
            TryLockError::WouldBlock if Instant::now() < end => sleep(Duration::from_millis(50)),
            TryLockError::WouldBlock => return Err(CheckpointError::Locked(folder.to_owned())),
            TryLockError::Error(error) => {
                let remedy = "use a file system with locks";
                return Err(CheckpointError::file("lock", folder, remedy)(error));
            }
        }
    }
    Ok(lock)
}

/// Writes a folder's list of names to the disk.
pub fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Removes a file, or a folder with all that is in it, if it is there.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_dir_all(path) {
        Err(error) if error.kind() == ErrorKind::NotADirectory => fs::remove_file(path),
        other => other,
    };
    removed.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}
