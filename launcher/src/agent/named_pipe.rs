//! Removing the named pipe of a launcher that is gone.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Removes a named pipe that has no reader; true if nothing is left at the path.
pub fn remove_unread(path: &Path) -> bool {
    match fs::symlink_metadata(path) {
        Err(error) => error.kind() == ErrorKind::NotFound,
        Ok(found) if !found.file_type().is_fifo() => false,
        Ok(_) => {
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::open(path, flags, rustix::fs::Mode::empty());
            opened.is_err_and(|error| error == Errno::NXIO) && fs::remove_file(path).is_ok()
        }
    }
}
