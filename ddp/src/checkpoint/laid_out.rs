//! How the tensors of the last checkpoint were laid out. What has not changed since then, ranks do not tell each other
//! again: it would stall the training.

use super::error::{CheckpointError, Result};
use super::layout::{TensorFile, lay_out};
use super::parts::{Listed, merge};
use super::state::{MODEL, OPTIMIZER};

/// The kinds of files that have tensors.
pub const STEMS: [&str; 2] = [MODEL, OPTIMIZER];

/// The files of the last checkpoint, and the parts that they were laid out for. All ranks have the same.
#[derive(Default)]
pub struct LaidOut {
    /// Of each rank, by the kind of the files.
    parts: Vec<[Vec<Listed>; STEMS.len()]>,
    /// Those of each kind.
    pub files: Vec<Vec<TensorFile>>,
}

impl LaidOut {
    /// Returns what `rank` tells the others of its parts: nothing where they are as before.
    pub fn news(
        &self,
        rank: usize,
        parts: [Vec<Listed>; STEMS.len()],
    ) -> Option<[Vec<Listed>; STEMS.len()]> {
        (self.parts.get(rank) != Some(&parts)).then_some(parts)
    }

    /// Has the next [`update`](Self::update) lay out all anew, in files of another size.
    pub fn forget_files(&mut self) {
        self.files.clear();
    }

    /// Lays out what the ranks have, of which each has told its [`news`](Self::news), in files of at most so many
    /// bytes.
    ///
    /// # Errors
    /// The same on all ranks. They tell all of it the next time.
    pub fn update(
        &mut self,
        news: Vec<Option<[Vec<Listed>; STEMS.len()]>>,
        most: u64,
        unfit: impl Fn(String) -> CheckpointError,
    ) -> Result<()> {
        if news.iter().all(Option::is_none) && !self.files.is_empty() {
            return Ok(());
        }
        let mut parts = std::mem::take(self).parts;
        parts.resize_with(news.len(), Default::default);
        for (of_rank, news) in parts.iter_mut().zip(news) {
            if let Some(news) = news {
                *of_rank = news;
            }
        }
        let mut files = Vec::with_capacity(STEMS.len());
        for (kind, stem) in STEMS.into_iter().enumerate() {
            let tensors = merge(parts.iter().flat_map(|of_rank| &of_rank[kind]).collect())?;
            files.push(lay_out(stem, &tensors, most).map_err(&unfit)?);
        }
        *self = Self { parts, files };
        Ok(())
    }
}
