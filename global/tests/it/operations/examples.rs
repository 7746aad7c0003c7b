//! Layouts that once gave wrong results, with the right values.

use flow_global::{B, GlobalTensor, NdSbp, P, Placement, S, Sbp};
use tch::{Device, Kind, Tensor};

use super::cases::case::{Case, Outputs, case, normal};
use super::cases::check::{Check, Own};
use crate::common::ranks::ranks;

/// Runs a case on a mesh of these ranks, with these SBPs of its inputs, forward and backward.
fn check(mesh: &[Vec<usize>], sbps: &[&[Sbp]], case: &Case) {
    check_gradients(mesh, sbps, case, 8);
}

/// The same, with so many layouts of the results' gradients.
fn check_gradients(mesh: &[Vec<usize>], sbps: &[&[Sbp]], case: &Case, gradients: usize) {
    let sbps: Vec<NdSbp> = sbps.iter().map(|sbp| sbp.to_vec()).collect();
    ranks(mesh.concat().len(), |group| {
        let placement = Placement::new(&group, mesh.to_vec()).unwrap();
        let check = Check::new(case).unwrap();
        for index in 0..gradients {
            let own = Own { rank: group.rank(), placement: &placement };
            check.run(own, &sbps, index).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        }
    });
}

fn column(ranks: usize) -> Vec<Vec<usize>> {
    (0..ranks).map(|rank| vec![rank]).collect()
}

fn square() -> Vec<Vec<usize>> {
    vec![vec![0, 1], vec![2, 3]]
}

/// A part of one element is not broadcast, where the tensor has several.
#[test]
fn rows_are_not_lost_where_each_rank_has_one() {
    for rows in [2, 3, 4] {
        let inputs = [normal([rows, 4]), normal([4, 3]), normal([1, 3])];
        let layer = case("a scaled layer", inputs, &[], |x| &x[2] * x[0].matmul(&x[1]).relu());
        check(&column(rows as usize), &[&[S(0), S(1)], &[B, S(0)], &[B, B]], &layer);
    }
    for rows in [2, 3, 5] {
        let inputs = [normal([1, 3]), normal([rows, 3])];
        let sbps: [&[Sbp]; 2] = [&[B, S(0)], &[S(0), S(0)]];
        check(&square(), &sbps, &case("a row times", inputs.clone(), &[], |x| &x[0] * &x[1]));
        check(&square(), &sbps, &case("a row plus", inputs.clone(), &[], |x| &x[0] + &x[1]));
        check(&square(), &sbps, &case("plus a row", inputs, &[], |x| &x[1] + &x[0]));
    }
    let inputs = [normal([1, 3]), normal([2, 4]), normal([4, 3])];
    let product = case("addmm of a row", inputs, &[], |x| x[0].addmm(&x[1], &x[2]));
    check(&column(2), &[&[B, S(0)], &[S(0), S(0)], &[B, B]], &product);
    check(&column(2), &[&[B, P], &[S(0), S(1)], &[B, S(0)]], &product);
}

#[test]
fn indices_and_values_are_not_broadcast_where_each_rank_has_one() {
    fn rows() -> Vec<Option<Tensor>> {
        vec![Some(Tensor::from_slice(&[0i64, 2]).view([2, 1]))]
    }
    let elements = case("index", [normal([4, 2, 3])], &[], |x| x[0].index(&rows()));
    let inputs = [normal([4, 2, 3]), normal([2, 1, 2, 3])];
    let written = case("index_put", inputs, &[], |x| x[0].index_put(&rows(), &x[1], false));
    for sbp in [[S(0), S(0)], [S(1), S(1)], [S(1), S(2)], [S(2), S(1)], [B, S(1)]] {
        check(&column(2), &[&sbp], &elements);
        check(&column(2), &[&sbp, &[S(2), S(2)]], &written);
    }
}

#[test]
fn views_know_the_sizes_of_the_whole() {
    let views = case("views", [normal([2, 3])], &[], |x| {
        let wide = x[0].view([2, 1, 3]);
        vec![
            x[0].view([2, 3]) * 2.0,
            x[0].view([1, 2, 3]) * 2.0,
            x[0].view([6]) * 2.0,
            wide.squeeze() * 2.0,
            wide.squeeze_dim(0) * 2.0,
            wide.expand([2, 4, 3], false) * 2.0,
            x[0].new_zeros([1, 3], (Kind::Double, Device::Cpu)) + &x[0],
        ]
    });
    for mesh in [column(2), column(3), vec![vec![0, 1]], square()] {
        for sbp in [[S(0), S(0)], [S(0), S(1)], [S(1), S(0)], [S(0), B], [B, S(0)]] {
            check(&mesh, &[&sbp], &views);
        }
    }
}

