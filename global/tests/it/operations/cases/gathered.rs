//! Operations without a rule: all their inputs are made B.

use tch::{Kind, Tensor};

use super::case::{Case, Input, case, ints, normal};

fn lstm_inputs() -> [Input; 5] {
    [normal([4, 3, 6]), normal([8, 6]), normal([8, 2]), normal([8]), normal([8])]
}

fn lstm(x: &[Tensor]) -> (Tensor, Tensor, Tensor) {
    let state = Tensor::zeros([1, 4, 2], (x[0].kind(), x[0].device()));
    x[0].lstm(&[state.shallow_clone(), state], &x[1..], true, 1, 0.0, true, false, true)
}

pub fn cases() -> Vec<Case> {
    let square = || [normal([5, 5])];
    vec![
        case("svd", [normal([5, 4])], &[], |x| x[0].svd(true, true).1),
        case("qr", [normal([5, 4]).constant()], &[], |x| Tensor::linalg_qr(&x[0], "reduced")),
        case("cholesky", square(), &[], |x| {
            let positive = x[0].matmul(&x[0].tr()) + Tensor::eye(5, (Kind::Double, x[0].device()));
            positive.linalg_cholesky(false)
        }),
        case("solve, inverse, det", [normal([4, 4]), normal([4, 2])], &[], |x| {
            let a = &x[0] + Tensor::eye(4, (Kind::Double, x[0].device())) * 5.0;
            vec![Tensor::linalg_solve(&a, &x[1], true), a.inverse(), a.det()]
        }),
        case("repeat_interleave", [normal([5, 6])], &[], |x| {
            x[0].repeat_interleave_self_int(2, 0, None)
        }),
        case(
            "float_power, selu, log_sigmoid, median",
            [normal([5, 6]), normal([6]).constant()],
            &[],
            |x| {
                let power = x[1].abs().ceil().detach();
                vec![x[0].float_power(&power), x[0].selu(), x[0].log_sigmoid(), x[0].median()]
            },
        ),
        case("cdist", [normal([5, 3]), normal([4, 3])], &[], |x| {
            Tensor::cdist(&x[0], &x[1], 2.0, None)
        }),
        case("cosine_similarity", [normal([5, 6]), normal([5, 6])], &[], |x| {
            Tensor::cosine_similarity(&x[0], &x[1], 1, 1e-8)
        }),
        case("unique", [ints(4, [9])], &[], |x| {
            vec![
                x[0].internal_unique2(true, true, true).0,
                x[0].unique_consecutive(false, true, None).2,
            ]
        }),
        case("meshgrid, block_diag", [normal([5]), normal([3])], &[], |x| {
            Tensor::meshgrid(x).into_iter().chain([Tensor::block_diag(x)]).collect::<Vec<_>>()
        }),
        case("fft", [normal([5, 6])], &[], |x| x[0].fft_rfft(None, 1, "backward").view_as_real()),
        case("lstm", lstm_inputs(), &[], lstm),
        // By oneDNN, whose kernel keeps more for backward where gradients are asked for.
        case("lstm in f32", lstm_inputs().map(|input| input.kind(Kind::Float)), &[], |x| {
            let _ = tch::no_grad(|| lstm(x));
            lstm(x)
        })
        .in_single(),
        case(
            "gru",
            [normal([4, 3, 6]), normal([6, 6]), normal([6, 2]), normal([6]), normal([6])],
            &[],
            |x| {
                let state = Tensor::zeros([1, 4, 2], (Kind::Double, x[0].device()));
                x[0].gru(&state, &x[1..], true, 1, 0.0, true, false, true)
            },
        ),
        case("embedding_bag", [normal([9, 6]), ints(9, [8])], &[], |x| {
            let offsets = Tensor::from_slice(&[0i64, 3, 5]).to_device(x[0].device());
            Tensor::embedding_bag::<Tensor>(&x[0], &x[1], &offsets, false, 1, false, None, false).0
        }),
        case("as_strided", [normal([5, 6])], &[], |x| x[0].as_strided([3, 2], [6, 2], 1) * 2.0),
        case("triplet loss", [normal([5, 6]), normal([5, 6]), normal([5, 6])], &[], |x| {
            let mean = tch::Reduction::Mean;
            Tensor::triplet_margin_loss(&x[0], &x[1], &x[2], 1.0, 2.0, 1e-6, false, mean)
        }),
    ]
}
