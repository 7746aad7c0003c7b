//! What autograd does besides one backward: no_grad, detach, double backward, accumulation, values
//! that are read.

use tch::{Kind, Tensor};

use super::case::{Case, case, ints, normal, options, positive, read};

const DOUBLE: Kind = Kind::Double;

pub fn cases() -> Vec<Case> {
    [gradients(), values()].into_iter().flatten().collect()
}

/// The gradient of a sum, which has a gradient itself.
fn gradient(y: &Tensor, x: &Tensor) -> Tensor {
    // libtorch does not check it.
    assert!(y.requires_grad());
    Tensor::run_backward(&[y.sum(DOUBLE)], &[x], true, true).remove(0)
}

fn gradients() -> Vec<Case> {
    vec![
        case("double backward of pow", [normal([5, 6])], &["pow", "mul"], |x| {
            gradient(&x[0].pow_tensor_scalar(3), &x[0])
        }),
        case("double backward of mm", [normal([5, 6]), normal([6, 4])], &["mm"], |x| {
            gradient(&x[0].mm(&x[1]).pow_tensor_scalar(2), &x[0])
        }),
        case("double backward of softmax", [normal([5, 6])], &["_softmax_backward_data"], |x| {
            gradient(&x[0].softmax(1, DOUBLE).pow_tensor_scalar(2), &x[0])
        }),
        case("double backward of tanh", [normal([5, 6])], &["tanh_backward"], |x| {
            gradient(&x[0].tanh(), &x[0])
        }),
        case("double backward of sigmoid", [normal([5, 6])], &["sigmoid_backward"], |x| {
            gradient(&x[0].sigmoid(), &x[0])
        }),
        case("double backward of gelu", [normal([5, 6])], &["gelu_backward"], |x| {
            gradient(&x[0].gelu("none"), &x[0])
        }),
        case(
            "double backward of a layer",
            [normal([5, 6]), normal([4, 6]), normal([4])],
            &["addmm"],
            |x| {
                let y = x[0].linear(&x[1], Some(&x[2])).tanh();
                vec![gradient(&y, &x[1]), gradient(&y, &x[0]), gradient(&y.exp(), &x[2])]
            },
        ),
        case(
            "double backward of layer_norm",
            [normal([5, 6]), normal([6]), normal([6])],
            &[],
            |x| {
                let y = x[0].layer_norm([6], Some(&x[1]), Some(&x[2]), 1e-5, false);
                gradient(&(y.pow_tensor_scalar(2) * 0.5), &x[0]) + &x[2]
            },
        ),
        case(
            "double backward of conv2d",
            [normal([3, 2, 5, 5]), normal([4, 2, 3, 3])],
            &["convolution"],
            |x| {
                let y = x[0].conv2d(&x[1], None::<Tensor>, 1, 1, 1, 1);
                gradient(&y.pow_tensor_scalar(2), &x[0])
            },
        ),
        case("double backward of views", [normal([5, 4, 6])], &["select", "slice"], |x| {
            let y = x[0].transpose(0, 1).select(0, 1).narrow(1, 1, 3)
                * x[0].select(1, 2).narrow(1, 0, 3);
            gradient(&y.pow_tensor_scalar(2), &x[0])
        }),
        case(
            "double backward of mse_loss",
            [normal([5, 6]), normal([5, 6])],
            &["mse_loss_backward"],
            |x| gradient(&x[0].mse_loss(&x[1], tch::Reduction::Mean), &x[0]),
        ),
        case(
            "double backward of cross entropy",
            [normal([7, 6]), ints(6, [7])],
            &["nll_loss_backward"],
            |x| gradient(&x[0].cross_entropy_for_logits(&x[1]), &x[0]),
        )
        .in_single(),
        case("double backward of norm", [normal([5, 6])], &["norm"], |x| {
            gradient(&x[0].norm(), &x[0])
        }),
        case("double backward of embedding", [normal([9, 4]), ints(9, [5])], &["embedding"], |x| {
            let y = Tensor::embedding(&x[0], &x[1], -1, false, false).pow_tensor_scalar(3);
            gradient(&y, &x[0])
        }),
        case("backward twice", [normal([5, 6])], &["add"], |x| {
            (&x[0] * 2.0).sum(DOUBLE).backward();
            x[0].pow_tensor_scalar(2).sum(DOUBLE).backward();
            vec![x[0].grad() * 1.0, x[0].tanh()]
        }),
        case("gradient is zeroed", [normal([5, 6])], &["zero", "detach"], |x| {
            x[0].pow_tensor_scalar(2).sum(DOUBLE).backward();
            let mut leaf = x[0].shallow_clone();
            leaf.zero_grad();
            vec![leaf.grad() + 1.0, &x[0] * 1.0]
        }),
        case("graph is kept", [normal([5, 6])], &["mul"], |x| {
            let y = x[0].pow_tensor_scalar(2).sum(DOUBLE);
            let first = Tensor::run_backward(&[&y], &[&x[0]], true, false).remove(0);
            let second = Tensor::run_backward(&[&y], &[&x[0]], false, false).remove(0);
            first + second * &x[0]
        }),
        case("no_grad", [normal([5, 6])], &["mul"], |x| {
            let constant = tch::no_grad(|| x[0].exp() * 2.0);
            vec![constant.detach(), &x[0] * constant]
        }),
        case("detached on the way", [normal([5, 6])], &["detach"], |x| {
            let y = x[0].exp();
            &y * y.detach() + y.detach().set_requires_grad(false)
        }),
        case("a new leaf", [normal([5, 6])], &["detach"], |x| {
            let leaf = x[0].detach().set_requires_grad(true);
            (leaf.exp() * &leaf).sum(DOUBLE).backward();
            leaf.grad() * &x[0]
        }),
        case("leaf in place without gradients", [normal([5, 6])], &["sub"], |x| {
            let mut leaf = x[0].detach().copy().set_requires_grad(true);
            leaf.pow_tensor_scalar(2).sum(DOUBLE).backward();
            tch::no_grad(|| {
                let change = leaf.grad() * 0.1;
                let _ = leaf.g_sub_(&change);
            });
            leaf.detach() * &x[0]
        }),
        case("backward on another thread", [normal([5, 6])], &["mul"], |x| {
            let leaf = x[0].detach().set_requires_grad(true);
            let loss = leaf.pow_tensor_scalar(2).sum(DOUBLE);
            std::thread::scope(|scope| scope.spawn(move || loss.backward()).join().unwrap());
            leaf.grad() * &x[0]
        }),
    ]
}

