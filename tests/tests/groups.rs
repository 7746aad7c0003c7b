//! Groups: sub-groups, refused arguments, nothing leaked, more ranks than cores.

use flow_tests::{assert_contains, launch, ranks, ranks_on_nodes, TEST_TIMEOUT};

fn passes(size: usize, scenario: &str) {
    assert_eq!(
        launch(size, "check_groups", &[scenario]),
        format!("{scenario} passed\n").repeat(size)
    );
}

/// Without flow-launch, where rank 0 serves the rendezvous.
fn passes_by_hand(size: usize, scenario: &str) {
    for rank in ranks(size, "check_groups", &[scenario]) {
        assert_eq!(rank.finish(TEST_TIMEOUT).success(), format!("{scenario} passed\n"));
    }
}

#[test]
fn sub_groups_have_their_own_ranks_and_sequence() {
    passes(5, "sub_groups");
}

#[test]
fn different_lists_of_members_are_told_on_every_rank() {
    passes(3, "different_lists");
}

#[test]
fn groups_of_their_members_making() {
    passes(5, "members");
    passes_by_hand(5, "members");
}

#[test]
fn different_lists_of_those_who_make_a_group() {
    passes(3, "members_differ");
}

#[test]
fn a_group_that_a_member_does_not_come_to_make() {
    passes(3, "members_absent");
}

/// Before, or after, it has come to make the group.
#[test]
fn a_group_one_of_whose_members_dies() {
    for way in ["early", "answered"] {
        for nodes in [&[3][..], &[1, 1, 1]] {
            let mut started = match nodes {
                [size] => ranks(*size, "check_groups", &["member_dies", way]),
                nodes => ranks_on_nodes(nodes, "check_groups", &["member_dies", way]),
            };
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
        let mut started = match nodes {
            [size] => ranks(*size, "check_groups", &["member_dies_before_its_turn"]),
            nodes => ranks_on_nodes(nodes, "check_groups", &["member_dies_before_its_turn"]),
        };
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

#[test]
fn five_hundred_groups_of_their_members_leak_nothing() {
    passes(2, "member_groups_come_and_go");
    passes(2, "members_leave_no_keys");
}

#[test]
fn worlds_are_told_apart_by_name() {
    passes(3, "named_worlds");
    passes_by_hand(3, "named_worlds");
}

#[test]
fn refused_arguments_leave_the_group_usable() {
    passes(2, "arguments");
}

#[test]
fn a_thousand_groups_leak_nothing() {
    passes(2, "groups_come_and_go");
}

#[test]
fn two_hundred_worlds_leak_nothing() {
    passes(2, "worlds_come_and_go");
    passes_by_hand(2, "worlds_come_and_go");
}

#[test]
fn worlds_live_side_by_side() {
    passes(3, "two_worlds");
    passes_by_hand(3, "two_worlds");
}

#[test]
fn sixteen_ranks_get_on() {
    passes(16, "rounds");
}
