//! Operations in place, on tensors and on views of them, and into tensors that are given (`out=`).

use tch::{Kind, Reduction, Tensor};

use super::case::{Case, between, bools, case, ints, normal, options, positive};

pub fn cases() -> Vec<Case> {
    [of_tensors(), of_views(), outs(), shapes()].into_iter().flatten().collect()
}

/// What a view that had to be boxed says: a change of it would not reach its base.
const LOST: &str = "does not share the tensor's memory";

type Change = fn(&mut Tensor);

fn of_tensors() -> Vec<Case> {
    let changes: Vec<(&str, &'static [&'static str], Change)> = vec![
        ("add_ a number", &["add"], |x| drop(x.g_add_scalar_(1.5))),
        ("sub_ a number", &["sub"], |x| drop(x.g_sub_scalar_(1.5))),
        ("mul_ by a number", &["mul"], |x| drop(x.g_mul_scalar_(1.5))),
        ("div_ by a number", &["div"], |x| drop(x.g_div_scalar_(1.5))),
        ("neg_", &["neg"], |x| drop(x.neg_())),
        ("abs_", &["abs"], |x| drop(x.abs_())),
        ("exp_", &["exp"], |x| drop(x.exp_())),
        ("tanh_", &["tanh"], |x| drop(x.tanh_())),
        ("relu_", &["relu"], |x| drop(x.relu_())),
        ("sigmoid_", &["sigmoid"], |x| drop(x.sigmoid_())),
        ("clamp_", &["clamp"], |x| drop(x.clamp_(-1.0, 1.0))),
        ("leaky_relu_", &["leaky_relu"], |x| drop(x.leaky_relu_())),
        ("hardtanh_", &["hardtanh"], |x| drop(x.hardtanh_())),
        ("pow_", &["pow"], |x| drop(x.pow_(2))),
        ("zero_ and fill_", &["zero", "fill"], |x| {
            let _ = x.zero_();
            let _ = x.fill_(2.0);
            let _ = x.g_add_scalar_(1.0);
        }),
        ("triu_", &["triu"], |x| drop(x.triu_(1))),
    ];
    let mut cases: Vec<Case> = changes
        .into_iter()
        .map(|(name, covers, change)| {
            case(name, [normal([5, 6])], covers, move |x| {
                let mut y = x[0].copy();
                change(&mut y);
                &y + &x[0]
            })
        })
        .collect();
    let both = || [normal([5, 6]), normal([5, 6])];
    cases.extend([
        case("add_", both(), &["add"], |x| x[0].copy().g_add_(&x[1])),
        case("add_ of a row", [normal([5, 6]), normal([6])], &["add"], |x| {
            x[0].copy().g_add_(&x[1])
        }),
        case("sub_", both(), &["sub"], |x| x[0].copy().g_sub_(&x[1])),
        case("mul_", both(), &["mul"], |x| x[0].copy().g_mul_(&x[1])),
        case("div_", [normal([5, 6]), positive([5, 6])], &["div"], |x| x[0].copy().g_div_(&x[1])),
        case("addcmul_", [normal([5, 6]), normal([5, 6]), normal([6])], &["addcmul"], |x| {
            x[0].copy().addcmul_(&x[1], &x[2])
        }),
        case("addcdiv_", [normal([5, 6]), normal([5, 6]), positive([5, 6])], &["addcdiv"], |x| {
            x[0].copy().addcdiv_(&x[1], &x[2])
        }),
        case("lerp_", both(), &["lerp"], |x| x[0].copy().lerp_(&x[1], 0.3)),
        case("masked_fill_", [normal([5, 6]), bools([5, 6])], &["masked_fill"], |x| {
            x[0].copy().masked_fill_(&x[1], 2.5)
        }),
        case("copy_", both(), &["copy"], |x| {
            let mut y = &x[0] * 2.0;
            y.copy_(&x[1]);
            y * &x[0]
        }),
        case("copy_ of a row", [normal([5, 6]).constant(), normal([6])], &["copy"], |x| {
            let mut y = x[0].copy();
            y.copy_(&x[1]);
            y
        }),
        case(
            "copy_ of another kind",
            [normal([5, 6]).constant(), ints(9, [5, 6])],
            &["copy"],
            |x| {
                let mut y = x[0].copy();
                y.copy_(&x[1]);
                y
            },
        ),
        case("copy_ into integers", [ints(9, [5, 6]), normal([5, 6]).constant()], &["copy"], |x| {
            let mut y = x[0].copy();
            y.copy_(&x[1]);
            y
        }),
        case("copy_ of a plain tensor", [normal([5, 6]).constant()], &["copy"], |x| {
            let mut y = x[0].copy();
            y.copy_(&Tensor::arange(30, (Kind::Double, y.device())).view([5, 6]));
            y
        }),
        case("addmm_", [normal([5, 7]), normal([5, 6]), normal([6, 7])], &["addmm"], |x| {
            x[0].copy().addmm_(&x[1], &x[2])
        }),
        case(
            "scatter_add_",
            [normal([5, 6]), ints(6, [5, 4]), normal([5, 4])],
            &["scatter_add"],
            |x| x[0].copy().scatter_add_(1, &x[1], &x[2]),
        ),
        case("index_put_", [normal([5, 6]), normal([2, 6])], &[], |x| {
            let rows = Tensor::from_slice(&[0i64, 3]);
            x[0].copy().index_put_(&[Some(rows)], &x[1], false)
        }),
        case("index_add_", [normal([5, 6]), ints(5, [7]), normal([7, 6])], &[], |x| {
            x[0].copy().index_add_(0, &x[1], &x[2])
        }),
        case("cumsum_ and renorm", [normal([5, 6])], &["cumsum"], |x| {
            x[0].copy().cumsum_(1, Kind::Double) * 2.0
        }),
        case("ints in place", [ints(9, [5, 6]), ints(4, [6])], &["add", "mul"], |x| {
            let mut y = x[0].copy();
            let _ = y.g_add_(&x[1]);
            y.g_mul_scalar_(3)
        }),
        case("operators", both(), &["add", "mul"], |x| {
            let mut y = x[0].copy();
            y += &x[1];
            y *= 2.0;
            y -= 1.0;
            y
        }),
        // As an optimizer does.
        case(
            "a step of momentum",
            [normal([5, 6]).constant(), normal([5, 6]).constant()],
            &["add"],
            |x| {
                tch::no_grad(|| {
                    let (mut weight, mut momentum) = (x[0].copy(), x[1].zeros_like());
                    for _ in 0..3 {
                        let _ = momentum.g_mul_scalar_(0.9);
                        let _ = momentum.g_add_(&x[1]);
                        let _ = weight.g_sub_(&(&momentum * 0.1));
                    }
                    (weight, momentum)
                })
            },
        ),
        case(
            "a step of Adam",
            [normal([5, 6]).constant(), normal([5, 6]).constant()],
            &["sqrt"],
            |x| {
                let (mut weight, mut mean) = (x[0].copy(), x[1].zeros_like());
                let mut square = x[1].zeros_like();
                for _ in 0..3 {
                    let _ = mean.g_mul_scalar_(0.9).g_add_(&(&x[1] * 0.1));
                    let _ = square.g_mul_scalar_(0.99).addcmul_(&x[1], &(&x[1] * 0.01));
                    let _ = weight.addcdiv_(&(&mean * -0.1), &(square.sqrt() + 1e-8));
                }
                vec![weight, mean, square]
            },
        ),
    ]);
    cases
}

