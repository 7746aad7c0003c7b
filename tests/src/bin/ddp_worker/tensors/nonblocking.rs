//! Operations beside the caller.

use anyhow::{Context, Result, ensure};
use flow_tensor::{P2pOp, ProcessGroup, ReduceOp, TensorCollectives};
use tch::{Kind, Tensor};

/// Several operations are under way at once, and waited for in another order than they began.
pub fn overlapping(group: &ProcessGroup) -> Result<()> {
    let options = (Kind::Float, group.device());
    let ranks = group.world_size() as f64;
    for _ in 0..5 {
        let own = Tensor::full([100_000], group.rank() as f64 + 1.0, options);
        let sum = group.all_reduce_tensor_async(own.copy(), ReduceOp::Sum)?;
        let gathered = group.all_gather_tensor_async(own.copy())?;
        drop(group.broadcast_tensor_async(own.copy(), 0)?);
        let largest = group.all_reduce_tensor_async(own.copy(), ReduceOp::Max)?;
        let beside = &own * 2; // the program goes on
        ensure!(largest.wait()?.min().double_value(&[]) == ranks);
        ensure!(
            gathered.wait()?.sum(Kind::Double).double_value(&[])
                == 1e5 * ranks * (ranks + 1.0) / 2.0
        );
        ensure!(sum.wait()?.max().double_value(&[]) == ranks * (ranks + 1.0) / 2.0);
        ensure!(beside.max().double_value(&[]) == 2.0 * (group.rank() as f64 + 1.0));
    }
    Ok(())
}

/// A rank that only reads gets its own tensor back, not a copy.
pub fn returned(group: &ProcessGroup) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let own = || {
        let tensor = Tensor::ones([20, 30], (Kind::Float, group.device())).tr();
        tensor.set_requires_grad(true)
    };
    let is_own = |name: &str, sent: &Tensor, back: &Tensor| -> Result<()> {
        let same = flow_autograd::data_ptr(sent) == flow_autograd::data_ptr(back)
            && sent.stride() == back.stride();
        ensure!(same && back.requires_grad(), "{name} has returned another tensor");
        Ok(())
    };
    let tensor = own();
    if rank == 0 {
        let back = group.broadcast_tensor_async(tensor.shallow_clone(), 0)?.wait()?;
        is_own("broadcast", &tensor, &back)?;
        drop(group.reduce_tensor_async(tensor.detach().copy(), ReduceOp::Sum, 0)?.wait()?);
    } else {
        drop(group.broadcast_tensor_async(tensor.detach().copy(), 0)?.wait()?);
        let back = group.reduce_tensor_async(tensor.shallow_clone(), ReduceOp::Sum, 0)?.wait()?;
        is_own("reduce", &tensor, &back)?;
    }
    if ranks > 1 {
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let place = tensor.zeros_like();
        let ops = vec![
            P2pOp::Send { data: tensor.shallow_clone(), to: next },
            P2pOp::Recv { buffer: place.shallow_clone(), from: previous },
        ];
        let back = group.batch_send_recv_tensors_async(ops)?.wait()?;
        is_own("batch_send_recv", &tensor, &back[0])?;
        ensure!(flow_autograd::data_ptr(&place) == flow_autograd::data_ptr(&back[1]));
        ensure!(place.min().double_value(&[]) == 1.0, "nothing was received");
    }
    Ok(())
}

/// The caller's stream goes on while an operation runs, and waits for it from `wait` on; the host
/// waits for neither. In the fake CUDA the calling thread is libtorch's stream.
pub fn beside_the_stream(group: &ProcessGroup) -> Result<()> {
    let prefix = std::env::var("FLOW_FAKE_WAITS").context("only the fake can tell")?;
    let file = format!("{prefix}.{}", group.rank());
    let host_waits = || std::fs::read_to_string(&file).unwrap_or_default();
    let ranks = group.world_size();
    let options = (Kind::Float, group.device());
    drop(group.all_reduce_tensor_async(Tensor::ones([1], options), ReduceOp::Sum)?.wait()?);
    let before = host_waits();
    for round in 0..20 {
        let own = Tensor::full([50_000], (group.rank() + round) as f64, options);
        let mut word = [0i64];
        if group.rank() == 0 {
            let sum = group.all_reduce_tensor_async(own, ReduceOp::Sum)?;
            // The others take part when rank 0's stream has gone on.
            (1..ranks).try_for_each(|rank| group.send(&word, rank))?;
            check(&sum.wait()?, ranks, round)?;
        } else {
            group.recv(&mut word, 0)?;
            check(&group.all_reduce_tensor_async(own, ReduceOp::Sum)?.wait()?, ranks, round)?;
        }
    }
    let after = host_waits();
    ensure!(before == after, "the host waited for the device: {:?}", after.strip_prefix(&before));
    Ok(())
}

fn check(sum: &Tensor, ranks: usize, round: usize) -> Result<()> {
    let expected = (ranks * round + ranks * (ranks - 1) / 2) as f64;
    let range = (sum.min().double_value(&[]), sum.max().double_value(&[]));
    ensure!(range == (expected, expected), "{range:?} instead of {expected}");
    Ok(())
}
