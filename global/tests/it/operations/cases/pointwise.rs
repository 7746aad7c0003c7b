//! Operations on each element, with broadcasting.

use tch::{Kind, Tensor};

use super::case::{Case, Input, between, bools, case, ints, normal, positive};

pub fn cases() -> Vec<Case> {
    [functions(), comparisons(), of_two(), scalars(), kinds(), constants()]
        .into_iter()
        .flatten()
        .collect()
}

type Function = fn(&Tensor) -> Tensor;

/// A case for a function of one tensor, named as its rule.
macro_rules! each {
    ($($name:literal, $input:expr, $function:expr;)*) => {
        vec![$({
            const COVERS: &[&str] = &[$name];
            let function: Function = $function;
            case($name, [$input], COVERS, move |x| function(&x[0]))
        },)*]
    };
}

fn functions() -> Vec<Case> {
    let wide = || normal([5, 6]);
    let unit = || between(-0.9, 0.9, [5, 6]);
    let mut cases = each! {
        "abs", wide(), Tensor::abs;
        "acos", unit(), Tensor::acos;
        "acosh", between(1.1, 3.0, [5, 6]), Tensor::acosh;
        "asin", unit(), Tensor::asin;
        "asinh", wide(), Tensor::asinh;
        "atan", wide(), Tensor::atan;
        "atanh", unit(), Tensor::atanh;
        "ceil", wide(), Tensor::ceil;
        "celu", wide(), Tensor::celu;
        "clamp", wide(), |x| x.clamp(-1.0, 1.0);
        "clamp_max", wide(), |x| x.clamp_max(0.5);
        "clamp_min", wide(), |x| x.clamp_min(0.5);
        "clone", wide(), |x| x.transpose(0, 1).contiguous();
        "cos", wide(), Tensor::cos;
        "cosh", wide(), Tensor::cosh;
        "digamma", positive([5, 6]), Tensor::digamma;
        "erf", wide(), Tensor::erf;
        "erfc", wide(), Tensor::erfc;
        "erfinv", unit(), Tensor::erfinv;
        "exp", wide(), Tensor::exp;
        "exp2", wide(), Tensor::exp2;
        "expm1", wide(), Tensor::expm1;
        "floor", wide(), Tensor::floor;
        "frac", wide(), Tensor::frac;
        "lgamma", positive([5, 6]), Tensor::lgamma;
        "log", positive([5, 6]), Tensor::log;
        "log10", positive([5, 6]), Tensor::log10;
        "log1p", positive([5, 6]), Tensor::log1p;
        "log2", positive([5, 6]), Tensor::log2;
        "nan_to_num", wide(), |x| x.log().nan_to_num(3.0, None, None) + x.nan_to_num(0.0, 1.0, 2.0);
        "neg", wide(), Tensor::neg;
        "polygamma", positive([5, 6]), |x| x.polygamma(1);
        "reciprocal", positive([5, 6]), Tensor::reciprocal;
        "relu", wide(), Tensor::relu;
        "round", wide(), Tensor::round;
        "rsqrt", positive([5, 6]), Tensor::rsqrt;
        "sgn", wide(), Tensor::sgn;
        "sign", wide(), Tensor::sign;
        "sin", wide(), Tensor::sin;
        "sinh", wide(), Tensor::sinh;
        "sqrt", positive([5, 6]), Tensor::sqrt;
        "tan", unit(), Tensor::tan;
        "trunc", wide(), Tensor::trunc;
        "alias", wide(), |x| x.alias() * 2.0;
        "lift_fresh", wide(), |x| x.detach().lift_fresh() * x;
    };
    macro_rules! with_backward {
        ($($name:literal, $function:expr;)*) => {
            $(
                let function: Function = $function;
                cases.push(case(
                    $name,
                    [normal([5, 6])],
                    &[$name, concat!($name, "_backward")],
                    move |x| function(&x[0]),
                ));
            )*
        };
    }
    with_backward! {
        "elu", Tensor::elu;
        "gelu", |x| x.gelu("none");
        "hardsigmoid", |x| x.g_mul_scalar(2.0).hardsigmoid();
        "hardswish", |x| x.g_mul_scalar(2.0).hardswish();
        "hardtanh", Tensor::hardtanh;
        "leaky_relu", Tensor::leaky_relu;
        "sigmoid", Tensor::sigmoid;
        "silu", Tensor::silu;
        "softplus", Tensor::softplus;
        "tanh", Tensor::tanh;
    }
    cases.extend([
        case("logit", [between(0.1, 0.9, [5, 6])], &["logit", "logit_backward"], |x| {
            vec![x[0].logit(None), x[0].logit(0.2)]
        }),
        case("threshold", [wide()], &["threshold", "threshold_backward"], |x| {
            x[0].threshold(0.3, 0.1)
        }),
        case("mish", [wide()], &["mish"], |x| x[0].mish()),
        case("square", [wide()], &["pow"], |x| x[0].square()),
        case("isfinite", [wide().constant()], &["abs"], |x| x[0].relu().log().isfinite()),
        case("gelu tanh", [wide()], &["gelu"], |x| x[0].gelu("tanh")),
        case("relu6", [between(-3.0, 9.0, [5, 6])], &["hardtanh"], |x| x[0].relu6()),
        case("round to decimals", [wide()], &["round"], |x| x[0].round_decimals(1)),
        case("a chain", [wide()], &["tanh", "exp", "mul"], |x| {
            (x[0].tanh() * 2.0 + x[0].sigmoid()).exp().log1p()
        }),
    ]);
    cases
}

