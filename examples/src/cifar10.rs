//! The CIFAR-10 data set in its binary format. It has 50,000 training and 10,000 test images of 32
//! x 32 in three colours, in ten classes.
//!
//! The format, from <https://www.cs.toronto.edu/~kriz/cifar.html>: `data_batch_1.bin` to
//! `data_batch_5.bin` and `test_batch.bin` have one record after the other. Each is a byte for the
//! class and 3072 bytes for the pixels: red, green, blue, each row by row.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use flow::prelude::*;

use crate::fashion;

/// Number of classes.
pub const CLASSES: usize = 10;
/// Rows and columns of an image.
pub const SIDE: usize = 32;
const COLOURS: usize = 3;
/// Bytes of an image.
const IMAGE: usize = COLOURS * SIDE * SIDE;
const RECORD: usize = 1 + IMAGE;
const TRAINING: [&str; 5] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
];
const TEST: &str = "test_batch.bin";

/// Labelled images that become tensors a batch at a time.
#[derive(Debug, PartialEq)]
pub struct Images {
    /// Image after image, each `[3, 32, 32]`.
    pixels: Vec<u8>,
    /// The class of each image, below [`CLASSES`].
    labels: Vec<u8>,
    /// Mean of all values of a colour, on a scale from 0 to 1.
    mean: [f32; COLOURS],
    deviation: [f32; COLOURS],
}

/// Returns whether CIFAR-10 is in this folder, or what is left of it.
pub fn is_in(folder: &Path) -> bool {
    TRAINING.iter().chain([&TEST]).any(|name| folder.join(name).exists())
}

/// Returns the training and the test images in `folder`.
///
/// # Errors
/// When a file is missing, has no whole records, or a class that does not exist.
pub fn load(folder: &Path) -> Result<(Arc<Images>, Arc<Images>)> {
    Ok((Images::read(folder, &TRAINING)?, Images::read(folder, &[TEST])?))
}

impl Images {
    fn read(folder: &Path, names: &[&str]) -> Result<Arc<Self>> {
        let mut images = Self {
            pixels: Vec::new(),
            labels: Vec::new(),
            mean: [0.4914, 0.4822, 0.4465],
            deviation: [0.2470, 0.2435, 0.2616],
        };
        for name in names {
            images.append(&folder.join(name))?;
        }
        Ok(Arc::new(images))
    }

    fn append(&mut self, path: &Path) -> Result<()> {
        let name = path.display();
        let bytes = fs::read(path).with_context(|| format!("cannot read {name}"))?;
        ensure!(
            !bytes.is_empty() && bytes.len().is_multiple_of(RECORD),
            "{name} has {} bytes; CIFAR-10's records take {RECORD} bytes each",
            bytes.len()
        );
        for (index, record) in bytes.chunks_exact(RECORD).enumerate() {
            let label = record[0];
            ensure!(
                usize::from(label) < CLASSES,
                "{name}: label {label} of image {index} is not in the interval [0, {}]",
                CLASSES - 1
            );
            self.labels.push(label);
            self.pixels.extend(&record[1..]);
        }
        Ok(())
    }

    /// Makes colour images of the grey ones of Fashion-MNIST: 28 x 28 in the middle of 32 x 32, the same for each colour.
    ///
    /// # Errors
    /// When there is no image, or images are larger than 32 x 32.
    pub fn from_grey(split: &fashion::Split) -> Result<Arc<Self>> {
        let &fashion::Split { rows, columns, .. } = split;
        ensure!(
            !split.labels.is_empty() && (1..=SIDE).contains(&rows) && (1..=SIDE).contains(&columns),
            "found {} images of {rows} x {columns}, MobileNetV2 takes one or more of up to \
             {SIDE} x {SIDE}",
            split.labels.len()
        );
        let top = (SIDE - rows) / 2;
        let left = (SIDE - columns) / 2;
        let mut pixels = Vec::with_capacity(split.labels.len() * IMAGE);
        for image in split.images.chunks_exact(rows * columns) {
            let mut padded = [0; SIDE * SIDE];
            for (row, values) in image.chunks_exact(columns).enumerate() {
                padded[(top + row) * SIDE + left..][..columns].copy_from_slice(values);
            }
            for _ in 0..COLOURS {
                pixels.extend(padded);
            }
        }
        let labels = split.labels.clone();
        // Of Fashion-MNIST's images with their new edges.
        Ok(Arc::new(Self { pixels, labels, mean: [0.2190; 3], deviation: [0.3318; 3] }))
    }
}

