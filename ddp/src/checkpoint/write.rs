//! Writes a rank's parts of a checkpoint's files, and the files that checkpoints are merged into.
//!
//! Large pieces go to the disk past the kernel's cache, while the next one is copied and summed. What
//! is less than a page goes by way of the cache: at the ends of a piece are other ranks' bytes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread;

use rustix::fs::OFlags;

use super::error::{CheckpointError, Result};
use super::sums::{PIECE, Piece};

/// The alignment of direct writes, of addresses and in files.
const PAGE: usize = 4096;
/// Shorter writes go by way of the cache.
const LEAST_DIRECT: usize = 64 << 10;
/// Pieces that are filled or written at a time.
const BUFFERS: usize = 2;

/// Writes to files `names` in `folder`, which are there, what `fill` gives, and flushes them.
/// Returns the pieces, with the number of their file. `path` is where the files will be.
///
/// # Errors
/// Those of `fill`; the disk refuses.
pub fn write(
    folder: &Path,
    path: &Path,
    names: &[impl AsRef<Path> + Sync],
    fill: impl FnOnce(&mut Pieces) -> Result<()>,
) -> Result<Vec<(usize, Piece)>> {
    thread::scope(|scope| {
        let (to_disk, full) = mpsc::sync_channel(BUFFERS);
        let (back, empty) = mpsc::channel();
        for _ in 0..BUFFERS {
            let _ = back.send(Buffer::new());
        }
        let open = |file: usize| Target::open(folder, path, names[file].as_ref());
        let disk = scope.spawn(move || write_all(open, &full, &back));
        let mut pieces = Pieces { to_disk, empty, current: None, done: Vec::new() };
        let filled = fill(&mut pieces).and_then(|()| pieces.end());
        let Pieces { to_disk, done, .. } = pieces;
        drop(to_disk);
        disk.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        filled.map(|()| done)
    })
}

/// Collects bytes into pieces, and has them written.
pub struct Pieces {
    to_disk: SyncSender<Filled>,
    empty: Receiver<Buffer>,
    current: Option<Filled>,
    done: Vec<(usize, Piece)>,
}

/// A piece of a file. Its first byte is as far behind a page's start as in the file.
struct Filled {
    file: usize,
    start: u64,
    length: usize,
    buffer: Buffer,
}

impl Pieces {
    /// Adds bytes of a file, which lie behind those before or elsewhere.
    ///
    /// # Errors
    /// An earlier piece could not be written.
    pub fn add(&mut self, file: usize, mut start: u64, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let follows = self
                .current
                .as_ref()
                .is_some_and(|piece| piece.file == file && piece.end() == start);
            if !follows {
                self.end()?;
            }
            let mut piece = match self.current.take() {
                Some(piece) => piece,
                None => {
                    let buffer = self.empty.recv().map_err(|_| stopped())?;
                    Filled { file, start, length: 0, buffer }
                }
            };
            let filled = piece.bytes().end;
            let (now, rest) = bytes.split_at(bytes.len().min(PIECE - filled));
            piece.buffer.bytes(filled..filled + now.len()).copy_from_slice(now);
            piece.length += now.len();
            start += now.len() as u64;
            bytes = rest;
            let is_full = piece.bytes().end == PIECE;
            self.current = Some(piece);
            if is_full {
                self.end()?;
            }
        }
        Ok(())
    }

    /// Ends the piece.
    fn end(&mut self) -> Result<()> {
        let Some(mut piece) = self.current.take() else { return Ok(()) };
        let range = piece.bytes();
        self.done.push((piece.file, Piece::of(piece.start, piece.buffer.bytes(range))));
        self.to_disk.send(piece).map_err(|_| stopped())
    }
}

impl Filled {
    fn end(&self) -> u64 {
        self.start + self.length as u64
    }

    /// Returns where its bytes are in the buffer.
    fn bytes(&self) -> Range<usize> {
        let start = self.start as usize % PAGE;
        start..start + self.length
    }
}

/// The writer has stopped: its own error says why.
fn stopped() -> CheckpointError {
    CheckpointError::write("")(ErrorKind::BrokenPipe.into())
}

/// Memory that begins at a page.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Self {
        let memory = vec![0; PIECE + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Self { memory, start }
    }

    fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.memory[self.start..][range]
    }
}

/// A file to write to.
struct Target {
    path: PathBuf,
    /// By way of the cache.
    cached: File,
    /// Past it, where the file system can.
    direct: Option<File>,
}

impl Target {
    fn open(folder: &Path, path: &Path, name: &Path) -> Result<Self> {
        let path = path.join(name);
        let file = folder.join(name);
        let cached = OpenOptions::new().write(true).open(&file);
        let cached = cached.map_err(CheckpointError::write(&path))?;
        let flags = OFlags::DIRECT.bits() as i32;
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(&file).ok();
        Ok(Self { path, cached, direct })
    }

    fn write(&mut self, piece: &mut Filled) -> io::Result<()> {
        let Range { start, end } = piece.bytes();
        let first = start.next_multiple_of(PAGE);
        let last = end / PAGE * PAGE;
        let page = piece.start - start as u64;
        let mut cached = [start..end, end..end];
        if let Some(direct) = &self.direct
            && last >= first + LEAST_DIRECT
        {
            match direct.write_all_at(piece.buffer.bytes(first..last), page + first as u64) {
                Ok(()) => cached = [start..first, last..end],
                // The file system wants another alignment.
                Err(error) if error.kind() == ErrorKind::InvalidInput => self.direct = None,
                Err(error) => return Err(error),
            }
        }
        for range in cached {
            let at = page + range.start as u64;
            self.cached.write_all_at(piece.buffer.bytes(range), at)?;
        }
        Ok(())
    }
}

/// Writes pieces until there are no more, and flushes their files, which `open` opens by their numbers.
fn write_all(
    open: impl Fn(usize) -> Result<Target>,
    full: &Receiver<Filled>,
    back: &Sender<Buffer>,
) -> Result<()> {
    let mut targets = BTreeMap::new();
    for mut piece in full {
        let target = match targets.entry(piece.file) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(open(piece.file)?),
        };
        let written = target.write(&mut piece);
        written.map_err(CheckpointError::write(&target.path))?;
        let _ = back.send(piece.buffer); // nobody waits for it after the last piece
    }
    for Target { path, cached, .. } in targets.into_values() {
        cached.sync_all().map_err(CheckpointError::write(path))?;
    }
    Ok(())
}
