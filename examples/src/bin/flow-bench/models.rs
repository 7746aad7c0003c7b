//! The models of the benches, the same as in `scripts/peers/models.py`.

use std::convert::Infallible;

use clap::ValueEnum;
use flow_ddp::FullyShard;
use flow_examples::gpt_block::plain_gpt_block;
use tch::nn::{self, ModuleT, SequentialT};
use tch::vision::{mobilenet, resnet};

/// Layers of 2048 of the wide model.
pub const WIDE_LAYERS: u32 = 6;
/// Width and heads of the GPT block.
const WIDTH: i64 = 1024;
const HEADS: i64 = 16;

#[derive(Clone, Copy, ValueEnum)]
pub enum Model {
    /// 784 - 512 - 10, batch 50
    Mlp,
    /// Two convolutions and two dense layers on 28 x 28, batch 50
    Lenet,
    /// Six dense layers of 2048 and one of 10, batch 32
    Wide,
    /// MobileNetV2 on 32 x 32, batch 32
    Mobilenet,
    /// ResNet-50 on 224 x 224, batch 32
    Resnet50,
    /// One block of a GPT of width 1024 with 16 heads, on 1024 tokens, batch 8
    Gpt,
}

impl Model {
    pub fn name(self) -> &'static str {
        match self {
            Model::Mlp => "mlp",
            Model::Lenet => "lenet",
            Model::Wide => "wide",
            Model::Mobilenet => "mobilenet",
            Model::Resnet50 => "resnet50",
            Model::Gpt => "gpt",
        }
    }

    /// Shape of a batch.
    pub fn input(self) -> &'static [i64] {
        match self {
            Model::Mlp => &[50, 784],
            Model::Lenet => &[50, 1, 28, 28],
            Model::Wide => &[32, 2048],
            Model::Mobilenet => &[32, 3, 32, 32],
            Model::Resnet50 => &[32, 3, 224, 224],
            Model::Gpt => &[8, 1024, WIDTH],
        }
    }

    /// Returns the model, a classifier of ten classes, with its variables below `path`.
    pub fn build(self, path: &nn::Path) -> SequentialT {
        match self {
            Model::Mlp => mlp(path),
            Model::Lenet => lenet(path),
            Model::Wide => plain_wide(path, WIDE_LAYERS),
            Model::Mobilenet => nn::seq_t().add(mobilenet::v2(path, 10)),
            Model::Resnet50 => nn::seq_t().add(resnet::resnet50(path, 10)),
            Model::Gpt => gpt(path),
        }
    }

    /// Returns the model with each layer of the wide one a module that `shard` shards, and others whole.
    pub fn build_sharded(
        self,
        path: &nn::Path,
        shard: &FullyShard,
    ) -> Result<SequentialT, flow_ddp::Error> {
        if let Model::Wide = self {
            return wide(path, WIDE_LAYERS, |path, outputs| {
                shard.module(|| nn::linear(path, 2048, outputs, Default::default()))
            });
        }
        Ok(nn::seq_t().add(shard.module(|| self.build(path))?))
    }
}

fn mlp(path: &nn::Path) -> SequentialT {
    nn::seq_t()
        .add(nn::linear(path / "fc1", 784, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "fc2", 512, 10, Default::default()))
}

fn lenet(path: &nn::Path) -> SequentialT {
    let same = nn::ConvConfig { padding: 2, ..Default::default() };
    nn::seq_t()
        .add(nn::conv2d(path / "conv1", 1, 32, 5, same))
        .add_fn(|x| x.max_pool2d_default(2))
        .add(nn::conv2d(path / "conv2", 32, 64, 5, same))
        .add_fn(|x| x.max_pool2d_default(2).flat_view())
        .add(nn::linear(path / "fc1", 64 * 7 * 7, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "fc2", 512, 10, Default::default()))
}

/// Returns the wide model, with so many layers of 2048, on one process.
pub fn plain_wide(path: &nn::Path, layers: u32) -> SequentialT {
    let Ok(model) = wide(path, layers, |path, outputs| {
        Ok::<_, Infallible>(nn::linear(path, 2048, outputs, Default::default()))
    });
    model
}

/// Returns the wide model. `dense` makes a layer of so many outputs.
fn wide<L: ModuleT + 'static, E>(
    path: &nn::Path,
    layers: u32,
    dense: impl Fn(nn::Path, i64) -> Result<L, E>,
) -> Result<SequentialT, E> {
    let mut model = nn::seq_t();
    for layer in 0..layers {
        model = model.add(dense(path / format!("fc{layer}"), 2048)?).add_fn(|x| x.relu());
    }
    Ok(model.add(dense(path / format!("fc{layers}"), 10)?))
}

fn gpt(path: &nn::Path) -> SequentialT {
    let Ok(block) = plain_gpt_block(path, WIDTH, HEADS);
    block.add_fn(|x| x.mean_dim([1i64].as_slice(), false, None)).add(nn::linear(
        path / "classes",
        WIDTH,
        10,
        Default::default(),
    ))
}
