//! A file of a checkpoint, wherever its bytes are.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// A file of a checkpoint that is open. Its bytes are those of one file, or are spread over memories of
/// several ranks.
pub struct SavedFile {
    /// Where it is, or was when it was opened.
    pub path: PathBuf,
    /// In order, without gaps.
    extents: Vec<Extent>,
}

/// Bytes of a file that lie side by side.
pub struct Extent {
    /// The first of them in the file.
    pub start: u64,
    pub length: u64,
    /// What has them, and where there.
    pub file: Arc<File>,
    pub at: u64,
}

impl SavedFile {
    /// Returns a file that is on a disk.
    ///
    /// # Errors
    /// The disk does not tell its length.
    pub fn whole(path: PathBuf, file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let extent = Extent { start: 0, length, file: Arc::new(file), at: 0 };
        Ok(Self { path, extents: vec![extent] })
    }

    /// Returns the file that has these bytes; None if some are missing, or are there twice.
    pub fn of(path: PathBuf, mut extents: Vec<Extent>) -> Option<Self> {
        extents.sort_by_key(|extent| (extent.start, extent.length));
        let mut end = 0;
        for extent in &extents {
            if extent.start != end {
                return None;
            }
            end += extent.length;
        }
        Some(Self { path, extents })
    }

    /// Returns how many bytes it has.
    pub fn length(&self) -> u64 {
        self.extents.last().map_or(0, |last| last.start + last.length)
    }

    /// Reads as many bytes as `bytes` has, from `start` on.
    ///
    /// # Errors
    /// It ends before; it cannot be read.
    pub fn read_exact_at(&self, mut bytes: &mut [u8], mut start: u64) -> io::Result<()> {
        let first = self.extents.partition_point(|extent| extent.start + extent.length <= start);
        for extent in &self.extents[first..] {
            if bytes.is_empty() {
                break;
            }
            let skipped = start - extent.start;
            let length = bytes.len().min((extent.length - skipped) as usize);
            let (now, rest) = bytes.split_at_mut(length);
            extent.file.read_exact_at(now, extent.at + skipped)?;
            start += length as u64;
            bytes = rest;
        }
        if bytes.is_empty() { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(bytes: &[u8]) -> Arc<File> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(file)
    }

    #[test]
    fn bytes_are_read_wherever_they_are() {
        let [one, other] = [file(b"xx0123xx"), file(b"89y4567")];
        let extent = |start, length, file: &Arc<File>, at| Extent {
            start,
            length,
            file: Arc::clone(file),
            at,
        };
        let extents = vec![
            extent(8, 2, &other, 0),
            extent(0, 4, &one, 2),
            extent(4, 0, &one, 0),
            extent(4, 4, &other, 3),
        ];
        let saved = SavedFile::of("file".into(), extents).unwrap();
        assert_eq!(saved.length(), 10);
        for start in 0..=10 {
            for end in start..=10 {
                let mut bytes = vec![0; end - start];
                saved.read_exact_at(&mut bytes, start as u64).unwrap();
                assert_eq!(bytes, b"0123456789"[start..end]);
            }
            let error = saved.read_exact_at(&mut [0; 11][start..], start as u64).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        }
        for gap in [1, 3, 5] {
            let extents = vec![extent(0, 4, &one, 2), extent(gap, 2, &other, 0)];
            assert!(SavedFile::of("file".into(), extents).is_none());
        }
    }
}
