//! Ranks that fork: their children, which no other program replaces, leave them alone.

use flow_tests::{launch, launcher, ranks, ranks_on_nodes, Process, TEST_TIMEOUT};

const WORKER: &str = "check_forks";

fn passes(scenario: &str) {
    assert_eq!(launch(2, WORKER, &[scenario]), format!("{scenario} passed\n").repeat(2));
}

/// Without flow-launch, where rank 0 serves the rendezvous; on two nodes too.
fn passes_by_hand(scenario: &str) {
    for ranks in [ranks(2, WORKER, &[scenario]), ranks_on_nodes(&[1, 1], WORKER, &[scenario])] {
        for rank in ranks {
            assert_eq!(rank.finish(TEST_TIMEOUT).success(), format!("{scenario} passed\n"));
        }
    }
}

#[test]
fn a_child_neither_takes_nor_gives_back_memory() {
    passes("memory");
    passes_by_hand("memory");
}

#[test]
fn operations_of_a_child_fail_at_once() {
    passes("operations");
    passes_by_hand("operations");
}

#[test]
fn a_fork_beside_busy_threads() {
    passes("busy");
    passes_by_hand("busy");
}

#[test]
fn a_connection_to_the_store_is_its_maker_s() {
    passes("store");
}

#[test]
fn tensors_of_a_child() {
    passes("tensors");
    for progress in ["hooks", "thread"] {
        let mut command = launcher(2, &[], WORKER, &["tensors"]);
        command.env("FLOW_DDP_PROGRESS", progress);
        assert_eq!(
            Process::start(command).finish(TEST_TIMEOUT).success(),
            "tensors passed\n".repeat(2)
        );
    }
}

#[test]
fn children_join_anew() {
    passes("joins_anew");
    for rank in ranks(2, WORKER, &["joins_anew"]) {
        assert_eq!(rank.finish(TEST_TIMEOUT).success(), "joins_anew passed\n");
    }
}
