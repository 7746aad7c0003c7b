//! The memory that a rank copies its part of a checkpoint into. flow-launch's outlives this process.
//!
//! | bytes | contents |
//! |---|---|
//! | from 0 and from 64 on | a header of a generation: where its record is, and the record's BLAKE3 |
//! | from 4096 on | what was copied, and the records of what it is |
//!
//! There are two generations at most. A new one is copied beside the one that all ranks have, and its
//! header is written last. So it is whole or not there, whenever the process is killed.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use flow_comm::MappedFile;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::sums::{BLOCK, PIECE, THREADS, sum};
use crate::fsdp::machine_memory::available;

/// The first byte of what is copied.
const FIRST: u64 = 4096;
/// The bytes between two headers.
const HEADER: usize = 64;
/// Generations.
const SLOTS: usize = 2;

/// A rank's memory.
pub struct Memory {
    pub file: Arc<File>,
    /// Where ranks of this machine open it.
    pub path: PathBuf,
    mapped: Option<MappedFile>,
    /// The generation that stays, as all ranks have it.
    kept: Option<Generation>,
    /// What is copied now.
    copied: Range<u64>,
    /// The copies that have begun.
    begun: Arc<AtomicU64>,
}

/// Bytes that stay in a memory until two more copies have begun.
pub struct Held {
    begun: Arc<AtomicU64>,
    at: u64,
}

impl Held {
    /// Whether the bytes may be others now.
    pub fn may_be_replaced(&self) -> bool {
        self.begun.load(Ordering::Acquire) - self.at >= 2
    }
}

/// What all ranks have saved at a time: the same on all of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stamp {
    pub format: u32,
    pub step: usize,
    /// Counts up with each save.
    pub number: u64,
    /// No other save has the same.
    pub nonce: u64,
    /// The ranks that have something of it.
    pub holders: usize,
    /// Whether one before it was whole.
    pub follows: bool,
    /// The files.
    pub names: Vec<String>,
}

/// What a rank tells the others before it copies.
#[derive(Serialize, Deserialize)]
pub struct Ready {
    /// How many bytes larger its memory becomes.
    pub grows: u64,
    /// How many are free on its machine, if it becomes larger.
    pub available: u64,
    /// Whether it has something to copy.
    pub holds: bool,
    /// Whether its memory has a generation that stays.
    pub follows: bool,
    /// No other save has that of rank 0.
    pub nonce: u64,
}

/// Bytes of a file, and their place there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    pub file: usize,
    pub start: u64,
    pub length: u64,
}

/// What a rank has copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub stamp: Stamp,
    /// The folder that the checkpoint is written to as well.
    pub folder: Option<PathBuf>,
    /// This rank's number among the holders, if it is one.
    pub holder: Option<usize>,
    /// Where the first block is.
    pub start: u64,
    /// They lie side by side.
    pub blocks: Vec<Block>,
    /// The BLAKE3 of each piece of at most [`PIECE`] bytes of the blocks.
    pub sums: Vec<String>,
}

/// A generation whose record is whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    slot: usize,
    /// Its blocks and its record.
    bytes: Range<u64>,
    pub record: Record,
    header: Vec<u8>,
}

impl Memory {
    /// Makes memory of this process.
    pub fn own() -> io::Result<Self> {
        let file = File::from(memfd_create("flow-checkpoint", MemfdFlags::CLOEXEC)?);
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into();
        Ok(Self::of(file, path))
    }

    /// Returns the memory `file`, which other ranks open by `path`.
    pub fn of(file: File, path: PathBuf) -> Self {
        Self {
            file: Arc::new(file),
            path,
            mapped: None,
            kept: None,
            copied: FIRST..FIRST,
            begun: Arc::default(),
        }
    }

