//! What an operation cannot do with a tensor is an error of this rank, at once, and breaks nothing.

use anyhow::{Context, Result, ensure};
use flow_tensor::{P2pOp, ProcessGroup, ReduceOp, TensorCollectives, functional};
use tch::{Kind, Tensor};

pub fn all(group: &ProcessGroup) -> Result<()> {
    let ones = |shape: &[i64], kind| Tensor::ones(shape, (kind, group.device()));
    let ranks = group.world_size() as i64;
    let float = ones(&[ranks + 1, 2], Kind::Float);
    let expanded = || ones(&[1], Kind::Float).expand([3], false);
    let peer = if ranks > 1 { (group.rank() + 1) % group.world_size() } else { 0 };
    let root = group.rank();
    let says = |result: flow_tensor::Result<()>, expected: &[&str]| -> Result<()> {
        let text = result.err().context(format!("no error of {expected:?}"))?.to_string();
        ensure!(expected.iter().all(|part| text.contains(part)), "{expected:?}: {text}");
        ensure!(text.contains(&format!("rank {}", group.rank())), "{text}");
        Ok(())
    };
    let sum = ReduceOp::Sum;
    says(group.all_reduce_tensor(&mut ones(&[2], Kind::Bool), sum), &["all_reduce", "Bool"])?;
    says(
        group.reduce_tensor_async(ones(&[2], Kind::Int16), sum, 0).map(drop),
        &["reduce", "Int16"],
    )?;
    says(
        group.reduce_scatter_tensor(&float, sum).map(drop),
        &["reduce_scatter", "number of ranks"],
    )?;
    says(functional::scatter(group, &float, 0).map(drop), &["scatter", "number of ranks"])?;
    if ranks > 1 {
        says(group.all_to_all_tensor(&float).map(drop), &["all_to_all", "cannot be divided"])?;
        says(group.recv_tensor(&mut expanded(), peer), &["recv", "expand()"])?;
    }
    says(group.scatter_tensor(None, &mut float.copy(), root), &["scatter", "has no input"])?;
    says(group.all_reduce_tensor(&mut expanded(), sum), &["all_reduce", "expand()"])?;
    says(group.all_gather_tensor(&Tensor::new()).map(drop), &["all_gather", "undefined"])?;
    let product = functional::all_reduce(group, &float, ReduceOp::Product);
    says(product.map(drop), &["all_reduce", "no gradient"])?;

    let counts = vec![1; ranks as usize];
    says(
        group.all_gather_v_tensor(&float, &counts).map(drop),
        &["all_gather_v", "this rank's count is 1, but the first dimension"],
    )?;
    says(
        group.reduce_scatter_v_tensor_async(float.copy(), &counts, sum).map(drop),
        &["reduce_scatter_v", "the sum of counts is"],
    )?;
    says(
        group.all_to_all_v_tensor(&ones(&[1], Kind::Int), &[1], &[]).map(drop),
        &["all_to_all_v", "counts for", "give one for each"],
    )?;
    says(
        group.all_gather_v_tensor(&Tensor::from(1.0), &counts).map(drop),
        &["all_gather_v", "no first dimension"],
    )?;
    if ranks > 1 {
        let mut ops = [
            P2pOp::Send { data: float.shallow_clone(), to: peer },
            P2pOp::Recv { buffer: expanded(), from: peer },
        ];
        says(group.batch_send_recv_tensors(&mut ops), &["batch_send_recv", "expand()"])?;
    }

    let mut still = ones(&[2], Kind::Float);
    group.all_reduce_tensor(&mut still, sum)?;
    ensure!(still.double_value(&[0]) == ranks as f64);
    Ok(())
}
