//! What process groups promise, as scenarios that need no libtorch: `registry` says how they are
//! written, started and tested. The programs `worker` and `mpi_worker` run them.

mod arguments;
mod beside;
mod buckets;
mod collectives;
mod connections;
mod failures;
pub mod fakes;
mod groups;
mod hangs;
mod in_place;
mod leaks;
mod member_groups;
mod meshes;
mod messages;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod reconfigure;
mod reconfigured_memory;
pub mod registry;
pub mod top;
mod trace;

use std::process::ExitCode;

use anyhow::Result;

const FILES: &[registry::File] = &[
    failures::FILES[0],
    failures::FILES[1],
    failures::FILES[2],
    failures::FILES[3],
    failures::FILES[4],
    failures::FILES[5],
    failures::FILES[6],
    failures::FILES[7],
    ("arguments", arguments::SCENARIOS),
    ("buckets", buckets::SCENARIOS),
    ("collectives", collectives::SCENARIOS),
    ("connections", connections::SCENARIOS),
    ("groups", groups::SCENARIOS),
    ("hangs", hangs::SCENARIOS),
    ("in_place", in_place::SCENARIOS),
    ("leaks", leaks::SCENARIOS),
    ("member_groups", member_groups::SCENARIOS),
    ("meshes", meshes::SCENARIOS),
    ("messages", messages::SCENARIOS),
    #[cfg(feature = "mpi")]
    ("mpi", mpi::SCENARIOS),
    ("nccl", nccl::SCENARIOS),
    ("nccl::failures", nccl::failures::SCENARIOS),
    ("reconfigure", reconfigure::SCENARIOS),
    ("reconfigured_memory", reconfigured_memory::SCENARIOS),
    ("top", top::SCENARIOS),
    ("trace", trace::SCENARIOS),
];

/// The main function of `worker` and `mpi_worker`: one rank of a scenario, or the tests. `--nccl`
/// prints which NCCL there is.
pub fn main() -> Result<ExitCode> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("off")).init();
    if std::env::args().nth(1).as_deref() == Some("--nccl") {
        nccl::print_library();
        return Ok(ExitCode::SUCCESS);
    }
    registry::main(FILES, |group, run| run(group))
}
