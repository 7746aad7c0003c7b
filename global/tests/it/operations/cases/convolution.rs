//! Convolutions, pooling, upsampling.

use tch::{Kind, Tensor};

use super::case::{Case, Input, case, normal};

pub fn cases() -> Vec<Case> {
    [convolutions(), samplings()].into_iter().flatten().collect()
}

const COVERS: &[&str] = &["convolution", "convolution_backward"];

fn convolutions() -> Vec<Case> {
    let images = || normal([5, 4, 6, 6]);
    let weights = || normal([8, 4, 3, 3]);
    let with_bias = || [images(), weights(), normal([8])];
    vec![
        case("conv2d", with_bias(), COVERS, |x| x[0].conv2d(&x[1], Some(&x[2]), 1, 1, 1, 1)),
        case("conv2d, stride 2", with_bias(), COVERS, |x| {
            x[0].conv2d(&x[1], Some(&x[2]), 2, 1, 1, 1)
        }),
        case("conv2d without bias", [images(), weights()], COVERS, |x| {
            x[0].conv2d(&x[1], None::<Tensor>, 1, 0, 1, 1)
        }),
        case("conv2d, channels last", [images().channels_last(), weights()], COVERS, |x| {
            x[0].conv2d(&x[1], None::<Tensor>, 1, 1, 1, 1)
        }),
        case("conv2d, one by one", [images(), normal([7, 4, 1, 1]), normal([7])], COVERS, |x| {
            x[0].conv2d(&x[1], Some(&x[2]), 1, 0, 1, 1)
        }),
        case("conv2d, each channel", [images(), normal([4, 1, 3, 3]), normal([4])], COVERS, |x| {
            x[0].conv2d(&x[1], Some(&x[2]), 1, 1, 1, 4)
        }),
        case("conv2d, groups", [images(), normal([6, 2, 3, 3])], COVERS, |x| {
            x[0].conv2d(&x[1], None::<Tensor>, 1, 1, 1, 2)
        }),
        case("conv2d, dilated", [images(), weights()], COVERS, |x| {
            x[0].conv2d(&x[1], None::<Tensor>, 1, 2, 2, 1)
        }),
        case("conv2d of one image", [normal([4, 6, 6]), weights(), normal([8])], COVERS, |x| {
            x[0].conv2d(&x[1], Some(&x[2]), 1, 1, 1, 1)
        }),
        case("conv1d", [normal([5, 4, 9]), normal([6, 4, 3]), normal([6])], COVERS, |x| {
            x[0].conv1d(&x[1], Some(&x[2]), 1, 1, 1, 1)
        }),
        case("conv3d", [normal([3, 2, 4, 4, 4]), normal([4, 2, 3, 3, 3])], COVERS, |x| {
            x[0].conv3d(&x[1], None::<Tensor>, 1, 1, 1, 1)
        }),
        case("conv2d, transposed", [images(), normal([4, 6, 3, 3]), normal([6])], COVERS, |x| {
            x[0].conv_transpose2d(&x[1], Some(&x[2]), 2, 1, 1, 1, 1)
        }),
        case(
            "conv2d in f32",
            [images().kind(Kind::Float), weights().kind(Kind::Float)],
            COVERS,
            |x| x[0].conv2d(&x[1], None::<Tensor>, 1, 1, 1, 1),
        ),
        case("conv2d of no images", [normal([0, 4, 6, 6]), weights()], COVERS, |x| {
            x[0].conv2d(&x[1], None::<Tensor>, 1, 1, 1, 1)
        }),
    ]
}

fn samplings() -> Vec<Case> {
    let images = || [normal([5, 3, 6, 6])];
    let one = || [normal([3, 6, 6])];
    let max: fn(&[Tensor]) -> Tensor = |x| x[0].max_pool2d(2, 2, 0, 1, false);
    let average: fn(&[Tensor]) -> Tensor = |x| x[0].avg_pool2d(3, 2, 1, false, true, None::<i64>);
    let adaptive: fn(&[Tensor]) -> Tensor = |x| x[0].adaptive_avg_pool2d([4, 3]);
    const MAX: &[&str] = &["max_pool2d_with_indices", "max_pool2d_with_indices_backward"];
    const AVERAGE: &[&str] = &["avg_pool2d", "avg_pool2d_backward"];
    const ADAPTIVE: &[&str] = &["_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"];
    const ADAPTIVE_MAX: &[&str] = &["adaptive_max_pool2d", "adaptive_max_pool2d_backward"];
    const REFLECTED: &[&str] = &["reflection_pad2d", "reflection_pad2d_backward"];
    const REPLICATED: &[&str] = &["replication_pad2d", "replication_pad2d_backward"];
    const BILINEAR: &[&str] = &["upsample_bilinear2d", "upsample_bilinear2d_backward"];
    const NEAREST: &[&str] = &["upsample_nearest2d", "upsample_nearest2d_backward"];
    let nearest = |x: &[Tensor]| x[0].upsample_nearest2d([12, 9], None, None);
    let last: fn() -> [Input; 1] = || [normal([5, 3, 6, 6]).channels_last()];
    vec![
        case("max_pool2d", images(), MAX, max),
        case("max_pool2d of one image", one(), MAX, max),
        case("max_pool2d, channels last", last(), MAX, max),
        case("max_pool2d with indices", images(), MAX, |x| {
            x[0].max_pool2d_with_indices(3, 2, 1, 1, true)
        }),
        case("avg_pool2d", images(), AVERAGE, average),
        case("avg_pool2d of one image", one(), AVERAGE, average),
        case("adaptive_avg_pool2d", images(), ADAPTIVE, adaptive),
        case("adaptive_avg_pool2d to one", images(), &["mean"], |x| {
            x[0].adaptive_avg_pool2d([1, 1])
        }),
        case("upsample_nearest2d", images(), NEAREST, nearest),
        case("upsample_bilinear2d", images(), BILINEAR, |x| {
            x[0].upsample_bilinear2d([12, 9], false, None, None)
        }),
        case("adaptive_max_pool2d", images(), ADAPTIVE_MAX, |x| x[0].adaptive_max_pool2d([2, 3])),
        case("pad by reflection", images(), REFLECTED, |x| x[0].pad([1, 1, 2, 2], "reflect", None)),
        case("pad by replication", images(), REPLICATED, |x| {
            x[0].pad([1, 1, 2, 2], "replicate", None)
        }),
        case("max_pool1d", [normal([5, 3, 8])], &[], |x| x[0].max_pool1d(2, 2, 0, 1, false)),
    ]
}
