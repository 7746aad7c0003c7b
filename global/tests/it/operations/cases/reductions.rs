//! Operations over dimensions.

use tch::{Kind, Tensor};

use super::case::{Case, between, bools, case, ints, normal, options, positive};

pub fn cases() -> Vec<Case> {
    [sums(), extremes(), moments(), orders(), softmaxes()].into_iter().flatten().collect()
}

const DOUBLE: Kind = Kind::Double;
const NONE: &[i64] = &[];

fn sums() -> Vec<Case> {
    let wide = || [normal([5, 4, 6])];
    vec![
        case("sum", wide(), &["sum"], |x| x[0].sum(DOUBLE)),
        case("sum of a number", [normal([])], &["sum"], |x| x[0].sum(DOUBLE)),
        case("sum of nothing", [normal([0, 4])], &["sum"], |x| x[0].sum(DOUBLE)),
        case("sum over a dimension", wide(), &["sum"], |x| {
            x[0].sum_dim_intlist([1i64].as_slice(), false, DOUBLE)
        }),
        case("sum over dimensions, kept", wide(), &["sum"], |x| {
            x[0].sum_dim_intlist([0i64, -1].as_slice(), true, DOUBLE)
        }),
        case("sum over dimensions", wide(), &["sum"], |x| {
            x[0].sum_dim_intlist([0i64, 2].as_slice(), false, DOUBLE)
        }),
        case("sum of bools", [bools([5, 6])], &["sum"], |x| x[0].sum(Kind::Int64)),
        case("sum of ints", [ints(9, [5, 6])], &["sum"], |x| {
            x[0].sum_dim_intlist([0i64].as_slice(), false, Kind::Int64)
        }),
        case("sum of f32 in f64", [normal([5, 6]).kind(Kind::Float)], &["sum"], |x| {
            x[0].sum(DOUBLE)
        })
        .in_single(),
        case("mean", wide(), &["mean"], |x| x[0].mean(DOUBLE)),
        case("mean over a dimension, kept", wide(), &["mean"], |x| {
            x[0].mean_dim([-1i64].as_slice(), true, DOUBLE)
        }),
        case("mean over dimensions", wide(), &["mean"], |x| {
            x[0].mean_dim([0i64, 1].as_slice(), false, DOUBLE)
        }),
        case("mean in bf16", [positive([5, 6]).kind(Kind::BFloat16)], &["mean"], |x| {
            x[0].mean(None::<Kind>)
        }),
        case("prod", [positive([5, 6])], &["prod"], |x| x[0].prod(DOUBLE)),
        case("prod over a dimension", [positive([5, 6])], &["prod"], |x| {
            vec![x[0].prod_dim_int(0, false, DOUBLE), x[0].prod_dim_int(1, true, DOUBLE)]
        }),
        case("any", [bools([5, 6])], &["any"], |x| {
            vec![x[0].any(), x[0].any_dim(0, false), x[0].any_dim(1, true)]
        }),
        case("all", [bools([5, 6])], &["all"], |x| {
            vec![x[0].all(), x[0].all_dim(0, false), x[0].all_dim(1, true)]
        }),
        case("any, all of no dimensions", [bools([5, 6])], &["any", "all"], |x| {
            vec![
                x[0].any_dims(NONE, false),
                x[0].all_dims(NONE, true),
                x[0].any_dims(&[0_i64, 1][..], true),
            ]
        }),
        case("sums as integers", [normal([5, 6]).constant()], &["sum", "cumsum"], |x| {
            vec![
                x[0].sum(Kind::Int64),
                x[0].sum_dim_intlist(0, false, Kind::Int64),
                x[0].cumsum(0, Kind::Int64),
                x[0].to_kind(Kind::Int64).sum(Kind::Int),
            ]
        }),
        case("cumsum", wide(), &["cumsum"], |x| {
            vec![x[0].cumsum(1, DOUBLE), x[0].cumsum(-1, DOUBLE)]
        }),
        case("cumprod", [positive([5, 6])], &["cumprod"], |x| {
            vec![x[0].cumprod(1, DOUBLE), x[0].cumprod(0, DOUBLE)]
        }),
        case("cummax, cummin", [normal([5, 6])], &["cummax", "cummin"], |x| {
            let (max, at) = x[0].cummax(0);
            vec![max, at, x[0].cummin(1).0]
        }),
        case("logcumsumexp", [normal([5, 6])], &["logcumsumexp"], |x| x[0].logcumsumexp(-1)),
        case("logsumexp", wide(), &["logsumexp"], |x| {
            vec![x[0].logsumexp([1i64], false), x[0].logsumexp([0i64, 2], true)]
        }),
    ]
}

