//! Collectives on tensors in real processes: see `check_tensors` for what each check is about.

use flow_tests::{launcher, on_fake_cuda, Process, TEST_TIMEOUT};

/// On CPUs and, with tensors on the CPU, by the way of GPUs: libtorch has no fake.
fn holds(check: &str, ranks: usize) {
    let command = || {
        let mut command = launcher(ranks, &[], "check_tensors", &[check]);
        command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
        command
    };
    let expected = format!("{check} holds on {ranks} ranks\n");
    assert_eq!(Process::start(command()).finish(TEST_TIMEOUT).success(), expected);
    let mut fake = command();
    fake.env("FLOW_TEST_DEVICE", "cuda").env("FLOW_TEST_HOST_AS_GPU", "1");
    if let Some(fake) = on_fake_cuda(fake) {
        let output = Process::start(fake).finish(TEST_TIMEOUT).success();
        assert_eq!(output, expected, "on fakes of GPUs");
    }
}

macro_rules! checks {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            for ranks in 1..=3 {
                holds(stringify!($name), ranks);
            }
        }
    )*};
}

checks! { grid overlapping first_gradients second_gradients pipeline misuse }