fn comparisons() -> Vec<Case> {
    let wide = || normal([5, 6]).constant();
    let some = || ints(3, [5, 6]);
    each! {
        "eq", some(), |x| x.eq(1);
        "ne", some(), |x| x.ne(1);
        "ge", wide(), |x| x.ge(0.5);
        "gt", wide(), |x| x.gt(0.5);
        "le", wide(), |x| x.le(0.5);
        "lt", wide(), |x| x.lt(0.5);
        "isnan", wide(), |x| x.log().isnan();
        "isinf", wide(), |x| x.relu().log().isinf();
        "logical_not", some(), Tensor::logical_not;
        "bitwise_not", some(), Tensor::bitwise_not;
    }
}

/// Shapes of two tensors that are broadcast to one.
fn pairs() -> Vec<(&'static str, Input, Input)> {
    vec![
        ("of equal shapes", normal([5, 6]), normal([5, 6])),
        ("with a row", normal([5, 6]), normal([6])),
        ("with a column", normal([5, 6]), normal([5, 1])),
        ("row and column", normal([1, 6]), normal([5, 1])),
        ("with a number", normal([5, 6]), normal([])),
        ("of other strides", normal([5, 6]).transposed(), normal([5, 6]).strided()),
        ("with a batch", normal([6]), normal([3, 5, 6])),
    ]
}