fn of_views() -> Vec<Case> {
    let matrix = || normal([5, 6]);
    vec![
        case("select().mul_", [matrix(), normal([5])], &["select", "mul"], |x| {
            let y = x[0].copy();
            let _ = y.select(1, 2).g_mul_(&x[1]);
            y * 2.0
        }),
        case("narrow().fill_", [matrix()], &["slice", "fill"], |x| {
            let y = x[0].copy();
            let _ = y.narrow(1, 1, 3).fill_(7.0);
            y * 2.0
        }),
        case("transpose().add_", [matrix(), normal([5])], &["transpose", "add"], |x| {
            let y = x[0].copy();
            let _ = y.transpose(0, 1).g_add_(&x[1]);
            y * 2.0
        }),
        case("view().mul_", [matrix()], &["view", "mul"], |x| {
            let y = x[0].copy();
            let _ = y.view([5, 2, 3]).g_mul_scalar_(3.0);
            y * 2.0
        }),
        case("a view of a view in place", [matrix(), normal([6])], &["transpose", "slice"], |x| {
            let y = x[0].copy();
            let _ = y.transpose(0, 1).narrow(1, 1, 2).select(1, 0).g_mul_(&x[1]);
            y * 2.0
        }),
        case("base in place, seen by its view", [matrix()], &["add", "transpose"], |x| {
            let mut y = x[0].copy();
            let view = y.transpose(0, 1);
            let _ = y.g_add_scalar_(2.0);
            view * 2.0
        }),
        case("unsqueeze().copy_", [matrix(), normal([5, 1, 6])], &["unsqueeze", "copy"], |x| {
            let y = x[0].copy();
            y.unsqueeze(1).copy_(&x[1]);
            y * 2.0
        }),
        case("diagonal().fill_", [normal([5, 5])], &[], |x| {
            let y = x[0].copy();
            let _ = y.diagonal(0, 0, 1).fill_(1.0);
            y * 2.0
        }),
        case("conj().mul_", [normal([5, 6, 2]), normal([6, 2])], &["_conj", "mul"], |x| {
            let y = x[0].view_as_complex().copy();
            let _ = y.conj().g_mul_(&x[1].view_as_complex());
            y.view_as_real() * 2.0
        }),
        case(
            "conj().imag().copy_",
            [normal([5, 6, 2]), normal([6])],
            &["_neg_view", "copy"],
            |x| {
                let y = x[0].view_as_complex().copy();
                y.conj().imag().copy_(&x[1].expand([5, 6], false));
                y.view_as_real() * 2.0
            },
        ),
        case("index by ranges, assigned", [matrix(), normal([5, 2])], &["slice", "copy"], |x| {
            let y = x[0].copy();
            y.slice(1, 2, 4, 1).copy_(&x[1]);
            y * 2.0
        }),
    ]
    .into_iter()
    .map(|case| case.may_refuse(LOST))
    .collect()
}

