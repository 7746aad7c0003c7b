//! The models of the step bench, the same as in `scripts/peers/step.py`.

use clap::ValueEnum;
use tch::nn::{self, SequentialT};
use tch::vision::mobilenet;

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
}

impl Model {
    pub fn name(self) -> &'static str {
        match self {
            Model::Mlp => "mlp",
            Model::Lenet => "lenet",
            Model::Wide => "wide",
            Model::Mobilenet => "mobilenet",
        }
    }

    /// Shape of a batch.
    pub fn input(self) -> &'static [i64] {
        match self {
            Model::Mlp => &[50, 784],
            Model::Lenet => &[50, 1, 28, 28],
            Model::Wide => &[32, 2048],
            Model::Mobilenet => &[32, 3, 32, 32],
        }
    }

    /// The model, which tells ten classes apart, with its variables below `path`.
    pub fn build(self, path: &nn::Path) -> SequentialT {
        match self {
            Model::Mlp => mlp(path),
            Model::Lenet => lenet(path),
            Model::Wide => wide(path),
            Model::Mobilenet => nn::seq_t().add(mobilenet::v2(path, 10)),
        }
    }
}

fn mlp(path: &nn::Path) -> SequentialT {
    nn::seq_t().add(nn::linear(path / "fc1", 784, 512, Default::default())).add_fn(|x| x.relu()).add(nn::linear(
        path / "fc2",
        512,
        10,
        Default::default(),
    ))
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

fn wide(path: &nn::Path) -> SequentialT {
    let hidden = (0..6).fold(nn::seq_t(), |model, i| {
        model.add(nn::linear(path / format!("fc{i}"), 2048, 2048, Default::default())).add_fn(|x| x.relu())
    });
    hidden.add(nn::linear(path / "fc6", 2048, 10, Default::default()))
}
