//! Checks collectives and buckets over NCCL, and fails in given ways. Started as any number of
//! ranks; each checks its own results. Runs on GPUs, and on the fakes of the driver and NCCL
//! that the tests build.

mod buckets;
mod collectives;
mod failures;
mod memory;

use anyhow::{bail, Result};
use flow_comm::nccl::Library;
use flow_comm::ProcessGroup;

fn main() -> Result<()> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("off")).init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if arguments == ["library"] {
        match Library::get() {
            Ok(library) => println!("{} {}", library.version(), library.path().display()),
            Err(error) => println!("{error}"),
        }
        return Ok(());
    }
    let group = ProcessGroup::from_env()?;
    match arguments[..] {
        ["collectives"] => collectives::run(&group)?,
        ["groups"] => collectives::groups(&group)?,
        ["buckets"] => buckets::run(&group)?,
        ["order"] => buckets::order(&group)?,
        ["fail", way] => return failures::run(&group, way),
        _ => bail!("usage: check_nccl library|collectives|groups|buckets|order|fail WAY"),
    }
    group.barrier()?;
    if group.rank() == 0 {
        println!("{} ranks agree", group.world_size());
    }
    Ok(())
}
