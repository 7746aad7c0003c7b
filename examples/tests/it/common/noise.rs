//! Data sets of random images.

use std::fs;
use std::path::Path;

/// Writes IDX files of `train` and `test` images of 28 x 28 with random pixels and labels.
pub fn write_noise(folder: &Path, train: u32, test: u32) {
    write(folder, train, test, |noise, _, _| noise);
}

/// The same with dark images that have a bright stripe of two columns, whose place is the label.
pub fn write_stripes(folder: &Path, train: u32, test: u32) {
    write(folder, train, test, |noise, column, label| {
        if column / 2 == usize::from(label) { 255 - noise / 4 } else { noise / 4 }
    });
}

/// A pixel is made of a random number, its column and the image's label.
fn write(folder: &Path, train: u32, test: u32, pixel: impl Fn(u8, usize, u8) -> u8) {
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
        let labels = noise(count, 10);
        let noise = noise(count * 28 * 28, 256).into_iter().enumerate();
        let pixels = noise.map(|(at, noise)| pixel(noise, at % 28, labels[at / (28 * 28)]));
        let images = [header(0x0803, &[count, 28, 28]), pixels.collect()].concat();
        let labels = [header(0x0801, &[count]), labels].concat();
        fs::write(folder.join(format!("{name}-images-idx3-ubyte")), images).unwrap();
        fs::write(folder.join(format!("{name}-labels-idx1-ubyte")), labels).unwrap();
    }
}
