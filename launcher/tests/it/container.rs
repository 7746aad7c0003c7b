//! flow-launch as process 1 of a container: here, of a namespace of processes.

use std::process::Command;

use flow_harness::cli::{run, script};

/// The command as process 1 of a container; None, and a line that says why, where containers cannot
/// be made.
fn in_a_container(command: &Command) -> Option<Command> {
    let is_root = rustix::process::geteuid().is_root();
    let map_root_user: &[&str] = if is_root { &[] } else { &["--map-root-user"] };
    let mut container = Command::new("unshare");
    container.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).args(map_root_user);
    let made =
        Command::new(container.get_program()).args(container.get_args()).arg("true").output();
    if !made.as_ref().is_ok_and(|made| made.status.success()) {
        println!("SKIPPED: flow-launch as process 1 of a container: unshare: {made:?}");
        return None;
    }
    container.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => container.env(name, value),
            None => container.env_remove(name),
        };
    }
    Some(container)
}

#[test]
fn orphans_are_reaped_and_exit_codes_are_not_taken_away() {
    // The outer shell ends before the inner one, which then is process 1's child.
    let text = "for i in 1 2 3 4 5; do
            orphan=$(sh -c 'sh -c \"while [ -e /proc/$$ ]; do :; done; exit 3\" >&- & echo $!')
            while [ -e /proc/$orphan ]; do sleep 0.01; done
        done
        echo reaped
        [ $RANK = 1 ] && exit 7; while :; do sleep 0.05; done";
    let Some(mut container) = in_a_container(&script("--nproc_per_node 2", text)) else { return };
    let finished = run(&mut container);
    assert!(finished.stdout.contains("reaped\n"), "{finished:?}");
    assert_eq!(finished.code, Some(7), "{finished:?}");
    assert!(
        finished.stderr.contains("rank 1 ") && finished.stderr.contains("failed with exit code 7"),
        "{finished:?}"
    );
}

#[test]
fn a_signal_to_process_1_ends_the_job() {
    let text = "trap 'echo stopping; exit 0' TERM; kill -TERM 1; while :; do sleep 0.05; done";
    let Some(mut container) = in_a_container(&script("", text)) else { return };
    let finished = run(&mut container);
    assert_eq!(
        (finished.code, finished.stdout.as_str()),
        (Some(143), "stopping\n"),
        "{finished:?}"
    );
}
