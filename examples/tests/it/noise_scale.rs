//! The example of a communication hook measures what it says it measures.

use flow_tests::{Process, TEST_TIMEOUT, launcher};

#[test]
fn the_noise_scale_is_the_one_that_is_known() {
    for ranks in [2, 3] {
        let command = launcher(ranks, &[], "noise_scale", &[]);
        let output = Process::start(command).finish(TEST_TIMEOUT).success();
        let measured: f64 = output
            .strip_prefix("noise scale: ")
            .and_then(|rest| rest.split(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("{output}"));
        // The seeds are fixed. 20 steps of 20,000 elements leave an error of about 1 %.
        assert!((3.8..4.2).contains(&measured), "{output}");
        assert!(output.ends_with("exactly 4.00\n"), "{output}");
    }
}

#[test]
fn one_rank_has_nothing_to_compare() {
    let finished = Process::start(launcher(1, &[], "noise_scale", &[])).finish(TEST_TIMEOUT);
    assert!(finished.stderr.contains("start two ranks or more"), "{}", finished.stderr);
    assert_eq!(finished.code, Some(1));
}
