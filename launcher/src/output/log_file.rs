//! One file that workers' output is appended to.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use memchr::memmem::Finder;
use rustix::fs::OFlags;

/// A file to which a worker's output is appended.
pub struct LogFile {
    pub path: PathBuf,
    /// Its size when it was opened.
    pub start: u64,
    /// None once it is given to the worker, or cannot be written.
    file: Option<File>,
}

impl LogFile {
    /// Opens a file, or makes it; `truncate` empties it.
    pub fn open(path: PathBuf, truncate: bool) -> io::Result<LogFile> {
        let flags = if truncate { OFlags::TRUNC } else { OFlags::empty() };
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .custom_flags(flags.bits() as i32)
            .open(&path)?;
        Ok(LogFile { start: file.metadata()?.len(), file: Some(file), path })
    }

    /// Takes the open file, for the worker itself to write to.
    pub fn take(&mut self) -> Option<File> {
        self.file.take()
    }

    /// Appends bytes. An error closes the file, so that it is reported once.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.write_all(bytes).map_err(|error| {
            self.file = None;
            format!(
                "cannot write to {}: {error}; it will lack the rest of the output",
                self.path.display()
            )
        })
    }
}

/// Copies the lines that contain one of several texts.
pub struct Filter {
    needles: Vec<Finder<'static>>,
    file: LogFile,
}

impl Filter {
    /// Makes a filter for lines that contain one of `needles`.
    pub fn new(needles: &[String], file: LogFile) -> Filter {
        let needles = needles.iter().map(|needle| Finder::new(needle).into_owned());
        Filter { needles: needles.collect(), file }
    }

    /// Takes a line, a piece of one that is too long, or a state of a progress bar.
    pub fn put(&mut self, prefix: &str, segment: &[u8]) -> Result<(), String> {
        let line = segment.trim_ascii_end();
        if !self.needles.iter().any(|needle| needle.find(line).is_some()) {
            return Ok(());
        }
        self.file.write(&[prefix.as_bytes(), line, b"\n"].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_reported_once() {
        let mut full = LogFile::open("/dev/full".into(), false).unwrap();
        assert!(full.write(b"x").unwrap_err().contains("/dev/full"));
        assert_eq!(full.write(b"x"), Ok(()));
    }
}
