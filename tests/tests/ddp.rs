//! `Ddp` in real processes: see `check_ddp` for what each check is about.

use std::fmt::Debug;

use flow_tests::{instruction_sets, launcher, on_fake_cuda, Process, TEST_TIMEOUT};

/// How gradients may travel: the default, by copies, and with a thread for communication.
const MODES: [Option<(&str, &str)>; 3] =
    [None, Some(("FLOW_DDP_COPY", "1")), Some(("FLOW_DDP_PROGRESS", "thread"))];

/// What is about the CPU's shared memory.
const NOT_ON_GPUS: [&str; 2] = ["wrapped_again", "joined_again"];

/// The way of GPUs, with tensors on the CPU: libtorch has no fake. `scripts/gpu-check` runs the
/// same on GPUs.
fn holds_on_fakes(check: &str, ranks: usize) {
    let mut command = launcher(ranks, &[], "check_ddp", &[check]);
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
    command.env("FLOW_TEST_DEVICE", "cuda").env("FLOW_TEST_HOST_AS_GPU", "1");
    let waits =
        std::env::temp_dir().join(format!("flow-waits-{}-{check}-{ranks}", std::process::id()));
    command.env("FLOW_FAKE_WAITS", &waits);
    if let Some(command) = on_fake_cuda(command).filter(|_| !NOT_ON_GPUS.contains(&check)) {
        let output = Process::start(command).finish(TEST_TIMEOUT).success();
        for rank in 0..ranks {
            let _ = std::fs::remove_file(waits.with_extension(rank.to_string()));
        }
        assert_eq!(output, format!("{check} holds on {ranks} ranks\n"), "on fakes of GPUs");
    }
}

fn holds<'a>(
    check: &str,
    ranks: usize,
    mode: impl IntoIterator<Item = (&'a str, &'a str)> + Copy + Debug,
) {
    let mut command = launcher(ranks, &[], "check_ddp", &[check]);
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").envs(mode);
    let output = Process::start(command).finish(TEST_TIMEOUT).success();
    assert_eq!(output, format!("{check} holds on {ranks} ranks\n"), "{mode:?}");
}

#[test]
fn the_host_waits_for_a_gpu_in_no_step() {
    holds_on_fakes("waits", 2);
}

/// The checks that compare what training makes of whole models.
#[test]
fn trained_weights_are_right_on_every_instruction_set() {
    for set in instruction_sets() {
        for check in ["mlp", "lenet", "mobilenet"] {
            holds(check, 2, set);
        }
    }
}

/// A test for each check: on two and three ranks, in all modes on one of these.
macro_rules! checks {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            for (mode, ranks) in MODES.into_iter().zip([2, 3, 2]) {
                holds(stringify!($name), ranks, mode);
            }
            holds(stringify!($name), 3, None);
            holds_on_fakes(stringify!($name), 2);
            holds_on_fakes(stringify!($name), 3);
        }
    )*};
}

checks! {
    linear mlp lenet mobilenet shared_gradients
    no_sync guards several_forwards cleared_gradients
    nested nested_unused nested_twice
    unused_found unused_now_and_then unused_everywhere unused_accumulated
    unused_reported frozen_later differing_models unfit_models unfit_tensors replaced_buffers
    tied tied_names wrapped_twice
    frozen buffers changed wrapped_again joined_again sub_group memory sampler alone
    kinds communication_kinds many_buckets ready_order layouts
}
