//! Sub-groups over NCCL.

use anyhow::{Context, Result, ensure};
use flow_comm::{Mesh, ProcessGroup, f16};

use crate::collectives::{OnGpu, check_type};

/// Sub-groups: of a group that is used on GPUs already, and of one that is not.
pub fn run(group: &ProcessGroup) -> Result<()> {
    let device = group.use_cuda()?;
    for used in [false, true] {
        if used {
            group.nccl(device.ordinal())?;
        }
        let even: Vec<usize> = (0..group.world_size()).step_by(2).collect();
        let part = group.new_group(&even)?;
        ensure!(part.is_some() == group.rank().is_multiple_of(2), "a group of other ranks");
        if let Some(part) = part {
            let check = OnGpu::new(&part, &device)?;
            ensure!(
                check.nccl.size() == even.len() && check.nccl.rank() == part.rank(),
                "another place in the group"
            );
            check_type::<_, f32>(&check, &[1000])?;
            // The whole group meanwhile, on all its ranks.
        }
        // In another order than the parent's, and several groups in one collective.
        let size = group.world_size();
        let backwards: Vec<usize> = (0..size).rev().collect();
        let part = group.new_group(&backwards)?.context("this rank is a member")?;
        let check = OnGpu::new(&part, &device)?;
        ensure!(
            part.ranks() == backwards && check.nccl.rank() == size - 1 - group.rank(),
            "another place in the group"
        );
        check_type::<_, f32>(&check, &[1000])?;
        let part = group.split(Some(group.rank() % 2), -(group.rank() as i64))?;
        let part = part.context("every rank gives a color")?;
        let check = OnGpu::new(&part, &device)?;
        ensure!(
            check.nccl.rank() == part.rank()
                && part.ranks().iter().all(|r| r % 2 == group.rank() % 2),
            "another place in the group"
        );
        check_type::<_, f32>(&check, &[1000])?;
        let mesh = Mesh::new(group, &backwards, &[size, 1])?;
        let part = mesh.group(0)?;
        let check = OnGpu::new(part, &device)?;
        ensure!(check.nccl.rank() == size - 1 - group.rank(), "another place in the mesh");
        check_type::<_, f32>(&check, &[1000])?;
        // Made by its members alone, in another order.
        if group.rank().is_multiple_of(2) {
            let backwards: Vec<usize> = even.iter().rev().copied().collect();
            let part = group.new_group_of(&backwards, "backwards")?;
            let check = OnGpu::new(&part, &device)?;
            ensure!(
                part.ranks() == backwards && check.nccl.rank() == part.rank(),
                "another place in the group"
            );
            check_type::<_, f32>(&check, &[1000])?;
        }
        let whole = group.duplicate()?;
        let check = OnGpu::new(&whole, &device)?;
        check_type::<_, f16>(&check, &[33])?;
    }
    Ok(())
}
