//! Boxing of real tensors between ranks that are threads: every pair of layouts gives the tensor
//! that was there before.

use crate::common::ranks::ranks;
use crate::common::{Local, gather, sbps, scatter};
use flow_global::boxing::execute::Boxing;
use flow_global::boxing::plan::TensorLayout;
use flow_global::region::regions;
use flow_global::{B, Groups, P, Placement, S, Sbp};
use flow_tensor::{ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

/// A placement, and an SBP of each of its axes.
type Lying = (Placement, Vec<flow_global::Sbp>);

fn layout((placement, sbp): &Lying) -> TensorLayout<'_> {
    TensorLayout { placement, sbp }
}

/// Each rank's results of all cases: None where the rank is outside the new placement.
fn run(
    size: usize,
    make: fn(&ProcessGroup) -> Groups,
    cases: &[(Vec<usize>, Lying, Lying)],
) -> Vec<Vec<Option<Local>>> {
    ranks(size, |group| {
        let (groups, rank) = (make(&group), group.rank());
        let one = |(shape, from, to): &(Vec<usize>, Lying, Lying)| {
            let (from, to) = (layout(from), layout(to));
            let boxing = Boxing::new(rank, shape, from, to);
            let local = from.placement.position(rank).map(|position| {
                let region = regions(from.placement, from.sbp, shape);
                let sizes = region[position].shape();
                let sizes: Vec<i64> = sizes.iter().map(|&size| size as i64).collect();
                Tensor::from_slice(&scatter(shape, from)[position]).view(&sizes[..])
            });
            let options = (Kind::Int64, Device::Cpu);
            let result = boxing.run(&groups, options, local.as_ref());
            result
                .unwrap()
                .map(|result| Vec::<i64>::try_from(result.contiguous().view([-1])).unwrap())
        };
        cases.iter().map(one).collect()
    })
}

#[test]
fn every_pair_of_layouts() {
    let line = Placement::of([0, 1, 2]).unwrap();
    let mesh = Placement::of([[0, 2], [1, 3]]).unwrap();
    let other = Placement::of([[3, 4], [5, 0]]).unwrap();
    let mut cases = Vec::new();
    for shape in [&[][..], &[5], &[4, 6], &[2, 3, 5], &[0, 4]] {
        for (old, new) in
            [(&line, &line), (&mesh, &mesh), (&mesh, &other), (&mesh, &line), (&line, &other)]
        {
            for from in sbps(old.axes(), shape.len()) {
                for to in sbps(new.axes(), shape.len()) {
                    cases.push((shape.to_vec(), (old.clone(), from.clone()), (new.clone(), to)));
                }
            }
        }
    }
    assert!(cases.len() > 2000, "{}", cases.len());
    for make in [Groups::new, Groups::by_collectives] {
        check(&cases, &run(6, make, &cases));
    }
}

/// Compares the results of all ranks with the tensor.
fn check(cases: &[(Vec<usize>, Lying, Lying)], results: &[Vec<Option<Local>>]) {
    for (index, (shape, from, to)) in cases.iter().enumerate() {
        let locals: Vec<Local> =
            to.0.ranks().iter().map(|&rank| results[rank][index].clone().unwrap()).collect();
        let outside = (0..6).filter(|rank| !to.0.ranks().contains(rank));
        assert!(outside.into_iter().all(|rank| results[rank][index].is_none()));
        let expected: Vec<i64> = (1..=shape.iter().product::<usize>() as i64).collect();
        assert_eq!(gather(shape, layout(to), &locals), expected, "{shape:?} {from:?} -> {to:?}");
    }
}

/// Boxes a local between two SBPs on all ranks in a line.
fn boxed(group: &ProcessGroup, groups: &Groups, local: &Tensor, from: Sbp, to: Sbp) -> Tensor {
    let placement = Placement::of((0..group.world_size()).collect::<Vec<_>>()).unwrap();
    let mut shape: Vec<usize> = local.size().iter().map(|&size| size as usize).collect();
    if let Sbp::Split(dim) = from {
        shape[dim] *= group.world_size();
    }
    let (from, to) = ([from], [to]);
    let [from, to] = [&from, &to].map(|sbp| TensorLayout { placement: &placement, sbp });
    let boxing = Boxing::new(group.rank(), &shape, from, to);
    boxing.run(groups, (local.kind(), local.device()), Some(local)).unwrap().unwrap()
}

