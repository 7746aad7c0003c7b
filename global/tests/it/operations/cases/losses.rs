//! Losses.

use tch::{Kind, Reduction, Tensor};

use super::case::{Case, Input, between, case, ints, normal, positive};

const NLL: &[&str] = &["nll_loss_forward", "nll_loss_backward"];
const NLL_2D: &[&str] = &["nll_loss2d_forward", "nll_loss2d_backward"];
const MSE: &[&str] = &["mse_loss", "mse_loss_backward"];
const SMOOTH: &[&str] = &["smooth_l1_loss", "smooth_l1_loss_backward"];
const HUBER: &[&str] = &["huber_loss", "huber_loss_backward"];
const ENTROPY: &[&str] = &["binary_cross_entropy", "binary_cross_entropy_backward"];
const SCORES: &[&str] = &["binary_cross_entropy_with_logits"];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let reductions =
        [("mean", Reduction::Mean), ("sum", Reduction::Sum), ("each", Reduction::None)];
    for (name, reduction) in reductions {
        let scores = || [normal([7, 6]), ints(6, [7])];
        let named = |loss: &str| format!("{loss}, {name}");
        let add = &mut |loss: &str, inputs: Vec<Input>, covers, run: Loss| {
            cases.push(case(named(loss), inputs, covers, move |x| run(x, reduction)));
        };
        add("nll_loss", scores().into(), NLL, |x, reduction| {
            x[0].log_softmax(-1, Kind::Double).g_nll_loss(&x[1], None::<Tensor>, reduction, -100)
        });
        add("nll_loss, ignored", scores().into(), NLL, |x, reduction| {
            x[0].g_nll_loss(&x[1], None::<Tensor>, reduction, 2)
        });
        add(
            "nll_loss, weighted",
            vec![normal([7, 6]), ints(6, [7]), positive([6]).constant()],
            NLL,
            |x, reduction| x[0].g_nll_loss(&x[1], Some(&x[2]), reduction, -100),
        );
        add("nll_loss of one", vec![normal([6]), ints(6, [])], NLL, |x, reduction| {
            x[0].g_nll_loss(&x[1], None::<Tensor>, reduction, -100)
        });
        add(
            "nll_loss2d",
            vec![normal([5, 4, 3, 2]), ints(4, [5, 3, 2])],
            NLL_2D,
            |x, reduction| x[0].nll_loss_nd(&x[1], None::<Tensor>, reduction, 1),
        );
        add("cross entropy", scores().into(), NLL, |x, reduction| {
            x[0].cross_entropy_loss(&x[1], None::<Tensor>, reduction, -100, 0.0)
        });
        add("cross entropy, smoothed", scores().into(), NLL, |x, reduction| {
            x[0].cross_entropy_loss(&x[1], None::<Tensor>, reduction, -100, 0.1)
        });
        add("mse_loss", vec![normal([5, 6]), normal([5, 6])], MSE, |x, reduction| {
            x[0].mse_loss(&x[1], reduction)
        });
        add("l1_loss", vec![normal([5, 6]), normal([5, 6])], &["abs", "sub"], |x, reduction| {
            x[0].l1_loss(&x[1], reduction)
        });
        add("smooth_l1_loss", vec![normal([5, 6]), normal([5, 6])], SMOOTH, |x, reduction| {
            x[0].smooth_l1_loss(&x[1], reduction, 1.0)
        });
        add("huber_loss", vec![normal([5, 6]), normal([5, 6])], HUBER, |x, reduction| {
            x[0].huber_loss(&x[1], reduction, 0.7)
        });
        let unit = || between(0.1, 0.9, [5, 6]);
        add("binary cross entropy", vec![unit(), unit().constant()], ENTROPY, |x, reduction| {
            x[0].binary_cross_entropy(&x[1], None::<Tensor>, reduction)
        });
        let weighted = vec![unit(), unit().constant(), positive([6]).constant()];
        add("binary cross entropy, weighted", weighted, ENTROPY, |x, reduction| {
            x[0].binary_cross_entropy(&x[1], Some(&x[2]), reduction)
        });
        add(
            "binary cross entropy of scores",
            vec![normal([5, 6]), unit()],
            SCORES,
            |x, reduction| {
                x[0].binary_cross_entropy_with_logits(&x[1], None::<Tensor>, None, reduction)
            },
        );
        let weights = || positive([6]).constant();
        let weighted = vec![normal([5, 6]), unit(), positive([5, 1]).constant(), weights()];
        add("binary cross entropy of scores, weighted", weighted, SCORES, |x, reduction| {
            x[0].binary_cross_entropy_with_logits(&x[1], Some(&x[2]), Some(&x[3]), reduction)
        });
        add("kl_div", vec![normal([5, 6]), unit()], &["xlogy"], |x, reduction| {
            x[0].kl_div(&x[1], reduction, false)
        });
    }
    cases.extend([
        case(
            "cross entropy with probabilities",
            [normal([7, 6]), normal([7, 6])],
            &["_log_softmax"],
            |x| {
                let target = x[1].softmax(-1, Kind::Double);
                x[0].cross_entropy_loss(&target, None::<Tensor>, Reduction::Mean, -100, 0.0)
            },
        ),
        case("cross entropy for logits", [normal([7, 6]), ints(6, [7])], NLL, |x| {
            x[0].cross_entropy_for_logits(&x[1])
        })
        .in_single(),
        case("mse_loss of broadcast targets", [normal([5, 6]), normal([6])], MSE, |x| {
            x[0].mse_loss(&x[1].expand([5, 6], false), Reduction::Mean)
        }),
        // libtorch broadcasts, and divides by the number of pairs.
        case("losses of a row and a column", [normal([6, 1]), normal([6])], &[], |x| {
            vec![
                x[0].mse_loss(&x[1], Reduction::Mean),
                x[0].smooth_l1_loss(&x[1], Reduction::Mean, 1.0),
                x[0].huber_loss(&x[1], Reduction::Sum, 0.7),
            ]
        }),
        case(
            "losses of two kinds",
            [normal([6]).kind(Kind::Float).constant(), normal([6]).constant()],
            &[],
            |x| {
                vec![
                    x[0].mse_loss(&x[1], Reduction::Mean),
                    x[0].huber_loss(&x[1], Reduction::Mean, 1.0),
                ]
            },
        )
        .in_single(),
        case(
            "losses in f16",
            [normal([6]).kind(Kind::Half), normal([6]).kind(Kind::Half)],
            MSE,
            |x| {
                vec![
                    x[0].mse_loss(&x[1], Reduction::Mean),
                    x[0].smooth_l1_loss(&x[1], Reduction::Mean, 1.0),
                ]
            },
        ),
        case("accuracy", [normal([7, 6]).constant(), ints(6, [7])], &[], |x| {
            x[0].accuracy_for_logits(&x[1])
        }),
    ]);
    cases
}

type Loss = fn(&[Tensor], Reduction) -> Tensor;
