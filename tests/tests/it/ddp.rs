//! Whole models trained by `Ddp` with each kind of libtorch's kernels. What `Ddp` promises
//! otherwise is in the scenarios.

use flow_tests::{Process, TEST_TIMEOUT, instruction_sets, launcher};

#[test]
fn trained_weights_are_right_on_every_instruction_set() {
    for set in instruction_sets() {
        for check in ["ddp::mlp", "ddp::lenet", "ddp::mobilenet"] {
            let mut command = launcher(2, &[], "ddp_worker", &[check]);
            command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").envs(set);
            let output = Process::start(command).finish(TEST_TIMEOUT).success();
            assert_eq!(output, format!("{check} passed\n").repeat(2), "{set:?}");
        }
    }
}
