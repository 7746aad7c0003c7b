//! The examples of views through the real launcher.

use std::fs;
use std::path::Path;

use crate::common::noise::{write_noise, write_stripes};
use flow_tests::{Process, TEST_TIMEOUT, launcher};

/// What a program prints when `ranks` ranks run it on the data in `folder`, and the losses of its
/// six steps.
fn train(folder: &Path, ranks: usize, program: &str, options: &[&str]) -> (String, Vec<f64>) {
    run_steps("6", folder, ranks, program, options)
}

/// A batch of 25 images is not the same number for each of two or three ranks.
fn run_steps(
    steps: &str,
    folder: &Path,
    ranks: usize,
    program: &str,
    options: &[&str],
) -> (String, Vec<f64>) {
    let file = folder.join("losses");
    let (data, losses) = (folder.to_str().unwrap(), file.to_str().unwrap());
    let shared = ["--data", data, "--batch-size", "25", "--steps", steps, "--losses", losses];
    let options = [&shared[..], &["--double"], options].concat();
    let output =
        Process::start(launcher(ranks, &[], program, &options)).finish(TEST_TIMEOUT).success();
    let losses = fs::read_to_string(file).unwrap();
    (output, losses.lines().map(|line| line.parse().unwrap()).collect())
}

/// In double precision the order of sums makes 1e-15 of a loss.
fn assert_equal(case: &str, losses: &[f64], alone: &[f64]) {
    assert_eq!((losses.len(), alone.len()), (6, 6), "{case}");
    for (step, (loss, alone)) in losses.iter().zip(alone).enumerate() {
        let difference = (loss - alone).abs() / alone;
        assert!(difference < 1e-10, "{case}, step {step}: {loss}, alone {alone}");
    }
}

/// The last line of what is printed: the test accuracy.
fn accuracy(output: &str) -> &str {
    let line = output.lines().next_back().unwrap_or_default();
    assert!(line.starts_with("test accuracy "), "{output}");
    line
}

#[test]
fn lenet_learns_the_same_in_both_views() {
    let folder = tempfile::tempdir().unwrap();
    write_noise(folder.path(), 200, 50);
    let run =
        |ranks, view| train(folder.path(), ranks, "lenet", &["--view", view, "--dropout", "0"]);
    let (output, alone) = run(1, "consistent");
    assert!(alone[5] < 0.9 * alone[0], "it does not learn: {alone:?}");
    for (ranks, view) in [(2, "consistent"), (2, "mirrored"), (3, "mirrored")] {
        let (printed, losses) = run(ranks, view);
        assert_equal(&format!("{view}, {ranks} ranks"), &losses, &alone);
        assert_eq!(accuracy(&printed), accuracy(&output));
    }
}

/// What dropout drops in the consistent view depends on the logical element only.
#[test]
fn dropout_is_that_of_one_rank_in_the_consistent_view() {
    let folder = tempfile::tempdir().unwrap();
    write_noise(folder.path(), 200, 50);
    let run = |ranks| train(folder.path(), ranks, "lenet", &["--view", "consistent"]).1;
    assert_equal("2 ranks", &run(2), &run(1));
}

/// At the learning rate of OneFlow's programs, 0.1.
#[test]
fn both_views_learn_images_that_have_something_to_learn() {
    let folder = tempfile::tempdir().unwrap();
    write_stripes(folder.path(), 500, 50);
    for (program, view) in [("lenet", "consistent"), ("lenet", "mirrored"), ("mlp", "mirrored")] {
        let (output, losses) = run_steps("20", folder.path(), 2, program, &["--view", view]);
        let last = losses[15..].iter().sum::<f64>() / 5.0;
        assert!(last < 0.5 * losses[0], "{program}, {view}: {losses:?}, {output}");
    }
}

#[test]
fn an_mlp_learns_the_same_data_parallel_and_hybrid_as_on_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    write_noise(folder.path(), 200, 50);
    let run = |ranks, view| train(folder.path(), ranks, "mlp", &["--view", view, "--lr", "0.01"]);
    let (output, alone) = run(1, "consistent");
    assert!(alone[5] < 0.9 * alone[0], "it does not learn: {alone:?}");
    for (ranks, view) in [(2, "mirrored"), (2, "consistent"), (3, "consistent")] {
        let (printed, losses) = run(ranks, view);
        assert_equal(&format!("{view}, {ranks} ranks"), &losses, &alone);
        assert_eq!(accuracy(&printed), accuracy(&output));
        let sbps = "images [B], hidden [S(1)] -> [S(0)], logits [S(0)]\n";
        assert_eq!(printed.starts_with(sbps), view == "consistent", "{printed}");
    }
}

/// One rank of two trains; the other one has the results.
#[test]
fn fewer_devices_than_ranks_are_enough() {
    let folder = tempfile::tempdir().unwrap();
    write_noise(folder.path(), 200, 50);
    let options = ["--view", "consistent", "--dropout", "0"];
    let (_, alone) = train(folder.path(), 1, "lenet", &options);
    let options = [&options[..], &["--devices", "1"]].concat();
    assert_equal("1 of 2 ranks", &train(folder.path(), 2, "lenet", &options).1, &alone);
}

#[test]
fn more_devices_than_ranks_are_an_error_with_both_numbers() {
    let folder = tempfile::tempdir().unwrap();
    write_noise(folder.path(), 50, 50);
    let data = folder.path().to_str().unwrap();
    for (program, view) in [
        ("lenet", &["--view", "mirrored"][..]),
        ("lenet", &["--view", "consistent"]),
        ("mlp", &["--view", "consistent"]),
    ] {
        let options = [&["--data", data, "--devices", "3"], view].concat();
        let finished = Process::start(launcher(2, &[], program, &options)).finish(TEST_TIMEOUT);
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{finished:?}");
        let expected = format!("{program}: asked for 3 devices, found 2: start as many ranks");
        assert!(finished.stderr.contains(&expected), "{}", finished.stderr);
    }
}
