//! LeNet on Fashion-MNIST through the real launcher.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Duration;

use crate::common::noise::write_noise;
use crate::common::{accuracies, data};
use flow_tests::{Process, TEST_TIMEOUT, instruction_sets, launch, launcher, program};
use tempfile::tempdir;

/// The losses of 20 steps in double precision in which `ranks` ranks have batches of `batch` images
/// each.
fn losses(data: &str, ranks: usize, batch: usize, instruction_set: [(&str, &str); 3]) -> Vec<f64> {
    let folder = tempdir().unwrap();
    // There is nothing to evaluate here: noise is enough.
    write_noise(folder.path(), 0, 4);
    for file in fs::read_dir(data).unwrap().map(|file| file.unwrap().path()) {
        let Some(name) = file
            .file_name()
            .and_then(|name| name.to_str())
            .filter(|name| name.starts_with("train"))
        else {
            continue;
        };
        let _ = fs::remove_file(folder.path().join(name.trim_end_matches(".gz")));
        symlink(&file, folder.path().join(name)).unwrap();
    }
    let file = folder.path().join("losses");
    let (data, batch, file) =
        (folder.path().to_str().unwrap(), batch.to_string(), file.to_str().unwrap());
    let arguments = [
        "--data",
        data,
        "--double",
        "--batch-size",
        &batch,
        "--steps",
        "20",
        "--lr",
        "0.02",
        "--losses",
        file,
    ];
    let mut command = launcher(ranks, &[], "mnist", &arguments);
    command.envs(instruction_set);
    Process::start(command).finish(TEST_TIMEOUT).success();
    fs::read_to_string(file).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

/// Both have the same 20 images in each step and sum over them in another order. In double
/// precision that makes 5e-16, whatever the instruction set. Gradients summed instead of averaged
/// make 1e-3 in the second step and 0.1 in the tenth; other first weights or another order of the
/// images make 3e-3 in the first.
#[test]
fn two_ranks_learn_as_one_with_the_joined_batch() {
    let Some(data) = data("the loss curve of two ranks against one") else { return };
    for set in instruction_sets() {
        let two = losses(&data, 2, 10, set);
        let one = losses(&data, 1, 20, set);
        assert_eq!((two.len(), one.len()), (20, 20));
        assert!(two[19] < 0.8 * two[0], "it does not learn: {two:?}");
        for (step, (two, one)) in two.iter().zip(&one).enumerate() {
            let difference = (two - one).abs() / one;
            println!(
                "{}, step {step}: {two} {one}, relative difference {difference:.1e}",
                set[0].1
            );
            assert!(
                difference < 1e-10,
                "{set:?}, step {step}: {two} with two ranks, {one} with one"
            );
        }
    }
}

#[test]
fn two_ranks_recognize_clothes() {
    let Some(data) = data("the test accuracy of two ranks") else { return };
    let arguments = ["--data", &data, "--steps", "400"];
    let training = Process::start(launcher(2, &[], "mnist", &arguments));
    let output = training.finish(Duration::from_secs(900)).success();
    let accuracy = *accuracies(&output).last().expect("an epoch");
    assert!((85.0..100.0).contains(&accuracy), "{output}");
}

/// With 501 test images in batches of 250, rank 0 has two batches and rank 1 has one.
#[test]
fn accuracy_counts_every_test_image_once() {
    let folder = tempdir().unwrap();
    write_noise(folder.path(), 4, 501);
    let evaluate = |ranks| {
        let folder = folder.path().to_str().unwrap();
        accuracies(&launch(ranks, "mnist", &["--data", folder, "--epochs", "1", "--lr", "0"]))
    };
    let alone = evaluate(1);
    assert_eq!(alone.len(), 1);
    assert_eq!(evaluate(2), alone);
    assert_eq!(evaluate(3), alone);
}

/// The one line with which mnist, run alone with these arguments, fails.
fn error(arguments: &[&str]) -> String {
    let mut command = Command::new(program("mnist"));
    command.args(arguments);
    let finished = Process::start(command).finish(TEST_TIMEOUT);
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{finished:?}");
    assert_eq!(finished.stderr.lines().count(), 1, "{finished:?}");
    finished.stderr
}

#[test]
fn an_empty_folder_is_an_error_that_says_how_to_get_the_data() {
    let folder = tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let expected = format!(
        "mnist: no train-images-idx3-ubyte[.gz] in {folder}; get Fashion-MNIST with \
         `scripts/setup --data` or `apt-get install dataset-fashion-mnist`\n"
    );
    assert_eq!(error(&["--data", folder]), expected);

    let finished =
        Process::start(launcher(2, &[], "mnist", &["--data", folder])).finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(1));
    assert!(finished.stderr.contains(&expected), "{}", finished.stderr);
}

#[test]
fn a_truncated_file_is_an_error() {
    let folder = tempdir().unwrap();
    write_noise(folder.path(), 4, 4);
    let file = folder.path().join("train-images-idx3-ubyte");
    fs::File::options().write(true).open(&file).unwrap().set_len(1000).unwrap();
    let expected = format!(
        "mnist: {} is truncated: an array of shape [4, 28, 28] takes 3136 bytes after the header, \
         found 984\n",
        file.display()
    );
    assert_eq!(error(&["--data", folder.path().to_str().unwrap()]), expected);
}

#[test]
fn no_image_is_an_error() {
    let folder = tempdir().unwrap();
    write_noise(folder.path(), 4, 0);
    let folder = folder.path().to_str().unwrap();
    let expected =
        format!("mnist: {folder}: found 0 images of 28 x 28, LeNet takes one or more of 28 x 28\n");
    assert_eq!(error(&["--data", folder]), expected);
}

#[test]
fn wrong_arguments_are_usage_errors() {
    for argument in [
        "--epochs=0",
        "--batch-size=0",
        "--lr=-1",
        "--momentum=nan",
        "--steps=-1",
        "--seed=x",
        "data",
    ] {
        let mut command = Command::new(program("mnist"));
        command.arg(argument);
        let finished = Process::start(command).finish(TEST_TIMEOUT);
        assert_eq!(finished.code, Some(2), "{finished:?}");
        let value = argument.split('=').next_back().unwrap();
        assert_eq!(finished.stderr.lines().count(), 1, "{finished:?}");
        assert!(finished.stderr.contains(&format!("'{value}'")), "{finished:?}");
    }
}
