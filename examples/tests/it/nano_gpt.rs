//! The short GPT: two ranks have the losses of one, and it learns.

use std::fs;
use std::path::Path;

use flow_tests::{Process, TEST_TIMEOUT, launcher};
use tempfile::tempdir;

/// The losses of a training on the text in `folder`, and the loss of the part that was held out.
fn losses(folder: &Path, ranks: usize, more: &[&str]) -> (Vec<f64>, String) {
    let text = folder.join("text").display().to_string();
    let file = folder.join("losses").display().to_string();
    let words = "--layers 2 --width 16 --heads 2 --context 8 --batch-size 8 --steps 40 --lr 0.02";
    let mut arguments: Vec<&str> = words.split_whitespace().collect();
    arguments.extend(["--text", &text, "--losses", &file]);
    arguments.extend(more);
    let command = launcher(ranks, &[], "nano_gpt", &arguments);
    let output = Process::start(command).finish(TEST_TIMEOUT).success();
    let losses = fs::read_to_string(file).unwrap();
    let held_out = output.lines().find_map(|line| line.split_once("held out: "));
    let held_out = held_out.expect("the loss of what was held out").1.to_owned();
    (losses.lines().map(|line| line.parse().unwrap()).collect(), held_out)
}

/// Every rank takes its part of the samples that one rank would have, and sums come in another order.
#[test]
fn two_ranks_learn_as_one() {
    let folder = tempdir().unwrap();
    let text = "one two three four five six seven eight nine ten\n".repeat(40);
    fs::write(folder.path().join("text"), text).unwrap();
    let (one, of_one) = losses(folder.path(), 1, &["--double"]);
    let (two, of_two) = losses(folder.path(), 2, &["--double"]);
    assert_eq!((one.len(), two.len()), (40, 40));
    for (step, (one, two)) in one.iter().zip(&two).enumerate() {
        assert!((one - two).abs() < 1e-10, "step {step}: {one} by one rank, {two} by two");
    }
    assert_eq!(of_one, of_two);
    // All bytes are as likely as others at first: ln 256 = 5.545. The text has 16 of them: ln 16 = 2.77.
    assert!((one[0] - 5.545).abs() < 0.2 && one[39] < 2.77, "it does not learn: {one:?}");
}

#[test]
fn it_goes_on_with_a_text() {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("text"), "abc".repeat(500)).unwrap();
    let text = folder.path().join("text").display().to_string();
    let words =
        "--layers 1 --width 16 --heads 2 --context 8 --steps 300 --lr 0.02 --sample-bytes 9";
    let mut arguments: Vec<&str> = words.split_whitespace().collect();
    arguments.extend(["--text", &text, "--sample", "abcab"]);
    let command = launcher(2, &[], "nano_gpt", &arguments);
    let output = Process::start(command).finish(TEST_TIMEOUT).success();
    assert!(output.contains("abcabcabcabcab"), "{output}");
}
