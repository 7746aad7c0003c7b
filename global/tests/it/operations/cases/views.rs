//! Views, and what only moves elements.

use tch::{IndexOp, Kind, Tensor};

use super::case::{Case, Input, bools, case, ints, normal};

pub fn cases() -> Vec<Case> {
    [moved(), reshaped(), parts(), joined(), chains()].into_iter().flatten().collect()
}

const NONE: &[i64] = &[];
const COMPLEX: &[&str] = &["angle", "complex", "polar"];

fn wide() -> [Input; 1] {
    [normal([5, 4, 6])]
}

fn moved() -> Vec<Case> {
    vec![
        case("t", [normal([5, 6])], &["t"], |x| x[0].tr() * 2.0),
        case("t of a vector", [normal([5])], &["t"], |x| x[0].tr() * 2.0),
        case("transpose", wide(), &["transpose"], |x| x[0].transpose(0, -1) * 2.0),
        case("permute", wide(), &["permute"], |x| x[0].permute([2, 0, 1]) * 2.0),
        case("permute from the end", wide(), &["permute"], |x| x[0].permute([-1, -3, -2]) * 2.0),
        case("movedim", wide(), &["permute"], |x| x[0].movedim([0i64], [2i64]) * 2.0),
        case("swapaxes", wide(), &["transpose"], |x| x[0].swapaxes(0, 1) * 2.0),
        case("unsqueeze", wide(), &["unsqueeze"], |x| {
            vec![x[0].unsqueeze(0) * 2.0, x[0].unsqueeze(2) * 2.0, x[0].unsqueeze(-1) * 2.0]
        }),
        case("squeeze", [normal([1, 5, 1, 6])], &["squeeze"], |x| {
            vec![
                x[0].squeeze() * 2.0,
                x[0].squeeze_dim(2) * 2.0,
                x[0].squeeze_dim(1) * 2.0,
                x[0].squeeze_dims([0i64, 2]) * 2.0,
            ]
        }),
        case("expand", [normal([5, 1, 6])], &["expand"], |x| {
            vec![
                x[0].expand([5, 3, 6], false) * 2.0,
                x[0].expand([2, -1, 4, -1], false) * 2.0,
                x[0].expand([5, 1, 6], false) * 2.0,
            ]
        }),
        case("expand of a number", [normal([])], &["expand"], |x| x[0].expand([5, 6], false) * 2.0),
        case("expand_as", [normal([6]), normal([5, 6])], &["expand"], |x| {
            x[0].expand_as(&x[1]) * &x[1]
        }),
        case("flip", wide(), &["flip"], |x| vec![x[0].flip([0i64]), x[0].flip([1i64, -1])]),
        case("roll", wide(), &["roll"], |x| {
            vec![x[0].roll([2], [1]), x[0].roll([1, -1], [0, 2]), x[0].roll([3], &[] as &[i64])]
        }),
        case("repeat", wide(), &["repeat"], |x| {
            vec![x[0].repeat([1, 2, 1]), x[0].repeat([2, 1, 1, 3]), x[0].repeat([1, 0, 1])]
        }),
        case("pixel_shuffle", [normal([3, 8, 2, 4])], &["pixel_shuffle", "pixel_unshuffle"], |x| {
            vec![x[0].pixel_shuffle(2), x[0].pixel_unshuffle(2)]
        }),
        case("complex numbers", [normal([5, 6, 2])], &["view_as_complex", "view_as_real"], |x| {
            let complex = x[0].view_as_complex();
            (&complex * &complex).view_as_real()
        }),
        case("conj bits", [normal([5, 6, 2])], &["_conj", "_neg_view"], |x| {
            let conj = x[0].view_as_complex().conj();
            vec![
                conj.real(),
                conj.imag(),
                conj.imag().resolve_neg() * 2.0,
                conj.resolve_conj().view_as_real(),
                conj.conj().view_as_real(),
                conj.transpose(0, 1).select(0, 2).imag().exp(),
                conj.view([-1]).imag(),
                (&conj * 2.0).imag(),
                conj.copy().view_as_real(),
                conj.matmul(&conj.mh()).view_as_real(),
            ]
        }),
        case("conj bits that stay", [normal([5, 6, 2])], &["_conj", "_neg_view"], |x| {
            let conj = x[0].view_as_complex().conj();
            vec![conj.shallow_clone(), conj.transpose(0, 1), conj.imag(), conj.imag().tr()]
        }),
        case("conj_physical", [normal([5, 6, 2])], &["_conj_physical", "conj_physical"], |x| {
            let complex = x[0].view_as_complex();
            vec![complex.conj_physical().imag(), complex.copy().conj_physical_().view_as_real()]
        }),
        case("parts of complex numbers", [normal([5, 6]), normal([6])], COMPLEX, |x| {
            let complex = Tensor::complex(&x[0], &x[1].expand_as(&x[0]));
            vec![
                complex.real(),
                complex.imag() * &x[1],
                complex.angle(),
                Tensor::polar(&x[0].abs(), &x[1].expand_as(&x[0])).imag(),
            ]
        }),
        case("tril, triu", wide(), &["tril", "triu"], |x| {
            vec![x[0].tril(0), x[0].triu(1), x[0].tril(-1)]
        }),
        case("pad", wide(), &["constant_pad_nd"], |x| {
            vec![
                x[0].constant_pad_nd([1, 2]),
                x[0].constant_pad_nd([0, 0, 2, 1]),
                x[0].pad([1, 1], "constant", 3.5),
                x[0].constant_pad_nd([-1, -2]),
            ]
        }),
    ]
}

