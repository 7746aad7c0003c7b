//! The memory that a rank copies its part of a checkpoint into. flow-launch's outlives this process.
//!
//! | bytes | contents |
//! |---|---|
//! | from 0 and from 64 on | a header of a generation: where its record is, and the record's BLAKE3 |
//! | from 4096 on | what was copied, and the records of what it is |
//!
//! There are two generations at most. A new one is copied beside the one that all ranks have, and its
//! header is written last. So it is whole or not there, whenever the process is killed.

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
    /// How many bytes larger its memory becomes, and how many are free on its machine.
    pub grows: u64,
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
        Ready {
            grows: (self.free_place(bytes) + bytes).saturating_sub(length),
            available: available().unwrap_or(u64::MAX),
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// The bytes that this thread writes to memories before it is killed, as it were.
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Returns those of these bytes that are still written.
    pub fn until_killed(bytes: &[u8]) -> &[u8] {
        let written = LEFT.get().min(bytes.len());
        LEFT.set(LEFT.get() - written);
        &bytes[..written]
    }

    /// The record of `length` bytes that a rank alone has copied at a step.
    pub fn record(step: usize, length: u64) -> Record {
        let names = vec!["file".to_owned()];
        let stamp = Stamp {
            format: 0,
            step,
            number: step as u64,
            nonce: 0,
            holders: 1,
            follows: false,
            names,
        };
        let blocks = vec![Block { file: 0, start: 0, length }];
        Record { stamp, folder: None, holder: Some(0), start: 0, blocks, sums: Vec::new() }
    }

    fn bytes(step: usize, length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 31 + step * 7) as u8).collect()
    }

    /// Returns the memory as a process finds it that starts now.
    fn reopened(memory: &Memory) -> Memory {
        Memory::of(memory.file.try_clone().unwrap(), memory.path.clone())
    }

    /// Checks that a process that starts now finds these steps, and the bytes of each.
    #[track_caller]
    fn finds(memory: &Memory, expected: &[(usize, usize)]) {
        let memory = reopened(memory);
        let mut found = memory.generations().unwrap();
        found.sort_by_key(|found| found.record.stamp.step);
        let steps: Vec<_> = found.iter().map(|found| found.record.stamp.step).collect();
        assert_eq!(steps, expected.iter().map(|(step, _)| *step).collect::<Vec<_>>());
        for (Generation { record, .. }, &(step, length)) in found.iter().zip(expected) {
            assert!(memory.is_whole(record).unwrap(), "step {step}");
            let mut read = vec![0; length];
            memory.file.read_exact_at(&mut read, record.start).unwrap();
            assert!(read == bytes(step, length), "step {step} has other bytes");
        }
    }

    fn save(memory: &mut Memory, step: usize, length: usize) {
        memory.begin(length as u64).unwrap();
        memory.push(&bytes(step, length));
        let sealed = memory.seal(record(step, length as u64)).unwrap();
        memory.commit(&sealed).unwrap();
        memory.keep(Some(sealed));
    }

    #[test]
    fn a_process_that_ends_in_a_save_leaves_the_generation_before() {
        let mut memory = Memory::own().unwrap();
        finds(&memory, &[]);
        let length = PIECE + 10_000;
        for step in 1..6 {
            let before: &[_] = if step == 1 { &[] } else { &[(step - 1, length)] };
            memory.begin(length as u64).unwrap();
            finds(&memory, before);
            let new = bytes(step, length);
            memory.push(&new[..length / 2]);
            finds(&memory, before);
            memory.push(&new[length / 2..]);
            finds(&memory, before);
            let sealed = memory.seal(record(step, length as u64)).unwrap();
            finds(&memory, before);
            memory.commit(&sealed).unwrap();
            finds(&memory, &[before, &[(step, length)]].concat());
            // Another rank may not have committed it: a process that starts now keeps the one before.
            let mut next = reopened(&memory);
            next.keep(next.generations().unwrap().into_iter().find(|found| *found != sealed));
            if step % 2 == 0 {
                next.begin(length as u64).unwrap();
                next.push(&bytes(step + 1, length));
                finds(&next, before);
                memory = reopened(&next);
                memory.keep(memory.generations().unwrap().pop());
                save(&mut memory, step, length);
            } else {
                memory.keep(Some(sealed));
            }
        }
    }

    #[test]
    fn a_process_that_is_killed_after_any_byte_leaves_this_generation_or_the_one_before() {
        let all = [(1, 300), (2, 200), (3, 250)];
        let mut at = 0;
        let mut is_killed = true;
        while is_killed {
            let mut memory = Memory::own().unwrap();
            save(&mut memory, 1, 300);
            save(&mut memory, 2, 200);
            LEFT.set(at);
            save(&mut memory, 3, 250);
            is_killed = LEFT.replace(usize::MAX) == 0;
            // The next process keeps the newest one, and saves beside it.
            let mut next = reopened(&memory);
            let found = next.generations().unwrap();
            let is_there = |step| found.iter().any(|found| found.record.stamp.step == step);
            assert!(is_there(2) && (is_there(3) || is_killed), "after {at} bytes");
            let expected: Vec<_> = all.into_iter().filter(|(step, _)| is_there(*step)).collect();
            finds(&next, &expected);
            let newest = found.into_iter().max_by_key(|found| found.record.stamp.step);
            next.keep(newest);
            save(&mut next, 4, 250);
            finds(&next, &[expected[expected.len() - 1], (4, 250)]);
            at += 1;
        }
        assert!(at > 48 + 250 + 48, "the last save has written {at} bytes");
    }

    #[test]
    fn a_wrong_byte_is_found_wherever_it_is() {
        let mut memory = Memory::own().unwrap();
        save(&mut memory, 1, 5000);
        save(&mut memory, 2, PIECE + BLOCK + 5);
        let generation = memory.kept.clone().unwrap();
        let end = generation.bytes.end;
        let record = generation.record.end()..end;
        let header = (generation.slot * HEADER) as u64..(generation.slot * HEADER) as u64 + 48;
        for at in header.chain(record) {
            let mut byte = [0];
            memory.file.read_exact_at(&mut byte, at).unwrap();
            memory.file.write_all_at(&[!byte[0]], at).unwrap();
            finds(&memory, &[(1, 5000)]);
            memory.file.write_all_at(&byte, at).unwrap();
        }
        let generation = &generation.record;
        for at in [0, BLOCK - 1, BLOCK, PIECE - 1, PIECE, PIECE + BLOCK + 4] {
            let at = generation.start + at as u64;
            let mut byte = [0];
            memory.file.read_exact_at(&mut byte, at).unwrap();
            memory.file.write_all_at(&[!byte[0]], at).unwrap();
            assert!(!memory.is_whole(generation).unwrap(), "byte {at}");
            memory.file.write_all_at(&byte, at).unwrap();
        }
        finds(&memory, &[(1, 5000), (2, PIECE + BLOCK + 5)]);
        memory.file.set_len(end - 1).unwrap();
        finds(&memory, &[(1, 5000)]);
    }

    #[test]
    fn the_generation_that_is_kept_is_never_overwritten() {
        let mut memory = Memory::own().unwrap();
        let most = 60_000;
        let mut length = 0;
        for step in 1..300 {
            let last = length;
            // Often the same as before, as in a training.
            length = if step % 3 == 0 { (step * step * 7919) % most } else { length };
            memory.begin(length as u64).unwrap();
            memory.push(&vec![0; length]);
            if step > 1 {
                finds(&memory, &[(step - 1, last)]);
            }
            save(&mut memory, step, length);
            let expected = [(step - 1, last), (step, length)];
            finds(&memory, if step == 1 { &expected[1..] } else { &expected });
            let bytes = memory.file.metadata().unwrap().len();
            assert!(bytes < 3 * (most as u64 + 3 * FIRST), "{bytes} bytes at step {step}");
        }
    }
}
