//! Files of token numbers, and windows of them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tch::Tensor;

use super::loader::Dataset;
use crate::BoxError;

/// A file that has nothing but token numbers, as `np.array(tokens, dtype=np.uint16).tofile(path)`
/// writes it: nanoGPT's `.bin` files, and Megatron's.
///
/// Tokens are read where they are asked for, from the system's page cache, which all processes of a
/// machine share: so a file may be larger than the memory. The file is not mapped into memory. One
/// that is cut meanwhile is then an error, where a mapped one would kill the process.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    kind: TokenKind,
    len: usize,
}

/// The type of the tokens in a [`TokenFile`], the low byte first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// `np.uint16`: vocabularies of up to 65,536 tokens.
    U16,
    /// `np.uint32`.
    U32,
}

impl TokenKind {
    fn bytes(self) -> usize {
        match self {
            Self::U16 => size_of::<u16>(),
            Self::U32 => size_of::<u32>(),
        }
    }
}

/// Errors of token files.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// A file cannot be opened.
    #[error("cannot open the token file {}: {error}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// A file has a part of a token.
    #[error(
        "{} has {bytes} bytes, it should have a multiple of {} for tokens of {kind:?}",
        .path.display(),
        .kind.bytes()
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The tokens that it was opened for.
        kind: TokenKind,
    },
    /// Tokens cannot be read.
    #[error(
        "cannot read tokens {start} to {end} of {}: {error}; it had {len} when it was opened",
        .path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The first token.
        start: usize,
        /// The token after the last one.
        end: usize,
        /// The number of tokens when it was opened.
        len: usize,
        /// The cause.
        error: io::Error,
    },
    /// The block size is 0.
    #[error("block size 0, it should be at least 1")]
    BlockSize,
    /// No file has a window.
    #[error(
        "the longest of {files} token file(s) has {longest} tokens, it should have more than the \
         block size {block_size}"
    )]
    Short {
        /// The number of files.
        files: usize,
        /// The most tokens that a file has.
        longest: usize,
        /// The tokens of a window's inputs.
        block_size: usize,
    },
    /// There is no such window.
    #[error("there is no window {index}, it should be below {windows}")]
    Window {
        /// The index that was given.
        index: usize,
        /// The number of windows.
        windows: usize,
    },
}

impl TokenFile {
    /// Opens a file of tokens of a type.
    ///
    /// # Errors
    /// When the file cannot be opened, or its size is no multiple of a token's.
    pub fn open(path: impl AsRef<Path>, kind: TokenKind) -> Result<Self, TokenError> {
        let path = path.as_ref().to_path_buf();
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, file) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err(TokenError::Open { path, error }),
        };
        if !bytes.is_multiple_of(kind.bytes() as u64) {
            return Err(TokenError::Size { path, bytes, kind });
        }
        let len = bytes as usize / kind.bytes();
        Ok(Self { path, file, kind, len })
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads `count` tokens, the first of them that at `start`.
    ///
    /// # Errors
    /// When the file has not so many, or cannot be read.
    pub fn read(&self, start: usize, count: usize) -> Result<Vec<i64>, TokenError> {
        let end = start.saturating_add(count);
        let bytes = self.bytes(start, end).map_err(|error| {
            let path = self.path.clone();
            TokenError::Read { path, start, end, len: self.len, error }
        })?;
        Ok(match self.kind {
            TokenKind::U16 => numbers(&bytes, |token| u16::from_le_bytes(token).into()),
            TokenKind::U32 => numbers(&bytes, |token| u32::from_le_bytes(token).into()),
        })
    }

    fn bytes(&self, start: usize, end: usize) -> io::Result<Vec<u8>> {
        if end > self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let size = self.kind.bytes();
        let mut bytes = vec![0; (end - start) * size];
        self.file.read_exact_at(&mut bytes, (start * size) as u64)?;
        Ok(bytes)
    }
}

fn numbers<const N: usize>(bytes: &[u8], number: fn([u8; N]) -> i64) -> Vec<i64> {
    let (tokens, _) = bytes.as_chunks::<N>();
    tokens.iter().map(|&token| number(token)).collect()
}

/// The windows of `block_size + 1` tokens in token files, as samples for a language model: the
/// inputs are all but the last token of a window, and the targets all but the first.
///
/// A batch is two tensors of 64-bit integers, samples x `block_size`, on the CPU. A window is of one
/// file. The last tokens of a file that fill no window are left out.
///
/// ```no_run
/// use std::sync::Arc;
/// use flow_ddp::{DataLoader, Dataset, DistributedSampler, TokenDataset, TokenFile, TokenKind};
///
/// # fn main() -> anyhow::Result<()> {
/// # let group = flow_ddp::ProcessGroup::from_env()?;
/// let file = TokenFile::open("train.bin", TokenKind::U16)?;
/// let windows = Arc::new(TokenDataset::new(vec![file], 1024)?);
/// let sampler = DistributedSampler::new(windows.len(), &group);
/// for batch in DataLoader::new(&windows, &sampler, 12) {
///     let (inputs, targets) = batch?; // 12 x 1024
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct TokenDataset {
    files: Vec<TokenFile>,
    block_size: usize,
    stride: usize,
    /// The number of windows in the files up to each.
    ends: Vec<usize>,
}

impl TokenDataset {
    /// Makes the windows of `files`, each of which begins with the last token of the one before it.
    ///
    /// # Errors
    /// When `block_size` is 0, or no file has more tokens than that.
    pub fn new(files: Vec<TokenFile>, block_size: usize) -> Result<Self, TokenError> {
        if block_size == 0 {
            return Err(TokenError::BlockSize);
        }
        let longest = files.iter().map(TokenFile::len).max().unwrap_or(0);
        if longest <= block_size {
            return Err(TokenError::Short { files: files.len(), longest, block_size });
        }
        Ok(Self { files, block_size, stride: block_size, ends: Vec::new() }.stride(block_size))
    }

    /// Sets how many tokens after another a window begins, one at least (default: `block_size`).
    /// With 1, each place in a file begins one, as in nanoGPT's batches.
    pub fn stride(mut self, tokens: usize) -> Self {
        self.stride = tokens.max(1);
        self.ends.clear();
        let mut windows = 0;
        for file in &self.files {
            if file.len > self.block_size {
                windows += (file.len - self.block_size - 1) / self.stride + 1;
            }
            self.ends.push(windows);
        }
        self
    }

    fn window(&self, index: usize) -> Result<Vec<i64>, TokenError> {
        if index >= self.len() {
            return Err(TokenError::Window { index, windows: self.len() });
        }
        let file = self.ends.partition_point(|&end| end <= index);
        let before = if file == 0 { 0 } else { self.ends[file - 1] };
        self.files[file].read((index - before) * self.stride, self.block_size + 1)
    }
}

impl Dataset for TokenDataset {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn batch(&self, indices: &[usize]) -> Result<(Tensor, Tensor), BoxError> {
        let mut inputs = Vec::new();
        let mut targets = Vec::new();
        for &index in indices {
            let window = self.window(index)?;
            inputs.extend_from_slice(&window[..self.block_size]);
            targets.extend_from_slice(&window[1..]);
        }
        let shape = [indices.len() as i64, self.block_size as i64];
        let tensor = |tokens: Vec<i64>| Tensor::f_from_slice(&tokens)?.f_view(shape);
        Ok((tensor(inputs)?, tensor(targets)?))
    }
}
