//! `index.json`: what a checkpoint has, and in which files.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use flow_ddp::checkpoint::plan::pieces;
use flow_ddp::checkpoint::saved_file::SavedFile;
use flow_ddp::checkpoint::sums::{Piece, Sums, failed_to_read};
use flow_ddp::checkpoint::{CheckpointError, Result};
use serde::{Deserialize, Serialize};

use super::index::Index;
use super::shards::file_name;

/// Says what is in a checkpoint.
pub const INDEX: &str = "index.json";
/// Raised when files change so that versions before cannot read them.
pub const FORMAT: u32 = 2;
/// The text before the names of the `VarStore`'s variables.
pub const MODEL: &str = "model.";
/// The text before the names of the optimizer's state.
pub const OPTIMIZER: &str = "optimizer.";

/// The contents of `index.json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Contents {
    pub format: u32,
    pub step: usize,
    /// The length of each rank's file; 0 of a rank that had nothing to save. Memory knows lengths and sums itself.
    pub files: Vec<u64>,
    /// The sums of these files.
    pub sums: Sums,
    /// [`flow_autograd::StateDict::parameters`]; None without an optimizer.
    pub optimizer: Option<Vec<String>>,
    /// [`crate::random::Generator::state`].
    pub generator: [u64; 2],
    /// The program's.
    pub state: serde_json::Value,
    pub index: Index,
}

impl Contents {
    /// Reads `index.json` of the checkpoint at `path`.
    pub fn read(path: &Path) -> Result<Self> {
        let file = path.join(INDEX);
        let remedy = "give the folder of one checkpoint, as checkpoints/step-100";
        let text = fs::read(&file).map_err(CheckpointError::file("read", &file, remedy))?;
        Self::parse(path, &text)
    }

    /// Reads `index.json` of the checkpoint at `path`, which is in memory.
    pub fn read_from(path: &Path, files: &[SavedFile]) -> Result<Self> {
        let Some(file) = files.first() else {
            let reason = format!("it has no {INDEX}");
            return Err(CheckpointError::Other { path: path.into(), what: "program", reason });
        };
        let mut text = vec![0; file.length() as usize];
        file.read_exact_at(&mut text, 0).map_err(failed_to_read(&file.path))?;
        Self::parse(path, &text)
    }

    /// Reads the text of `index.json` of the checkpoint at `path`.
    fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let file = path.join(INDEX);
        let value: serde_json::Value = serde_json::from_slice(text)
            .map_err(|error| CheckpointError::damaged(&file, error.to_string()))?;
        if value["format"] != FORMAT {
            let reason = format!("it has not format {FORMAT} of Flow's sharded checkpoints");
            return Err(CheckpointError::Other { path: path.into(), what: "program", reason });
        }
        let contents: Self = serde_json::from_slice(text)
            .map_err(|error| CheckpointError::damaged(&file, error.to_string()))?;
        contents.index.check().map_err(|reason| CheckpointError::damaged(&file, reason))?;
        Ok(contents)
    }

    /// Takes the lengths and sums of the ranks' files from the texts of their [pieces] of the files `names`.
    pub fn add_files(&mut self, names: &[String], texts: &[String]) -> Result<()> {
        for (rank, text) in texts.iter().enumerate() {
            let name = file_name(rank);
            let own = pieces(text)?.into_iter().filter(|(file, _)| names[*file] == name);
            let pieces: Vec<Piece> = own.map(|(_, piece)| piece).collect();
            let bytes = pieces.iter().map(|piece| piece.length as u64).sum();
            self.files.push(bytes);
            if bytes > 0 {
                self.sums.insert(name, pieces);
            }
        }
        Ok(())
    }

    /// Returns the text of the file.
    pub fn text(&self) -> Result<Vec<u8>> {
        serde_json::to_vec_pretty(self)
            .map_err(|error| CheckpointError::unfit("save", "the index", error))
    }

    /// Writes the file into `folder`, and flushes it to the disk.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(INDEX);
        write_to_disk(&path, &self.text()?).map_err(CheckpointError::write(&path))
    }

    /// Checks that each rank's file is there and as long as it was.
    pub fn check_files(&self, path: &Path) -> Result<()> {
        let written = self.files.iter().enumerate().filter(|&(_, &bytes)| bytes > 0);
        for (rank, &bytes) in written {
            let file = path.join(file_name(rank));
            let remedy = "bring it back, or use another checkpoint";
            let metadata = fs::metadata(&file);
            let seen = metadata.map_err(CheckpointError::file("read", &file, remedy))?.len();
            if seen != bytes {
                let reason = format!("it has {seen} of {bytes} bytes");
                return Err(CheckpointError::damaged(file, reason));
            }
        }
        Ok(())
    }
}

/// Writes a file, and flushes it to the disk.
fn write_to_disk(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