fn extremes() -> Vec<Case> {
    let wide = || [normal([5, 6])];
    let constant = || [normal([5, 6]).constant()];
    vec![
        case("max", wide(), &["max"], |x| x[0].max()),
        case("min", wide(), &["min"], |x| x[0].min()),
        case("max over a dimension", wide(), &["max"], |x| x[0].max_dim(1, false)),
        case("min over a dimension, kept", wide(), &["min"], |x| x[0].min_dim(0, true)),
        case("max of two", [normal([5, 6]), normal([6])], &["maximum"], |x| x[0].max_other(&x[1])),
        case("amax", wide(), &["amax"], |x| {
            vec![x[0].amax([0i64], false), x[0].amax([0i64, 1], true)]
        }),
        case("amin", wide(), &["amin"], |x| {
            vec![x[0].amin([1i64], true), x[0].amin([0i64, 1], false)]
        }),
        case("max of ints", [ints(99, [5, 6])], &["max", "amax"], |x| {
            vec![x[0].max(), x[0].amax([0i64], false)]
        }),
        case("argmax", constant(), &["argmax"], |x| {
            vec![x[0].argmax(None, false), x[0].argmax(1, false), x[0].argmax(0, true)]
        }),
        case("argmin", constant(), &["argmin"], |x| {
            vec![x[0].argmin(None, false), x[0].argmin(-1, false), x[0].argmin(0, true)]
        }),
    ]
}

fn moments() -> Vec<Case> {
    let wide = || [normal([5, 4, 6])];
    let norms: fn(&[Tensor]) -> Vec<Tensor> = |x| {
        vec![
            x[0].norm_scalaropt_dim(2, [1i64], false),
            x[0].norm_scalaropt_dim(1, [0i64, 2], true),
            x[0].norm_scalaropt_dtype(3, DOUBLE),
            x[0].norm_scalaropt_dim(f64::INFINITY, [0i64, 1, 2], false),
        ]
    };
    vec![
        case("var", wide(), &["var"], |x| x[0].var(true)),
        case("var over a dimension", wide(), &["var"], |x| {
            vec![
                x[0].var_dim([0i64].as_slice(), true, false),
                x[0].var_dim([1i64, 2].as_slice(), false, true),
            ]
        }),
        case("std", wide(), &["std"], |x| x[0].std(true)),
        case("std over a dimension", wide(), &["std"], |x| {
            x[0].std_dim([2i64].as_slice(), false, true)
        }),
        case("var_mean", wide(), &["var_mean"], |x| {
            x[0].var_mean_dim([0i64, 1].as_slice(), true, false)
        }),
        case("norm", wide(), &["norm"], |x| x[0].norm()),
        case("norms", wide(), &["norm"], norms),
        case("linalg_vector_norm", wide(), &["linalg_vector_norm"], |x| {
            let whole: Option<&[i64]> = None;
            vec![
                x[0].view([-1]).linalg_norm(3, whole, true, DOUBLE),
                x[0].linalg_norm(2, [0i64].as_slice(), false, DOUBLE),
            ]
        }),
        case("norm of zeros and nothing", [normal([0, 4])], &["norm"], |x| x[0].norm()),
        case("norm in another kind", [normal([5, 6]).kind(Kind::Float)], &["norm"], |x| {
            vec![
                x[0].norm_scalaropt_dtype(2, DOUBLE),
                x[0].norm_scalaropt_dim_dtype(1, [1i64], true, DOUBLE),
            ]
        })
        .in_single(),
        case("trace", [normal([5, 5])], &["trace"], |x| x[0].trace()),
        case("counting norm", [ints(2, [5, 6]).kind(DOUBLE)], &["norm"], |x| {
            x[0].norm_scalaropt_dim(0, [0i64, 1], false)
        }),
    ]
}

