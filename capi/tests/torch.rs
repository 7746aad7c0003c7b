//! The back-end of torch.distributed over this library: the programs in `pytorch/tests`, with
//! PyTorch as it is, under flow-launch and torchrun.

use std::path::PathBuf;
use std::process::Command;

use flow_harness::cli::{launcher, run};
use flow_harness::python::{have, python};
use flow_harness::{assert_contains, job, program, root, Finished, Process, TEST_TIMEOUT};

/// Says why not, where there is no PyTorch or are no headers of it.
fn is_skipped() -> bool {
    if !have("torch") {
        return true;
    }
    let is_missing = !headers().join("torch/csrc/distributed/c10d/Backend.hpp").exists();
    if is_missing {
        println!("SKIPPED: the C++ part of flow_torch: LIBTORCH has no headers of c10d");
    }
    is_missing
}

/// PyTorch's, which the environment of `scripts/setup --pytorch` leaves out: libtorch's are the
/// same.
fn headers() -> PathBuf {
    let folder = std::env::var_os("LIBTORCH").map_or_else(|| root().join(".libtorch"), Into::into);
    folder.join("include")
}

fn script(name: &str) -> String {
    root().join("pytorch/tests").join(name).display().to_string()
}

/// With flow_torch as it is in the checkout, compiled once for all tests.
fn with_flow(command: &mut Command) -> &mut Command {
    let library = program("libflow_comm.so");
    let cache = library.ancestors().nth(2).unwrap().join("tmp/flow_torch");
    command
        .env("PYTHONPATH", root().join("pytorch"))
        .env("FLOW_TORCH_INCLUDE", headers())
        .env("FLOW_CACHE", cache)
        .env("OMP_NUM_THREADS", "1")
        .env("PYTHONWARNINGS", "ignore")
}

/// The script on so many ranks under flow-launch.
fn launch(ranks: &str, name: &str) -> Finished {
    let flags = ["--nproc-per-node", ranks, "--no-python", &python(), &script(name)];
    run(with_flow(&mut launcher(&flags)))
}

#[test]
fn collectives_and_messages_are_gloos() {
    if is_skipped() {
        return;
    }
    let finished = launch("3", "collectives.py");
    assert!(finished.code == Some(0) && finished.stdout == "same\nsame\nsame\n", "{finished:?}");
}

#[test]
fn ddp_and_fsdp_train_as_over_gloo_under_torchrun() {
    if is_skipped() {
        return;
    }
    let mut torchrun = Command::new(python());
    torchrun.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]);
    let finished = run(with_flow(torchrun.arg(script("training.py"))));
    assert!(finished.code == Some(0), "{finished:?}");
    let same = finished.stdout.lines().filter(|line| line.ends_with(": same bits"));
    assert_eq!(same.count(), 7, "{finished:?}");
}

#[test]
fn flows_ddp_trains_as_torchs_over_gloo() {
    if is_skipped() {
        return;
    }
    let finished = launch("2", "ddp.py");
    let good = finished.stdout.lines().filter(|line| line.ends_with(": good")).count();
    assert!(finished.code == Some(0) && good == 2 * 50, "{finished:?}");
}

/// Three ranks: gradients are divided before they are summed up.
#[test]
fn flows_ddp_on_three_ranks() {
    if is_skipped() {
        return;
    }
    let cases = ["many buckets", "types", "layouts", "gradients of every kind"];
    let script = script("ddp.py");
    let flags = ["--nproc-per-node", "3", "--no-python", &python(), &script];
    let finished = run(with_flow(launcher(&flags).args(cases)));
    let good = finished.stdout.lines().filter(|line| line.ends_with(": good")).count();
    assert!(finished.code == Some(0) && good == 3 * cases.len(), "{finished:?}");
}

#[test]
fn forks_and_memory() {
    if is_skipped() {
        return;
    }
    let finished = launch("2", "forks.py");
    assert!(finished.code == Some(0) && !finished.stdout.contains("BAD"), "{finished:?}");
}

