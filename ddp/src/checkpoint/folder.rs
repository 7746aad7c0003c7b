//! The folder of checkpoints, as rank 0 sees it: `step-N` is a folder of files that is whole or not
//! there, whenever the process is killed or the machine loses its power.

use std::cmp::Reverse;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::error::CheckpointError;

type Result<T> = std::result::Result<T, CheckpointError>;

/// Locked by the one job that writes here.
const LOCK: &str = ".checkpoint.lock";
/// A checkpoint that is being written. One that is there at the start is of a killed writer.
const PARTIAL: &str = ".checkpoint.partial";
/// A checkpoint that is being removed.
const REMOVED: &str = ".checkpoint.removed";
/// Followed by the name of a checkpoint that another one of the same step is about to replace.
const REPLACED: &str = ".checkpoint.replaced.";
/// The sums of a checkpoint's other files, for `sha256sum --check`.
const SUMS: &str = "SHA256SUMS";
/// How long a writer that is being stopped may still hold the lock: longer than flow-launch waits
/// before it kills.
const STOPPING: Duration = Duration::from_secs(10);

const WRITABLE: &str = "see that the disk has space and the folder can be written";

/// The folder, locked until this is dropped or the process ends.
pub struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    /// Makes the folder if it is missing, locks it, and tidies up after a killed writer.
    pub fn open(path: &Path) -> Result<Self> {
        create(path).map_err(CheckpointError::file("make the folder", path, WRITABLE))?;
        let lock = lock(path)?;
        let folder = Self { path: path.to_owned(), _lock: lock };
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
            let path = self.path.join(name);
            if path.exists() {
                remove(&old.path())?;
            } else {
                fs::rename(old.path(), path)?;
            }
        }
        Ok(())
    }

    /// The checkpoint of `step`, whether there is one or not.
    pub fn checkpoint(&self, step: usize) -> PathBuf {
        self.path.join(format!("step-{step}"))
    }

    /// The steps of the checkpoints, the newest first.
    pub fn steps(&self) -> Result<Vec<usize>> {
        steps(&self.path).map_err(CheckpointError::file(
            "read the folder",
            &self.path,
            "see that it can be read",
        ))
    }

    /// Adds the checkpoint of `step`, or replaces it. `fill` writes its files into the folder that
    /// it is given.
    pub fn write(&self, step: usize, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let (path, partial) = (self.checkpoint(step), self.path.join(PARTIAL));
        let write = |result: io::Result<()>| {
            result.map_err(CheckpointError::file("write", &path, WRITABLE))
        };
        write(remove(&partial).and_then(|()| fs::create_dir(&partial)))?;
        fill(&partial)?;
        write(self.finish(&partial, &path))
    }

    fn finish(&self, partial: &Path, path: &Path) -> io::Result<()> {
        let mut sums = String::new();
        for entry in fs::read_dir(partial)? {
            let entry = entry?;
            let file = File::open(entry.path())?;
            sums += &format!("{}  {}\n", sum(&file)?, entry.file_name().to_string_lossy());
            file.sync_all()?;
        }
        fs::write(partial.join(SUMS), sums)?;
        File::open(partial.join(SUMS))?.sync_all()?;
        sync(partial)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let replaced = self.path.join(format!("{REPLACED}{name}"));
        if path.exists() {
            fs::rename(path, &replaced)?;
        }
        fs::rename(partial, path)?;
        sync(&self.path)?;
        remove(&replaced)
    }

    /// The contents of a checkpoint's files, if it is whole; else what is wrong with it.
    pub fn read<const N: usize>(
        &self,
        step: usize,
        names: [&str; N],
    ) -> std::result::Result<[Vec<u8>; N], String> {
        let folder = self.checkpoint(step);
        let read =
            |name: &str| fs::read(folder.join(name)).map_err(|error| format!("{name}: {error}"));
        let sums = String::from_utf8_lossy(&read(SUMS)?).into_owned();
        let mut contents = [const { Vec::new() }; N];
        for (name, bytes) in names.iter().zip(&mut contents) {
            *bytes = read(name)?;
            let line = format!("{}  {name}", sum(&bytes[..]).unwrap_or_default());
            if !sums.lines().any(|known| known == line) {
                return Err(format!("{name} has not the sum that is in {SUMS}"));
            }
        }
        Ok(contents)
    }

    /// Removes the checkpoint of `step`.
    pub fn remove(&self, step: usize) -> Result<()> {
        let (path, removed) = (self.checkpoint(step), self.path.join(REMOVED));
        // Under another name first: half a checkpoint is never seen.
        remove(&removed)
            .and_then(|()| fs::rename(&path, &removed))
            .and_then(|()| remove(&removed))
            .map_err(CheckpointError::file("remove", path, WRITABLE))
    }
}

/// The steps of the checkpoints in a folder, the newest first.
pub fn steps(folder: &Path) -> io::Result<Vec<usize>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("step-"));
        let step = number.and_then(|number| number.parse::<usize>().ok());
        // Another program's may be `step-0100`.
        steps.extend(step.filter(|step| number == Some(step.to_string().as_str())));
    }
    steps.sort_unstable_by_key(|&step| Reverse(step));
    Ok(steps)
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

/// As `create_dir_all`, and what is made is still there when the machine has lost its power.
fn create(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent =
        folder.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    create(parent)?;
    fs::create_dir_all(folder)?; // no error where another process has just made it
    sync(parent)
}

/// Writes a folder's list of names to the disk.
fn sync(folder: &Path) -> io::Result<()> {
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

/// The SHA-256 of what is read, in hexadecimal digits.
fn sum(mut from: impl Read) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        match from.read(&mut chunk)? {
            0 => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            length => hash.update(&chunk[..length]),
        }
    }
}
