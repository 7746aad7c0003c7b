//! The folder of checkpoints, as rank 0 sees it: `step-N` is a folder of files that is whole or not
//! there, whenever the process is killed or the machine loses its power.

use std::cmp::Reverse;
use std::ffi::OsStr;
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
/// What the program, the sampler and the optimizer go on from.
pub const STATE: &str = "state.json";
/// How long a writer that is being stopped may still hold the lock: longer than flow-launch waits
/// before it kills.
const STOPPING: Duration = Duration::from_secs(10);

const WRITABLE: &str = "see that the disk has space and the folder can be written";
const READABLE: &str = "see that the disk can be read, or move the checkpoint away";

/// Why a checkpoint was not read.
pub enum ReadError {
    /// A file is missing or has another sum.
    Damaged(String),
    /// It may be whole, but the disk cannot be read.
    Failed(CheckpointError),
}

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
            if step_of(&name).is_some() && !is_checkpoint(&old.path())? {
                log::warn!(
                    "{} has neither {SUMS} nor {STATE}: it is no checkpoint, and stays",
                    old.path().display()
                );
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
        let failed = |error| CheckpointError::file("write", &path, WRITABLE)(error);
        if path.try_exists().map_err(failed)? && !is_checkpoint(&path).map_err(failed)? {
            return Err(CheckpointError::Foreign(path));
        }
        remove(&partial).and_then(|()| fs::create_dir(&partial)).map_err(failed)?;
        fill(&partial)?;
        self.finish(&partial, &path).map_err(failed)
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
        self.replace(path, partial)
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
    pub fn set_aside(&self, step: usize) -> Result<()> {
        let path = self.checkpoint(step);
        let set_aside = || {
            for number in 1.. {
                let number = if number == 1 { String::new() } else { format!(".{number}") };
                let aside = self.path.join(format!("step-{step}.damaged{number}"));
                if !aside.try_exists()? {
                    fs::rename(&path, aside)?;
                    break;
                }
            }
            sync(&self.path)
        };
        set_aside().map_err(CheckpointError::file("rename", &path, WRITABLE))
    }

    /// The contents of a checkpoint's files, if it is whole.
    pub fn read<const N: usize>(
        &self,
        step: usize,
        names: [&str; N],
    ) -> std::result::Result<[Vec<u8>; N], ReadError> {
        let folder = self.checkpoint(step);
        let read = |name: &str| {
            let file = folder.join(name);
            fs::read(&file).map_err(|error| match error.kind() {
                ErrorKind::NotFound => ReadError::Damaged(format!("{name}: {error}")),
                _ => ReadError::Failed(CheckpointError::file("read", file, READABLE)(error)),
            })
        };
        let sums = String::from_utf8_lossy(&read(SUMS)?).into_owned();
        let mut contents = [const { Vec::new() }; N];
        for (name, bytes) in names.iter().zip(&mut contents) {
            *bytes = read(name)?;
            let line = format!("{}  {name}", sum(&bytes[..]).unwrap_or_default());
            if !sums.lines().any(|known| known == line) {
                let reason = format!("{name} has not the sum that is in {SUMS}");
                return Err(ReadError::Damaged(reason));
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
        let entry = entry?;
        if let Some(step) = step_of(&entry.file_name()) {
            if is_checkpoint(&entry.path())? {
                steps.push(step);
            }
        }
    }
    steps.sort_unstable_by_key(|&step| Reverse(step));
    Ok(steps)
}

/// The step in a checkpoint's name. Another program's may be `step-0100`.
fn step_of(name: &OsStr) -> Option<usize> {
    let number = name.to_str()?.strip_prefix("step-")?;
    number.parse().ok().filter(|step: &usize| number == step.to_string())
}

/// Whether the folder is a checkpoint of ours, whole or damaged. One that has lost its sums or its
/// state is damaged; a folder without both is another program's.
fn is_checkpoint(folder: &Path) -> io::Result<bool> {
    for name in [SUMS, STATE] {
        match fs::metadata(folder.join(name)) {
            Ok(_) => return Ok(true),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
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

/// As `create_dir_all`; the folders survive a loss of power.
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

/// The SHA-256 of a file's bytes, in hexadecimal digits.
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

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_checkpoint_that_cannot_be_replaced_is_still_there() {
        let path = std::env::temp_dir().join(format!("flow-checkpoint-{}", std::process::id()));
        let folder = Folder::open(&path).unwrap();
        let fill = |partial: &Path| {
            fs::write(partial.join("file"), "old").unwrap();
            Ok(())
        };
        folder.write(7, fill).unwrap();
        folder.replace(&folder.checkpoint(7), &path.join("is not there")).unwrap_err();
        assert_eq!(folder.steps().unwrap(), [7]);
        let contents = folder.read(7, ["file"]).ok().expect("it is whole");
        assert_eq!(contents, [b"old".to_vec()]);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_checkpoint_is_replaced_even_if_the_old_one_cannot_be_removed() {
        let path = std::env::temp_dir().join(format!("flow-replaced-{}", std::process::id()));
        let folder = Folder::open(&path).unwrap();
        let fill = |text: &'static str| {
            move |partial: &Path| {
                fs::write(partial.join("file"), text).unwrap();
                Ok(())
            }
        };
        folder.write(7, fill("old")).unwrap();
        let fixed = |name: &str| path.join(name).join("fixed");
        fs::create_dir(fixed("step-7")).unwrap();
        fs::write(fixed("step-7").join("file"), "").unwrap();
        fs::set_permissions(fixed("step-7"), Permissions::from_mode(0o500)).unwrap();
        if File::create(fixed("step-7").join("other")).is_ok() {
            println!("SKIPPED: an old checkpoint that cannot be removed: root removes everything");
        } else {
            folder.write(7, fill("new")).unwrap();
            let contents = folder.read(7, ["file"]).ok().expect("it is whole");
            assert_eq!(contents, [b"new".to_vec()]);
            drop(folder);
            let replaced = fixed(".checkpoint.replaced.step-7");
            fs::set_permissions(&replaced, Permissions::from_mode(0o700)).unwrap();
            assert_eq!(Folder::open(&path).unwrap().steps().unwrap(), [7]);
            assert!(!replaced.exists());
        }
        fs::remove_dir_all(&path).unwrap();
    }
}
