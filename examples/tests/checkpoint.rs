//! mnist with checkpoints, killed and started again through the real launcher.

mod common;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use common::{accuracies, data, write_noise};
use flate2::write::GzEncoder;
use flate2::Compression;
use flow_tests::{assert_contains, launcher, Finished, Process};
use rustix::process::{kill_process, Pid, Signal};
use tempfile::{tempdir, TempDir};

/// The longest that a training may take before it counts as stuck.
const LONG: Duration = Duration::from_secs(900);

/// A folder with random images, and what jobs write.
struct Folder(TempDir);

impl Folder {
    /// With 600 images: 30 steps an epoch for two ranks with batches of 10.
    fn new() -> Self {
        let folder = Self(tempdir().unwrap());
        write_noise(folder.0.path(), 600, 20);
        folder
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Arguments of a training on the random images.
    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let data = self.path("");
        let common = ["--data", &data, "--batch-size", "10", "--lr", "0.02"];
        common.iter().chain(more).map(|argument| argument.to_string()).collect()
    }

    /// As [`Folder::arguments`], with checkpoints, weights and losses of the job in this folder.
    fn job(&self, more: &[&str]) -> Vec<String> {
        let files = [("checkpoint", "checkpoint"), ("save", "weights.safetensors"), ("losses", "losses")];
        let files = files.map(|(option, name)| [format!("--{option}"), self.path(name)]);
        let arguments = self.arguments(more);
        arguments.into_iter().chain(files.into_iter().flatten()).collect()
    }

    /// The steps of the job's checkpoints.
    fn steps(&self) -> Vec<usize> {
        let Ok(files) = fs::read_dir(self.path("checkpoint")) else { return Vec::new() };
        let names = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut steps: Vec<usize> =
            names.filter_map(|name| name.strip_prefix("step-").map(|step| step.parse().unwrap())).collect();
        steps.sort_unstable();
        steps
    }

    fn checkpoint(&self, step: usize) -> PathBuf {
        self.0.path().join("checkpoint").join(format!("step-{step}"))
    }

    /// The weights and the losses that the job ended with.
    fn result(&self) -> (Vec<u8>, String) {
        (fs::read(self.path("weights.safetensors")).unwrap(), fs::read_to_string(self.path("losses")).unwrap())
    }

    /// The same of a job that nobody interrupts, and that writes no checkpoint.
    fn uninterrupted(&self, ranks: usize) -> (Vec<u8>, String) {
        let (weights, losses) = (self.path("whole.safetensors"), self.path("whole-losses"));
        run(ranks, &self.arguments(&["--save", &weights, "--losses", &losses]));
        (fs::read(weights).unwrap(), fs::read_to_string(losses).unwrap())
    }

    /// Runs the job until rank 0 is killed, after the checkpoint of `step`.
    fn killed_after(&self, step: usize, ranks: usize, arguments: &[String]) {
        let job = Process::start(command(ranks, &[], arguments));
        self.kill_after(step);
        assert_contains(&job.finish(LONG).stderr, &["rank 0", "SIGKILL"]);
    }

    /// Kills rank 0 of the running job at some moment after it has written the checkpoint of `step`.
    fn kill_after(&self, step: usize) {
        let deadline = Instant::now() + LONG;
        while self.steps().last().is_none_or(|&last| last < step) {
            assert!(Instant::now() < deadline, "no checkpoint of step {step}: {:?}", self.steps());
            sleep(Duration::from_millis(1));
        }
        sleep(random(Duration::from_millis(40)));
        let rank_0 = worker(&self.path("checkpoint")).expect("rank 0 runs");
        kill_process(rank_0, Signal::KILL).unwrap();
    }
}

