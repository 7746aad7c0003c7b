//! Arguments that collectives refuse; the group stays usable.

use anyhow::{Context, Result, bail, ensure};
use flow_comm::{Error, ProcessGroup, ReduceOp};

use crate::beside;
use crate::groups::sum_of_ranks;
use crate::registry::{Scenario, by_hand, launched, scenario};

pub const SCENARIOS: &[Scenario] = &[scenario(
    "refused_arguments_leave_the_group_usable",
    arguments,
    &[launched(2), by_hand(&[1, 1])],
)];

/// With two ranks.
fn arguments(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let other = 1 - group.rank();
    let refused = |operation: &str, reason: &str, result: Result<(), Error>| {
        let Err(error) = result else { bail!("{operation} accepted what it should not: {reason}") };
        ensure!(matches!(error, Error::Argument { .. }), "{error:?}");
        let expected = format!("rank {rank}: {operation}: {reason}");
        ensure!(error.to_string() == expected, "{error:?} and not {expected:?}");
        ensure!(sum_of_ranks(group)? == 1, "after {expected}");
        Ok(())
    };
    let mut four = [0.0_f32; 4];
    let mut five = [0.0_f32; 5];
    let no_rank = "2 is not a rank: it must be 0 to 1";
    refused("broadcast", &format!("root {no_rank}"), group.broadcast(&mut four, 2))?;
    refused("reduce", &format!("root {no_rank}"), group.reduce(&mut four, ReduceOp::Sum, 2))?;
    refused("gather", &format!("root {no_rank}"), group.gather(&[1], None::<&mut [i32; 2]>, 2))?;
    refused("scatter", &format!("root {no_rank}"), group.scatter(None::<&[i32; 2]>, &mut [1], 2))?;
    refused("send", &format!("peer {no_rank}"), group.send(&four, 2))?;
    refused("recv", &format!("peer {no_rank}"), group.recv(&mut four, 2))?;

    let itself = format!("rank {rank} is this rank itself: a peer is another one");
    refused("send", &itself, group.send(&four, rank))?;
    refused("recv", &itself, group.recv(&mut four, rank))?;
    refused("send", &itself, beside::send(group, vec![1_u8], rank, 0)?.wait().map(drop))?;

    let lengths = |input, output, right| {
        format!(
            "input of {input} and output of {output} elements do not fit: output must be {right} \
             elements"
        )
    };
    refused("all_gather", &lengths(4, 5, 8), group.all_gather(&four, &mut five))?;
    refused(
        "reduce_scatter",
        &lengths(4, 5, 2),
        group.reduce_scatter(&four, &mut five, ReduceOp::Sum),
    )?;
    refused("all_to_all", &lengths(4, 5, 4), group.all_to_all(&four, &mut five))?;
    let odd = "5 elements cannot be divided into 2 equal blocks";
    refused("all_to_all", odd, group.all_to_all(&five.clone(), &mut five))?;
    refused("gather", &lengths(4, 5, 8), group.gather(&four, Some(&mut five), rank))?;
    refused("scatter", &lengths(4, 5, 2), group.scatter(Some(&four), &mut five, rank))?;

    let types = "input is f32 but output is i32: they must be alike";
    refused("all_gather", types, group.all_gather(&four, &mut [0_i32; 8]))?;
    refused("reduce_scatter", types, group.reduce_scatter(&four, &mut [0_i32; 2], ReduceOp::Sum))?;
    refused("all_to_all", types, group.all_to_all(&four, &mut [0_i32; 4]))?;

    let side = |root: usize, what: &str| {
        format!("the root (rank {root}), and no other rank, gives the {what}")
    };
    refused("gather", &side(rank, "output"), group.gather(&four, None::<&mut [f32; 8]>, rank))?;
    refused("gather", &side(other, "output"), group.gather(&four, Some(&mut [0.0_f32; 8]), other))?;
    refused("scatter", &side(rank, "input"), group.scatter(None::<&[f32; 8]>, &mut four, rank))?;
    refused(
        "scatter",
        &side(other, "input"),
        group.scatter(Some(&[0.0_f32; 8]), &mut four, other),
    )?;

    let error =
        group.alloc_shared::<f64>(1 << 50).err().context("8 PiB were allocated")?.to_string();
    let expected = format!(
        "rank {rank}: alloc_shared failed: no room for {} x f64 in the shared memory of rank {rank}: \
         drop shared buffers and groups that are no longer used",
        1_u64 << 50
    );
    ensure!(error == expected, "{error}");
    ensure!(group.alloc_shared::<f64>(usize::MAX).is_err());
    Ok(())
}
