//! Scaled dot-product attention.

use tch::{Kind, Tensor};

use super::case::{Case, Input, bools, case, normal, options};

const COVERS: &[&str] = &[
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
];

pub fn cases() -> Vec<Case> {
    let heads = || normal([2, 4, 5, 3]);
    let three = || [heads(), heads(), heads()];
    let attention = |mask: Option<&Tensor>, is_causal: bool, x: &[Tensor]| {
        Tensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], mask, 0.0, is_causal, None, false)
    };
    let mut all = vec![
        case("attention", three(), COVERS, move |x| attention(None, false, x)),
        case("causal attention", three(), COVERS, move |x| attention(None, true, x)),
        case(
            "attention to other words",
            [heads(), normal([2, 4, 7, 3]), normal([2, 4, 7, 3])],
            COVERS,
            move |x| attention(None, false, x),
        ),
        case("attention with a mask", with(three(), normal([5, 5]).constant()), COVERS, move |x| {
            attention(Some(&x[3]), false, x)
        }),
        case(
            "attention with a mask, as many words as samples and heads",
            with([(); 3].map(|()| normal([4, 4, 4, 3])), normal([4, 4]).constant()),
            COVERS,
            move |x| attention(Some(&x[3]), false, x),
        ),
        case(
            "attention with a mask for each head",
            with(three(), normal([2, 4, 5, 5]).constant()),
            COVERS,
            move |x| attention(Some(&x[3]), false, x),
        ),
        case(
            "attention with a mask of bools",
            with(three(), bools([2, 1, 5, 5])),
            COVERS,
            move |x| {
                let mask =
                    x[3].logical_or(&Tensor::ones([5, 5], (Kind::Bool, x[3].device())).tril(0));
                attention(Some(&mask), false, x)
            },
        ),
        case("attention by hand", three(), &["bmm", "_softmax", "masked_fill"], |x| {
            let mask = Tensor::ones([5, 5], (Kind::Double, x[0].device())).tril(0).eq(0.0);
            let scores = x[0].matmul(&x[1].transpose(-2, -1)) / 3f64.sqrt();
            scores.masked_fill(&mask, -1e9).softmax(-1, Kind::Double).matmul(&x[2])
        }),
        case(
            "attention of 3 dimensions",
            [normal([4, 5, 3]), normal([4, 5, 3]), normal([4, 5, 3])],
            &[],
            move |x| attention(None, true, x),
        ),
    ];
    // libtorch's fast kernels on GPUs know these kinds only; on CPUs bf16 may want AMX.
    let kinds: &[Kind] = if options().1.is_cuda() {
        &[Kind::Float, Kind::Half, Kind::BFloat16]
    } else {
        &[Kind::Float]
    };
    for &kind in kinds {
        let heads = || normal([2, 4, 16, 16]).kind(kind);
        let name = format!("causal attention in {kind:?}");
        all.push(case(&name, [heads(), heads(), heads()], COVERS, move |x| {
            attention(None, true, x)
        }));
    }
    all
}

fn with(inputs: [Input; 3], mask: Input) -> Vec<Input> {
    inputs.into_iter().chain([mask]).collect()
}