#[test]
fn as_many_bytes_are_received_as_the_plan_says() {
    let line = Placement::of([0, 1, 2, 3]).unwrap();
    let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
    let other = Placement::of([3, 1, 2]).unwrap();
    // An all-reduce of more than `SMALL` bytes.
    let shape = [64, 66];
    let mut cases = Vec::new();
    for (old, new) in [(&line, &line), (&mesh, &mesh), (&line, &mesh), (&mesh, &other)] {
        for from in sbps(old.axes(), 2) {
            for to in sbps(new.axes(), 2) {
                cases.push(((old, from.clone()), (new, to)));
            }
        }
    }
    let all = ranks(4, |group| {
        let groups = Groups::new(&group);
        type Lies<'a> = (&'a Placement, Vec<Sbp>);
        let one = |(from, to): &(Lies, Lies)| {
            let [from, to] =
                [from, to].map(|(placement, sbp)| TensorLayout { placement, sbp: &sbp[..] });
            let local = from.placement.position(group.rank()).map(|position| {
                let region = &regions(from.placement, from.sbp, &shape)[position];
                let sizes: Vec<i64> = region.shape().iter().map(|&size| size as i64).collect();
                Tensor::ones(&sizes[..], (Kind::Double, Device::Cpu))
            });
            let boxing = Boxing::new(group.rank(), &shape, from, to);
            let before = groups.received();
            boxing.run(&groups, (Kind::Double, Device::Cpu), local.as_ref()).unwrap();
            (groups.received() - before, boxing.plan().received() as u64 * 8)
        };
        cases.iter().map(one).collect::<Vec<_>>()
    });
    for (index, case) in cases.iter().enumerate() {
        let received: u64 = all.iter().map(|rank| rank[index].0).sum();
        assert_eq!(received, all[0][index].1, "{case:?}");
    }
}

#[test]
fn terms_of_all_kinds_and_reductions() {
    let kinds = [
        Kind::Bool,
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::BFloat16,
        Kind::Float,
        Kind::Double,
    ];
    ranks(3, |group| {
        for groups in [Groups::new(&group), Groups::by_collectives(&group)] {
            for kind in kinds {
                let term = |rank: usize| {
                    let numbers = Tensor::arange(5 * 7, (Kind::Int64, Device::Cpu));
                    (numbers + rank as i64 * 2).remainder(4).to_kind(kind).view([5, 7])
                };
                let stacked = Tensor::stack(&[term(0), term(1), term(2)], 0).to_kind(Kind::Double);
                let cases = [
                    (ReduceOp::Max, stacked.amax([0i64], false)),
                    (ReduceOp::Min, stacked.amin([0i64], false)),
                    (ReduceOp::Sum, stacked.sum_dim_intlist(&[0i64][..], false, Kind::Double)),
                    (ReduceOp::Avg, stacked.mean_dim(&[0i64][..], false, Kind::Double)),
                    (ReduceOp::Product, stacked.prod_dim_int(0, false, Kind::Double)),
                ];
                let own = term(group.rank());
                for (op, expected) in cases {
                    let is_arithmetic = !matches!(op, ReduceOp::Max | ReduceOp::Min);
                    if kind == Kind::Bool && is_arithmetic {
                        continue;
                    }
                    let terms = Sbp::Partial(op);
                    let expected = expected.to_kind(kind);
                    let all = boxed(&group, &groups, &own, terms, B);
                    assert_eq!(all.kind(), kind);
                    assert!(
                        all.allclose(&expected.to_kind(kind), 1e-2, 1e-2, false),
                        "{kind:?} {op:?}"
                    );
                    for dim in [0, 1] {
                        let part = boxed(&group, &groups, &own, terms, S(dim));
                        let expected = &expected.tensor_split(3, dim as i64)[group.rank()];
                        assert!(
                            part.allclose(expected, 1e-2, 1e-2, false),
                            "{kind:?} {op:?} {dim}"
                        );
                    }
                    // New terms of which one is enough are copies; of sums and products they are not.
                    let again =
                        boxed(&group, &groups, &boxed(&group, &groups, &all, B, terms), terms, B);
                    assert!(again.allclose(&all, 1e-2, 1e-2, false), "{kind:?} {op:?} again");
                }
            }
        }
    });
}

#[test]
fn terms_of_different_reductions_are_reduced_from_the_last_axis_on() {
    ranks(4, |group| {
        let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
        let from = [P, Sbp::Partial(ReduceOp::Max)];
        let from = TensorLayout { placement: &mesh, sbp: &from };
        let to = TensorLayout { placement: &mesh, sbp: &[B, B] };
        let boxing = Boxing::new(group.rank(), &[2], from, to);
        let local = Tensor::from_slice(&[[1, 8], [5, 2], [30, 10], [10, 40]][group.rank()]);
        let groups = Groups::new(&group);
        let result = boxing.run(&groups, (Kind::Int, Device::Cpu), Some(&local)).unwrap().unwrap();
        assert_eq!(Vec::<i32>::try_from(result).unwrap(), [35, 48]);
    });
}

