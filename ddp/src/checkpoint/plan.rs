//! The files of a checkpoint that is written, and where this rank's parts go.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::error::{CheckpointError, Result};
use super::layout::{TensorFile, index};
use super::memory::{Block, Memory};
use super::parts::Part;
use super::sums::{BLOCK, Piece, SUMS, Sums};
use super::write::{Pieces, write};

/// Files, and what this rank writes of them.
pub struct Plan {
    /// Whether this rank writes the first bytes of files.
    has_heads: bool,
    names: Vec<String>,
    /// The first bytes of each file. Empty if another rank has them.
    files: Vec<Vec<u8>>,
    /// This rank's parts, each with its file and where the tensor begins there.
    parts: Vec<(usize, u64, Part)>,
    /// What is written in place of them.
    copy: Option<CopiedParts>,
}

/// The bytes of a rank's parts, in a memory.
struct CopiedParts {
    memory: Arc<File>,
    /// Where the first block is. They lie side by side.
    start: u64,
    blocks: Vec<Block>,
}

impl CopiedParts {
    fn write(&self, pieces: &mut Pieces) -> Result<()> {
        let mut buffer = vec![0; BLOCK];
        let mut at = self.start;
        for block in &self.blocks {
            let end = block.start + block.length;
            for start in (block.start..end).step_by(BLOCK) {
                let bytes = &mut buffer[..BLOCK.min((end - start) as usize)];
                self.memory.read_exact_at(bytes, at).map_err(failed_to_copy)?;
                pieces.add(block.file, start, bytes)?;
                at += bytes.len() as u64;
            }
        }
        Ok(())
    }
}

impl Plan {
    /// Makes a plan of no files. `has_heads` says whether this rank writes the first bytes of those that are added.
    pub fn new(has_heads: bool) -> Self {
        Self { has_heads, names: Vec::new(), files: Vec::new(), parts: Vec::new(), copy: None }
    }

    /// Adds a file that begins with these bytes.
    pub fn add(&mut self, name: String, head: Vec<u8>) {
        self.names.push(name);
        self.files.push(head);
    }

    /// Adds files of tensors, and this rank's parts of them.
    pub fn add_tensors(&mut self, stem: &str, files: &[TensorFile], parts: Vec<Part>) {
        let index = index(stem, files);
        let mut places = HashMap::new();
        for TensorFile { name, header, head } in files {
            let file = self.names.len();
            for (tensor, info) in &header.tensors {
                places.insert(&tensor[..], (file, head.len() as u64 + info.data_offsets.0));
            }
            self.add(name.clone(), head.clone());
        }
        if let Some((name, text)) = index {
            self.add(name, text);
        }
        for part in parts {
            let (file, start) = places[&part.name[..]];
            self.parts.push((file, start, part));
        }
        self.parts.sort_by_key(|(file, start, part)| (*file, *start, part.start()));
    }

    /// Makes the files whose first bytes this rank writes, in the folder `partial`. `path` is where they will be;
    /// `remedy` is the advice if that fails.
    pub fn create(&self, partial: &Path, path: &Path, remedy: &'static str) -> Result<()> {
        for (file, _) in self.heads() {
            let name = &self.names[file];
            let created = File::create_new(partial.join(name));
            created.map_err(CheckpointError::file("write", path.join(name), remedy))?;
        }
        Ok(())
    }

    /// Returns the first bytes that this rank writes, with the number of their file.
    fn heads(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let heads = self.files.iter().map(|head| &head[..]).enumerate();
        heads.filter(|(_, head)| self.has_heads && !head.is_empty())
    }

    /// Writes this rank's parts, and the heads if it has them. Returns the pieces of each file, as text for
    /// [`pieces`].
    pub fn write(&self, partial: &Path, path: &Path) -> Result<String> {
        let is_empty = match &self.copy {
            Some(copy) => copy.blocks.is_empty(),
            None => self.bytes() == 0,
        };
        if is_empty {
            return Ok("[]".into());
        }
        let pieces = write(partial, path, &self.names, |pieces| match &self.copy {
            Some(copy) => copy.write(pieces),
            None => self.each_block(|file, start, bytes| pieces.add(file, start, bytes)),
        })?;
        serde_json::to_string(&pieces).map_err(|error| CheckpointError::unfit("save", SUMS, error))
    }

    /// Returns how many bytes this rank writes.
    pub fn bytes(&self) -> u64 {
        let heads = self.heads().map(|(_, head)| head.len());
        let parts = self.parts.iter().map(|(_, _, part)| part.bytes());
        heads.chain(parts).sum::<usize>() as u64
    }

