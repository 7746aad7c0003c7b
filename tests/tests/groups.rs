//! Ranks that die while a group is made. What groups promise otherwise is in the scenarios.

use flow_tests::{assert_contains, ranks_on_nodes, TEST_TIMEOUT};

/// Before, or after, it has come to make the group.
#[test]
fn a_group_one_of_whose_members_dies() {
    for way in ["early", "answered"] {
        for nodes in [&[3][..], &[1, 1, 1]] {
            let arguments = ["member_groups::member_dies", way];
            let mut started = ranks_on_nodes(nodes, "worker", &arguments);
            let mut victim = started.pop().expect("there are three");
            victim.wait_for("waiting");
            let culprit = format!("failed: rank 2 (pid {} on ", victim.pid());
            drop(victim);
            for rank in started {
                let said = rank.finish(TEST_TIMEOUT).success();
                assert_contains(
                    &said,
                    &["new_group_of([0, 1, 2], \"key\")", &culprit, "member_dies passed"],
                );
            }
        }
    }
}

#[test]
fn a_group_one_of_whose_members_dies_before_the_key_is_free() {
    for nodes in [&[4][..], &[1, 1, 1, 1]] {
        let scenario = "member_groups::member_dies_before_its_turn";
        let mut started = ranks_on_nodes(nodes, "worker", &[scenario]);
        let victim = started.pop().expect("there are four");
        let mut waiting = started.pop().expect("there are four");
        waiting.wait_for("waiting");
        let culprit = format!("failed: rank 3 (pid {} on ", victim.pid());
        drop(victim);
        assert_contains(
            &waiting.finish(TEST_TIMEOUT).success(),
            &["new_group_of([2, 3], \"key\")", &culprit, "passed"],
        );
        started.into_iter().for_each(|rank| drop(rank.finish(TEST_TIMEOUT).success()));
    }
}