fn reshaped() -> Vec<Case> {
    let view = |shape: &'static [i64]| move |x: &[Tensor]| x[0].view(shape) * 2.0;
    let reshape = |shape: &'static [i64]| move |x: &[Tensor]| x[0].reshape(shape) * 2.0;
    vec![
        case("view, the first is taken apart", [normal([12, 5])], &["view"], view(&[2, 2, 3, 5])),
        case("view, the last is taken apart", [normal([5, 12])], &["view"], view(&[5, 4, 3])),
        case("view, all are taken together", wide(), &["view"], view(&[-1])),
        case("view, the first are taken together", wide(), &["view"], view(&[20, 6])),
        case("view, the last are taken together", wide(), &["view"], view(&[5, -1])),
        case("view, groups", [normal([4, 6, 6, 4])], &["view"], view(&[24, 2, 3, 4])),
        case("view, other cuts", [normal([4, 6])], &["view"], view(&[3, 8])),
        case("view, ones", [normal([1, 6, 1])], &["view"], view(&[6, 1, 1, 1])),
        case("view of a number", [normal([])], &["view"], view(&[1, 1])),
        case("view as a number", [normal([1, 1])], &["view"], view(&[])),
        case("view of nothing", [normal([0, 4])], &["view"], view(&[2, 0, 2])),
        case("reshape", wide(), &["view"], reshape(&[10, 12])),
        case("reshape of transposed", [normal([4, 6]).transposed()], &["view"], reshape(&[24])),
        case("reshape after transpose", wide(), &["_unsafe_view", "clone"], |x| {
            x[0].transpose(0, 1).reshape([4, 30]) * 2.0
        }),
        case("reshape of ints", [ints(9, [5, 4, 6])], &["view"], |x| x[0].reshape([20, 6])),
        case("flatten", wide(), &["view"], |x| {
            x[0].flatten(1, 2) * x[0].flatten(0, -1).view([5, 24])
        }),
        case("heads", [normal([4, 5, 12])], &["view", "transpose"], |x| {
            let heads = x[0].view([4, 5, 3, 4]).transpose(1, 2);
            heads.transpose(1, 2).contiguous().view([4, 5, 12]) * 2.0
        }),
        case("_unsafe_view", wide(), &["_unsafe_view"], |x| {
            x[0].internal_unsafe_view([20, 6]) * 2.0
        }),
        case("_reshape_alias", wide(), &[], |x| x[0].internal_reshape_alias([20, 6], [6, 1]) * 2.0),
        case(
            "view of other kinds",
            [normal([5, 4]).kind(Kind::Float).constant()],
            &["view"],
            |x| {
                // The bits of a sum, with the last ones of rounding.
                vec![x[0].view_dtype(Kind::Int).to_kind(Kind::Double), x[0].view([20])]
            },
        )
        .in_single(),
        case("squeeze of no dimensions", [normal([1, 4])], &["squeeze"], |x| {
            vec![x[0].squeeze_dims(NONE) * 2.0, x[0].squeeze_dims([0, 1]) * 2.0]
        }),
        case("view_copy", wide(), &["view_copy"], |x| x[0].view_copy([20, 6]) * 2.0),
        case(
            "reshape_as, view_as",
            [normal([5, 12]), normal([10, 6]).constant()],
            &["view"],
            |x| x[0].reshape_as(&x[1]) * x[0].view_as(&x[1]),
        ),
    ]
}