    /// Copies what this rank writes into `memory`, so that tensors may change before it is written.
    pub fn copy(&mut self, memory: &mut Memory) -> Result<()> {
        memory.begin(self.bytes()).map_err(failed_to_copy)?;
        let mut blocks: Vec<Block> = Vec::new();
        self.each_block(|file, start, bytes| {
            memory.push(bytes);
            let length = bytes.len() as u64;
            match blocks.last_mut() {
                Some(last) if last.file == file && last.start + last.length == start => {
                    last.length += length;
                }
                _ => blocks.push(Block { file, start, length }),
            }
            Ok(())
        })?;
        let start = memory.copied_at();
        self.copy = Some(CopiedParts { memory: Arc::clone(&memory.file), start, blocks });
        self.parts.clear();
        Ok(())
    }

    /// Returns what was [copied](Self::copy), in order.
    pub fn copied(&self) -> &[Block] {
        self.copy.as_ref().map_or(&[], |copy| &copy.blocks)
    }

    /// Returns the files' names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Gives the bytes that this rank writes, in blocks: the file, the place there, and the bytes.
    fn each_block(&self, mut block: impl FnMut(usize, u64, &[u8]) -> Result<()>) -> Result<()> {
        for (file, head) in self.heads() {
            block(file, 0, head)?;
        }
        for (file, base, part) in &self.parts {
            part.each_block(*base, |start, bytes| block(*file, start, bytes))?;
        }
        Ok(())
    }
}

/// Returns the pieces that a rank [has written](Plan::write), each with the number of its file.
pub fn pieces(text: &str) -> Result<Vec<(usize, Piece)>> {
    serde_json::from_str(text).map_err(|error| CheckpointError::unfit("save", SUMS, error))
}

/// Writes the sums of all ranks' pieces of the files `names`.
pub fn write_sums(partial: &Path, path: &Path, names: &[String], texts: &[String]) -> Result<()> {
    let mut sums: Sums = names.iter().map(|name| (name.clone(), Vec::new())).collect();
    for text in texts {
        for (file, piece) in pieces(text)? {
            sums.entry(names[file].clone()).or_default().push(piece);
        }
    }
    sums.values_mut().for_each(|pieces| pieces.sort_by_key(|piece| piece.start));
    let text =
        serde_json::to_vec(&sums).map_err(|error| CheckpointError::unfit("save", SUMS, error))?;
    let written = File::create_new(partial.join(SUMS)).and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()
    });
    written.map_err(CheckpointError::write(path.join(SUMS)))
}

/// Makes the error of a copy.
fn failed_to_copy(error: io::Error) -> CheckpointError {
    CheckpointError::unfit(
        "make",
        "a copy of the state",
        format!("{error}; see that there is memory"),
    )
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;

    #[test]
    fn a_column_is_written_without_its_gaps() {
        let folder = tempfile::tempdir().unwrap();
        let mut plan = Plan::new(true);
        plan.add("file".to_owned(), b"head".to_vec());
        let column = Tensor::from_slice(&[1_i32, 2, 3, 4]).view([2, 2]).narrow(1, 1, 1);
        plan.parts.push((0, 4, Part::new("numbers", &[2, 1], 0, column).unwrap()));
        plan.create(folder.path(), folder.path(), "").unwrap();
        plan.write(folder.path(), folder.path()).unwrap();
        let written = std::fs::read(folder.path().join("file")).unwrap();
        let numbers = [2_i32, 4].map(i32::to_le_bytes).concat();
        assert_eq!(written, [&b"head"[..], &numbers].concat());
    }

    #[test]
    fn what_is_copied_is_written_whatever_becomes_of_the_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let mut plan = Plan::new(true);
        plan.add("file".to_owned(), b"head".to_vec());
        let mut tensor = Tensor::from_slice(&[1_i32, 2, 3]);
        let part = Part::new("numbers", &[3], 0, tensor.shallow_clone()).unwrap();
        plan.parts.push((0, 4, part));
        plan.create(folder.path(), folder.path(), "").unwrap();
        plan.copy(&mut Memory::own().unwrap()).unwrap();
        let _ = tensor.fill_(9);
        plan.write(folder.path(), folder.path()).unwrap();
        let written = std::fs::read(folder.path().join("file")).unwrap();
        let mut expected = b"head".to_vec();
        expected.extend([1_i32, 2, 3].iter().flat_map(|number| number.to_le_bytes()));
        assert_eq!(written, expected);
    }
}
