//! A training that ends early, or whose files are damaged, goes on as if nothing had happened.

use std::fs;

use flow_tests::{Process, assert_contains};

use super::job::{Folder, LONG, command, error, run};

#[test]
fn killed_three_times_it_ends_with_the_same_weights() {
    let folder = Folder::new();
    let arguments = folder.job(&["--checkpoint-every", "1"]);
    for step in [3, 25, 40] {
        folder.killed_after(step, 2, &arguments);
        assert!((1..=3).contains(&folder.steps().len()), "{:?}", folder.steps());
    }
    // As a writer leaves it that is killed before all is written.
    let half = fs::read(folder.model(*folder.steps().last().unwrap())).unwrap();
    let partial = folder.path("checkpoint/.checkpoint.partial");
    // The killed writer may have left it, too.
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial + "/model.safetensors", &half[..half.len() / 2]).unwrap();
    for of_others in ["partial", "step-60.partial", "step-one"] {
        fs::write(folder.path("checkpoint/") + of_others, "").unwrap();
    }
    let output = run(2, &arguments).stdout;
    assert_contains(&output, &["going on in epoch 2"]);
    let files = fs::read_dir(folder.path("checkpoint")).unwrap();
    let mut names: Vec<_> =
        files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [".checkpoint.lock", "partial", "step-59", "step-60", "step-60.partial", "step-one"]
    );

    let expected = folder.uninterrupted(2);
    assert!(folder.result() == expected, "other weights or losses");

    // Started once more, there is nothing to do.
    run(2, &arguments);
    assert!(folder.result() == expected, "other weights or losses");
}

#[test]
fn restarted_by_the_launcher_it_ends_with_the_same_weights() {
    let folder = Folder::new();
    let arguments = folder.job(&["--checkpoint-every", "1"]);
    let job = Process::start(command(2, &["--max-restarts", "2"], &arguments));
    for step in [10, 35] {
        folder.kill_after(step);
    }
    let finished = job.finish(LONG);
    assert!(folder.workers().is_empty(), "left: {:?}", folder.workers());
    let same_ranks = !finished.stderr.contains("to the bit");
    let output = finished.success();
    assert_contains(&output, &["going on in epoch 1", "going on in epoch 2"]);
    assert!(same_ranks && folder.result() == folder.uninterrupted(2), "other weights or losses");
}

#[test]
fn a_damaged_checkpoint_is_kept_aside_and_the_one_before_serves() {
    let folder = Folder::new();
    let arguments = folder.job(&["--checkpoint-every", "25"]);
    run(1, &arguments);
    let expected = folder.result();
    assert_eq!(expected.1.lines().count(), 120);
    assert_eq!(folder.steps(), [100, 120]);

    let newest = folder.checkpoint(120);
    let good = fs::read(folder.model(120)).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    let state =
        fs::read_to_string(newest.join("state.json")).unwrap().replacen("losses", "numbers", 1);
    let first = folder.path("checkpoint/step-120.damaged");
    let names =
        [first.clone()].into_iter().chain((2..=6).map(|number| format!("{first}.{number}")));
    for ((file, damaged), kept) in [
        ("model.safetensors", Some(&flipped[..])),
        ("optimizer.safetensors", Some(&good[..good.len() - 1])),
        ("model.safetensors", Some(&[])),
        ("state.json", Some(state.as_bytes())),
        ("sums.json", Some(&[])),
        ("sums.json", None),
    ]
    .into_iter()
    .zip(names)
    {
        match damaged {
            Some(damaged) => fs::write(newest.join(file), damaged).unwrap(),
            None => fs::remove_file(newest.join(file)).unwrap(),
        }
        let finished = run(1, &arguments);
        assert_contains(
            &finished.stderr,
            &[&format!("the checkpoint {} is damaged: ", newest.display())],
        );
        assert_contains(&finished.stdout, &["going on in epoch 2 after 400 of 600 images"]);
        assert!(folder.result() == expected, "other weights or losses");
        assert_eq!(folder.steps(), [100, 120]);
        assert!(fs::exists(&kept).unwrap());
        assert_eq!(fs::read(format!("{kept}/{file}")).ok().as_deref(), damaged);
    }

    for step in folder.steps() {
        fs::write(folder.model(step), "no tensors").unwrap();
    }
    let all = format!(
        "mnist: all checkpoints in {} are damaged; remove them to start anew: ",
        folder.path("checkpoint")
    );
    assert!(error(&arguments).lines().last().unwrap().starts_with(&all));
}

#[test]
fn a_loss_that_is_no_number_is_kept_as_it_is() {
    let folder = Folder::new();
    let arguments = folder.job(&["--lr", "1e6", "--steps", "20", "--checkpoint-every", "15"]);
    run(1, &arguments);
    let (_, losses) = folder.result();
    assert_contains(&losses, &["NaN"]);
    for left in [&[15, 20][..], &[15]] {
        assert_eq!(folder.steps(), left);
        run(1, &arguments);
        assert_eq!(folder.result().1, losses);
        fs::remove_dir_all(folder.checkpoint(20)).unwrap();
    }
}
