//! What the tests of mnist share.

pub mod noise;

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
