//! Networks, made of tch's own layers, as for one device.

use tch::nn::{self, Module, ModuleT};
use tch::{Kind, Tensor};

/// Maps inputs to predictions, in training.
pub type Network = Box<dyn Fn(&Tensor) -> Tensor>;

/// A hidden layer of `hidden` units between `inputs` and `outputs`.
fn perceptron(path: &nn::Path, inputs: i64, hidden: i64, outputs: i64) -> Network {
    let column = nn::linear(path / "column", inputs, hidden, Default::default());
    let row = nn::linear(path / "row", hidden, outputs, Default::default());
    Box::new(move |x| row.forward(&column.forward(x).relu()))
}

pub fn mlp(path: &nn::Path) -> Network {
    perceptron(path, 8, 16, 6)
}

/// Sizes that no mesh divides.
pub fn uneven_mlp(path: &nn::Path) -> Network {
    perceptron(path, 7, 13, 5)
}

/// Two convolutions with batch norm, pooling and dropout that keeps all.
pub fn cnn(path: &nn::Path) -> Network {
    let convolution = |name: &str, inputs, outputs, stride| {
        let config = nn::ConvConfig { padding: 1, stride, bias: false, ..Default::default() };
        nn::conv2d(path / name, inputs, outputs, 3, config)
    };
    let norm = |name: &str, channels| nn::batch_norm2d(path / name, channels, Default::default());
    let (one, two) =
        (convolution("convolution_1", 3, 8, 1), convolution("convolution_2", 8, 16, 2));
    let (norm_one, norm_two) = (norm("norm_1", 8), norm("norm_2", 16));
    let head = nn::linear(path / "head", 16 * 2 * 2, 10, Default::default());
    Box::new(move |x| {
        let x = norm_one.forward_t(&one.forward(x), true).relu().max_pool2d_default(2);
        let x = norm_two.forward_t(&two.forward(&x), true).relu();
        head.forward(&x.flat_view().dropout(0.0, true))
    })
}

/// The same, with dropout that drops.
pub fn cnn_with_dropout(path: &nn::Path) -> Network {
    let hidden = nn::conv2d(path / "convolution_1", 3, 8, 3, Default::default());
    let head = nn::linear(path / "head", 8 * 3 * 3, 10, Default::default());
    Box::new(move |x| {
        let x = hidden.forward(x).relu().avg_pool2d_default(2);
        head.forward(&x.flat_view().dropout(0.3, true))
    })
}

pub fn mobilenet(path: &nn::Path) -> Network {
    let model = tch::vision::mobilenet::v2(path, 10);
    Box::new(move |x| model.forward_t(x, true))
}

pub fn resnet(path: &nn::Path) -> Network {
    let model = tch::vision::resnet::resnet18(path, 10);
    Box::new(move |x| model.forward_t(x, true))
}

const WIDTH: i64 = 16;
const HEADS: i64 = 4;
pub const WORDS: i64 = 32;
pub const LENGTH: i64 = 6;

/// A block of GPT between an embedding and the scores of the next words.
pub fn gpt(path: &nn::Path) -> Network {
    let linear =
        |name: &str, inputs, outputs| nn::linear(path / name, inputs, outputs, Default::default());
    let norm = |name: &str| nn::layer_norm(path / name, vec![WIDTH], Default::default());
    let words = nn::embedding(path / "words", WORDS, WIDTH, Default::default());
    let positions = nn::embedding(path / "positions", LENGTH, WIDTH, Default::default());
    let (norm_one, norm_two, last_norm) = (norm("norm_1"), norm("norm_2"), norm("norm_3"));
    let (query, key) = (linear("query", WIDTH, WIDTH), linear("key", WIDTH, WIDTH));
    let (value, projection) = (linear("value", WIDTH, WIDTH), linear("projection", WIDTH, WIDTH));
    let (up, down) = (linear("up", WIDTH, 4 * WIDTH), linear("down", 4 * WIDTH, WIDTH));
    let no_bias = nn::LinearConfig { bias: false, ..Default::default() };
    let head = nn::linear(path / "head", WIDTH, WORDS, no_bias);
    Box::new(move |x| {
        let (batch, length) = x.size2().unwrap();
        let at = Tensor::arange(length, (Kind::Int64, x.device()));
        let x = words.forward(x) + positions.forward(&at);
        let normed = norm_one.forward(&x);
        let heads = |layer: &nn::Linear| {
            let split = [batch, length, HEADS, WIDTH / HEADS];
            layer.forward(&normed).view(split).transpose(1, 2)
        };
        let attention = Tensor::scaled_dot_product_attention(
            &heads(&query),
            &heads(&key),
            &heads(&value),
            None::<Tensor>,
            0.0,
            true,
            None,
            false,
        );
        let attention = attention.transpose(1, 2).contiguous().view([batch, length, WIDTH]);
        let x = x + projection.forward(&attention);
        let x = &x + down.forward(&up.forward(&norm_two.forward(&x)).gelu("none"));
        head.forward(&last_norm.forward(&x)).view([batch * length, WORDS])
    })
}