/// On a mesh, what the ranks have is reduced over the last axis, then over the first one. Boxing
/// between any two pairs of SBPs does not change what comes out.
#[test]
fn pairs_of_reductions() {
    let ops = ReduceOp::ALL.iter().map(|&op| Sbp::Partial(op));
    let sbps: Vec<Sbp> = ops.chain([B, S(0)]).collect();
    let pairs: Vec<[Sbp; 2]> =
        sbps.iter().flat_map(|&one| sbps.iter().map(move |&other| [one, other])).collect();
    let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
    let local = |sbp: &[Sbp; 2], rank: usize| -> Vec<f64> {
        let range = regions(&mesh, sbp, &[4])[rank].0[0].clone();
        // Copies are equal.
        let at = mesh.coordinates(rank).into_iter().zip(sbp);
        let number = at.fold(0, |number, (at, &sbp)| 2 * number + if sbp == B { 0 } else { at });
        range.map(|index| ((number * 7 + index * 3) % 5 + 1) as f64).collect()
    };
    let results = ranks(4, |group| {
        let groups = Groups::new(&group);
        let mut results = Vec::new();
        for (from, to) in pairs.iter().flat_map(|from| pairs.iter().map(move |to| (from, to))) {
            let [old, new] = [from, to].map(|sbp| TensorLayout { placement: &mesh, sbp });
            let boxing = Boxing::new(group.rank(), &[4], old, new);
            let local = Tensor::from_slice(&local(from, group.rank()));
            let options = (Kind::Double, Device::Cpu);
            let result = boxing.run(&groups, options, Some(&local)).unwrap().unwrap();
            results.push(Vec::<f64>::try_from(result.contiguous()).unwrap());
        }
        results
    });
    let combine = |sbp: Sbp, one: Vec<f64>, other: Vec<f64>| -> Vec<f64> {
        let Sbp::Partial(op) = sbp else {
            assert!(sbp != B || one == other, "copies differ: {one:?} {other:?}");
            return if sbp == B { one } else { [one, other].concat() };
        };
        let reduce = |(a, b): (f64, f64)| match op {
            ReduceOp::Sum => a + b,
            ReduceOp::Avg => (a + b) / 2.0,
            ReduceOp::Product => a * b,
            ReduceOp::Max => a.max(b),
            ReduceOp::Min => a.min(b),
        };
        one.into_iter().zip(other).map(reduce).collect()
    };
    let value = |[outer, inner]: [Sbp; 2], own: &dyn Fn(usize) -> Vec<f64>| {
        combine(outer, combine(inner, own(0), own(1)), combine(inner, own(2), own(3)))
    };
    let cases = pairs.iter().flat_map(|&from| pairs.iter().map(move |&to| (from, to)));
    for (index, (from, to)) in cases.enumerate() {
        let expected = value(from, &|rank| local(&from, rank));
        let found = value(to, &|rank| results[rank][index].clone());
        assert_eq!(found, expected, "{from:?} -> {to:?}");
    }
}

#[test]
fn one_rank_and_no_elements_communicate_nothing() {
    ranks(2, |group| {
        let groups = Groups::new(&group);
        // An axis of one rank has no terms: the result is a view.
        let alone = Placement::of([[0], [1]]).unwrap();
        let [from, to] =
            [&[S(0), P], &[S(0), B]].map(|sbp| TensorLayout { placement: &alone, sbp });
        let boxing = Boxing::new(group.rank(), &[4, 2], from, to);
        let local = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
        let result = boxing.run(&groups, (Kind::Float, Device::Cpu), Some(&local)).unwrap();
        assert!(boxing.is_view());
        assert_eq!(result.unwrap().data_ptr(), local.data_ptr());
        let empty = Tensor::ones([0, 3], (Kind::Float, Device::Cpu));
        for (from, to) in [(P, B), (P, S(1)), (S(0), B), (B, P), (S(0), S(1))] {
            let _ = boxed(&group, &groups, &empty, from, to);
        }
        assert_eq!(groups.received(), 0);
        let number = Tensor::from(3.0);
        let sum = boxed(&group, &groups, &number, P, B);
        assert_eq!((sum.double_value(&[]), sum.size()), (6.0, vec![]));
    });
}
