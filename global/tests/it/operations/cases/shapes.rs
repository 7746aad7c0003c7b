//! Shapes at the edges: numbers, nothing, one element, dimensions that are shorter than a mesh.

use tch::{Kind, Tensor};

use super::case::{Case, between, case, normal};

pub fn cases() -> Vec<Case> {
    let shapes = [
        ("a number", normal([])),
        ("one element", normal([1])),
        ("two elements", normal([2])),
        ("nothing", normal([0])),
        ("no rows", normal([0, 3])),
        ("ones", normal([1, 1, 1])),
        ("two by three", normal([2, 3])),
        ("seven", normal([7])),
    ];
    let mut cases = Vec::new();
    for (name, input) in shapes {
        let mut add = |operation: &str, function: fn(&Tensor) -> Vec<Tensor>| {
            let name = format!("{operation} of {name}");
            let case = case(name, [input.clone()], &[], move |x| function(&x[0]));
            cases.push(if operation == "kinds" { case.in_single() } else { case });
        };
        add("pointwise", |x| vec![(x * 2.0 + 1.0).tanh(), x * x, x.relu() - x]);
        add("reductions", |x| vec![x.sum(Kind::Double), (x * x).sum(Kind::Double).exp()]);
        add("views", |x| vec![x.view([-1]) * 2.0, x.unsqueeze(0) * 2.0, x.reshape(x.size()) * 2.0]);
        add("kinds", |x| vec![x.to_kind(Kind::Float), x.gt(0.0), x.detach().to_kind(Kind::Int64)]);
        add("in place", |x| {
            let mut y = x.copy();
            let _ = y.g_mul_(x);
            vec![y.relu_()]
        });
    }
    cases.extend([
        case("means of short dimensions", [normal([2, 1, 3])], &["mean"], |x| {
            vec![
                x[0].mean_dim([0i64].as_slice(), false, Kind::Double),
                x[0].mean_dim([1i64].as_slice(), false, Kind::Double),
                x[0].mean(Kind::Double),
            ]
        }),
        case("softmax of short dimensions", [normal([2, 1, 3])], &["_softmax"], |x| {
            vec![x[0].softmax(0, Kind::Double), x[0].softmax(1, Kind::Double)]
        }),
        case("mm of short dimensions", [normal([2, 3]), normal([3, 1])], &["mm"], |x| {
            x[0].mm(&x[1])
        }),
        case("views of short dimensions", [normal([2, 1, 3])], &["view"], |x| {
            vec![x[0].view([6]) * 2.0, x[0].transpose(0, 2).reshape([3, 2]) * 2.0]
        }),
        case("five dimensions", [between(-1.0, 1.0, [2, 3, 1, 2, 3])], &["permute"], |x| {
            x[0].permute([4, 1, 0, 3, 2]).sum_dim_intlist([1i64, 2].as_slice(), true, Kind::Double)
        }),
        case("numbers with tensors", [normal([]), normal([5, 6]), normal([1])], &["mul"], |x| {
            &x[0] * &x[1] + &x[2] * x[0].exp()
        }),
    ]);
    cases
}
