//! One node's workers are started anew after a failure: nothing of the start before is left.

use flow_harness::cli::{run, script, seconds_until_killed};

/// What a worker has started goes with its start, even if it has left the worker's process group,
/// as `timeout` does.
#[test]
fn what_has_left_its_group_goes_before_the_next_start() {
    for (starter, which) in [(1, "fails"), (0, "is stopped")] {
        let folder = tempfile::tempdir().unwrap();
        let sign = folder.path().join("alive");
        let sign = sign.display();
        let text = format!(
            "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
                [ $RANK != {starter} ] || timeout 1000 sh -c 'while :; do echo >{sign}; sleep 0.02; done' &
                [ $RANK = 1 ] || exec sleep 1000
                while [ ! -e {sign} ]; do sleep 0.02; done; exit 3
             fi
             [ $RANK = 1 ] || exit 0
             rm {sign}; sleep 1; [ ! -e {sign} ] || echo it lives on"
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
fn workers_have_the_shutdown_timeout_before_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (reported, ready) = (folder.path().join("events"), folder.path().join("ready"));
    let text = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
         if [ $RANK = 0 ]; then trap '' TERM; echo >{0}; while :; do sleep 0.1; done; fi
         while [ ! -e {0} ]; do sleep 0.1; done; exit 3",
        ready.display()
    );
    // Less than without the flag.
    let flags = format!(
        "--nproc_per_node 2 --max-restarts 1 --shutdown-timeout 6 --events {}",
        reported.display()
    );
    let finished = run(&mut script(&flags, &text));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let seconds = seconds_until_killed(&reported);
    assert!(seconds > 5.5 && seconds < 30.0, "killed after {seconds} s");
}
