//! OneFlow's documented example, to the digit.

use flow_tests::{Process, TEST_TIMEOUT, instruction_sets, launch, launcher, on_fake_cuda};

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
    for set in instruction_sets() {
        let mut command = launcher(2, &["--prefix"], "train", &[]);
        command.envs(set);
        has_the_documented_digits(&Process::start(command).finish(TEST_TIMEOUT).success());
    }
}

/// The way of GPUs, with tensors on the CPU.
#[test]
fn on_fake_gpus_the_digits_are_the_same() {
    let Some(mut command) =
        on_fake_cuda(launcher(2, &["--prefix"], "train", &["--device", "cuda"]))
    else {
        return;
    };
    command.env("FLOW_TEST_HOST_AS_GPU", "1");
    has_the_documented_digits(&Process::start(command).finish(TEST_TIMEOUT).success());
}

#[test]
fn an_error_for_more_ranks_than_gpus_has_both_numbers() {
    let Some(mut command) = on_fake_cuda(launcher(2, &[], "train", &["--device", "cuda"])) else {
        return;
    };
    command.env("FLOW_TEST_HOST_AS_GPU", "1").env("FLOW_FAKE_GPUS", "1").env("RUST_BACKTRACE", "0");
    let finished = Process::start(command).finish(TEST_TIMEOUT);
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{}", finished.stderr);
    let message = "asked for 2 ranks with a GPU each on this machine, found 1 GPU";
    assert!(finished.stderr.contains(message), "{}", finished.stderr);
}

/// Which of the two is missing first depends on the machine; where neither is, there is nothing to
/// see.
#[test]
fn without_cuda_the_error_says_what_to_install() {
    let mut command = launcher(1, &[], "train", &["--device", "cuda"]);
    command.env("RUST_BACKTRACE", "0");
    let finished = Process::start(command).finish(TEST_TIMEOUT);
    if finished.code == Some(0) {
        println!("SKIPPED: the error of a machine without CUDA: this one has a GPU");
        return;
    }
    let texts = [
        "libcuda.so.1 is not found; install NVIDIA's driver",
        "scripts/setup --cuda gets a libtorch with CUDA",
    ];
    assert!(texts.iter().any(|text| finished.stderr.contains(text)), "{}", finished.stderr);
}

#[test]
fn an_unknown_device_is_a_usage_error() {
    let finished =
        Process::start(launcher(1, &[], "train", &["--device", "gpu"])).finish(TEST_TIMEOUT);
    assert_eq!(finished.code, Some(2));
    assert!(finished.stderr.contains("it should be cpu or cuda"), "{}", finished.stderr);
}

fn has_the_documented_digits(output: &str) {
    for (rank, documented) in DOCUMENTED.iter().enumerate() {
        let prefix = format!("[rank {rank}] ");
        let printed: Vec<_> =
            output.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let loss =
            |point: usize| format!("{}/500 loss:{}", 50 * point, documented[point.min(6) - 1]);
        let expected: Vec<_> =
            (1..=10).map(loss).chain(["w: [[2.0000], [3.0000]]".into()]).collect();
        assert_eq!(printed, expected, "rank {rank}");
    }
    assert_eq!(output.lines().count(), 22, "{output}");
}

#[test]
fn more_ranks_find_the_weights_too() {
    for ranks in [3, 4] {
        let output = launch(ranks, "train", &[]);
        assert_eq!(output.matches("w: [[2.0000], [3.0000]]\n").count(), ranks, "{output}");
    }
}
