//! LeNet on Fashion-MNIST.

use std::sync::Arc;

use anyhow::Result;
use flow::prelude::*;
use tch::nn::SequentialT;
use tch::nn::init::{FanInOut, Init, NonLinearity, NormalOrUniform};

use crate::fashion;
use crate::images::Images;

/// LeNet as in OneFlow's documentation, with PyTorch's first weights: tch's own are larger, too
/// large to start fast.
pub fn lenet(path: &nn::Path) -> SequentialT {
    let gain = NonLinearity::ExplicitGain(1.0 / 3f64.sqrt());
    let ws_init =
        Init::Kaiming { dist: NormalOrUniform::Uniform, fan: FanInOut::FanIn, non_linearity: gain };
    let convolution = nn::ConvConfig { padding: 2, ws_init, ..Default::default() };
    let dense = nn::LinearConfig { ws_init, ..Default::default() };
    nn::seq_t()
        .add(nn::conv2d(path / "conv1", 1, 32, 5, convolution))
        .add_fn(|x| x.max_pool2d_default(2).relu())
        .add(nn::conv2d(path / "conv2", 32, 64, 5, convolution))
        .add_fn(|x| x.max_pool2d_default(2).relu().flat_view())
        .add(nn::linear(path / "dense1", 64 * 7 * 7, 512, dense))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "dense2", 512, fashion::CLASSES as i64, dense))
}

/// Moves a batch to the model's device, the images in the model's precision.
pub fn on(vs: &nn::VarStore, (images, labels): (Tensor, Tensor)) -> (Tensor, Tensor) {
    (images.to_device_(vs.device(), vs.kind(), false, false), labels.to(vs.device()))
}

/// Returns the part of `images` that the model classifies rightly, over all ranks. Each image is seen once,
/// so that ranks may have different numbers of batches: they meet only after their last.
pub fn accuracy(
    model: &Ddp<SequentialT>,
    vs: &nn::VarStore,
    images: &Arc<Images>,
    workers: usize,
) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let sampler = DistributedSampler::new(images.len(), model.group()).shuffle(false).pad(false);
    let mut correct = [0];
    for batch in DataLoader::new(images, &sampler, 250).workers(workers) {
        let (images, labels) = on(vs, batch?);
        let classes = model.forward_t(&images, false).argmax(1, false);
        correct[0] += classes.eq_tensor(&labels).sum(Kind::Int64).int64_value(&[]);
    }
    model.group().all_reduce(&mut correct, ReduceOp::Sum)?;
    Ok(correct[0] as f64 / images.len() as f64)
}
