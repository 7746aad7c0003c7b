//! Files and folders that are there to last, and one job's.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::error::{CheckpointError, Result, WRITABLE};

/// The time for which a job that is being stopped may still hold the lock: longer than flow-launch
/// waits before it kills.
const STOPPING: Duration = Duration::from_secs(10);

/// The time for which a folder may get new files while it is removed.
const LONGEST_REMOVAL: Duration = Duration::from_secs(10);

/// Locks a file in `folder`, until it is dropped or the process ends.
pub fn lock(folder: &Path, name: &str) -> Result<File> {
    let lock = File::create(folder.join(name))
        .map_err(CheckpointError::file("write to", folder, WRITABLE))?;
    lock_file(&lock, folder)?;
    Ok(lock)
}

/// Locks a file, by which `folder` is locked.
pub fn lock_file(lock: &File, folder: &Path) -> Result<()> {
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
    Ok(())
}

/// Makes the file `path` of what `write` writes to the file whose name it gets. The file is whole or
/// not there: it has another name first, and goes away if something fails.
///
/// # Errors
/// Those of `write`; the disk refuses.
pub fn write_whole(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let written = write(partial).and_then(|()| {
        let flushed = File::open(partial).and_then(|file| file.sync_all());
        flushed.and_then(|()| fs::rename(partial, path)).map_err(CheckpointError::write(path))
    });
    if written.is_err() {
        let _ = fs::remove_file(partial); // the error says more
    }
    written?;
    sync(parent(path)).map_err(CheckpointError::write(path))
}

/// Makes a folder as `create_dir_all` does; the folders survive a loss of power.
pub fn create(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    create(parent(folder))?;
    fs::create_dir_all(folder)?; // no error where another process has just made it
    sync(parent(folder))
}

/// Returns the folder that a file or folder is in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."))
}

/// Writes a folder's list of names to the disk.
pub fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Removes a folder into which others may still write, if it is there. It first gets the name
/// `aside`: then they find it no more. Those that have found it before may each make one more file.
pub fn remove_in_use(path: &Path, aside: &Path) -> io::Result<()> {
    remove(aside)?;
    match fs::rename(path, aside) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    }
    until_empty(|| remove(aside))
}

/// Calls `remove` again where a file was made just then in the folder that it removes. A folder that
/// does not become empty, as on NFS while a file there is open, is an error after a while.
fn until_empty(mut remove: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let deadline = Instant::now() + LONGEST_REMOVAL;
    loop {
        match remove() {
            Err(error)
                if error.kind() == ErrorKind::DirectoryNotEmpty && Instant::now() < deadline =>
            {
                sleep(Duration::from_millis(1));
            }
            removed => return removed,
        }
    }
}

/// Removes folders while the caller goes on: a disk that has each freed block erased takes its time.
/// Once this is dropped they are gone.
#[derive(Default)]
pub struct Remover(Option<JoinHandle<()>>);

impl Remover {
    /// Removes folders, once those before are removed. What cannot be removed is a warning in the log.
    pub fn start(&mut self, folders: Vec<PathBuf>) {
        self.wait();
        let thread = thread::Builder::new().name("checkpoints".to_owned());
        match thread.spawn(move || remove_all(&folders)) {
            Ok(thread) => self.0 = Some(thread),
            // The next save removes them.
            Err(error) => log::warn!("cannot start a thread that removes old checkpoints: {error}"),
        }
    }

    /// Waits until no folder is being removed.
    pub fn wait(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join(); // `remove_all` does not panic
        }
    }
}

fn remove_all(folders: &[PathBuf]) {
    for folder in folders {
        if let Err(error) = until_empty(|| remove(folder)) {
            log::warn!("cannot remove {}: {error}", folder.display());
        }
    }
}

impl Drop for Remover {
    fn drop(&mut self) {
        self.wait();
    }
}

/// Removes a file, or a folder with all that is in it, if it is there.
pub fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_dir_all(path) {
        Err(error) if error.kind() == ErrorKind::NotADirectory => fs::remove_file(path),
        other => other,
    };
    removed.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_removed_however_many_files_come_meanwhile() {
        let mut attempts = 0;
        let removed = until_empty(|| {
            attempts += 1;
            match attempts {
                5 => Ok(()),
                _ => Err(ErrorKind::DirectoryNotEmpty.into()),
            }
        });
        assert!(removed.is_ok() && attempts == 5, "{removed:?}");
        let refused = until_empty(|| Err(ErrorKind::PermissionDenied.into()));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
}
