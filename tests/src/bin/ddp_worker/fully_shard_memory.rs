//! The memory that a `FullyShard` takes.

use anyhow::{Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::FullyShard;
use tch::nn::{self, Adam, ModuleT};
use tch::{Kind, Tensor};

use crate::fsdp::shared_bytes;
use crate::models::{device, store};

/// All ranks together have the training once, and each a few modules whole: also within a forward.
pub fn memory(group: &ProcessGroup) -> Result<()> {
    const LAYERS: usize = 64;
    const WIDTH: i64 = 512;
    const MIB: usize = 1 << 20;
    let vs = store();
    let before = shared_bytes(group)?;
    let shard = FullyShard::new(&vs, group)?;
    let mut net = nn::seq_t();
    for layer in 0..LAYERS {
        let path = vs.root() / layer;
        let config = nn::LinearConfig { bias: false, ..Default::default() };
        let linear = shard.module(|| nn::linear(&path, WIDTH, WIDTH, config))?;
        net = net.add(linear).add_fn(Tensor::tanh);
    }
    let model = shard.wrap(net)?;
    let optimizer = model.optimizer(Adam::default(), 1e-3)?;
    let input = Tensor::ones([2, WIDTH], (Kind::Float, device()));
    let mut bytes = Vec::new();
    for _ in 0..3 {
        let output = model.forward_t(&input, true).sum(Kind::Float);
        bytes.push(shared_bytes(group)? - before);
        optimizer.backward_step(&output)?;
        bytes.push(shared_bytes(group)? - before);
    }
    // Parameters, gradients and two parts of Adam's state.
    let all = 4 * LAYERS * MIB;
    let modules = 12 * MIB * group.world_size();
    for (number, &bytes) in bytes.iter().enumerate() {
        let expected = if number == 0 { all / 2 } else { all };
        ensure!(bytes >= expected - expected / 10, "{number}: {bytes} bytes, not {expected}");
        ensure!(bytes <= expected + modules, "{number}: {bytes} bytes, not {expected}");
    }
    Ok(())
}
