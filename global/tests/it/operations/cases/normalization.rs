//! Normalizations.

use tch::Tensor;

use super::case::{Case, case, normal, positive};

const LAYER: &[&str] = &["native_layer_norm", "native_layer_norm_backward"];
const GROUP: &[&str] = &["native_group_norm", "native_group_norm_backward"];
const BATCH: &[&str] = &["native_batch_norm", "native_batch_norm_backward"];

pub fn cases() -> Vec<Case> {
    let images = || normal([5, 4, 3, 3]);
    let channels = || [images(), normal([4]), normal([4])];
    let statistics =
        || [images(), normal([4]), normal([4]), normal([4]).constant(), positive([4]).constant()];
    vec![
        case("layer_norm", [normal([5, 4, 6]), normal([6]), normal([6])], LAYER, |x| {
            x[0].layer_norm([6], Some(&x[1]), Some(&x[2]), 1e-5, false)
        }),
        case(
            "layer_norm of 2 dimensions",
            [normal([5, 4, 6]), normal([4, 6]), normal([4, 6])],
            LAYER,
            |x| x[0].layer_norm([4, 6], Some(&x[1]), Some(&x[2]), 1e-5, false),
        ),
        case("layer_norm without weights", [normal([5, 6])], LAYER, |x| {
            x[0].layer_norm([6], None::<Tensor>, None::<Tensor>, 1e-5, false)
        }),
        case("layer_norm of all", [normal([6]), normal([6]), normal([6])], LAYER, |x| {
            x[0].layer_norm([6], Some(&x[1]), Some(&x[2]), 1e-5, false)
        }),
        case("native_layer_norm", [normal([5, 6]), normal([6]), normal([6])], LAYER, |x| {
            x[0].native_layer_norm([6], Some(&x[1]), Some(&x[2]), 1e-5)
        }),
        case("batch_norm in training", channels(), BATCH, |x| {
            x[0].batch_norm(Some(&x[1]), Some(&x[2]), None, None, true, 0.1, 1e-5, false)
        }),
        case("batch_norm in training, no weights", [images()], BATCH, |x| {
            x[0].batch_norm(None::<Tensor>, None, None, None, true, 0.1, 1e-5, false)
        }),
        case("batch_norm in training, with statistics", statistics(), BATCH, |x| {
            let (mean, variance) = (x[3].copy(), x[4].copy());
            let y = x[0].batch_norm(
                Some(&x[1]),
                Some(&x[2]),
                Some(&mean),
                Some(&variance),
                true,
                0.3,
                1e-5,
                false,
            );
            vec![y, mean, variance]
        }),
        case("batch_norm in use", statistics(), BATCH, |x| {
            x[0].batch_norm(
                Some(&x[1]),
                Some(&x[2]),
                Some(&x[3]),
                Some(&x[4]),
                false,
                0.3,
                1e-5,
                false,
            )
        }),
        case("batch_norm of rows", [normal([7, 4]), normal([4]), normal([4])], BATCH, |x| {
            x[0].batch_norm(Some(&x[1]), Some(&x[2]), None, None, true, 0.1, 1e-5, false)
        }),
        case("native_batch_norm", channels(), BATCH, |x| {
            x[0].native_batch_norm(Some(&x[1]), Some(&x[2]), None, None, true, 0.1, 1e-5).0
        }),
        case("_native_batch_norm_legit", statistics(), &["_native_batch_norm_legit"], |x| {
            let (mean, variance) = (x[3].copy(), x[4].copy());
            let y = x[0].internal_native_batch_norm_legit(
                Some(&x[1]),
                Some(&x[2]),
                &mean,
                &variance,
                true,
                0.3,
                1e-5,
            );
            vec![y.0, mean, variance]
        }),
        case("instance_norm", channels(), &[], |x| {
            x[0].instance_norm(Some(&x[1]), Some(&x[2]), None, None, true, 0.1, 1e-5, false)
        }),
        case("group_norm", channels(), GROUP, |x| {
            x[0].group_norm(2, Some(&x[1]), Some(&x[2]), 1e-5, false)
        }),
        case("group_norm without weights", [images()], GROUP, |x| {
            x[0].group_norm(4, None::<Tensor>, None, 1e-5, false)
        }),
        case("group_norm, channels last", [images().channels_last(), normal([4])], GROUP, |x| {
            x[0].group_norm(2, Some(&x[1]), None, 1e-5, false)
        }),
        case("batch norm without running statistics", [normal([4, 3, 2, 2])], &[], |x| {
            let no = None::<&Tensor>;
            let norm = Tensor::internal_native_batch_norm_legit_no_stats;
            norm(&x[0], no, no, true, 0.1, 1e-5).0 * 2.0
        }),
        case("weight norm by hand", [normal([5, 6]), normal([5, 1])], &["norm"], |x| {
            &x[0] / x[0].norm_scalaropt_dim(2, [1i64], true) * &x[1]
        }),
    ]
}