impl Dataset for Images {
    /// Normalized images `[batch, 3, 32, 32]` and their classes `[batch]`.
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn batch(&self, indices: &[usize]) -> Result<Self::Batch, Box<dyn Error + Send + Sync>> {
        let mut pixels = Vec::with_capacity(indices.len() * IMAGE);
        for index in indices {
            let image = &self.pixels[index * IMAGE..][..IMAGE];
            for (colour, bytes) in image.chunks_exact(SIDE * SIDE).enumerate() {
                let mean = self.mean[colour];
                let deviation = self.deviation[colour];
                pixels
                    .extend(bytes.iter().map(|&byte| (f32::from(byte) / 255.0 - mean) / deviation));
            }
        }
        let labels: Vec<i64> = indices.iter().map(|&index| self.labels[index].into()).collect();
        let shape = [-1, COLOURS as i64, SIDE as i64, SIDE as i64];
        Ok((Tensor::from_slice(&pixels).view(shape), Tensor::from_slice(&labels)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record whose red is `label`, green 10 more, blue 20 more; its first red pixel is 255.
    fn record(label: u8) -> Vec<u8> {
        let colours = [label, label + 10, label + 20].map(|value| [value; SIDE * SIDE]);
        let mut record = [&[label][..], &colours.concat()].concat();
        record[1] = 255;
        record
    }

    /// A folder with two training images in each file, but one in the last, and one test image.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (index, name) in (0..).zip(TRAINING) {
            let second = if index < 4 { record(index + 5) } else { Vec::new() };
            fs::write(folder.path().join(name), [record(index), second].concat()).unwrap();
        }
        fs::write(folder.path().join(TEST), record(7)).unwrap();
        folder
    }

    fn error(folder: &Path) -> String {
        format!("{:#}", load(folder).unwrap_err())
    }

    #[test]
    fn reads_records_in_the_order_of_the_files() {
        let folder = folder();
        assert!(is_in(folder.path()));
        let (train, test) = load(folder.path()).unwrap();
        assert_eq!(train.labels, [0, 5, 1, 6, 2, 7, 3, 8, 4]);
        assert_eq!((train.len(), test.len(), &*test.labels), (9, 1, &[7][..]));

        let (images, labels) = train.batch(&[3, 0]).unwrap();
        assert_eq!(images.size(), [2, 3, 32, 32]);
        assert_eq!(Vec::<i64>::try_from(labels).unwrap(), [6, 0]);
        let pixel = |colour: i64, row: i64, column: i64| {
            images.double_value(&[0, colour, row, column]) as f32
        };
        let normalized = |byte: f32, colour: usize| {
            (byte / 255.0 - [0.4914, 0.4822, 0.4465][colour]) / [0.2470, 0.2435, 0.2616][colour]
        };
        assert_eq!(pixel(0, 0, 0), normalized(255.0, 0));
        assert_eq!(pixel(0, 0, 1), normalized(6.0, 0));
        assert_eq!(pixel(1, 31, 31), normalized(16.0, 1));
        assert_eq!(pixel(2, 0, 0), normalized(26.0, 2));
    }

    #[test]
    fn what_is_no_file_of_records_is_an_error() {
        let folder = folder();
        let file = folder.path().join("data_batch_3.bin");
        let name = file.display();
        for length in [0, 1, RECORD - 1, RECORD + 1] {
            fs::write(&file, vec![0; length]).unwrap();
            let expected =
                format!("{name} has {length} bytes; CIFAR-10's records take 3073 bytes each");
            assert_eq!(error(folder.path()), expected);
        }
        fs::write(&file, [record(1), record(10)].concat()).unwrap();
        let expected = format!("{name}: label 10 of image 1 is not in the interval [0, 9]");
        assert_eq!(error(folder.path()), expected);
        fs::remove_file(&file).unwrap();
        assert!(error(folder.path()).starts_with(&format!("cannot read {name}: ")));
    }

    #[test]
    fn grey_images_are_padded_and_repeated() {
        let images = (1..=28 * 28).map(|value| (value % 251) as u8).collect();
        let split = fashion::Split { images, labels: vec![4], rows: 28, columns: 28 };
        let padded = Images::from_grey(&split).unwrap();
        let at = |colour: usize, row: usize, column: usize| {
            padded.pixels[(colour * SIDE + row) * SIDE + column]
        };
        for colour in 0..3 {
            assert_eq!((at(colour, 2, 2), at(colour, 3, 4)), (1, 31));
            assert_eq!((at(colour, 1, 2), at(colour, 2, 1), at(colour, 30, 29)), (0, 0, 0));
        }
        let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
        assert_eq!(sum(&padded.pixels), 3 * sum(&split.images));

        let large = fashion::Split { images: vec![0; 33], labels: vec![0], rows: 33, columns: 1 };
        let error = Images::from_grey(&large).unwrap_err().to_string();
        let expected = "found 1 images of 33 x 1, MobileNetV2 takes one or more of up to 32 x 32";
        assert_eq!(error, expected);
    }
}
