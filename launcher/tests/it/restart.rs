//! One node's workers are started anew after a failure: nothing of the start before is left, but what they
//! have put into the launcher's memory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use flow_harness::cli::{Running, run, script, until_gone};
use rustix::process::Signal;

/// What a worker has started goes with its start, even if it has left the worker's process group,
/// as `timeout` does.
#[test]
fn what_has_left_its_group_goes_before_the_next_start() {
    for (starter, which) in [(1, "fails"), (0, "is stopped")] {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let pid = pid.display();
        let text = format!(
            "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
                [ $RANK != {starter} ] || timeout 1000 sh -c 'echo $$ >{pid}; sleep 1000; :' &
                [ $RANK = 1 ] || exec sleep 1000
                while [ ! -s {pid} ]; do sleep 0.02; done; exit 3
             fi
             [ $RANK = 1 ] || exit 0
             status=/proc/$(cat {pid})/status
             [ ! -e $status ] || grep -q '^State:.*Z' $status || echo it lives on"
        );
        let finished = run(&mut script("--nproc_per_node 2 --grace 0.5 --max-restarts 1", &text));
        assert_eq!(
            (finished.code, finished.stdout.as_str()),
            (Some(0), ""),
            "of the worker that {which}: {finished:?}"
        );
    }
}

#[test]
fn memory_for_checkpoints_outlives_killed_workers() {
    let text = "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
            echo that of $LOCAL_RANK >$FLOW_CHECKPOINT_MEMORY; kill -9 $$
        fi
        cat $FLOW_CHECKPOINT_MEMORY";
    for rank in 0..2 {
        // Only this one is killed: the other one is stopped.
        let others = format!(
            "[ $RANK = {rank} ] || {{ echo that of $LOCAL_RANK >$FLOW_CHECKPOINT_MEMORY; \
                              [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 1000; }}"
        );
        let text = format!("{others}\n{text}");
        let finished = run(&mut script("--nproc_per_node 2 --max-restarts 1", &text));
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert_eq!(finished.sorted_lines(), ["that of 0", "that of 1"], "{finished:?}");
    }
}

#[test]
fn memory_for_checkpoints_goes_with_a_killed_launcher() {
    let text = "head -c 20000000 /dev/zero >$FLOW_CHECKPOINT_MEMORY; echo $$
        echo $FLOW_CHECKPOINT_MEMORY; exec sleep 1000";
    let mut running = Running::start(&mut script("", text));
    let worker: i32 = running.line().parse().unwrap();
    let memory = fs::metadata(running.line()).unwrap();
    assert_eq!(memory.len(), 20_000_000);
    let file = (memory.dev(), memory.ino());
    assert_eq!(holders(file), [running.pid()]);
    running.signal(Signal::KILL);
    running.finish();
    until_gone(&[worker]);
    assert_eq!(holders(file), [0; 0]);
}

/// Returns the processes that have the file open.
fn holders(file: (u64, u64)) -> Vec<i32> {
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let holds = |process: &Path| {
        let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let mut open = open.filter_map(|entry| fs::metadata(entry.path()).ok());
        open.any(|open| (open.dev(), open.ino()) == file)
    };
    let holders = processes.filter(|process| holds(process));
    holders.filter_map(|path| path.file_name()?.to_str()?.parse().ok()).collect()
}
