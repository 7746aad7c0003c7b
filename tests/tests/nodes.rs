//! Groups over several nodes, on one machine: each node's ranks share their own memory, and the
//! rest goes over TCP.

use std::time::Duration;

use flow_tests::{assert_contains, ranks_on_nodes, Finished, Process, DETECTION_LIMIT};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

fn lines(finished: Finished) -> Vec<String> {
    finished.success().lines().filter(|line| *line != "looping").map(str::to_owned).collect()
}

fn signal(process: &Process, signal: Signal) {
    kill(Pid::from_raw(process.pid() as i32), signal).expect("the process is ours");
}

/// Rank 1 of three is killed, whether it leads its node or not.
#[test]
fn a_killed_rank_is_named_on_all_nodes() {
    for nodes in [&[2, 1][..], &[1, 2], &[1, 1, 1]] {
        for what in ["small", "shared", "ordinary", "gather", "async", "messages"] {
            let mut ranks = ranks_on_nodes(nodes, "check_failures", &["loop", what]);
            ranks.iter_mut().for_each(|rank| rank.wait_for("looping"));
            let victim = ranks.remove(1);
            signal(&victim, Signal::SIGKILL);
            for process in ranks {
                let said = lines(process.finish(DETECTION_LIMIT));
                assert_contains(&said[0], &[&format!("rank 1 (pid {} on ", victim.pid()), "died"]);
                assert!(said[0].starts_with("PeerLost"), "{nodes:?} {what}: {said:?}");
                assert_contains(&said[1], &["then Poisoned"]);
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for nodes in [&[2, 1][..], &[1, 2], &[1, 1, 1]] {
        let mut ranks = ranks_on_nodes(nodes, "check_failures", &["leave"]);
        let mut leaver = ranks.remove(1);
        leaver.wait_for("left");
        for process in ranks {
            let said = lines(process.finish(DETECTION_LIMIT));
            let peer = format!("failed: rank 1 (pid {} on ", leaver.pid());
            assert_contains(
                &said[0],
                &["PeerLost", "all_reduce #1 (4 x f32, sum)", &peer, "has left the group"],
            );
        }
    }
}

/// Whether it has gone when the other begins to wait, or goes then; the two may have no connection
/// before that.
#[test]
fn a_rank_that_goes_before_a_group_is_used_is_named() {
    for nodes in [&[2, 1][..], &[1, 1, 1]] {
        for (way, said) in [
            ("die", "PeerLost: "),
            ("leave", "has left the group"),
            ("fail", "rank 1 aborted the group: the data ran out"),
        ] {
            for order in ["before", "after"] {
                let arguments = ["unused", way, order];
                let mut ranks = ranks_on_nodes(nodes, "check_failures", &arguments);
                let waiting = ranks.pop().expect("there are three");
                let text = lines(waiting.finish(DETECTION_LIMIT));
                assert_contains(&text[0], &["rank 2: all_reduce #0", "rank 1", said]);
            }
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_on_all_nodes() {
    for nodes in [&[1, 2][..], &[2, 1], &[1, 1, 1]] {
        let mut ranks = ranks_on_nodes(nodes, "check_failures", &["absent"]);
        let absent = ranks.pop().expect("there are three");
        let culprit = format!("timed out after 1s: waited for rank 2 (pid {} on ", absent.pid());
        for process in ranks {
            assert_contains(&lines(process.finish(DETECTION_LIMIT))[0], &[&culprit]);
        }
    }
}

/// It hears of the failure as well, and a rank that is stopped for a while only is waited for.
#[test]
fn a_stopped_rank_is_waited_for_until_the_timeout() {
    let mut ranks = ranks_on_nodes(&[1, 1], "check_failures", &["loop_timeout", "ordinary", "6"]);
    ranks.iter_mut().for_each(|rank| rank.wait_for("looping"));
    signal(&ranks[1], Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(2));
    signal(&ranks[1], Signal::SIGCONT);
    std::thread::sleep(Duration::from_millis(500));
    signal(&ranks[1], Signal::SIGSTOP);
    let stopped = ranks.remove(1);
    let culprit = format!("timed out after 6s: waited for rank 1 (pid {} on ", stopped.pid());
    let said = lines(ranks.remove(0).finish(DETECTION_LIMIT));
    assert_contains(&said[0], &["Timeout", &culprit]);
    signal(&stopped, Signal::SIGCONT);
    assert_contains(&lines(stopped.finish(DETECTION_LIMIT))[0], &["timed out after 6s"]);
}

#[test]
fn an_abort_reaches_all_nodes() {
    for by in ["0", "1", "2"] {
        for process in ranks_on_nodes(&[2, 1], "check_failures", &["abort", by]) {
            let said = lines(process.finish(DETECTION_LIMIT));
            let culprit = format!("rank {by} aborted the group: the data ran out");
            assert_contains(&said[0], &["Poisoned", "all_reduce #1", &culprit]);
        }
    }
}

/// Only its sender matters to a message between nodes.
#[test]
fn a_message_comes_though_others_leave() {
    let ranks = ranks_on_nodes(&[1, 2], "check_failures", &["message_past"]);
    let said: Vec<_> = ranks.into_iter().map(|rank| lines(rank.finish(DETECTION_LIMIT))).collect();
    assert_eq!(said[2], ["received [7, 7, 7, 7, 7, 7, 7, 7, 7]", "no error"]);
}

/// Also where the receiver serves the store, and ends at once.
#[test]
fn a_message_of_another_length_is_told_on_both_sides() {
    for process in ranks_on_nodes(&[1, 1], "check_failures", &["message_too_long"]) {
        assert_contains(
            &lines(process.finish(DETECTION_LIMIT))[0],
            &["rank 1 sends 16777216 x u8, rank 0 receives 9 x u8"],
        );
    }
}

/// Each rank is told its own side and that of a rank that does something else, whichever node that
/// is on.
#[test]
fn disagreements_are_told_on_all_nodes() {
    for (what, even, odd) in [
        ("operation", "all_reduce #1 (4 x f32, sum)", "broadcast #1 (4 x f32, root 0)"),
        ("much", "all_reduce #1 (4 x f32, sum)", "all_reduce #1 (200000 x f32, sum)"),
        ("much_gathered", "all_gather #1 (200000 x u8)", "all_gather #1 (4 x u8)"),
        ("new_group", "barrier #1", "new_group #1"),
    ] {
        for nodes in [&[2, 1][..], &[1, 2]] {
            for (rank, process) in
                ranks_on_nodes(nodes, "check_failures", &["mismatch", what]).into_iter().enumerate()
            {
                let said = lines(process.finish(DETECTION_LIMIT));
                let sides = match rank {
                    1 => format!("rank 1 called {odd}, rank 0 called {even};"),
                    _ => format!("rank {rank} called {even}, rank 1 called {odd};"),
                };
                assert_contains(
                    &said[0],
                    &[&format!("Mismatch: rank {rank}: ranks disagree"), &sides],
                );
            }
        }
    }
}
