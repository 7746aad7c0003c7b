//! Every collective against a plain reference, in real processes.

use flow_tests::launch;

#[test]
fn one_rank() {
    assert_eq!(launch(1, "check_collectives", &[]), "1 ranks agree\n");
}

#[test]
fn two_ranks() {
    assert_eq!(launch(2, "check_collectives", &[]), "2 ranks agree\n");
}

#[test]
fn three_ranks() {
    assert_eq!(launch(3, "check_collectives", &[]), "3 ranks agree\n");
}

#[test]
fn four_ranks() {
    assert_eq!(launch(4, "check_collectives", &[]), "4 ranks agree\n");
}

#[test]
fn five_ranks() {
    assert_eq!(launch(5, "check_collectives", &[]), "5 ranks agree\n");
}
