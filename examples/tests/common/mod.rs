//! What the tests of mnist share.

use std::fs;
use std::path::Path;

use flow_examples::fashion;

/// The folder of Fashion-MNIST; where it is missing, says that `test` is skipped.
pub fn data(test: &str) -> Option<String> {
    let folder = fashion::default_folder().to_str().expect("a folder in UTF-8").to_owned();
    let found = ["", ".gz"]
        .iter()
        .any(|end| Path::new(&folder).join(format!("train-images-idx3-ubyte{end}")).exists());
    if !found {
        println!("SKIPPED: {test}: no Fashion-MNIST in {folder}; get it with scripts/setup --data");
    }
    found.then_some(folder)
}

/// The test accuracy that each epoch ended with, in percent.
pub fn accuracies(output: &str) -> Vec<f64> {
    let number = |line: &str| line.split_once("test accuracy ")?.1.split_once(" %")?.0.parse().ok();
    output.lines().filter_map(number).collect()
}

/// Writes IDX files of `train` and `test` images of 28 x 28 with random pixels and labels.
pub fn write_noise(folder: &Path, train: u32, test: u32) {
    let mut state = 1u32;
    let mut noise = |count: u32, below: u32| -> Vec<u8> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223); // Numerical Recipes' generator
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
