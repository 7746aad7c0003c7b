//! A save that the disk has no room for is an error on all ranks, and leaves nothing behind.
//!
//! The disk is "full" where files may not be longer than a limit of the process: each test runs in
//! a process of its own.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::ranks::ranks;
use flow_ddp::{Ddp, DistributedSampler};
use flow_global::checkpoint::{ShardedCheckpoints, merge};
use flow_global::view::{Job, View};
use flow_global::{B, Placement, distribute};
use flow_tensor::ProcessGroup;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

/// No file may be longer, where the disk is full.
const ROOM: u64 = 64 << 10;
/// Numbers of single precision that take more.
const MANY: i64 = 64 << 10;

/// Runs this test in a process that gets errors, and no signal, for files that are too long.
/// Returns true in that process.
fn is_apart() -> bool {
    const APART: &str = "FLOW_TEST_APART";
    if std::env::var_os(APART).is_some() {
        return true;
    }
    let thread = std::thread::current();
    let test = thread.name().expect("a test's thread has its name");
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(APART, "1")
        .output()
        .unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
    false
}

/// Calls this while the disk is full.
fn full<T>(save: impl FnOnce() -> T) -> T {
    let usual = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(ROOM), ..usual }).unwrap();
    let result = save();
    setrlimit(Resource::Fsize, usual).unwrap();
    result
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[track_caller]
fn assert_full(error: &str) {
    assert!(error.contains("File too large") && error.lines().count() == 1, "{error}");
}

#[test]
fn of_a_data_parallel_training() {
    if !is_apart() {
        return;
    }
    let folder = tempdir().unwrap();
    let group = ProcessGroup::from_env().unwrap();
    let vs = VarStore::new(Device::Cpu);
    let net = nn::linear(vs.root(), 3, 2, Default::default());
    let model = Ddp::new(net, &vs, &group).unwrap();
    let optimizer = nn::Adam::default().build(&vs, 0.1).unwrap();
    let sampler = DistributedSampler::new(10, &group);
    let mut checkpoints = flow_ddp::Checkpoints::open(folder.path(), &group).unwrap();
    let mut save = |step| checkpoints.save(step, &model, &vs, &optimizer, &sampler, &7);
    save(1).unwrap();
    let _ = vs.root().zeros_no_train("many", &[MANY]);
    assert_full(&full(|| save(2)).unwrap_err().to_string());
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-1"]);
    save(3).unwrap();
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-1", "step-3"]);
}

/// Rank 1 has something to save that is too long.
#[test]
fn of_a_sharded_training() {
    if !is_apart() {
        return;
    }
    let folder = tempdir().unwrap();
    let path = folder.path();
    let barrier = std::sync::Barrier::new(2);
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let _ = nn::linear(vs.root(), 3, 2, Default::default());
        let mut checkpoints = ShardedCheckpoints::open(path, &group).unwrap();
        checkpoints.save(1, &vs, None, &()).unwrap();
        let _ = vs.root().zeros_no_train("many", &[MANY]);
        let second = Placement::new(&group, [1]).unwrap();
        distribute(&vs, &second, |_, _| [B]).unwrap();
        // The limit is that of the process: one rank sets it for both.
        let limit = getrlimit(Resource::Fsize);
        barrier.wait();
        setrlimit(Resource::Fsize, Rlimit { current: Some(ROOM), ..limit }).unwrap();
        barrier.wait();
        let error = checkpoints.save(2, &vs, None, &()).unwrap_err().to_string();
        barrier.wait();
        setrlimit(Resource::Fsize, limit).unwrap();
        assert_full(&error);
        assert_eq!(error.starts_with("rank 1: "), group.rank() == 0, "{error}");
        assert_eq!(names(path), [".checkpoint.lock", "step-1"]);
        barrier.wait();
        checkpoints.save(3, &vs, None, &()).unwrap();
    });
    assert_eq!(names(path), [".checkpoint.lock", "step-1", "step-3"]);

    let out = path.join("model.safetensors");
    let error = full(|| merge(path.join("step-3"), &out)).unwrap_err().to_string();
    assert_full(&error);
    assert_eq!(names(path), [".checkpoint.lock", "step-1", "step-3"]);
    merge(path.join("step-3"), &out).unwrap();
}

/// Rank 1 cannot write what it has copied: all ranks are told once, and the next one is saved.
#[test]
fn of_a_sharded_training_beside_it() {
    if !is_apart() {
        return;
    }
    let folder = tempdir().unwrap();
    let path = folder.path();
    let barrier = std::sync::Barrier::new(2);
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let _ = vs.root().zeros_no_train("many", &[MANY]);
        let second = Placement::new(&group, [1]).unwrap();
        distribute(&vs, &second, |_, _| [B]).unwrap();
        let mut checkpoints = ShardedCheckpoints::open(path, &group).unwrap();
        let limit = getrlimit(Resource::Fsize);
        for is_told_by_wait in [true, false] {
            let step = if is_told_by_wait { 1 } else { 4 };
            // The memory of the copy is there from now on: the limit is that of files in memory, too.
            checkpoints.async_save(step, &vs, None, &()).unwrap();
            checkpoints.wait().unwrap();
            // The limit is that of the process: one rank sets it for both.
            barrier.wait();
            setrlimit(Resource::Fsize, Rlimit { current: Some(ROOM), ..limit }).unwrap();
            barrier.wait();
            checkpoints.async_save(step + 1, &vs, None, &()).unwrap();
            let error = if is_told_by_wait {
                checkpoints.wait()
            } else {
                checkpoints.async_save(step + 2, &vs, None, &())
            };
            let error = error.unwrap_err().to_string();
            assert_full(&error);
            assert!(
                error.contains(&format!("step-{}/rank-00001.safetensors", step + 1)),
                "{error}"
            );
            assert_eq!(error.starts_with("rank 1: "), group.rank() == 0, "{error}");
            if !is_told_by_wait {
                assert_full(&checkpoints.wait().unwrap_err().to_string());
            }
            checkpoints.wait().unwrap();
            barrier.wait();
            assert!(!path.join(".checkpoint.partial").exists());
            setrlimit(Resource::Fsize, limit).unwrap();
            barrier.wait();
            checkpoints.save(step + 2, &vs, None, &()).unwrap();
        }
    });
    assert_eq!(names(path), [".checkpoint.lock", "step-4", "step-6"]);
}

/// What was there before stays.
#[test]
fn of_a_job() {
    if !is_apart() {
        return;
    }
    let folder = tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let barrier = std::sync::Barrier::new(2);
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let _ = vs.root().ones("many", &[MANY]);
        let placement = Placement::all(&group).unwrap();
        let job = Job::predict(View::Mirrored, &placement, &vs, |inputs| Ok(inputs[0].copy()));
        let job = job.unwrap();
        job.save(&path).unwrap();
        let limit = getrlimit(Resource::Fsize);
        barrier.wait();
        setrlimit(Resource::Fsize, Rlimit { current: Some(ROOM), ..limit }).unwrap();
        barrier.wait();
        let error = job.save(&path).unwrap_err().to_string();
        barrier.wait();
        setrlimit(Resource::Fsize, limit).unwrap();
        assert_full(&error);
    });
    assert_eq!(names(folder.path()), ["model.safetensors"]);
    let read = Tensor::read_safetensors(&path).unwrap();
    assert_eq!(read[0].1, Tensor::ones([MANY], (Kind::Float, Device::Cpu)));
}
