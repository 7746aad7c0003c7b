//! Synchronized batch norms of a model whose backward fails.

use anyhow::Result;
use flow_autograd::GradHook;
use flow_comm::ProcessGroup;
use flow_ddp::{BoxError, Ddp, Error, convert_sync_batchnorm};
use tch::{Kind, Tensor, nn};

use crate::helpers::{error, says};
use crate::models::{self, device, store};

/// A backward that fails on one rank, after its first gradient, is an error of ranks that wait in a
/// synchronized batch norm, whose backward comes later. A model that is wrapped anew trains.
pub fn failing(group: &ProcessGroup) -> Result<()> {
    for converts_first in [true, false] {
        let store = store();
        let gate = Tensor::ones([1], (Kind::Float, device())).set_requires_grad(true);
        let between = gate.shallow_clone();
        let net = models::batchnorm(&store.root()).add_fn(move |x| x * &between).add(nn::linear(
            store.root() / "last",
            10,
            10,
            Default::default(),
        ));
        if converts_first {
            convert_sync_batchnorm(&store, group)?;
        }
        let model = Ddp::new(net, &store, group)?;
        if !converts_first {
            convert_sync_batchnorm(&store, group)?;
        }
        train(&model)?;
        let fails = group.rank() == 1;
        let hook = fails.then(|| GradHook::install(&gate, refuse)).transpose()?;
        let elsewhere = "rank 1 aborted the group: its backward failed";
        let cause = if fails { "rank 1 has had enough" } else { elsewhere };
        says(&error(train(&model))?, &[cause])?;
        drop(hook);
        train(&Ddp::new(model.into_inner(), &store, group)?)?;
    }
    Ok(())
}

fn refuse(_: &Tensor) -> Result<(), BoxError> {
    Err("rank 1 has had enough".into())
}

fn train(model: &Ddp<nn::SequentialT>) -> flow_ddp::Result<()> {
    let x = Tensor::randn([4, 3, 8, 8], (Kind::Float, device()));
    let loss = model.try_forward_t(&x, true)?.square().mean(Kind::Float);
    loss.f_backward().map_err(Error::from_backward)
}
