//! A program that uses MPI itself, beside groups whose nodes MPI connects.
//!
//! usage: own_mpi [multiple | serialized | finalized]
//!
//! The first two tell for which threads it initializes MPI; `finalized`: it also finalizes MPI
//! before there is a group.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use flow_comm::{ProcessGroup, ReduceOp};
use mpi::collective::SystemOperation;
use mpi::traits::CommunicatorCollectives;
use mpi::Threading;

fn main() -> Result<()> {
    let argument = std::env::args().nth(1);
    let (threading, is_finalized) = match argument.as_deref() {
        None | Some("multiple") => (Threading::Multiple, false),
        Some("serialized") => (Threading::Serialized, false),
        Some("finalized") => (Threading::Multiple, true),
        Some(other) => bail!("{other:?}: must be multiple, serialized or finalized"),
    };
    let (universe, provided) =
        mpi::initialize_with_threading(threading).context("MPI is initialized already")?;
    ensure!(provided >= threading, "this MPI is for {provided:?} threads only");
    if is_finalized {
        drop(universe);
        ProcessGroup::from_env()?;
        return Ok(());
    }
    let world = universe.world();
    let group = ProcessGroup::from_env()?;
    let (rank, size) = (group.rank(), group.world_size());
    for round in 0..100 {
        let (own, mut sums) = (rank as i64 + round, [0, 0]);
        std::thread::scope(|scope| {
            let by_group = scope.spawn(|| -> Result<i64> {
                let mut data = [own];
                group
                    .new_group(&(0..size).collect::<Vec<_>>())?
                    .context("all are in it")?
                    .all_reduce(&mut data, ReduceOp::Sum)?;
                Ok(data[0])
            });
            world.all_reduce_into(&own, &mut sums[0], SystemOperation::sum());
            sums[1] = by_group.join().expect("it does not panic")?;
            anyhow::Ok(())
        })?;
        ensure!(sums[0] == sums[1], "rank {rank}: {sums:?} in round {round}");
    }
    // A group that outlives MPI is of no more use, and does no harm.
    drop(universe);
    std::thread::sleep(Duration::from_millis(100));
    ensure!(group.barrier().is_err(), "MPI is finalized");
    println!("rank {rank} of {size}: all is well");
    Ok(())
}
