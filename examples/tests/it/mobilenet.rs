//! MobileNetV2 by `Ddp`, by a hand-written loop and by SBP, through the real launcher.

use std::fs;
use std::path::Path;

use crate::common::noise::write_noise;
use flow_tests::{Process, TEST_TIMEOUT, assert_contains, launcher};

/// Writes CIFAR-10's six files, of `records` records each, with pixels that are no noise: bars
/// whose place is the class.
fn write_cifar10(folder: &Path, records: u8) {
    let training = (1..=5).map(|file| format!("data_batch_{file}.bin"));
    for (file, name) in (0..).zip(training.chain(["test_batch.bin".into()])) {
        let record = |index: u8| {
            let class = (index * 3 + file) % 10;
            let pixel = |at: usize| {
                if at % 32 / 3 == usize::from(class) {
                    200 + index % 50
                } else {
                    (at % 97) as u8 + file
                }
            };
            [class].into_iter().chain((0..3072).map(pixel)).collect::<Vec<u8>>()
        };
        fs::write(folder.join(name), (0..records).flat_map(record).collect::<Vec<_>>()).unwrap();
    }
}

/// What `mobilenet` prints on two ranks, and the losses of its steps.
fn compare(folder: &Path, steps: &str, more: &[&str]) -> (String, Vec<Vec<f64>>) {
    let file = folder.join("losses");
    let arguments = [
        "--data",
        folder.to_str().unwrap(),
        "--batch-size",
        "8",
        "--epochs",
        "3",
        "--steps",
        steps,
        "--compare",
        "--losses",
        file.to_str().unwrap(),
    ];
    let arguments = [&arguments[..], more].concat();
    let command = launcher(2, &[], "mobilenet", &arguments);
    let output = Process::start(command).finish(TEST_TIMEOUT).success();
    let numbers =
        |line: &str| line.split(' ').map(|number| number.parse().unwrap()).collect::<Vec<f64>>();
    (output, fs::read_to_string(file).unwrap().lines().map(numbers).collect())
}

/// Batch norm takes each rank's own batch in both, and both add up the same two gradients: the
/// losses have the same bits.
#[test]
fn ddp_and_a_hand_written_loop_have_equal_losses() {
    let folder = tempfile::tempdir().unwrap();
    write_cifar10(folder.path(), 10);
    let (output, losses) = compare(folder.path(), "100", &[]);
    // 50 images: 25 of each rank, in batches of 8, 8, 8 and 1, three times.
    assert_eq!(losses.len(), 12, "{output}");
    for (step, losses) in losses.iter().enumerate() {
        assert_eq!(losses.len(), 3);
        assert_eq!(losses[0], losses[1], "step {step}: {output}");
    }
    assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "weights stay: {output}");
    assert_contains(
        &output,
        &["loss by ddp, hand, sbp:", "by ddp: ", "by hand: ", "by sbp: ", "ms per step"],
    );
    assert!(!output.contains("Fashion"), "{output}");
}

/// With its running statistics, batch norm does the same for a split batch as for each rank's own.
/// What single precision makes of sums in another order stays below 1e-6 of a loss in the first
/// steps.
#[test]
fn sbp_has_the_losses_of_ddp_where_batch_norm_is_frozen() {
    let folder = tempfile::tempdir().unwrap();
    write_cifar10(folder.path(), 10);
    let (output, losses) = compare(folder.path(), "6", &["--frozen", "--lr", "0.001"]);
    assert_eq!(losses.len(), 6, "{output}");
    for (step, losses) in losses.iter().enumerate() {
        assert_eq!(losses[0], losses[1], "step {step}: {output}");
        let difference = (losses[2] - losses[0]).abs() / losses[0];
        assert!(difference < 1e-4, "step {step}: {output}");
    }
    assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "weights stay: {output}");
}

#[test]
fn without_cifar10_it_says_what_it_trains_on() {
    let folder = tempfile::tempdir().unwrap();
    write_noise(folder.path(), 32, 2);
    let (output, losses) = compare(folder.path(), "2", &[]);
    let folder = folder.path().display();
    let expected = format!("no CIFAR-10 in {folder}: training on Fashion-MNIST, as 3 x 32 x 32\n");
    assert!(output.starts_with(&expected), "{output}");
    assert_eq!(losses.len(), 2);
    assert_eq!(losses[1][0], losses[1][1], "{output}");
}
