//! Other ranks go on than those that were interrupted.

use std::fs;
use std::thread;

use flow_tests::{Process, assert_contains, free_port, launcher};

use super::job::{Folder, LONG, alone, command, has, kill, run};
use crate::common::{accuracies, data};

/// Three ranks go on where two were killed, and one where three were.
#[test]
fn other_numbers_of_ranks_go_on_with_the_rest_of_the_epoch() {
    let folder = Folder::new();
    let arguments = folder.job(&["--checkpoint-every", "1"]);
    folder.killed_after(5, 2, &arguments);
    let by_two = *folder.steps().last().unwrap();
    folder.killed_after(by_two + 3, 3, &arguments);
    let by_three = *folder.steps().last().unwrap() - by_two;
    let finished = run(1, &arguments);

    let images = 20 * by_two + 30 * by_three;
    assert!(images < 600, "the rest of the first epoch is dealt out twice");
    assert_contains(
        &finished.stdout,
        &[&format!("going on in epoch 1 after {images} of 600 images")],
    );
    assert_contains(
        &finished.stderr,
        &["was saved by 3 rank(s) of ", "not be the same to the bit"],
    );
    let losses = folder.result().1.lines().count();
    assert_eq!(losses, by_two + by_three + (1200 - images) / 10);
}

/// Two ranks have 60 steps in all, one has 120.
#[test]
fn so_many_steps_are_done_by_whatever_number_of_ranks() {
    for (ranks, others, steps, every) in [(2, 1, 50, 40), (1, 2, 90, 80)] {
        let folder = Folder::new();
        let arguments =
            folder.job(&["--steps", &steps.to_string(), "--checkpoint-every", &every.to_string()]);
        run(ranks, &arguments);
        let (_, whole) = folder.result();
        assert_eq!(whole.lines().count(), steps);
        assert_eq!(folder.steps(), [every, steps]);
        fs::remove_dir_all(folder.checkpoint(steps)).unwrap(); // as if it had been stopped before

        let output = run(others, &arguments).stdout;
        assert_contains(&output, &["going on in epoch 2"]);
        let (_, losses) = folder.result();
        assert_eq!(losses.lines().count(), steps);
        assert!(losses.lines().take(every).eq(whole.lines().take(every)));
    }
}

#[test]
fn another_number_of_threads_is_a_warning() {
    if thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
        println!("SKIPPED: a checkpoint and other threads: libtorch takes one thread on one core");
        return;
    }
    let folder = Folder::new();
    let threads = |number: &str| {
        let mut command = alone(&folder.job(&["--steps", "1"]));
        command.env("OMP_NUM_THREADS", number);
        Process::start(command).finish(LONG)
    };
    for number in ["1", "1"] {
        let finished = threads(number);
        assert!(finished.code == Some(0) && finished.stderr.is_empty(), "{finished:?}");
    }
    let warning = "was saved by 1 rank(s) of 1 thread(s), and 1 of 2 resume: the weights will not \
                   be the same to the bit";
    assert_contains(&threads("2").stderr, &[warning]);
}

#[test]
fn one_rank_goes_on_for_two_and_learns() {
    let Some(data) = data("one rank that goes on where two were killed") else { return };
    let folder = Folder::new();
    let checkpoint = folder.path("checkpoint");
    let steps = ["--data", &data, "--epochs", "1", "--steps", "200"];
    let saved = ["--checkpoint", &checkpoint, "--checkpoint-every", "20"];
    let arguments = [&steps[..], &saved[..]].concat();
    let owned: Vec<String> = arguments.iter().map(|&text| text.to_owned()).collect();
    folder.killed_after(60, 2, &owned);
    let training = Process::start(launcher(1, &[], "mnist", &arguments));
    let output = training.finish(LONG).success();
    assert_contains(&output, &["going on in epoch 1 after "]);
    let accuracy = accuracies(&output)[0];
    assert!((70.0..100.0).contains(&accuracy), "{output}");
}

/// Two nodes with a rank each; one is lost.
#[test]
fn nodes_that_are_left_go_on_without_the_lost_one() {
    let folder = Folder::new();
    let endpoint = format!("127.0.0.1:{}", free_port());
    let start = |configuration| {
        let flags = ["--nnodes", "1:2", "--rdzv-endpoint", &endpoint, "--rdzv-conf", configuration];
        let mut agent = command(1, &flags, &folder.job(&["--checkpoint-every", "1"]));
        agent.env("OMP_NUM_THREADS", "1");
        Process::start(agent)
    };
    let [leading, lost] = ["is_host=1", "is_host=0"].map(start);
    folder.until_step(10);
    let workers = folder.workers();
    assert!(
        workers.len() == 2 && workers.iter().all(|worker| has(worker, "environ", "WORLD_SIZE=2")),
        "{workers:?}"
    );
    kill(lost.pid());

    let output = leading.finish(LONG).success();
    let going_on: Vec<_> =
        output.lines().filter(|line| line.starts_with("going on in epoch ")).collect();
    let [line] = going_on[..] else { panic!("{output}") };
    let numbers: Vec<usize> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [epoch, taken, 600] = numbers[..] else { panic!("{line}") };
    let images = 600 * (epoch - 1) + taken;
    assert!((200..1200).contains(&images), "{line}");
    assert_eq!(folder.result().1.lines().count(), images / 20 + (1200 - images) / 10);
    assert!(folder.workers().is_empty(), "left: {:?}", folder.workers());
}
