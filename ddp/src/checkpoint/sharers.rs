//! Which ranks see rank 0's disk, and rank 0's files for those that do not.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use flow_comm::ProcessGroup;
use rustix::fs::{MemfdFlags, memfd_create};

use super::agree::{agree, from_rank_0};
use super::error::{CheckpointError, Result};
use super::saved_file::SavedFile;
use super::sums::{PIECE, failed_to_read};

/// Returns the ranks that see the same at `path` as rank 0, which is one of them. All ranks call this.
pub fn ranks(group: &ProcessGroup, path: &Path) -> Result<Vec<usize>> {
    let seen = fs::metadata(path);
    let seen = seen.map_or([0; 3], |seen| [seen.ino() as i64, seen.mtime(), seen.mtime_nsec()]);
    let mut all = vec![0i64; 3 * group.world_size()];
    group.all_gather(&seen, &mut all)?;
    let ranks = all.chunks(3).enumerate().filter(|(_, seen)| *seen == &all[..3]);
    Ok(ranks.map(|(rank, _)| rank).collect())
}

/// Opens files of the checkpoint `path`, with rank 0's contents. All ranks call this, with the same
/// names.
pub fn open(group: &ProcessGroup, path: &Path, names: &[&String]) -> Result<Vec<SavedFile>> {
    let sharers = ranks(group, path)?;
    let sees = sharers.contains(&group.rank());
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        let path = path.join(name);
        let opened = if sees {
            File::open(&path).map_err(failed_to_read(&path))
        } else {
            memfd_create("checkpoint", MemfdFlags::CLOEXEC)
                .map(File::from)
                .map_err(|error| failed_to_receive(&path)(error.into()))
        };
        let file = agree(group, opened)?;
        if sharers.len() < group.world_size() {
            let own = (group.rank() == 0)
                .then(|| file.metadata().map(|file| file.len()).map_err(failed_to_read(&path)));
            let length = from_rank_0(group, own)?;
            let read = |block: &mut [u8], start| {
                file.read_exact_at(block, start).map_err(failed_to_read(&path))
            };
            let write = |block: &[u8], start| {
                if sees {
                    return Ok(());
                }
                file.write_all_at(block, start).map_err(failed_to_receive(&path))
            };
            send(group, 0, length, read, write)?;
        }
        let opened = SavedFile::whole(path.clone(), file).map_err(failed_to_read(&path));
        files.push(agree(group, opened)?);
    }
    Ok(files)
}

/// Gives so many bytes, which rank `root` reads, to all ranks, which write them. All ranks call this.
pub fn send(
    group: &ProcessGroup,
    root: usize,
    length: u64,
    read: impl Fn(&mut [u8], u64) -> Result<()>,
    write: impl Fn(&[u8], u64) -> Result<()>,
) -> Result<()> {
    let mut bytes = vec![0; PIECE];
    let mut done = Ok(());
    for start in (0..length).step_by(PIECE) {
        let block = &mut bytes[..PIECE.min((length - start) as usize)];
        if group.rank() == root && done.is_ok() {
            done = read(block, start);
        }
        group.broadcast(&mut *block, root)?;
        if done.is_ok() {
            done = write(block, start);
        }
    }
    agree(group, done)
}

/// Makes the error of keeping what another rank sends.
pub fn failed_to_receive(path: &Path) -> impl FnOnce(std::io::Error) -> CheckpointError + '_ {
    CheckpointError::file(
        "receive",
        path,
        "see that there is memory, or use a disk that all machines share",
    )
}
