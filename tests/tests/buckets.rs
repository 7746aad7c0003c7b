//! Buckets of gradients, as `Ddp` reduces them.

use flow_tests::launch;

fn passes(scenario: &str) {
    assert_eq!(launch(2, "check_buckets", &[scenario]), format!("{scenario} passed\n").repeat(2));
}

#[test]
fn buckets_are_posted_once() {
    passes("pieces");
}

#[test]
fn refused_buckets_leave_the_group_usable() {
    passes("refused");
}

#[test]
fn pieces_of_other_lengths_are_told() {
    passes("other_lengths");
}

#[test]
fn a_bucket_that_was_given_up_harms_nothing() {
    passes("given_up");
    passes("left");
}
