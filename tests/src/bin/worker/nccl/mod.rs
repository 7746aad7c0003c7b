//! Collectives and buckets over NCCL, and failures. Each rank checks its own results. Runs on GPUs
//! (`scripts/gpu-check`), and on the fake CUDA and NCCL that the tests build.

mod buckets;
mod collectives;
mod failures;
mod memory;

use anyhow::{Context, Result};
use flow_comm::nccl::Library;
use flow_comm::ProcessGroup;
use flow_tests::registry::{launched, scenario, Scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "collectives",
        collectives::run,
        &[
            launched(1).on_fake_cuda(),
            launched(2).on_fake_cuda(),
            launched(3).on_fake_cuda(),
            launched(4).on_fake_cuda(),
        ],
    ),
    scenario(
        "groups",
        collectives::groups,
        &[launched(2).on_fake_cuda(), launched(5).on_fake_cuda()],
    ),
    scenario(
        "buckets",
        buckets::run,
        &[launched(1).on_fake_cuda(), launched(2).on_fake_cuda(), launched(4).on_fake_cuda()],
    ),
    // `tests/nccl.rs` reads the journal of its calls.
    scenario("order", buckets::order, &[]),
    // The way is the next argument; `tests/nccl.rs` reads what the ranks print.
    scenario("fail", fail, &[]),
];

fn fail(group: &ProcessGroup) -> Result<()> {
    let way = std::env::args().nth(2).context("usage: worker nccl::fail WAY")?;
    failures::run(group, &way)
}

/// Prints the version and the path of the NCCL that programs use.
pub fn print_library() {
    match Library::get() {
        Ok(library) => println!("{} {}", library.version(), library.path().display()),
        Err(error) => println!("{error}"),
    }
}