/// Numbers that are read. All ranks read them.
fn values() -> Vec<Case> {
    let wide = || [normal([5, 6]).constant()];
    vec![
        case("double_value", wide(), &["_local_scalar_dense"], |x| {
            vec![read(x[0].sum(DOUBLE).double_value(&[])), read(x[0].double_value(&[3, 1]))]
        })
        .reads(),
        case("int64_value", [ints(9, [5, 6])], &[], |x| {
            read((x[0].int64_value(&[4, 5]) + x[0].max().int64_value(&[])) as f64)
        })
        .reads(),
        case("equal, allclose", wide(), &["equal", "allclose", "is_same_size"], |x| {
            assert!(x[0].is_same_size(&(&x[0] + 1.0)));
            let (same, other) = (x[0].equal(&x[0].copy()), x[0].equal(&(&x[0] + 1.0)));
            let close = x[0].allclose(&(&x[0] + 1e-12), 1e-6, 1e-8, false);
            read(f64::from(u8::from(same)) + 2.0 * f64::from(u8::from(other || !close)))
        })
        .reads(),
        case("size, kind, numel", [positive([5, 6]).kind(Kind::Float).constant()], &[], |x| {
            let view = x[0].transpose(0, 1);
            let sizes = [view.size(), vec![x[0].numel() as i64, x[0].dim() as i64]].concat();
            assert_eq!((x[0].kind(), x[0].device()), (Kind::Float, options().1));
            Tensor::from_slice(&sizes)
        })
        .reads(),
        case("Vec of all", wide(), &[], |x| {
            let all = Tensor::zeros([5, 6], options());
            read(
                (0..30).map(|index| x[0].double_value(&[index / 6, index % 6])).sum::<f64>()
                    + all.numel() as f64,
            )
        })
        .reads(),
    ]
}
