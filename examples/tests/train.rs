//! OneFlow's documented example, to the digit.

use flow_tests::{launcher, Process, PATIENCE};

/// What OneFlow's documentation shows for each rank; from step 300 on the loss no longer changes.
const DOCUMENTED: [[&str; 6]; 2] = [
    [
        "0.00025336415274068713",
        "6.4776631916174665e-06",
        "1.6628223420411814e-07",
        "4.3155523599125445e-09",
        "1.2369127944111824e-10",
        "4.547473508864641e-12",
    ],
    [
        "0.004111831542104483",
        "0.00010519695933908224",
        "2.6898414944298565e-06",
        "6.904883775860071e-08",
        "1.8917489796876907e-09",
        "6.184563972055912e-11",
    ],
];

#[test]
fn prints_the_documented_digits() {
    let output = Process::start(launcher(2, &["--prefix"], "train", &[])).finish(PATIENCE).success();
    for (rank, documented) in DOCUMENTED.iter().enumerate() {
        let prefix = format!("[rank {rank}] ");
        let printed: Vec<_> = output.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let loss = |point: usize| format!("{}/500 loss:{}", 50 * point, documented[point.min(6) - 1]);
        let expected: Vec<_> = (1..=10).map(loss).chain(["w: [[2.0000], [3.0000]]".into()]).collect();
        assert_eq!(printed, expected, "rank {rank}");
    }
    assert_eq!(output.lines().count(), 22, "{output}");
}

#[test]
fn a_third_rank_is_told_how_many_to_start() {
    let finished = Process::start(launcher(3, &[], "train", &[])).finish(PATIENCE);
    assert_eq!(finished.status.code(), Some(1));
    let message = "rank 2: this example has data for two ranks; run it with --nproc_per_node 2";
    assert!(finished.stderr.contains(message), "{}", finished.stderr);
}