fn command(ranks: usize, flags: &[&str], arguments: &[String]) -> Command {
    launcher(ranks, flags, "mnist", &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

fn run(ranks: usize, arguments: &[String]) -> Finished {
    let finished = Process::start(command(ranks, &[], arguments)).finish(LONG);
    assert!(finished.status.success(), "{finished:?}");
    finished
}

/// Some part of `most`.
fn random(most: Duration) -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    most.mul_f64(f64::from(now.subsec_nanos() % 1000) / 1000.0)
}

/// The mnist that is rank 0 and has this argument.
fn worker(argument: &str) -> Option<Pid> {
    let is = |process: &Path| {
        let has = |file: &str, text: &str| {
            let file = fs::read(process.join(file)).unwrap_or_default();
            file.split(|&byte| byte == 0).any(|part| part == text.as_bytes())
        };
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        name == "mnist\n" && has("cmdline", argument) && has("environ", "RANK=0")
    };
    let mut processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    Pid::from_raw(processes.find(|process| is(process))?.file_name()?.to_str()?.parse().ok()?)
}

#[test]
fn killed_three_times_it_ends_with_the_same_weights() {
    let folder = Folder::new();
    let arguments = folder.job(&["--checkpoint-every", "1"]);
    for step in [3, 25, 40] {
        folder.killed_after(step, 2, &arguments);
        assert!((1..=3).contains(&folder.steps().len()), "{:?}", folder.steps());
    }
    // As a writer leaves it that is killed before all is written.
    let half = fs::read(folder.checkpoint(*folder.steps().last().unwrap())).unwrap();
    fs::write(folder.path("checkpoint/partial"), &half[..half.len() / 2]).unwrap();
    let output = run(2, &arguments).stdout;
    assert_contains(&output, &["going on in epoch 2"]);
    assert_eq!(folder.steps(), [59, 60]);
    assert_eq!(fs::read_dir(folder.path("checkpoint")).unwrap().count(), 2, "nothing else is left");

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
    let output = job.finish(LONG).success();
    assert_contains(&output, &["going on in epoch 1", "going on in epoch 2"]);
    assert!(folder.result() == folder.uninterrupted(2), "other weights or losses");
}

#[test]
fn a_damaged_checkpoint_is_told_and_the_one_before_serves() {
    let folder = Folder::new();
    let arguments = folder.job(&["--checkpoint-every", "25"]);
    run(1, &arguments);
    let expected = folder.result();
    assert_eq!(expected.1.lines().count(), 120);
    assert_eq!(folder.steps(), [100, 120]);

    let newest = folder.checkpoint(120);
    let good = fs::read(&newest).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    for damaged in [&flipped[..], &good[..good.len() - 1], &[]] {
        fs::write(&newest, damaged).unwrap();
        let finished = run(1, &arguments);
        assert_contains(&finished.stderr, &[&format!("the checkpoint {} is damaged: ", newest.display())]);
        assert_contains(&finished.stdout, &["going on in epoch 2 after 400 of 600 images"]);
        assert!(folder.result() == expected, "other weights or losses");
        assert_eq!(folder.steps(), [100, 120]);
    }

    for step in folder.steps() {
        fs::write(folder.checkpoint(step), "no gzip").unwrap();
    }
    let all =
        format!("mnist: all checkpoints in {} are damaged; remove them to start anew: ", folder.path("checkpoint"));
    assert!(error(&arguments).lines().last().unwrap().starts_with(&all));
}

/// What mnist, run alone, says on failing.
fn error(arguments: &[String]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mnist"));
    command.args(arguments);
    let finished = Process::start(command).finish(LONG);
    assert_eq!(finished.status.code(), Some(1), "{finished:?}");
    finished.stderr
}

#[test]
fn the_checkpoint_of_another_training_is_an_error_that_says_what_differs() {
    let folder = Folder::new();
    run(1, &folder.job(&["--epochs", "1"]));
    let with = "the checkpoint was made with";
    for (option, value, difference) in [
        ("--epochs", "2", format!("{with} --epochs 1, not 2; use that, or another folder")),
        ("--batch-size", "20", format!("{with} --batch-size 10, not 20; use that, or another folder")),
        ("--lr", "0.5", format!("{with} --lr 0.02, not 0.5; use that, or another folder")),
        ("--steps", "50", format!("{with} --steps all, not 50; use that, or another folder")),
        ("--momentum", "0", format!("{with} --momentum 0.9, not 0; use that, or another folder")),
        ("--seed", "7", "cannot resume: the state was saved with seed 0, this sampler has seed 7".to_owned()),
    ] {
        let arguments = folder.job(&["--epochs", "1"]);
        let others = arguments.chunks(2).filter(|pair| pair[0] != option).flatten().cloned();
        let arguments: Vec<String> = others.chain([option.to_owned(), value.to_owned()]).collect();
        assert_eq!(error(&arguments), format!("mnist: {difference}\n"));
    }

    write_noise(folder.0.path(), 500, 20);
    let difference = "cannot resume: the state was saved with samples 600, this sampler has samples 500";
    assert_eq!(error(&folder.job(&["--epochs", "1"])), format!("mnist: {difference}\n"));

    for step in folder.steps() {
        let mut file = GzEncoder::new(fs::File::create(folder.checkpoint(step)).unwrap(), Compression::none());
        file.write_all(b"{}\n").unwrap();
        file.finish().unwrap();
    }
    let text = error(&folder.job(&["--epochs", "1"]));
    let foreign = format!("mnist: the checkpoint in {} is of another program: ", folder.path("checkpoint"));
    assert!(text.starts_with(&foreign) && text.lines().count() == 1, "{text}");
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error() {
    let folder = Folder::new();
    fs::write(folder.path("checkpoint"), "a file").unwrap();
    let expected = format!("mnist: cannot make the folder {}: ", folder.path("checkpoint"));
    let text = error(&folder.job(&[]));
    assert!(text.starts_with(&expected) && text.lines().count() == 1, "{text}");
}

/// Three ranks go on where two were killed, and one where three were.
#[test]
fn other_numbers_of_ranks_go_on_with_the_rest_of_the_epoch() {
    let folder = Folder::new();
    let arguments = folder.job(&["--checkpoint-every", "1"]);
    folder.killed_after(5, 2, &arguments);
    let by_two = *folder.steps().last().unwrap();
    folder.killed_after(by_two + 3, 3, &arguments);
    let by_three = *folder.steps().last().unwrap() - by_two;
    let output = run(1, &arguments).stdout;

    let images = 20 * by_two + 30 * by_three;
    assert!(images < 600, "the rest of the first epoch is dealt out twice");
    assert_contains(&output, &[&format!("going on in epoch 1 after {images} of 600 images")]);
    let losses = folder.result().1.lines().count();
    assert_eq!(losses, by_two + by_three + (1200 - images) / 10);
}

#[test]
fn one_rank_goes_on_for_two_and_learns() {
    let Some(data) = data("one rank that goes on where two were killed") else { return };
    let folder = Folder::new();
    let checkpoint = folder.path("checkpoint");
    let arguments = ["--data", &data, "--epochs", "1", "--checkpoint", &checkpoint, "--checkpoint-every", "50"];
    folder.killed_after(150, 2, &arguments.map(String::from));
    let training = Process::start(launcher(1, &[], "mnist", &arguments));
    let output = training.finish(LONG).success();
    assert_contains(&output, &["going on in epoch 1 after "]);
    let accuracy = accuracies(&output)[0];
    assert!((80.0..100.0).contains(&accuracy), "{output}");
}