#[test]
fn what_would_hang_or_give_wrong_data() {
    if is_skipped() {
        return;
    }
    let finished = launch("2", "hazards.py");
    let good = finished.stdout.lines().filter(|line| line.ends_with(": good")).count();
    assert!(finished.code == Some(0) && good == 2 * 9, "{finished:?}");
}

#[test]
fn a_rank_without_a_compiler_is_an_error_on_all() {
    if is_skipped() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let script = script("no_compiler.py");
    let flags = ["--nproc-per-node", "2", "--no-python", &python(), &script];
    let finished = run(with_flow(launcher(&flags).arg(cache.path())));
    let reason = "its C++ part is compiled at first use, and there is no /nonexistent/c++: ";
    assert_eq!(finished.stdout.matches(reason).count(), 2, "{finished:?}");
    assert_contains(&finished.stdout, &["flow_torch: rank 1 cannot join: "]);
}

/// By `MASTER_ADDR`, without a launcher: a launcher would end the other rank.
#[test]
fn a_rank_that_is_killed_is_named() {
    if is_skipped() {
        return;
    }
    for how in ["async", "backward", "ddp"] {
        let store = std::env::temp_dir().join(job());
        let rank = |rank: &str| {
            let mut command = Command::new(python());
            command.arg(script("killed.py")).args([how, store.to_str().unwrap(), rank]);
            with_flow(&mut command);
            Process::start(command)
        };
        let [first, second] = ["0", "1"].map(rank);
        let first = first.finish(TEST_TIMEOUT);
        assert_eq!(second.finish(TEST_TIMEOUT).code, None);
        assert_eq!(first.code, Some(3), "{first:?}");
        assert_contains(&first.stdout, &["rank 0: all_reduce #", " failed: rank 1 (pid ", "died"]);
        let _ = std::fs::remove_file(store);
    }
}

/// Three ranks that call themselves two machines.
#[test]
fn ranks_on_two_machines() {
    if is_skipped() {
        return;
    }
    let store = std::env::temp_dir().join(job());
    let rank = |rank: usize| {
        let mut command = Command::new(python());
        let rank = rank.to_string();
        command.arg(script("machines.py")).args([store.to_str().unwrap(), rank.as_str()]);
        with_flow(&mut command);
        Process::start(command)
    };
    for (number, process) in [0, 1, 2].map(rank).into_iter().enumerate() {
        let finished = process.finish(TEST_TIMEOUT);
        assert_eq!(finished.stdout, format!("rank {number}: 3 [6, 6] [0, 1, 2]\n"), "{finished:?}");
    }
    let _ = std::fs::remove_file(store);
}

/// Installed as users do, no program imports it: `import torch` finds the backend. With FLOW_TORCH=1
/// gloo is flow.
#[test]
fn the_wheel_needs_no_import() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let site = folder.path().join("site");
    let mut wheel = Command::new(root().join("scripts/wheel"));
    wheel.arg("--torch").arg(folder.path()).arg("--quiet").env_remove("PYTHONPATH");
    let built = run(wheel.env("FLOW_COMM_LIBRARY", program("libflow_comm.so")));
    if built.stderr.contains("No matching distribution found for setuptools") {
        println!("SKIPPED: flow_torch's wheel: pip cannot get setuptools");
        return;
    }
    assert_eq!(built.code, Some(0), "{built:?}");
    let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let file = files.filter(|file| file.extension().is_some_and(|ending| ending == "whl"));
    let mut install = Command::new("python3");
    install.args(["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]);
    run(install.arg(&site).args(file).env_remove("PYTHONPATH")).success();

    let script = script("unmodified.py");
    let flags = ["--nproc-per-node", "2", "--no-python", &python(), &script];
    for (backend, replaces) in [("flow", "0"), ("gloo", "1")] {
        let arguments: Vec<&str> = flags.into_iter().chain([backend]).collect();
        let mut job = launcher(&arguments);
        let finished =
            run(with_flow(&mut job).env("PYTHONPATH", &site).env("FLOW_TORCH", replaces));
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert_eq!(finished.stdout, "flow [2.0, 2.0, 2.0]\n".repeat(2), "{finished:?}");
    }
}
