//! Collectives and buckets over NCCL, and failures. Each rank checks its own results. Runs on GPUs
//! (`scripts/gpu-check`), and on the fake CUDA and NCCL that the tests build.

mod buckets;
pub mod failures;
mod groups;
pub mod memory;

use flow_comm::nccl::Library;

use crate::registry::{Scenario, launched, scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario("groups", groups::run, &[launched(2).on_fake_cuda(), launched(5).on_fake_cuda()]),
    scenario(
        "buckets",
        buckets::run,
        &[launched(1).on_fake_cuda(), launched(2).on_fake_cuda(), launched(4).on_fake_cuda()],
    ),
    scenario(
        "all_ranks_issue_the_same_calls_in_order",
        buckets::order,
        &[launched(2).on_fake_cuda()],
    )
    .checked_by(buckets::same_calls),
];

/// Prints the version and the path of the NCCL that programs use.
pub fn print_library() {
    match Library::get() {
        Ok(library) => println!("{} {}", library.version(), library.path().display()),
        Err(error) => println!("{error}"),
    }
}