/// What is written lies in parts of which some are empty, and other tensors must be boxed to it.
#[test]
fn short_dimensions_are_written_in_place() {
    let mesh = [vec![0, 1], vec![2, 3], vec![4, 5]];
    let inputs = [normal([5, 6]), normal([5, 6])];
    let product = case("mul_", inputs, &[], |x| x[0].copy().g_mul_(&x[1]));
    for other in [[P, S(1)], [S(0), P], [S(1), S(0)], [B, B]] {
        check(&mesh, &[&[S(0), S(0)], &other], &product);
    }
    let seen = case("seen by a view", [normal([5, 6])], &[], |x| {
        let mut base = x[0].copy();
        let views = [base.transpose(0, 1), base.narrow(1, 1, 3), base.view([5, 2, 3])];
        let _ = base.g_add_scalar_(2.0);
        Vec::from(views.map(|view| view * 2.0))
    });
    check(&mesh, &[&[S(0), S(0)]], &seen);
}

/// Statistics that are cut along their second dimension have gaps.
#[test]
fn statistics_have_no_gaps() {
    let inputs = [normal([4, 4, 6]), normal([6]), normal([6])];
    let norm = case("layer_norm", inputs, &[], |x| {
        x[0].layer_norm([6], Some(&x[1]), Some(&x[2]), 1e-5, false)
    });
    // The gradients of the result lie in all ways, split along that dimension too.
    for sbp in [[S(0), B], [B, S(0)], [B, B], [S(1), B]] {
        check_gradients(&square(), &[&sbp, &[B, B], &[B, B]], &norm, 25);
    }
}

/// The gradient of what was reduced is broadcast.
#[test]
fn reductions_have_gradients_where_each_rank_has_one_row() {
    fn reduced<R: Outputs>(
        name: &str,
        rows: i64,
        run: impl Fn(&Tensor) -> R + Send + Sync + 'static,
    ) -> Case {
        case(name, [normal([rows, 4])], &[], move |x| run(&x[0]))
    }
    for (mesh, rows) in
        [(column(2), 2), (column(3), 3), (square(), 2), (square(), 3), (vec![vec![0, 1]], 2)]
    {
        for dim in [0i64, 1] {
            let cases = [
                reduced("var_mean", rows, move |x| x.var_mean_dim([dim].as_slice(), true, false)),
                reduced("std_dim", rows, move |x| x.std_dim([dim].as_slice(), true, false)),
                reduced("logsumexp", rows, move |x| x.logsumexp([dim], false)),
                reduced("amax", rows, move |x| x.amax([dim], false)),
                reduced("norm", rows, move |x| x.norm_scalaropt_dim(2, [dim], true)),
            ];
            for case in &cases {
                for sbp in [[S(0), S(1)], [S(0), S(0)], [S(1), S(0)], [S(0), B], [P, S(0)]] {
                    check(&mesh, &[&sbp], case);
                }
            }
        }
    }
}

/// Two terms, each on its rank, in a kind.
fn terms(values: [f64; 2], kind: Kind, rank: usize, placement: &Placement) -> Tensor {
    let own = Tensor::from(values[rank]).to_kind(kind);
    own.to_global(placement, [P]).unwrap()
}

#[test]
fn partial_sums_are_added_before_they_are_rounded() {
    type Run = fn(&Tensor, Kind) -> Tensor;
    let runs: [(&str, Run); 5] = [
        ("to_kind", |x, kind| x.to_kind(kind)),
        ("sum", |x, kind| x.sum(kind)),
        ("cumsum", |x, kind| x.cumsum(0, kind)),
        ("copy_", |x, kind| {
            let mut copy = Tensor::zeros([], (kind, Device::Cpu))
                .to_global(&x.placement().unwrap(), [B])
                .unwrap();
            copy.copy_(x);
            copy
        }),
        ("add_", |x, kind| {
            let sum = Tensor::zeros([], (kind, Device::Cpu))
                .to_global(&x.placement().unwrap(), [P])
                .unwrap();
            sum.shallow_clone().g_add_(x)
        }),
    ];
    let values = [
        ([1000.5, -999.0], Kind::Float, Kind::BFloat16, 1.5),
        ([70000.0, -69999.0], Kind::Float, Kind::Half, 1.0),
        ([1e9 + 0.5, -(1e9 - 1.0)], Kind::Double, Kind::Float, 1.5),
    ];
    for (name, run) in runs {
        for (of_ranks, from, to, expected) in values {
            ranks(2, |group| {
                let placement = Placement::all(&group).unwrap();
                let sum = terms(of_ranks, from, group.rank(), &placement);
                assert_eq!(sum.sbp().unwrap(), [P]);
                let found = run(&sum, to);
                assert_eq!(found.kind(), to);
                let found = found.full().unwrap().double_value(&[]);
                assert_eq!(found, expected, "{name} of {of_ranks:?} in {from:?} as {to:?}");
            });
        }
    }
}

/// A wider kind holds each term as it is, so nothing is reduced yet.
#[test]
fn wider_kinds_keep_partial_sums() {
    for (from, to) in [
        (Kind::BFloat16, Kind::Float),
        (Kind::Half, Kind::Double),
        (Kind::Float, Kind::Double),
        (Kind::Int64, Kind::Int),
    ] {
        ranks(2, |group| {
            let placement = Placement::all(&group).unwrap();
            let sum = terms([3.0, 4.0], from, group.rank(), &placement).to_kind(to);
            assert_eq!(sum.sbp().unwrap(), [P], "{from:?} to {to:?}");
            assert_eq!(sum.full().unwrap().double_value(&[]), 7.0);
        });
    }
}