fn of_two() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shapes, one, other) in pairs() {
        let inputs = [one, other];
        let mut add = |name: &str, covers, function: fn(&Tensor, &Tensor) -> Tensor| {
            let name = format!("{name} {shapes}");
            cases.push(case(name, inputs.clone(), covers, move |x| function(&x[0], &x[1])));
        };
        add("add", &["add"], |x, y| x + y);
        add("sub", &["sub"], |x, y| x - y);
        add("mul", &["mul"], |x, y| x * y);
        add("div", &["div"], |x, y| x / (y.abs() + 0.5));
        add("maximum", &["maximum"], Tensor::maximum);
        add("where", &["where", "gt"], |x, y| x.where_self(&x.gt_tensor(y), &(y * 2.0)));
    }
    let wide = || normal([5, 6]);
    let both = || [wide(), wide()];
    let constants = || [wide().constant(), wide().constant()];
    let integers = || [ints(7, [5, 6]), ints(4, [6])];
    let flags = || [bools([5, 6]), bools([5, 1])];
    let powers = || [positive([5, 6]), normal([6])];
    cases.extend([
        case("atan2", both(), &["atan2"], |x| x[0].atan2(&x[1])),
        case("minimum", both(), &["minimum"], |x| x[0].minimum(&x[1])),
        case("fmod", [wide(), positive([6]).constant()], &["fmod"], |x| x[0].fmod_tensor(&x[1])),
        case("remainder", [wide(), positive([6])], &["remainder"], |x| {
            x[0].remainder_tensor(&x[1])
        }),
        case("lerp", both(), &["lerp"], |x| x[0].lerp(&x[1], 0.3)),
        case("lerp by a tensor", [wide(), wide(), normal([6])], &["lerp"], |x| {
            x[0].lerp_tensor(&x[1], &x[2])
        }),
        case("addcmul", [wide(), wide(), normal([6])], &["addcmul"], |x| {
            x[0].addcmul(&x[1], &x[2])
        }),
        case("addcdiv", [wide(), wide(), positive([6])], &["addcdiv"], |x| {
            x[0].addcdiv(&x[1], &x[2])
        }),
        case("copysign", [wide(), normal([6])], &["copysign"], |x| x[0].copysign(&x[1])),
        case("hypot", [wide(), normal([6])], &["hypot"], |x| x[0].hypot(&x[1])),
        case("logaddexp", [wide(), normal([6])], &["logaddexp", "logaddexp2"], |x| {
            vec![x[0].logaddexp(&x[1]), x[0].logaddexp2(&x[1])]
        }),
        case(
            "prelu",
            [normal([3, 6, 5]), positive([6])],
            &["_prelu_kernel", "_prelu_kernel_backward"],
            |x| x[0].prelu(&x[1]),
        ),
        case("prelu of one weight", [wide(), positive([1])], &["_prelu_kernel"], |x| {
            x[0].prelu(&x[1])
        }),
        case("pow", powers(), &["pow"], |x| x[0].pow(&x[1])),
        case("xlogy", [wide(), positive([5, 6])], &["xlogy"], |x| x[0].xlogy(&x[1])),
        case("rsub", both(), &["rsub"], |x| x[0].rsub(&x[1])),
        case("floor_divide", constants(), &["floor_divide"], |x| x[0].floor_divide(&(&x[1] + 3.0))),
        case("div rounded", both(), &["div"], |x| {
            let divisor = x[1].abs() + 0.5;
            x[0].g_div_tensor_mode(&divisor, "floor") + x[0].g_div_tensor_mode(&divisor, "trunc")
        }),
        case("bitwise_and", integers(), &["bitwise_and"], |x| x[0].bitwise_and_tensor(&x[1])),
        case("bitwise_or", integers(), &["bitwise_or"], |x| x[0].bitwise_or_tensor(&x[1])),
        case("bitwise_xor", integers(), &["bitwise_xor"], |x| x[0].bitwise_xor_tensor(&x[1])),
        case("logical_and", flags(), &["logical_and"], |x| x[0].logical_and(&x[1])),
        case("logical_or", flags(), &["logical_or"], |x| x[0].logical_or(&x[1])),
        case("logical_xor", flags(), &["logical_xor"], |x| x[0].logical_xor(&x[1])),
        case("comparisons of two", constants(), &["eq", "ne", "ge", "gt", "le", "lt"], |x| {
            let (x, y) = (&x[0], &x[1]);
            let [ge, gt] = [x.ge_tensor(y), x.gt_tensor(y)];
            vec![x.eq_tensor(y), x.ne_tensor(y), ge, gt, x.le_tensor(y), x.lt_tensor(y)]
        }),
        case("clamp by tensors", [wide(), normal([6]), normal([5, 1])], &["clamp"], |x| {
            x[0].clamp_tensor(Some(&x[1]), Some(&x[2]))
        }),
        case("masked_fill", [wide(), bools([6])], &["masked_fill"], |x| {
            x[0].masked_fill(&x[1], 7.0)
        }),
        case(
            "masked_fill by a tensor",
            [wide(), bools([5, 6]), normal([])],
            &["masked_fill"],
            |x| x[0].masked_fill_tensor(&x[1], &x[2]),
        ),
        case("where of three", [bools([5, 1]), wide(), normal([6])], &["where"], |x| {
            x[1].where_self(&x[0], &x[2])
        }),
        case("where and a number", [bools([5, 6]), wide()], &["where"], |x| {
            x[1].where_scalarother(&x[0], 2.0)
        }),
        // The same tensor twice, and one that depends on the other.
        case("a tensor with itself", [wide()], &["mul", "add"], |x| &x[0] * &x[0] + &x[0]),
        case("a tensor and its transpose", [normal([6, 6])], &["add", "t"], |x| &x[0] + x[0].tr()),
    ]);
    cases
}

