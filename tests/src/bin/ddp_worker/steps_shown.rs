//! `flow-launch top` shows the steps of each way to train.

use anyhow::{Result, ensure};
use flow_ddp::{Ddp, Fsdp, FullyShard, ProcessGroup};
use flow_tests::top::shown;
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Kind, Tensor};

use crate::models::{device, mlp, store};

/// Steps of each.
const STEPS: u64 = 3;

/// A step is a backward that reduces gradients.
pub fn of_all(group: &ProcessGroup) -> Result<()> {
    let input = Tensor::randn([4, 784], (Kind::Float, device()));
    let vs = store();
    let model = Ddp::new(mlp(&vs.root()), &vs, group)?;
    let mut optimizer = nn::Sgd::default().build(&vs, 0.01)?;
    for _ in 0..STEPS {
        {
            let _guard = model.no_sync();
            model.forward_t(&input, true).sum(Kind::Float).f_backward()?;
        }
        optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float));
    }
    steps_are(group, STEPS)?;
    let vs = store();
    let model = Fsdp::new(mlp(&vs.root()), &vs, group)?;
    let optimizer = model.optimizer(nn::Sgd::default(), 0.01)?;
    for _ in 0..STEPS {
        optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    }
    steps_are(group, 2 * STEPS)?;
    let vs = store();
    let shard = FullyShard::new(&vs, group)?;
    let net = shard.module(|| nn::linear(vs.root(), 784, 10, Default::default()))?;
    let model = shard.wrap(nn::seq_t().add(net))?;
    let optimizer = model.optimizer(nn::Sgd::default(), 0.01)?;
    for _ in 0..STEPS {
        optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float))?;
    }
    steps_are(group, 3 * STEPS)
}

fn steps_are(group: &ProcessGroup, steps: u64) -> Result<()> {
    let view = shown()?;
    let own = &view["ranks"][group.rank()];
    ensure!(own["steps"] == steps && own["step_seconds"].is_number(), "{steps} steps: {view}");
    Ok(())
}
