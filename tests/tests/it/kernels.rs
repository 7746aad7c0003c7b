//! Packing and unpacking on GPUs, compiled by the C++ compiler and run by the fake driver.

use std::process::Command;

use flow_tests::{Process, TEST_TIMEOUT, assert_contains, on_fake_cuda, program};

#[test]
fn kernels() {
    let Some(command) = on_fake_cuda(Command::new(program("examples/cuda_check"))) else { return };
    assert_contains(&Process::start(command).finish(TEST_TIMEOUT).success(), &["cases are right"]);
}
