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

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::super::parts::Part;
    use super::*;

    /// The parts of a rank that has elements of a tensor of the model.
    fn parts(shape: i64, start: usize, elements: i64) -> [Vec<Listed>; STEMS.len()] {
        let elements = Tensor::zeros([elements], (Kind::Float, Device::Cpu));
        [vec![Part::new("a", &[shape], start, elements).unwrap().listed()], Vec::new()]
    }

    #[test]
    fn what_is_as_before_is_not_told_again() {
        let mut laid_out = LaidOut::default();
        // Tells what two ranks have, and returns how many bytes the tensor has then.
        let mut save = |ranks: [[Vec<Listed>; STEMS.len()]; 2], told: [bool; 2]| {
            let mut ranks = ranks.into_iter().enumerate();
            let news =
                [(); 2].map(|()| ranks.next().and_then(|(rank, of)| laid_out.news(rank, of)));
            assert_eq!(news.each_ref().map(Option::is_some), told);
            laid_out.update(news.into(), u64::MAX, |reason| {
                CheckpointError::unfit("save", "the files", reason)
            })?;
            Ok::<_, CheckpointError>(laid_out.files[0][0].header.tensors["a"].data_offsets.1)
        };
        assert_eq!(save([parts(4, 0, 2), parts(4, 2, 2)], [true, true]).unwrap(), 16);
        assert_eq!(save([parts(4, 0, 2), parts(4, 2, 2)], [false, false]).unwrap(), 16);
        assert_eq!(save([parts(4, 0, 1), parts(4, 1, 3)], [true, true]).unwrap(), 16);
        // One rank's are others, which do not fit those of the other rank.
        let error = save([parts(4, 0, 1), parts(4, 2, 2)], [false, true]).unwrap_err().to_string();
        assert!(error.contains("ranks do not have the same of it"), "{error}");
        assert_eq!(save([parts(6, 0, 1), parts(6, 1, 5)], [true, true]).unwrap(), 24);
    }
}
