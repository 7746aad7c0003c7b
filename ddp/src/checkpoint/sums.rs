//! The SHA-256 of a checkpoint's files, in a file that `sha256sum --check` takes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::error::{CheckpointError, Result};

/// The sums of a checkpoint's other files.
pub const SUMS: &str = "SHA256SUMS";

/// Writes the sums of the files in `folder`, and flushes all files to the disk.
pub fn write(folder: &Path) -> io::Result<()> {
    let mut sums = String::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let file = File::open(entry.path())?;
        sums += &format!("{}  {}\n", sum(&file)?, entry.file_name().to_string_lossy());
        file.sync_all()?;
    }
    fs::write(folder.join(SUMS), sums)?;
    File::open(folder.join(SUMS))?.sync_all()
}

/// Returns the contents of files in `folder`, if they have their sums.
pub fn read<const N: usize>(folder: &Path, names: [&str; N]) -> Result<[Vec<u8>; N]> {
    let sums = String::from_utf8_lossy(&read_file(folder, SUMS)?).into_owned();
    let mut contents = [const { Vec::new() }; N];
    for (name, bytes) in names.iter().zip(&mut contents) {
        *bytes = read_file(folder, name)?;
        let line = format!("{}  {name}", sum(&bytes[..]).unwrap_or_default());
        if !sums.lines().any(|known| known == line) {
            let reason = format!("it has not the sum that is in {SUMS}");
            return Err(CheckpointError::damaged(folder.join(name), reason));
        }
    }
    Ok(contents)
}

fn read_file(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let file = folder.join(name);
    let remedy = "see that the disk can be read, or move the checkpoint away";
    fs::read(&file).map_err(CheckpointError::file("read", file, remedy))
}

/// Returns the SHA-256 of a file's bytes, in hexadecimal digits.
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
