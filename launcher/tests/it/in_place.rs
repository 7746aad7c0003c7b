//! `--elastic in-place`: a worker that fails is started again alone.

use flow_harness::cli::{events, run, script};
use flow_harness::{Finished, assert_contains};

/// The other worker goes on until the one that has failed is there again.
const FAILS_ONCE: &str = r#"
    echo "rank $RANK, $FLOW_REPLACEMENT before, restart $TORCHELASTIC_RESTART_COUNT"
    if [ $RANK = 1 ]; then
        [ $FLOW_REPLACEMENT = 0 ] || { touch $0; exit 0; }
        echo its last words >&2
        kill -KILL $$
    fi
    while [ ! -e $0 ]; do sleep 0.02; done"#;

#[test]
fn a_worker_that_fails_is_started_again_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("events");
    let flags = format!(
        "--nproc_per_node 2 --elastic in-place --max-restarts 1 --log-dir {} --tee 3 --events {}",
        folder.path().display(),
        file.display()
    );
    let mut command = script(&flags, FAILS_ONCE);
    let finished = run(command.arg(folder.path().join("done")));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_contains(
        &finished.stdout,
        &["rank 0, 0 before, restart 0", "rank 1, 0 before", "rank 1, 1 before, restart 1"],
    );
    let says = "it is started again alone (1 of 1)";
    assert_contains(&finished.stderr, &["rank 1 ", "SIGKILL", says, "its last words"]);
    let events = events(&file);
    let of = |what: &str| {
        let events = events.iter().filter(|event| event["event"] == what);
        events.map(|event| event["rank"].as_u64()).collect::<Vec<_>>()
    };
    assert_eq!(of("start"), [Some(0), Some(1), Some(1)]);
    assert_eq!(of("stop").len() + of("restart").len(), 0, "{events:?}");
    // Each has a log of its own.
    let logs = folder.path().read_dir().unwrap().filter_map(|entry| {
        let path = entry.unwrap().path().join("attempt_1/1/stdout.log");
        std::fs::read_to_string(path).ok()
    });
    assert_eq!(logs.collect::<Vec<_>>(), ["rank 1, 1 before, restart 1\n"]);
}

fn of_failing(flags: &str) -> Finished {
    let flags = format!("--nproc_per_node 3 --grace 0.5 --elastic in-place {flags}");
    run(&mut script(&flags, "[ $RANK = 2 ] && exit 7; sleep 1000"))
}

#[test]
fn when_no_restart_is_left_the_job_fails() {
    for restarts in [0, 2] {
        let finished = of_failing(&format!("--max-restarts {restarts}"));
        assert_eq!(finished.code, Some(7), "{finished:?}");
        let again = finished.stderr.matches("is started again alone").count();
        assert_eq!(again, restarts, "{finished:?}");
        assert_contains(&finished.stderr, &["rank 2 ", "code 7"]);
    }
}

/// The first worker ends when flow-launch has seen both others end.
#[test]
fn fewer_workers_go_on_if_they_are_enough() {
    let fails = r#"[ $RANK = 0 ] || exit $RANK
        while [ $(grep -c '"event":"exit"' $0) -lt 2 ]; do sleep 0.02; done; echo well"#;
    let job = |min: usize| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("events");
        let flags = format!(
            "--nproc_per_node 3 --grace 0.5 --elastic in-place --min-workers {min} --events {}",
            file.display()
        );
        run(script(&flags, fails).arg(file))
    };
    let finished = job(1);
    assert_eq!((finished.code, &finished.stdout[..]), (Some(0), "well\n"), "{finished:?}");
    assert_contains(&finished.stderr, &["the job goes on with 1 worker\n"]);
    let finished = job(2);
    assert!(matches!(finished.code, Some(1 | 2)), "{finished:?}");
}
