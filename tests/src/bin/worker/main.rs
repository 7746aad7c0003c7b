//! Runs one scenario of process groups, which needs no libtorch: `worker FILE::NAME`. `--nccl`
//! prints which NCCL there is.

mod arguments;
mod buckets;
mod collectives;
mod connections;
mod groups;
mod leaks;
mod member_groups;
mod meshes;
mod messages;
mod nccl;

use anyhow::Result;
use flow_tests::registry::{work, Scenario};

const FILES: &[(&str, &[Scenario])] = &[
    ("arguments", arguments::SCENARIOS),
    ("buckets", buckets::SCENARIOS),
    ("collectives", collectives::SCENARIOS),
    ("connections", connections::SCENARIOS),
    ("groups", groups::SCENARIOS),
    ("leaks", leaks::SCENARIOS),
    ("member_groups", member_groups::SCENARIOS),
    ("meshes", meshes::SCENARIOS),
    ("messages", messages::SCENARIOS),
    ("nccl", nccl::SCENARIOS),
];

fn main() -> Result<()> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("off")).init();
    if std::env::args().nth(1).as_deref() == Some("--nccl") {
        nccl::print_library();
        return Ok(());
    }
    work(FILES, |group, run| run(group))
}
