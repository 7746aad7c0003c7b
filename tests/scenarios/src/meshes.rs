//! Groups that keep an order, splits and meshes; each rank checks its own part.

use anyhow::{Context, Result, ensure};
use flow_comm::{Mesh, ProcessGroup, ReduceOp};

use crate::beside;
use crate::groups::sum_of_ranks;
use crate::registry::{Scenario, by_hand, in_process, launched, scenario};

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "groups_keep_the_order_of_their_list",
        ordered,
        &[launched(5), in_process(5), by_hand(&[3, 2])],
    ),
    scenario(
        "a_split_is_by_color_and_key",
        split,
        &[launched(5), in_process(5), by_hand(&[2, 2, 1])],
    ),
    scenario(
        "a_mesh_has_a_group_per_axis_and_coordinate",
        mesh,
        &[launched(8), in_process(8), by_hand(&[4, 4])],
    ),
];

/// With five ranks: the members' order is that of the list, in every kind of operation.
fn ordered(world: &ProcessGroup) -> Result<()> {
    let order = [4, 2, 0, 3];
    let Some(group) = world.new_group(&order)? else {
        ensure!(world.rank() == 1);
        return Ok(());
    };
    ensure!(group.ranks() == order && group.ranks()[group.rank()] == world.rank());
    ensure!(group.local_world_size() <= group.world_size());
    let own = world.rank() as i64;
    for round in 0..100 {
        let mut all = [0_i64; 4];
        group.all_gather(&[own], &mut all)?;
        ensure!(all == [4, 2, 0, 3], "{all:?}");
        let mut data = vec![own as f32; 100_000];
        group.broadcast(&mut data, round % 4)?;
        ensure!(data.iter().all(|&element| element == order[round % 4] as f32));
    }
    let blocks: Vec<i64> = (0..4).map(|block| 10 * own + block).collect();
    let mut received = [0_i64; 4];
    group.all_to_all(&blocks, &mut received)?;
    let rank = group.rank();
    ensure!(received == [4, 2, 0, 3].map(|from| 10 * from + rank as i64), "{received:?}");
    let mut scattered = [0.0_f32];
    group.reduce_scatter(&[0.0_f32, 1.0, 2.0, 3.0], &mut scattered, ReduceOp::Sum)?;
    ensure!(scattered == [4.0 * rank as f32]);
    let sent = beside::send(&group, vec![own; 50_000], (rank + 1) % 4, 0)?;
    let mut received = vec![0_i64; 50_000];
    group.recv(&mut received, (rank + 3) % 4)?;
    sent.wait()?;
    ensure!(received[49_999] == order[(rank + 3) % 4] as i64);
    // A group of a group: ranks are counted in the latter, in its order.
    let ends = group.new_group(&[3, 0])?;
    ensure!(ends.is_some() == [3, 4].contains(&world.rank()));
    if let Some(ends) = ends {
        ensure!(ends.ranks() == [3, 4] && sum_of_ranks(&ends)? == 7);
    }
    Ok(())
}

/// With five ranks.
fn split(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    // Even and odd ranks, in descending order.
    let group = world.split(Some(rank % 2), -(rank as i64))?.context("no group")?;
    let expected = if rank.is_multiple_of(2) { vec![4, 2, 0] } else { vec![3, 1] };
    ensure!(group.ranks() == expected && group.ranks()[group.rank()] == rank, "{group:?}");
    for _ in 0..100 {
        ensure!(sum_of_ranks(&group)? == expected.iter().sum::<usize>() as i64);
        ensure!(sum_of_ranks(world)? == 10);
    }
    // Equal keys keep the order; a rank without a color gets no group; colors may be large.
    let color = if rank == 2 { None } else { Some(usize::MAX - rank / 3) };
    let group = world.split(color, 0)?;
    ensure!(group.is_some() == (rank != 2));
    if let Some(group) = group {
        let expected: &[usize] = if rank < 2 { &[0, 1] } else { &[3, 4] };
        ensure!(group.ranks() == expected, "{group:?}");
        // What fails in one group does not fail its siblings.
        let passed = group.split(Some(0), 0)?.context("no group")?;
        ensure!(
            passed.ranks() == expected
                && sum_of_ranks(&passed)? == expected.iter().sum::<usize>() as i64
        );
    }
    ensure!(world.split(None, 0)?.is_none());
    let words = |rank: usize| if rank == 1 { [0, 1] } else { [0, 2] };
    let error = match rank {
        1 => world.new_group(&words(rank)).err(),
        _ => world.split(Some(0), 0).err(),
    };
    let error = error.context("a split was accepted beside new_group")?;
    ensure!(error.is_mismatch(), "{error:?}");
    Ok(())
}

