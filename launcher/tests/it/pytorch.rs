//! Python scripts as they are written for torchrun: real ones, with PyTorch's DDP over gloo, and
//! torchrun's own cases. PYTHON names an interpreter that has PyTorch, if python3 has none.

use flow_harness::cli::{Running, finish, launcher, run, until_gone};
use flow_harness::python::{have, python, startup};
use flow_harness::{Finished, free_port};

use std::fs;
use std::process::{Command, Stdio};

/// A file in the folder `pytorch`.
fn file(name: &str) -> String {
    format!("{}/tests/pytorch/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// flow-launch with these flags and then a script of ours and its arguments (separated by spaces).
fn launch(flags: &str, script: &str) -> Command {
    let mut words = script.split_whitespace();
    let script = file(words.next().unwrap());
    let arguments: Vec<_> =
        flags.split_whitespace().chain([script.as_str()]).chain(words).collect();
    let mut command = launcher(&arguments);
    command.env("PYTHON_EXEC", python()).env("PYTHONPATH", startup());
    command
}

/// What `train.py` printed on each rank, which must be the same.
fn weights<'a>(finished: impl IntoIterator<Item = &'a Finished>, ranks: usize) -> Vec<f64> {
    let finished: Vec<_> = finished.into_iter().collect();
    assert!(finished.iter().all(|finished| finished.code == Some(0)), "{finished:?}");
    let lines: Vec<_> = finished.iter().flat_map(|finished| finished.stdout.lines()).collect();
    assert_eq!(lines.len(), ranks, "{finished:?}");
    assert!(lines.iter().all(|line| *line == lines[0]), "{finished:?}");
    let weights = lines[0].strip_prefix("weights ").expect(lines[0]);
    weights.split(' ').map(|weight| weight.parse().unwrap()).collect()
}

fn assert_close(left: &[f64], right: &[f64]) {
    assert_eq!(left.len(), right.len());
    assert!(
        left.iter().zip(right).all(|(left, right)| (left - right).abs() < 2e-5),
        "{left:?} {right:?}"
    );
}

#[test]
fn ddp_trains_as_one_process_does() {
    if !have("torch") {
        return;
    }
    let one = weights([&run(&mut launch("", "train.py --epochs 2"))], 1);
    let elsewhere = tempfile::tempdir().unwrap();
    let mut two = launch("--nproc-per-node 2", "train.py --epochs 2 --workers 2");
    assert_close(&weights([&run(two.current_dir(&elsewhere))], 2), &one);

    // One worker on the first node, two on the second.
    let master = master();
    let [first, second] = [0, 1].map(|node| {
        let flags = format!("--nnodes 2 --nproc-per-node {} --node-rank {node} {master}", node + 1);
        let mut command = launch(&flags, "train.py --epochs 2");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    assert_close(&weights([&finish(first), &finish(second)], 3), &one);
}

/// Flags that name an address whose port is free.
fn master() -> String {
    format!("--master-addr 127.0.0.1 --master-port {}", free_port())
}

/// Of the PyTorch that is installed: with hyphens and with underscores.
#[test]
fn torchruns_flags_are_known() {
    if !have("torch") {
        return;
    }
    let program = "from torch.distributed.run import get_args_parser
for action in get_args_parser()._actions:
    value = '' if action.nargs == 0 else (action.choices or [action.default or 1])[0]
    for flag in action.option_strings:
        print(flag, value)";
    let flags =
        run(Command::new(python()).args(["-c", program]).env("PYTHONPATH", startup())).success();
    assert!(flags.contains("--nproc-per-node 1\n--nproc_per_node 1\n"), "{flags}");
    for line in flags.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        let finished = run(launcher(&words).args(["--dry-run", "true"]));
        let is_known = !finished.stderr.contains("unexpected argument");
        assert!(is_known, "{line}: {finished:?}");
    }
}

#[test]
fn a_store_at_the_masters_address() {
    if !have("torch") {
        return;
    }
    let finished = run(&mut launch("--nproc-per-node 3", "collective.py"));
    assert_eq!(finished.sorted_lines(), ["0 0 True 3", "1 1 True 3", "2 2 True 3"], "{finished:?}");
}

#[test]
fn the_store_is_there_before_rank_0_and_after_it() {
    if !have("torch") {
        return;
    }
    let finished = run(&mut launch("--nproc-per-node 3", "store.py"));
    assert_eq!(
        (finished.code, finished.sorted_lines()),
        (Some(0), vec!["1 True", "2 True"]),
        "{finished:?}"
    );
}

/// With torchrun's switch for it, rank 0 serves the store.
#[test]
fn a_store_that_rank_0_serves() {
    if !have("torch") {
        return;
    }
    for flags in ["--nproc-per-node 2".into(), format!("--nproc-per-node 2 {}", master())] {
        let mut command = launch(&flags, "collective.py");
        let finished = run(command.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"));
        assert_eq!(finished.sorted_lines(), ["0 0 True 1", "1 1 True 1"], "{finished:?}");
    }
}

#[test]
fn each_start_has_an_empty_store() {
    if !have("torch") {
        return;
    }
    let finished = run(&mut launch("--nproc-per-node 2 --max-restarts 1", "restart.py"));
    assert_eq!(
        (finished.code, finished.sorted_lines()),
        (Some(0), vec!["0 3", "1 3"]),
        "{finished:?}"
    );
}

/// The next start has the same TORCHELASTIC_RESTART_COUNT.
#[test]
fn ranks_meet_anew_when_a_node_joins() {
    if !have("torch") {
        return;
    }
    let flags = format!(
        "--nnodes 1:2 --rdzv-endpoint 127.0.0.1:{} --rdzv-conf last_call_timeout=0.1 \
         --nproc-per-node 1",
        free_port()
    );
    let mut first = Running::start(&mut launch(&flags, "grow.py"));
    assert_eq!(first.line(), "1 0");
    let second = run(&mut launch(&flags, "grow.py"));
    let first = first.finish();
    assert_eq!((second.code, second.stdout.as_str()), (Some(0), "2 0\n"), "{second:?}");
    assert_eq!((first.code, first.stdout.as_str()), (Some(0), "2 0\n"), "{first:?}");
}

#[test]
fn an_exception_is_the_cause_in_the_report() {
    if !have("torch") {
        return;
    }
    // What Python prints goes to a file: the report has what the worker has recorded.
    let logs = tempfile::tempdir().unwrap();
    let flags = format!("--nproc-per-node 2 --redirects 2 --log-dir {}", logs.path().display());
    let finished = run(&mut launch(&flags, "fail.py"));
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let (_, report) = finished.stderr.split_once("flow-launch: rank ").expect(&finished.stderr);
    assert!(report.starts_with("1 (local rank 1, "), "{report}");
    assert!(report.contains("ValueError: no class has number 12"), "{report}");
}

#[test]
fn children_of_workers_do_not_outlive_them() {
    if !have("torch") {
        return;
    }
    let mut running = Running::start(&mut launch("--nproc-per-node 2", "children.py"));
    let pids = running.numbers(2);
    let finished = running.finish();
    assert_eq!(finished.code, Some(137), "{finished:?}");
    assert!(finished.stderr.contains("flow-launch: rank 1 (local rank 1, "), "{finished:?}");
    assert_eq!(pids.len(), 8);
    until_gone(&pids);
}

/// Each of torchrun's ways to ask for four workers on one node starts those four.
#[test]
fn torchruns_own_cases() {
    let master = master();
    let port = master.rsplit(' ').next().unwrap();
    let node_0 = format!("--nnodes 1 --nproc-per-node 4 --node-rank 0 {master}");
    let one_of_two = format!(
        "--nnodes=1:2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} \
         --rdzv-id=a-job --rdzv-conf=join_timeout=60,last_call_timeout=1"
    );
    let cases = [
        ("--nproc-per-node 4", "touch.py"),
        (&node_0, "touch.py"),
        (&one_of_two, "touch.py"),
        ("--nproc-per-node 4 --no-python", "touch.sh"),
        ("--nproc-per-node 4 --standalone", "touch.py"),
        ("--nproc-per-node 4 --run-path", "touch.py"),
        ("", "touch.py"),
    ];
    for (flags, script) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut command = launch(flags, &format!("{script} {}", folder.path().display()));
        if flags.is_empty() {
            command
                .env("PET_NPROC_PER_NODE", "4")
                .env("PET_STANDALONE", "1")
                .env("PET_RDZV_ID", "a-job");
        }
        let finished = run(&mut command);
        let mut ranks: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name()).collect();
        ranks.sort();
        assert!(
            finished.code == Some(0) && ranks == ["0", "1", "2", "3"],
            "{flags}: {ranks:?} {finished:?}"
        );
    }
}

#[test]
fn torchs_timers_kill_a_worker_that_is_late() {
    if !have("torch") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = launch("--nproc-per-node 2", "timer.py");
    command.arg(folder.path().join("rank-0-was-in-time"));
    let finished = run(command.env("TORCHELASTIC_ENABLE_FILE_TIMER", "1"));
    assert_eq!(
        (finished.code, finished.stdout.as_str()),
        (Some(137), "in time\nin time\n"),
        "{finished:?}"
    );
    let reported: Vec<_> =
        finished.stderr.lines().filter(|line| line.contains("the timer ")).collect();
    let [reported] = reported[..] else { panic!("{finished:?}") };
    assert!(
        reported.starts_with("flow-launch: rank 1: the timer 'second step' of process "),
        "{reported}"
    );
    assert!(reported.ends_with("SIGKILL is sent to it, as it asked"), "{reported}");
}