/// Variants that write a tensor which is given; autograd takes none.
fn outs() -> Vec<Case> {
    let constant = || normal([5, 6]).constant();
    vec![
        case("add_out", [constant(), constant(), constant()], &["add"], |x| {
            let out = x[2].copy();
            let y = x[0].add_out(&out, &x[1]);
            vec![y, out]
        }),
        case("maximum_out", [constant(), constant()], &["maximum"], |x| {
            let out = x[0].zeros_like();
            let _ = x[0].maximum_out(&out, &x[1]);
            out
        }),
        case("exp_out of itself", [constant()], &["exp"], |x| {
            let out = x[0].copy();
            let _ = out.exp_out(&out);
            out
        }),
        case("mm_out", [normal([5, 6]).constant(), normal([6, 4]).constant()], &["mm"], |x| {
            let out = x[0].new_zeros([5, 4], (Kind::Double, x[0].device()));
            let _ = x[0].mm_out(&out, &x[1]);
            out
        }),
        case("sum_out", [constant()], &["sum"], |x| {
            let out = x[0].new_zeros([5], (Kind::Double, x[0].device()));
            let _ = x[0].sum_intlist_out(&out, [1i64].as_slice(), false, Kind::Double);
            out
        }),
        case("mean_out, norm_out", [constant()], &["mean", "norm"], |x| {
            let [mean, norm] = [(); 2].map(|_| x[0].new_zeros([0], options()));
            let _ = x[0].mean_out(&mean, [0i64, 1].as_slice(), false, Kind::Double);
            let _ = x[0].norm_out(&norm, 2, [0i64, 1], false);
            vec![mean, norm]
        }),
        case("losses' out", [constant(), constant()], &["mse_loss", "smooth_l1_loss"], |x| {
            let [mse, smooth] = [(); 2].map(|_| Tensor::zeros([], options()));
            let mean = Reduction::Mean;
            let _ = x[0].mse_loss_out(&mse, &x[1], mean);
            let _ = x[0].smooth_l1_loss_out(&smooth, &x[1], mean, 1.0);
            vec![mse, smooth]
        })
        .reads(),
        case("values and indices", [constant()], &["sort", "topk", "kthvalue", "median"], |x| {
            let mut results = Vec::new();
            let mut add = |run: &dyn Fn(&Tensor, &Tensor)| {
                let values = Tensor::zeros([0], options());
                let indices = Tensor::zeros([0], (Kind::Int64, options().1));
                run(&values, &indices);
                results.push(values);
            };
            add(&|values, indices| drop(x[0].sort_values(values, indices, 1, false)));
            add(&|values, indices| drop(x[0].topk_values(values, indices, 2, 1, true, true)));
            add(&|values, indices| drop(x[0].kthvalue_values(values, indices, 2, 1, false)));
            add(&|values, indices| drop(x[0].median_dim_values(values, indices, 1, false)));
            add(&|values, indices| drop(x[0].max_dim_max(values, indices, 1, false)));
            results
        })
        .reads(),
        case("cat_out", [constant(), constant()], &["cat"], |x| {
            let out = x[0].new_zeros([10, 6], (Kind::Double, x[0].device()));
            let _ = Tensor::cat_out(&out, x, 0);
            out
        }),
    ]
}

/// In place, of the shape.
fn shapes() -> Vec<Case> {
    vec![
        case(
            "transpose_, unsqueeze_, squeeze_",
            [between(-1.0, 1.0, [5, 6])],
            &["transpose"],
            |x| {
                let mut y = &x[0] * 2.0;
                let _ = y.transpose_(0, 1);
                let _ = y.unsqueeze_(0);
                let _ = y.squeeze_dim_(0);
                y * 3.0
            },
        ),
        case("t_", [normal([5, 6])], &["t"], |x| {
            let mut y = &x[0] * 2.0;
            let _ = y.t_();
            y * 3.0
        }),
    ]
}
