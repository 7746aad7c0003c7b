//! Every collective over NCCL against a plain reference.

use std::sync::Arc;

use anyhow::{ensure, Context, Result};
use flow_comm::nccl::CudaGroup;
use flow_comm::{DType, Mesh, ProcessGroup, ReduceOp};

use super::memory::{Array, Gpu};

pub fn run(group: &ProcessGroup) -> Result<()> {
    let device = group.use_cuda()?;
    let shares = std::env::var_os("FLOW_TEST_SHARE_GPUS").is_some_and(|value| value == "1");
    ensure!(
        shares || device.ordinal() == group.local_rank(),
        "{device:?} is not the GPU of this local rank"
    );
    let check = Check { nccl: group.nccl(device.ordinal())?, gpu: Gpu::new(&device)? };
    for &dtype in DType::ALL {
        for length in [0, 1, 5, 1000, 70_001] {
            check.all(dtype, length)?;
        }
    }
    check.nccl.barrier()?;
    Ok(())
}

/// Sub-groups: of a group that is used on GPUs already, and of one that is not.
pub fn groups(group: &ProcessGroup) -> Result<()> {
    let device = group.use_cuda()?;
    for used in [false, true] {
        if used {
            group.nccl(device.ordinal())?;
        }
        let even: Vec<usize> = (0..group.world_size()).step_by(2).collect();
        let part = group.new_group(&even)?;
        ensure!(part.is_some() == group.rank().is_multiple_of(2), "a group of other ranks");
        if let Some(part) = part {
            let check = Check { nccl: part.nccl(device.ordinal())?, gpu: Gpu::new(&device)? };
            ensure!(
                check.nccl.size() == even.len() && check.nccl.rank() == part.rank(),
                "another place in the group"
            );
            check.all(DType::F32, 1000)?;
            // The whole group meanwhile, on all its ranks.
        }
        // In another order than the parent's, and several groups in one collective.
        let size = group.world_size();
        let backwards: Vec<usize> = (0..size).rev().collect();
        let part = group.new_group(&backwards)?.context("this rank is a member")?;
        let check = Check { nccl: part.nccl(device.ordinal())?, gpu: Gpu::new(&device)? };
        ensure!(
            part.ranks() == backwards && check.nccl.rank() == size - 1 - group.rank(),
            "another place in the group"
        );
        check.all(DType::F32, 1000)?;
        let part = group.split(Some(group.rank() % 2), -(group.rank() as i64))?;
        let part = part.context("every rank gives a color")?;
        let check = Check { nccl: part.nccl(device.ordinal())?, gpu: Gpu::new(&device)? };
        ensure!(
            check.nccl.rank() == part.rank()
                && part.ranks().iter().all(|r| r % 2 == group.rank() % 2),
            "another place in the group"
        );
        check.all(DType::F32, 1000)?;
        let mesh = Mesh::new(group, &backwards, &[size, 1])?;
        let part = mesh.group(0)?;
        let check = Check { nccl: part.nccl(device.ordinal())?, gpu: Gpu::new(&device)? };
        ensure!(check.nccl.rank() == size - 1 - group.rank(), "another place in the mesh");
        check.all(DType::F32, 1000)?;
        // Made by its members alone, in another order.
        if group.rank().is_multiple_of(2) {
            let backwards: Vec<usize> = even.iter().rev().copied().collect();
            let part = group.new_group_of(&backwards, "backwards")?;
            let check = Check { nccl: part.nccl(device.ordinal())?, gpu: Gpu::new(&device)? };
            ensure!(
                part.ranks() == backwards && check.nccl.rank() == part.rank(),
                "another place in the group"
            );
            check.all(DType::F32, 1000)?;
        }
        let whole = group.duplicate()?;
        let check = Check { nccl: whole.nccl(device.ordinal())?, gpu: Gpu::new(&device)? };
        check.all(DType::F16, 33)?;
    }
    Ok(())
}

struct Check {
    nccl: Arc<CudaGroup>,
    gpu: Gpu,
}

/// What rank `rank` gives as element `index`: small whole numbers, whose sums and products are
/// exact in every type.
fn given(rank: usize, index: usize) -> f64 {
    ((rank * 3 + index) % 3) as f64
}