/// With eight ranks.
fn mesh(world: &ProcessGroup) -> Result<()> {
    let rank = world.rank();
    let before = world.sequence();
    let cube = Mesh::new(world, &[0, 1, 2, 3, 4, 5, 6, 7], &[2, 2, 2])?
        .with_names(&["data", "pipeline", "model"])?;
    ensure!(world.sequence() - before == 3, "an axis is one collective");
    ensure!(cube.coordinates() == Some(vec![rank / 4, rank / 2 % 2, rank % 2]));
    for (axis, bit) in [("data", 4), ("pipeline", 2), ("model", 1)] {
        let group = cube.group(axis)?;
        ensure!(group.ranks() == [rank & !bit, rank | bit], "{axis}: {group:?}");
        ensure!(sum_of_ranks(group)? == ((rank & !bit) + (rank | bit)) as i64);
    }
    ensure!(world.sequence() - before == 3, "groups are made once");
    let plane = cube.sub_mesh(&["model".into(), 0.into()])?;
    let base = rank & 2;
    ensure!(plane.ranks() == [base, base + 4, base + 1, base + 5] && plane.shape() == [2, 2]);
    ensure!(
        plane.names() == ["model", "data"] && plane.coordinates() == Some(vec![rank % 2, rank / 4])
    );
    ensure!(plane.group("data")?.ranks() == cube.group(0)?.ranks());

    // [[0, 2], [1, 3]] means that; ranks outside take part in making it.
    let before = world.sequence();
    let mesh = Mesh::new(world, &[0, 2, 1, 3], &[2, 2])?;
    ensure!(world.sequence() - before == 2);
    ensure!(mesh.coordinates().is_some() == (rank < 4));
    if rank < 4 {
        let row = [[0, 2], [1, 3]][rank % 2];
        let column = [[0, 1], [2, 3]][rank / 2];
        ensure!(mesh.group(1)?.ranks() == row && mesh.group(0)?.ranks() == column, "{mesh:?}");
        ensure!(mesh.coordinates() == Some(vec![rank % 2, rank / 2]));
    } else {
        let error = mesh.group(0).err().context("a rank outside has a group")?;
        ensure!(error.to_string().contains("not one of the mesh's, [0, 2, 1, 3]"), "{error}");
    }
    let line = Mesh::new(world, &[7, 5, 6], &[3, 1])?;
    if rank >= 5 {
        ensure!(line.group(0)?.ranks() == [7, 5, 6] && line.group(1)?.ranks() == [rank]);
    }

    for (error, expected) in [
        (Mesh::new(world, &[0, 1, 2], &[2, 2]).err(), "3 ranks fill no array of shape [2, 2]"),
        (Mesh::new(world, &[0, 0], &[2]).err(), "[0, 0] must be different ranks from 0 to 7"),
        (cube.clone().with_names(&["a", "a", "b"]).err(), "must be 3 different names"),
        (cube.group("color").err(), "there is no axis \"color\""),
        (cube.group(3).err(), "there is no axis 3"),
        (cube.sub_mesh(&[0.into(), 0.into()]).err(), "[0, 0] must be different axes"),
    ] {
        let error = error.context("a bad argument was accepted")?;
        ensure!(error.to_string().contains(expected), "{error}");
    }
    let shape = if rank == 7 { [4, 2] } else { [2, 4] };
    let error = Mesh::new(world, &[0, 1, 2, 3, 4, 5, 6, 7], &shape).err().context("different")?;
    ensure!(error.is_mismatch(), "{error:?}");
    Ok(())
}