fn orders() -> Vec<Case> {
    let wide = || [normal([5, 6])];
    let constant = || [normal([5, 6]).constant()];
    vec![
        case("sort", wide(), &["sort"], |x| x[0].sort(1, false)),
        case("sort, stable", wide(), &["sort"], |x| x[0].sort_stable(true, 0, true)),
        case("argsort", constant(), &["sort"], |x| {
            vec![x[0].argsort(-1, false), x[0].argsort_stable(true, 0, true)]
        }),
        case("topk", wide(), &["topk"], |x| x[0].topk(3, 1, true, true)),
        case("kthvalue", wide(), &["kthvalue"], |x| {
            vec![x[0].kthvalue(2, 1, false).0, x[0].kthvalue(3, 0, true).0]
        }),
        case("median", wide(), &["median"], |x| {
            vec![x[0].median_dim(1, false).0, x[0].median_dim(0, true).0]
        }),
        case("nanmedian", wide(), &["nanmedian"], |x| {
            vec![x[0].nanmedian_dim(1, false).0, x[0].nanmedian_dim(0, true).0]
        }),
        case("mode", [ints(3, [5, 6])], &["mode"], |x| x[0].mode(1, false).0),
        case("bucketize", [normal([5, 6]).constant()], &["bucketize"], |x| {
            x[0].bucketize(&Tensor::linspace(-2, 2, 5, options()), false, false)
        }),
        case("bucketize of a number", [normal([5]).constant()], &[], |x| {
            Tensor::bucketize_scalar(0.5, &x[0].sort(0, false).0, false, false)
        }),
        case("topk of columns", wide(), &["topk"], |x| x[0].topk(2, 0, false, true)),
    ]
}

fn softmaxes() -> Vec<Case> {
    let wide = || [between(-4.0, 4.0, [5, 4, 6])];
    const COVERS: &[&str] = &["_softmax", "_softmax_backward_data"];
    const LOG_COVERS: &[&str] = &["_log_softmax", "_log_softmax_backward_data"];
    vec![
        case("softmax", wide(), COVERS, |x| x[0].softmax(-1, DOUBLE)),
        case("softmax of dimension 0", wide(), COVERS, |x| x[0].softmax(0, DOUBLE)),
        case("glu", [normal([5, 4, 6])], &["glu", "glu_backward"], |x| {
            vec![x[0].glu(-1), x[0].glu(1)]
        }),
        case("softmax of a vector", [normal([7])], COVERS, |x| x[0].softmax(0, DOUBLE)),
        case("softmax of f32 in f64", [normal([5, 6]).kind(Kind::Float)], COVERS, |x| {
            x[0].softmax(1, DOUBLE)
        })
        .in_single(),
        case("log_softmax", wide(), LOG_COVERS, |x| x[0].log_softmax(-1, DOUBLE)),
        case("log_softmax of dimension 1", wide(), LOG_COVERS, |x| x[0].log_softmax(1, DOUBLE)),
        case("masked softmax", [normal([5, 6])], &["_softmax", "masked_fill"], |x| {
            let mask = Tensor::ones([5, 6], options()).tril(0).eq(0.0);
            x[0].masked_fill(&mask, f64::NEG_INFINITY).softmax(-1, DOUBLE)
        }),
        case("safe softmax", [normal([5, 6])], &["_safe_softmax"], |x| {
            x[0].internal_safe_softmax(-1, None)
        }),
    ]
}
