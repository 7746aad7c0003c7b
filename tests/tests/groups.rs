//! Groups: sub-groups, refused arguments, nothing leaked, more ranks than cores.

use flow_tests::{launch, ranks, PATIENCE};

fn passes(size: usize, scenario: &str) {
    assert_eq!(launch(size, "check_groups", &[scenario]), format!("{scenario} passed\n").repeat(size));
}

/// Without flow-launch, where rank 0 serves the rendezvous.
fn passes_by_hand(size: usize, scenario: &str) {
    for rank in ranks(size, "check_groups", &[scenario]) {
        assert_eq!(rank.finish(PATIENCE).success(), format!("{scenario} passed\n"));
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
