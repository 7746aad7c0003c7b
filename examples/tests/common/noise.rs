//! A data set of random images.

use std::fs;
use std::path::Path;

/// Writes IDX files of `train` and `test` images of 28 x 28 with random pixels and labels.
pub fn write_noise(folder: &Path, train: u32, test: u32) {
    let mut state = 1u32;
    let mut noise = |count: u32, below: u32| -> Vec<u8> {
        let mut next = || {
            // Numerical Recipes' generator.
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 16) % below) as u8
        };
        (0..count).map(|_| next()).collect()
    };
    for (name, count) in [("train", train), ("t10k", test)] {
        let header = |magic: u32, lengths: &[u32]| -> Vec<u8> {
            [magic].iter().chain(lengths).flat_map(|number| number.to_be_bytes()).collect()
        };
        let images = [header(0x0803, &[count, 28, 28]), noise(count * 28 * 28, 256)].concat();
        let labels = [header(0x0801, &[count]), noise(count, 10)].concat();
        fs::write(folder.join(format!("{name}-images-idx3-ubyte")), images).unwrap();
        fs::write(folder.join(format!("{name}-labels-idx1-ubyte")), labels).unwrap();
    }
}
