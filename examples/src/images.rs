//! Fashion-MNIST as a data set of tensors.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use flate2::Crc;
use flow::prelude::*;

use crate::fashion::{self, Split};

/// Rows and columns of an image.
pub const SIDE: usize = 28;
/// Mean and standard deviation of all grey values of Fashion-MNIST, on a scale from 0 to 1.
const MEAN: f32 = 0.2860;
const DEVIATION: f32 = 0.3530;

/// The numbers that grey values become.
#[derive(Clone, Copy)]
pub enum Pixels {
    /// Numbers from 0 to 1.
    Scaled,
    /// Numbers of mean 0 and deviation 1 over all training images.
    Standardized,
}

/// Labelled images that become tensors a batch at a time.
pub struct Images {
    split: Split,
    pixels: Pixels,
}

impl Images {
    /// Loads the training and the test images in `folder`.
    ///
    /// # Errors
    /// When they are missing, damaged, or not of 28 x 28.
    pub fn load(folder: &Path, pixels: Pixels) -> Result<(Arc<Self>, Arc<Self>)> {
        let (train, test) = fashion::load(folder)?;
        for split in [&train, &test] {
            let &Split { rows, columns, .. } = split;
            let count = split.labels.len();
            ensure!(
                count > 0 && (rows, columns) == (SIDE, SIDE),
                "{}: found {count} images of {rows} x {columns}, LeNet takes one or more of \
                 {SIDE} x {SIDE}",
                folder.display()
            );
        }
        Ok((Arc::new(Self { split: train, pixels }), Arc::new(Self { split: test, pixels })))
    }

    /// Returns a number that differs where images or labels do.
    pub fn checksum(&self) -> u32 {
        let mut checksum = Crc::new();
        checksum.update(&self.split.images);
        checksum.update(&self.split.labels);
        checksum.sum()
    }
}

impl Dataset for Images {
    /// Images `[batch, 1, 28, 28]` and their classes `[batch]`.
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.split.labels.len()
    }

    fn batch(&self, indices: &[usize]) -> Result<Self::Batch, Box<dyn Error + Send + Sync>> {
        let Split { images, labels, .. } = &self.split;
        let (mean, deviation) = match self.pixels {
            Pixels::Scaled => (0.0, 1.0),
            Pixels::Standardized => (MEAN, DEVIATION),
        };
        let bytes = indices.iter().flat_map(|index| &images[index * SIDE * SIDE..][..SIDE * SIDE]);
        let pixels: Vec<f32> =
            bytes.map(|&byte| (f32::from(byte) / 255.0 - mean) / deviation).collect();
        let labels: Vec<i64> = indices.iter().map(|&index| labels[index].into()).collect();
        let shape = [-1, 1, SIDE as i64, SIDE as i64];
        Ok((Tensor::from_slice(&pixels).view(shape), Tensor::from_slice(&labels)))
    }
}
