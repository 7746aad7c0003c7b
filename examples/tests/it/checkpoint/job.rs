//! A training that writes checkpoints, and ways to run it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use flow_tests::{Finished, Process, assert_contains, launcher, program};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::{TempDir, tempdir};

use crate::common::noise::write_noise;

/// The longest that a training may take before it counts as stuck.
pub const LONG: Duration = Duration::from_secs(900);

/// A folder with random images, and what jobs write.
pub struct Folder(TempDir);

impl Folder {
    /// With 600 images: 30 steps an epoch for two ranks with batches of 10.
    pub fn new() -> Self {
        let folder = Self(tempdir().unwrap());
        write_noise(folder.0.path(), 600, 20);
        folder
    }

    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Arguments of a training on the random images; later arguments replace earlier ones.
    pub fn arguments(&self, more: &[&str]) -> Vec<String> {
        let data = self.path("");
        let common = ["--data", &data, "--batch-size", "10", "--lr", "0.02"];
        let replaced = |pair: &&[&str]| !more.contains(&pair[0]);
        let common = common.chunks(2).filter(replaced).flatten();
        common.chain(more).map(|argument| argument.to_string()).collect()
    }

    /// As [`Folder::arguments`], with checkpoints, weights and losses of the job in this folder.
    pub fn job(&self, more: &[&str]) -> Vec<String> {
        let files =
            [("checkpoint", "checkpoint"), ("save", "weights.safetensors"), ("losses", "losses")];
        let files = files.map(|(option, name)| [format!("--{option}"), self.path(name)]);
        let arguments = self.arguments(more);
        arguments.into_iter().chain(files.into_iter().flatten()).collect()
    }

    /// The steps of the job's checkpoints.
    pub fn steps(&self) -> Vec<usize> {
        let Ok(files) = fs::read_dir(self.path("checkpoint")) else { return Vec::new() };
        let names = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut steps: Vec<usize> =
            names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
        steps.sort_unstable();
        steps
    }

    pub fn checkpoint(&self, step: usize) -> PathBuf {
        self.0.path().join("checkpoint").join(format!("step-{step}"))
    }

    /// Its file of weights.
    pub fn model(&self, step: usize) -> PathBuf {
        self.checkpoint(step).join("model.safetensors")
    }

    /// The weights and the losses that the job ended with.
    pub fn result(&self) -> (Vec<u8>, String) {
        (
            fs::read(self.path("weights.safetensors")).unwrap(),
            fs::read_to_string(self.path("losses")).unwrap(),
        )
    }

    /// The same of a job that nobody interrupts, and that writes no checkpoint.
    pub fn uninterrupted(&self, ranks: usize) -> (Vec<u8>, String) {
        let (weights, losses) = (self.path("whole.safetensors"), self.path("whole-losses"));
        run(ranks, &self.arguments(&["--save", &weights, "--losses", &losses]));
        (fs::read(weights).unwrap(), fs::read_to_string(losses).unwrap())
    }

    /// Runs the job until rank 0 is killed, after the checkpoint of `step`.
    pub fn killed_after(&self, step: usize, ranks: usize, arguments: &[String]) {
        let job = Process::start(command(ranks, &[], arguments));
        self.kill_after(step);
        assert_contains(&job.finish(LONG).stderr, &["rank 0", "SIGKILL"]);
        assert!(self.workers().is_empty(), "left: {:?}", self.workers());
    }

    /// Kills rank 0 of the running job at some moment after it has written the checkpoint of
    /// `step`.
    pub fn kill_after(&self, step: usize) {
        self.until_step(step);
        sleep(random(Duration::from_millis(40)));
        let workers = self.workers();
        let rank_0 =
            workers.iter().find(|process| has(process, "environ", "RANK=0")).expect("rank 0 runs");
        kill(rank_0.file_name().unwrap().to_str().unwrap().parse().unwrap());
    }

    /// Waits for the checkpoint of `step` or one after it.
    pub fn until_step(&self, step: usize) {
        until(&format!("the checkpoint of step {step}"), || {
            self.steps().last().is_some_and(|&last| last >= step)
        });
    }

    /// The folders in `/proc` of the job's mnist processes.
    pub fn workers(&self) -> Vec<PathBuf> {
        let checkpoint = self.path("checkpoint");
        let is_worker = |process: &PathBuf| {
            let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
            name == "mnist\n" && has(process, "cmdline", &checkpoint)
        };
        fs::read_dir("/proc")
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(is_worker)
            .collect()
    }
}

/// Whether `text` is one of the arguments or variables in this file of a process.
pub fn has(process: &Path, file: &str, text: &str) -> bool {
    let file = fs::read(process.join(file)).unwrap_or_default();
    file.split(|&byte| byte == 0).any(|part| part == text.as_bytes())
}

pub fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
}

pub fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !reached() {
        assert!(Instant::now() < deadline, "not in {LONG:?}: {what}");
        sleep(Duration::from_millis(1));
    }
}

pub fn command(ranks: usize, flags: &[&str], arguments: &[String]) -> Command {
    launcher(ranks, flags, "mnist", &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

pub fn run(ranks: usize, arguments: &[String]) -> Finished {
    let finished = Process::start(command(ranks, &[], arguments)).finish(LONG);
    assert!(finished.code == Some(0), "{finished:?}");
    finished
}

/// mnist without a launcher.
pub fn alone(arguments: &[String]) -> Command {
    let mut command = Command::new(program("mnist"));
    command.args(arguments);
    command
}

/// What mnist, run alone, says on failing.
pub fn error(arguments: &[String]) -> String {
    let finished = Process::start(alone(arguments)).finish(LONG);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    finished.stderr
}

/// Some part of `most`.
fn random(most: Duration) -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    most.mul_f64(f64::from(now.subsec_nanos() % 1000) / 1000.0)
}
