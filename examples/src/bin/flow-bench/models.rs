//! The models of the step bench, the same as in `scripts/peers/step.py`.

use clap::ValueEnum;
use tch::nn::{self, SequentialT};
use tch::vision::{mobilenet, resnet};
use tch::Tensor;

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

    /// The model, a classifier of ten classes, with its variables below `path`.
    pub fn build(self, path: &nn::Path) -> SequentialT {
        match self {
            Model::Mlp => mlp(path),
            Model::Lenet => lenet(path),
            Model::Wide => wide(path),
            Model::Mobilenet => nn::seq_t().add(mobilenet::v2(path, 10)),
            Model::Resnet50 => nn::seq_t().add(resnet::resnet50(path, 10)),
            Model::Gpt => gpt(path),
        }
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

fn wide(path: &nn::Path) -> SequentialT {
    let hidden = (0..6).fold(nn::seq_t(), |model, i| {
        model
            .add(nn::linear(path / format!("fc{i}"), 2048, 2048, Default::default()))
            .add_fn(|x| x.relu())
    });
    hidden.add(nn::linear(path / "fc6", 2048, 10, Default::default()))
}

/// A block of GPT-2 (Radford et al. 2019); classes are predicted from the mean over all tokens.
fn gpt(path: &nn::Path) -> SequentialT {
    let norm = |name| nn::layer_norm(path / name, vec![WIDTH], Default::default());
    let dense =
        |name, inputs, outputs| nn::linear(path / name, inputs, outputs, Default::default());
    let (norm1, qkv, projection) =
        (norm("norm1"), dense("qkv", WIDTH, 3 * WIDTH), dense("projection", WIDTH, WIDTH));
    let (norm2, up, down) =
        (norm("norm2"), dense("up", WIDTH, 4 * WIDTH), dense("down", 4 * WIDTH, WIDTH));
    nn::seq_t()
        .add_fn(move |x| x + attention(&x.apply(&norm1).apply(&qkv)).apply(&projection))
        .add_fn(move |x| x + x.apply(&norm2).apply(&up).gelu("tanh").apply(&down))
        .add_fn(|x| x.mean_dim([1i64].as_slice(), false, None))
        .add(dense("classes", WIDTH, 10))
}

/// Causal attention, from the queries, keys and values `[batch, tokens, 3 * WIDTH]`.
fn attention(qkv: &Tensor) -> Tensor {
    let (batch, tokens) = (qkv.size()[0], qkv.size()[1]);
    let heads = qkv.view([batch, tokens, 3, HEADS, WIDTH / HEADS]).permute([2, 0, 3, 1, 4]);
    let [q, k, v] = [0, 1, 2].map(|part| heads.get(part));
    let attended =
        Tensor::scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false);
    attended.transpose(1, 2).reshape([batch, tokens, WIDTH])
}