fn parts() -> Vec<Case> {
    vec![
        case("select", wide(), &["select", "select_backward"], |x| {
            vec![x[0].select(0, 1) * 2.0, x[0].select(1, -1) * 2.0, x[0].get(2) * 2.0]
        }),
        case("slice", wide(), &["slice", "slice_backward"], |x| {
            vec![
                x[0].slice(0, 1, 3, 1) * 2.0,
                x[0].slice(2, None, None, 2) * 2.0,
                x[0].slice(1, -3, None, 1) * 2.0,
                x[0].slice(2, 1, 100, 3) * 2.0,
            ]
        }),
        case("slice of nothing", wide(), &["slice"], |x| x[0].slice(0, 2, 2, 1) * 2.0),
        case("narrow", wide(), &["slice"], |x| x[0].narrow(0, 1, 3) * x[0].narrow(0, 2, 3)),
        case("indexing", wide(), &["slice", "select"], |x| {
            vec![x[0].i((1.., 0)) * 2.0, x[0].i((.., 1..3, 5)) * 2.0, x[0].i((-1, .., ..2)) * 2.0]
        }),
        case("split", wide(), &["split"], |x| {
            let parts = x[0].split(2, 0).into_iter().chain(x[0].split(3, 2));
            parts.map(|part| part * 2.0).collect::<Vec<_>>()
        }),
        case("split with sizes", wide(), &["split_with_sizes"], |x| {
            let parts = x[0].split_with_sizes([1i64, 0, 4], 0);
            parts.into_iter().map(|part| part * 2.0).collect::<Vec<_>>()
        }),
        case("chunk", wide(), &["split"], |x| {
            let parts = x[0].chunk(3, 1).into_iter().chain(x[0].chunk(2, -1));
            parts.map(|part| part * 2.0).collect::<Vec<_>>()
        }),
        case("unbind", wide(), &["unbind"], |x| {
            let parts = x[0].unbind(1).into_iter().chain(x[0].unbind(0));
            parts.map(|part| part * 2.0).collect::<Vec<_>>()
        }),
        case("some of the parts", wide(), &["split", "unbind"], |x| {
            &x[0].split(2, 2)[1] * x[0].unbind(2)[3].unsqueeze(2)
        }),
        case("diagonal", wide(), &["diagonal", "diagonal_backward"], |x| {
            vec![x[0].diagonal(1, 0, 1) * 2.0, x[0].diagonal(0, 2, -2) * 2.0]
        }),
        case("unfold", wide(), &["unfold", "unfold_backward"], |x| {
            vec![x[0].unfold(1, 3, 2) * 2.0, x[0].unfold(-1, 2, 2) * 2.0]
        }),
    ]
}

fn joined() -> Vec<Case> {
    let three = || [normal([5, 4]), normal([5, 4]), normal([5, 4])];
    vec![
        case("cat", [normal([5, 4]), normal([3, 4])], &["cat"], |x| Tensor::cat(x, 0)),
        case("cat of columns", [normal([5, 4]), normal([5, 1]), normal([5, 3])], &["cat"], |x| {
            Tensor::cat(x, -1)
        }),
        case("cat with nothing", [normal([5, 4]), normal([0, 4]), normal([2, 4])], &["cat"], |x| {
            Tensor::cat(x, 0)
        }),
        case("cat with an empty vector", [normal([5, 4]), normal([0]).constant()], &["cat"], |x| {
            Tensor::cat(x, 1)
        }),
        case("cat of one tensor twice", [normal([5, 4])], &["cat"], |x| {
            Tensor::cat(&[&x[0], &x[0]], 0)
        }),
        case("cat of kinds", [normal([5, 4]), ints(5, [5, 4])], &["cat"], |x| Tensor::cat(x, 0)),
        case("cat of bools", [bools([5, 4]), bools([5, 4])], &["cat"], |x| Tensor::cat(x, 1)),
        case("stack", three(), &["stack"], |x| {
            vec![Tensor::stack(x, 0), Tensor::stack(x, 1), Tensor::stack(x, -1)]
        }),
        case("vstack, hstack", three(), &["cat"], |x| vec![Tensor::vstack(x), Tensor::hstack(x)]),
    ]
}

/// Views of views.
fn chains() -> Vec<Case> {
    vec![
        case("transpose, narrow, select", wide(), &["transpose", "slice", "select"], |x| {
            x[0].transpose(0, 1).narrow(1, 1, 2).select(1, 0) * 2.0
        }),
        case("view of a transpose of a view", wide(), &["view", "transpose"], |x| {
            x[0].view([5, 2, 2, 6]).transpose(0, 1).select(2, 1).unsqueeze(0) * 2.0
        }),
        case("back and forth", wide(), &["permute", "squeeze"], |x| {
            x[0].unsqueeze(1).permute([3, 1, 0, 2]).permute([2, 1, 3, 0]).squeeze_dim(1) * 2.0
        }),
        case("a view and its base", wide(), &["add", "select"], |x| {
            x[0].select(1, 0).unsqueeze(1) + &x[0] + x[0].narrow(1, 2, 1)
        }),
    ]
}
