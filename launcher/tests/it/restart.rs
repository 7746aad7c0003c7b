//! One node's workers are started anew after a failure: nothing of the start before is left.

use flow_harness::cli::{run, script};

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