impl Check {
    fn all(&self, dtype: DType, length: usize) -> Result<()> {
        let (nccl, size, rank) = (&self.nccl, self.nccl.size(), self.nccl.rank());
        let (stream, ranks) = (&self.gpu.stream, || 0..size);
        let own = |count: usize| (0..count).map(|i| given(rank, i)).collect::<Vec<_>>();
        let roots = [0, size - 1];

        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg] {
            if op == ReduceOp::Avg && matches!(dtype, DType::I32 | DType::I64 | DType::U8) {
                continue;
            }
            let reduced = |i: usize| {
                let all = ranks().map(|r| given(r, i));
                match op {
                    ReduceOp::Sum => all.sum(),
                    ReduceOp::Product => all.product(),
                    ReduceOp::Min => all.fold(f64::MAX, f64::min),
                    ReduceOp::Max => all.fold(f64::MIN, f64::max),
                    ReduceOp::Avg => all.sum::<f64>() / size as f64,
                }
            };
            let mut buffer = self.gpu.array(dtype, &own(length))?;
            nccl.all_reduce(&mut buffer, op, stream)?;
            self.expect("all_reduce", &buffer, (0..length).map(reduced))?;

            for root in roots {
                let mut buffer = self.gpu.array(dtype, &own(length))?;
                nccl.reduce(&mut buffer, op, root, stream)?;
                let expected = |i| if rank == root { reduced(i) } else { given(rank, i) };
                self.expect("reduce", &buffer, (0..length).map(expected))?;
            }

            let input = self.gpu.array(dtype, &own(length * size))?;
            let mut output = self.gpu.array(dtype, &vec![9.0; length])?;
            nccl.reduce_scatter(&input, &mut output, op, stream)?;
            self.expect(
                "reduce_scatter",
                &output,
                (0..length).map(|i| reduced(rank * length + i)),
            )?;
        }

        let input = self.gpu.array(dtype, &own(length))?;
        let mut output = self.gpu.array(dtype, &vec![9.0; length * size])?;
        nccl.all_gather(&input, &mut output, stream)?;
        let gathered = || ranks().flat_map(|r| (0..length).map(move |i| given(r, i)));
        self.expect("all_gather", &output, gathered())?;

        let input = self.gpu.array(dtype, &own(length * size))?;
        let mut output = self.gpu.array(dtype, &vec![9.0; length * size])?;
        nccl.all_to_all(&input, &mut output, stream)?;
        let exchanged = ranks().flat_map(|r| (0..length).map(move |i| given(r, rank * length + i)));
        self.expect("all_to_all", &output, exchanged)?;

        for root in roots {
            let mut buffers =
                [self.gpu.array(dtype, &own(length))?, self.gpu.array(DType::F32, &own(3))?];
            nccl.broadcast(&mut buffers, root, stream)?;
            self.expect("broadcast", &buffers[0], (0..length).map(|i| given(root, i)))?;
            self.expect("broadcast", &buffers[1], (0..3).map(|i| given(root, i)))?;

            let input = self.gpu.array(dtype, &own(length))?;
            let mut output = self.gpu.array(dtype, &vec![9.0; length * size])?;
            nccl.gather(&input, (rank == root).then_some(&mut output), root, stream)?;
            if rank == root {
                self.expect("gather", &output, gathered())?;
            }

            let input = self.gpu.array(dtype, &own(length * size))?;
            let mut output = self.gpu.array(dtype, &vec![9.0; length])?;
            nccl.scatter((rank == root).then_some(&input), &mut output, root, stream)?;
            self.expect("scatter", &output, (0..length).map(|i| given(root, rank * length + i)))?;
        }

        if size > 1 && rank < 2 {
            let mut buffer = self.gpu.array(dtype, &own(length))?;
            match rank {
                0 => nccl.send(&buffer, 1, stream)?,
                _ => nccl.recv(&mut buffer, 0, stream)?,
            }
            self.expect("send and recv", &buffer, (0..length).map(|i| given(0, i)))?;
        }
        Ok(())
    }

    fn expect(
        &self,
        operation: &str,
        found: &Array,
        expected: impl Iterator<Item = f64>,
    ) -> Result<()> {
        let found = self.gpu.snapshot(found)?.numbers(&self.gpu)?;
        let expected: Vec<f64> = expected.collect();
        let rank = self.nccl.rank();
        ensure!(found.len() == expected.len(), "rank {rank}, {operation}: {} numbers", found.len());
        let wrong = found.iter().zip(&expected).position(|(f, e)| (f - e).abs() > 0.005 * e.abs());
        if let Some(at) = wrong {
            anyhow::bail!(
                "rank {rank}, {operation}: element {at} is {}, not {}",
                found[at],
                expected[at]
            );
        }
        Ok(())
    }
}