fn scalars() -> Vec<Case> {
    let wide = || [normal([5, 6])];
    vec![
        case("add a number", wide(), &["add"], |x| &x[0] + 3.0),
        case("sub a number", wide(), &["sub"], |x| &x[0] - 3.0),
        case("mul by a number", wide(), &["mul"], |x| &x[0] * 3.0),
        case("div by a number", wide(), &["div"], |x| &x[0] / 3.0),
        case("div by a number, rounded", wide(), &["div"], |x| {
            x[0].g_div_scalar_mode(0.3, "floor")
        }),
        case("rsub from a number", wide(), &["rsub"], |x| x[0].rsub_scalar(3.0) + (1.0 - &x[0])),
        case("pow by a number", wide(), &["pow"], |x| x[0].pow_tensor_scalar(3)),
        case("pow of a number", wide(), &["pow"], |x| Tensor::pow_scalar(2.0, &x[0])),
        case("fmod by a number", wide(), &["fmod"], |x| x[0].fmod(0.7)),
        case("remainder by a number", wide(), &["remainder"], |x| x[0].remainder(0.7)),
        case("xlogy by a number", wide(), &["xlogy"], |x| x[0].xlogy_scalar_other(0.7)),
        case("bitwise with a number", [ints(9, [5, 6])], &["bitwise_and", "bitwise_or"], |x| {
            vec![x[0].bitwise_and(5), x[0].bitwise_or(2), x[0].bitwise_xor(3)]
        }),
        // A plain tensor that all ranks have alike counts as B.
        case("with a plain tensor", wide(), &["add", "mul"], |x| {
            let plain = Tensor::arange(6, (Kind::Double, x[0].device()));
            (&x[0] + &plain) * plain.view([1, 6])
        }),
        case("with a plain number", wide(), &["mul"], |x| {
            &x[0] * Tensor::from(2.5f64) + Tensor::from(1.5f64) * &x[0]
        }),
    ]
}

fn kinds() -> Vec<Case> {
    let of = |kind| [normal([5, 6]).kind(kind), normal([6]).kind(kind)];
    let mut cases = vec![
        case("to f32 and back", [normal([5, 6])], &["_to_copy"], |x| {
            (x[0].to_kind(Kind::Float) * 2.0).to_kind(Kind::Double)
        })
        .in_single(),
        case("to int and bool", [normal([5, 6]).constant()], &["_to_copy"], |x| {
            vec![x[0].to_kind(Kind::Int64), x[0].to_kind(Kind::Bool), x[0].to_kind(Kind::Int)]
        }),
        case("from int and bool", [ints(5, [5, 6]), bools([6])], &["_to_copy"], |x| {
            x[0].to_kind(Kind::Double) * x[1].to_kind(Kind::Double)
        }),
        case(
            "kinds are promoted",
            [ints(5, [5, 6]), normal([6]).kind(Kind::Float)],
            &["mul"],
            |x| &x[0] * &x[1] + x[0].gt(2),
        ),
        case("ints", [ints(9, [5, 6]), ints(9, [6])], &["add", "mul", "sub", "neg"], |x| {
            vec![&x[0] + &x[1] * 2, x[0].neg() - &x[1], x[0].abs(), &x[0] / 2]
        }),
        case("bytes", [ints(9, [5, 6]).kind(Kind::Uint8)], &["add", "mul"], |x| &x[0] * 3 + &x[0]),
        case("32-bit ints", [ints(9, [5, 6]).kind(Kind::Int)], &["add", "mul"], |x| {
            &x[0] * 3 + &x[0]
        }),
        case("bools", [bools([5, 6]), bools([5, 6])], &["bitwise_and", "bitwise_not"], |x| {
            vec![x[0].bitwise_and_tensor(&x[1]), x[0].bitwise_not(), x[0].logical_or(&x[1])]
        }),
    ];
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        cases.push(case(format!("{kind:?}"), of(kind), &["add", "mul", "relu"], |x| {
            (&x[0] * &x[1] + 1.0).relu() + &x[0]
        }));
    }
    cases
}

fn constants() -> Vec<Case> {
    let wide = || [normal([5, 6]).constant()];
    vec![
        case("ones_like", wide(), &["ones_like"], |x| x[0].ones_like()),
        case("zeros_like", wide(), &["zeros_like"], |x| x[0].zeros_like()),
        case("full_like", wide(), &["full_like"], |x| x[0].full_like(2.5)),
        case("empty_like", wide(), &["empty_like", "fill"], |x| x[0].empty_like().fill_(2.5)),
        case("fill", [normal([5, 6]).constant(), normal([])], &["fill"], |x| {
            vec![x[0].fill(1.5), x[0].fill_tensor(&x[1])]
        }),
        case("zero", wide(), &["zero"], |x| x[0].copy().zero_()),
        case("detach", [normal([5, 6])], &["detach"], |x| &x[0] * x[0].detach()),
        case("copy", [normal([5, 6])], &["copy", "zeros_like"], |x| x[0].copy() * 2.0),
    ]
}
