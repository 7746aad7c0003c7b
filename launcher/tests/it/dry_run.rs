//! `--dry-run` prints what would be started and starts nothing.

use flow_harness::cli::{launcher, run};

#[test]
fn nothing_is_started_and_the_text_is_the_same_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let flags = [
        "--dry-run",
        "--nproc_per_node",
        "2",
        "--events",
        "events.json",
        "--log-dir",
        "logs",
        "--tee",
        "3",
    ];
    let dry_run =
        || run(launcher(&flags).args(["touch", "a b", "${local_rank}"]).current_dir(&folder));
    let finished = dry_run();
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""));
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    assert_eq!(finished.stdout, dry_run().stdout);
    for line in ["  RANK=1", "  WORLD_SIZE=2", "  FLOW_TOKEN=***", "  MASTER_PORT=<a free port>"] {
        assert!(
            finished.stdout.lines().any(|found| found == line),
            "{line} in {}",
            finished.stdout
        );
    }
    assert!(
        finished.stdout.contains("touch 'a b' 0\n") && finished.stdout.ends_with("touch 'a b' 1\n")
    );
}

#[test]
fn other_nodes_are_not_waited_for() {
    let several = [
        "--dry-run",
        "--nnodes",
        "2",
        "--node_rank",
        "1",
        "--master_addr",
        "nowhere.invalid",
        "true",
    ];
    let finished = run(&mut launcher(&several));
    assert!(
        finished.code == Some(0) && finished.stdout.contains("\nrank 1, local rank 0"),
        "{finished:?}"
    );
    let finished = run(&mut launcher(&[
        "--dry-run",
        "--nnodes",
        "1:2",
        "--rdzv_endpoint",
        "nowhere.invalid",
        "true",
    ]));
    assert!(
        finished.code == Some(0) && finished.stdout.contains("RANK=<given later>"),
        "{finished:?}"
    );
}

#[test]
fn what_could_not_be_started_is_said() {
    let finished = run(&mut launcher(&["--dry-run", "nosuchprogram"]));
    assert!(
        finished.code == Some(2) && finished.stderr.contains("no program nosuchprogram"),
        "{finished:?}"
    );
}