    /// Returns the generations that are there.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn generations(&self) -> io::Result<Vec<Generation>> {
        let mut found = Vec::new();
        for slot in 0..SLOTS {
            match self.read(slot) {
                Ok(generation) => found.extend(generation),
                // There is nothing, or not yet all.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Empties the memory if it has no generation: what is there is another program's.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn clear_others(&self) -> io::Result<()> {
        if self.generations()?.is_empty() { self.file.set_len(0) } else { Ok(()) }
    }

    fn read(&self, slot: usize) -> io::Result<Option<Generation>> {
        let mut header = [0; 48];
        self.file.read_exact_at(&mut header, (slot * HEADER) as u64)?;
        let [start, length] =
            [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte])));
        let all = FIRST..=self.file.metadata()?.len();
        if !start.checked_add(length).is_some_and(|end| all.contains(&start) && all.contains(&end))
        {
            return Ok(None);
        }
        let mut record = vec![0; length as usize];
        self.file.read_exact_at(&mut record, start)?;
        if header[16..] != *blake3::hash(&record).as_bytes() {
            return Ok(None);
        }
        let Ok(record) = serde_json::from_slice::<Record>(&record) else { return Ok(None) };
        let bytes = record.start.min(start)..record.end().max(start + length);
        Ok(Some(Generation { slot, bytes, record, header: header.to_vec() }))
    }

    /// Returns whether a generation's blocks have their sums.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn is_whole(&self, record: &Record) -> io::Result<bool> {
        let threads = thread::available_parallelism().map_or(1, |cores| cores.get().min(THREADS));
        Ok(self.sums(record.start..record.end(), threads)? == record.sums)
    }

    /// Returns the BLAKE3 of each piece of these bytes.
    fn sums(&self, bytes: Range<u64>, threads: usize) -> io::Result<Vec<String>> {
        let pieces: Vec<_> = bytes.clone().step_by(PIECE).collect();
        let each = pieces.len().div_ceil(threads).max(1);
        let sums_of = |pieces: &[u64]| {
            let mut block = vec![0; BLOCK];
            let sums = pieces.iter().map(|&start| {
                let length = PIECE.min((bytes.end - start) as usize);
                sum(&self.file, start, length, &mut block)
            });
            sums.collect::<io::Result<Vec<_>>>()
        };
        thread::scope(|scope| {
            let parts = pieces.chunks(each);
            let parts: Vec<_> = parts.map(|part| scope.spawn(|| sums_of(part))).collect();
            let mut sums = Vec::with_capacity(pieces.len());
            for part in parts {
                sums.extend(part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            }
            Ok(sums)
        })
    }

    /// Keeps this generation, and no other one.
    pub fn keep(&mut self, generation: Option<Generation>) {
        self.kept = generation;
    }

    /// Returns what the other ranks are told before so many bytes are copied.
    pub fn ready(&self, bytes: u64) -> Ready {
        let length = self.file.metadata().map_or(0, |file| file.len());
        let grows = (self.free_place(bytes) + bytes).saturating_sub(length);
        let available = if grows > 0 { available() } else { None };
        Ready {
            grows,
            available: available.unwrap_or(u64::MAX),
            holds: bytes > 0,
            follows: self.kept.is_some(),
            nonce: RandomState::new().build_hasher().finish(),
        }
    }

    /// Returns where so many bytes are free.
    fn free_place(&self, bytes: u64) -> u64 {
        match &self.kept {
            Some(kept) if FIRST + bytes > kept.bytes.start => {
                kept.bytes.end.next_multiple_of(FIRST)
            }
            _ => FIRST,
        }
    }

    /// Forgets what is not kept, and makes room for so many bytes.
    ///
    /// # Errors
    /// There is too little memory.
    pub fn begin(&mut self, bytes: u64) -> io::Result<()> {
        self.begun.fetch_add(1, Ordering::AcqRel);
        let kept = self.kept.as_ref().map(|kept| kept.slot);
        for slot in (0..SLOTS).filter(|slot| Some(*slot) != kept) {
            self.write(&[0; 48], (slot * HEADER) as u64)?;
        }
        let start = self.free_place(bytes);
        let end = start + bytes;
        if self.mapped.as_ref().is_none_or(|mapped| (mapped.length() as u64) < end) {
            self.mapped = None;
            let length = end.max(self.file.metadata()?.len());
            self.mapped = Some(MappedFile::map(&*self.file, length as usize)?);
        }
        self.copied = start..start;
        Ok(())
    }

    /// Returns what tells whether the generation that is kept now is there still.
    pub fn hold(&self) -> Held {
        Held { begun: Arc::clone(&self.begun), at: self.begun.load(Ordering::Acquire) }
    }

    /// Copies bytes behind those before. There is [room](Self::begin) for them.
    pub fn push(&mut self, bytes: &[u8]) {
        #[cfg(test)]
        let bytes = tests::until_killed(bytes);
        if let Some(mapped) = &mut self.mapped {
            mapped.write(self.copied.end as usize, bytes);
            self.copied.end += bytes.len() as u64;
        }
    }

    /// Returns where the first byte is that was copied since [`begin`](Self::begin).
    pub fn copied_at(&self) -> u64 {
        self.copied.start
    }

    /// Writes the record of what was copied, with its sums. The generation is there once it is
    /// [committed](Self::commit).
    ///
    /// # Errors
    /// There is too little memory.
    pub fn seal(&self, mut record: Record) -> io::Result<Generation> {
        let Range { start, end } = self.copied;
        record.start = start;
        record.sums = self.sums(start..end, 1)?; // the training has the other cores
        let text = serde_json::to_vec(&record)?;
        let length = text.len() as u64;
        let kept = self.kept.as_ref();
        let place = match kept {
            Some(kept) if end <= kept.bytes.start && end + length > kept.bytes.start => {
                kept.bytes.end
            }
            _ => end,
        };
        self.write(&text, place)?;
        let mut header = [place.to_le_bytes(), length.to_le_bytes()].concat();
        header.extend(blake3::hash(&text).as_bytes());
        let slot = usize::from(kept.is_some_and(|kept| kept.slot == 0));
        let bytes = start.min(place)..end.max(place + length);
        Ok(Generation { slot, bytes, record, header })
    }

    /// Makes a generation one that is there. The one that is kept is there as well.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn commit(&self, generation: &Generation) -> io::Result<()> {
        self.write(&generation.header, (generation.slot * HEADER) as u64)
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        #[cfg(test)]
        let bytes = tests::until_killed(bytes);
        self.file.write_all_at(bytes, at)
    }
}

impl Record {
    /// Returns the end of its blocks.
    fn end(&self) -> u64 {
        self.start + self.blocks.iter().map(|block| block.length).sum::<u64>()
    }
}
