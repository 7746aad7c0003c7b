//! What is said of messages with tags, and from any rank, that do not come. How they are matched is
//! in the scenarios.

use flow_tests::{
    assert_contains, launcher, ranks, ranks_on_nodes, Finished, Process, DETECTION_LIMIT,
    TEST_TIMEOUT,
};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

fn lines(finished: Finished) -> Vec<String> {
    finished.success().lines().filter(|line| *line != "waiting").map(str::to_owned).collect()
}

/// The same number of ranks on one node, and on two.
fn everywhere(size: usize, scenario: &str, arguments: &[&str]) -> [Vec<Process>; 2] {
    let arguments = [&[scenario], arguments].concat();
    [
        ranks(size, "check_failures", &arguments),
        ranks_on_nodes(&[1, size - 1], "check_failures", &arguments),
    ]
}

const FROM_ONE: &str = "rank 0: recv from rank 1 (9 x u8, tag 5) ";
const FROM_ANY: &str = "rank 0: recv from any rank (9 x u8, tag 5) ";

#[test]
fn a_killed_sender_is_named() {
    for (from, operation) in [("one", FROM_ONE), ("any", FROM_ANY)] {
        for mut ranks in everywhere(3, "message_wait", &[from]) {
            ranks[0].wait_for("waiting");
            kill(Pid::from_raw(ranks[1].pid() as i32), Signal::SIGKILL)
                .expect("the process is ours");
            let said = lines(ranks.remove(0).finish(DETECTION_LIMIT));
            let victim = format!("failed: rank 1 (pid {} on ", ranks[0].pid());
            assert_contains(&said[0], &["PeerLost: ", operation, &victim, "died"]);
            assert_contains(&said[1], &["then Poisoned"]);
        }
    }
}

/// Also while messages with other tags come.
#[test]
fn a_message_that_does_not_come_is_told() {
    for (from, operation) in [("one", FROM_ONE), ("any", FROM_ANY)] {
        for mut ranks in everywhere(3, "message_late", &[from]) {
            let said = lines(ranks.remove(0).finish(DETECTION_LIMIT));
            let late = format!("timed out after 1s: waited for rank 1 (pid {} on ", ranks[0].pid());
            assert_contains(&said[0], &["Timeout: ", operation, &late]);
            let said = lines(ranks.remove(0).finish(DETECTION_LIMIT));
            assert_contains(
                &said[0],
                &["rank 1: send to rank 0 (300000 x u8, tag 4) failed", operation, &late],
            );
        }
    }
}

#[test]
fn a_message_outlives_its_sender_and_another_is_not_waited_for() {
    for mut ranks in everywhere(2, "message_left_behind", &[]) {
        let sender = ranks.remove(1).finish(DETECTION_LIMIT);
        let said = lines(ranks.remove(0).finish(DETECTION_LIMIT));
        assert_eq!(said[0], "received [7, 7, 7, 7, 7, 7, 7, 7, 7]");
        let peer = format!("failed: rank 1 (pid {} on ", sender.pid);
        assert_contains(&said[1], &["PeerLost: ", FROM_ONE, &peer, "has left the group"]);
    }
}

#[test]
fn a_message_from_any_rank_comes_though_another_rank_has_died() {
    for mut ranks in everywhere(3, "message_beside_death", &[]) {
        let said = lines(ranks.remove(0).finish(DETECTION_LIMIT));
        assert_eq!(said[0], "received [7, 7, 7, 7, 7, 7, 7, 7, 7]");
        let victim = format!("failed: rank 1 (pid {} on ", ranks[0].pid());
        assert_contains(&said[1], &["PeerLost: ", FROM_ANY, &victim, "died"]);
    }
}

/// Whether it is received as it comes, or was kept before.
#[test]
fn a_message_of_another_type_is_told_with_its_tag() {
    for what in ["one", "any", "kept"] {
        for mut ranks in everywhere(2, "message_of_other_type", &[what]) {
            let said = lines(ranks.remove(0).finish(DETECTION_LIMIT));
            let sides = "rank 1 sends 5 x f32, rank 0 receives 9 x u8, both with tag 5";
            assert_contains(&said[0], &["Mismatch: rank 0: ", sides]);
        }
    }
}

#[test]
fn who_waits_for_any_rank_is_told_of_in_a_hang() {
    let job = launcher(3, &["--hang-timeout", "3"], "check_failures", &["message_wait", "any"]);
    let finished = Process::start(job).finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(124), "{finished:?}");
    assert_contains(&finished.stderr, &["rank 0 waits in recv from any rank (9 x u8, tag 5)"]);
}
