//! The sums of a checkpoint's files: BLAKE3 of each piece that a rank has written.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};

use super::error::{CheckpointError, Result};

/// The sums of a checkpoint's other files.
pub const SUMS: &str = "sums.json";

/// The longest piece.
pub const PIECE: usize = 8 << 20;

/// The bytes that are read at once: they stay in a cache of the CPU until they are summed.
pub const BLOCK: usize = 1 << 20;

/// The most threads that check sums.
pub const THREADS: usize = 8;

/// The pieces of each file, in order.
pub type Sums = BTreeMap<String, Vec<Piece>>;

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// The first byte.
    pub start: u64,
    /// At most [`PIECE`].
    pub length: usize,
    /// The BLAKE3 of the bytes, in hexadecimal digits.
    pub blake3: String,
}

impl Piece {
    /// Returns the piece of these bytes.
    pub fn of(start: u64, bytes: &[u8]) -> Self {
        Self { start, length: bytes.len(), blake3: blake3::hash(bytes).to_hex().to_string() }
    }
}

/// Returns the sums of a checkpoint whose files have them.
///
/// # Errors
/// A file is missing or damaged, or cannot be read.
pub fn read_checked(folder: &Path) -> Result<Sums> {
    let sums = read(folder)?;
    check_files(folder, &sums)?;
    Ok(sums)
}

/// Checks that files in `folder` have these sums.
///
/// # Errors
/// A file is missing or damaged, or cannot be read.
pub fn check_files(folder: &Path, sums: &Sums) -> Result<()> {
    let mut pieces = Vec::new();
    for (name, of_file) in sums {
        check_length(folder, name, of_file)?;
        pieces.extend(of_file.iter().map(|piece| (&name[..], piece)));
    }
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get().min(THREADS));
    let each = pieces.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        let parts = pieces.chunks(each);
        let checks: Vec<_> = parts.map(|part| scope.spawn(move || check(folder, part))).collect();
        for check in checks {
            check.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(())
    })
}

/// Returns the sums of the checkpoint in `folder`.
fn read(folder: &Path) -> Result<Sums> {
    let path = folder.join(SUMS);
    let text = fs::read(&path).map_err(failed_to_read(&path))?;
    serde_json::from_slice(&text).map_err(|error| CheckpointError::damaged(&path, error))
}

/// Checks that the pieces are all of the file.
fn check_length(folder: &Path, name: &str, pieces: &[Piece]) -> Result<()> {
    let path = folder.join(name);
    let mut end = 0;
    for piece in pieces {
        if piece.start != end || piece.length > PIECE {
            let reason = format!("{SUMS} is not that of its file {name}");
            return Err(CheckpointError::damaged(folder.join(SUMS), reason));
        }
        end += piece.length as u64;
    }
    let bytes = fs::metadata(&path).map_err(failed_to_read(&path))?.len();
    if bytes > end {
        return Err(CheckpointError::damaged(path, format!("it has {bytes} bytes, not {end}")));
    }
    Ok(())
}

/// Checks the sums of some pieces. The kernel keeps what is read, while there is memory, for those who
/// load it.
fn check(folder: &Path, pieces: &[(&str, &Piece)]) -> Result<()> {
    let mut block = vec![0; BLOCK];
    for of_file in pieces.chunk_by(|(one, _), (other, _)| one == other) {
        let path = folder.join(of_file[0].0);
        let file = File::open(&path).map_err(failed_to_read(&path))?;
        for (number, (_, piece)) in of_file.iter().enumerate() {
            if let Some((_, next)) = of_file.get(number + 1) {
                // The disk reads it while this one is summed.
                let _ =
                    fadvise(&file, next.start, NonZero::new(next.length as u64), Advice::WillNeed);
            }
            let found = sum(&file, piece.start, piece.length, &mut block);
            if found.map_err(failed_to_read(&path))? != piece.blake3 {
                let reason = format!("the bytes from {} on do not have their sum", piece.start);
                return Err(CheckpointError::damaged(path, reason));
            }
        }
    }
    Ok(())
}

/// Returns the BLAKE3 of so many bytes of a file, in hexadecimal digits. `block` has [`BLOCK`] bytes.
pub fn sum(file: &File, start: u64, length: usize, block: &mut [u8]) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let end = start + length as u64;
    for start in (start..end).step_by(BLOCK) {
        let length = BLOCK.min((end - start) as usize);
        file.read_exact_at(&mut block[..length], start)?;
        hasher.update(&block[..length]);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Makes the error of reading a checkpoint's file.
pub fn failed_to_read(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError + '_ {
    move |error| match error.kind() {
        ErrorKind::UnexpectedEof => CheckpointError::damaged(path, "its end is missing"),
        ErrorKind::InvalidData => CheckpointError::damaged(path, error),
        _ => {
            let remedy = "see that the disk can be read, or move the checkpoint away";
            CheckpointError::file("read", path, remedy)(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;

    #[test]
    fn a_wrong_byte_is_found_wherever_it_is() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..PIECE + 2 * BLOCK + 5).map(|i| ((i * i) >> 8) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let pieces = [0..PIECE, PIECE..PIECE + 7, PIECE + 7..bytes.len()];
        let pieces = pieces.map(|range| Piece::of(range.start as u64, &bytes[range]));
        let sums = Sums::from([("file".to_owned(), pieces.to_vec())]);
        check_files(folder.path(), &sums).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let last = bytes.len() - 1;
        for at in [0, BLOCK - 1, BLOCK, PIECE - 1, PIECE, PIECE + 6, PIECE + 7 + BLOCK, last] {
            file.write_all_at(&[!bytes[at]], at as u64).unwrap();
            let error = check_files(folder.path(), &sums).unwrap_err();
            assert!(matches!(error, CheckpointError::Damaged { .. }), "byte {at}: {error}");
            file.write_all_at(&[bytes[at]], at as u64).unwrap();
        }
        check_files(folder.path(), &sums).unwrap();
    }
}
