//! Plans of boxing, carried out on numbers in one process: every pair of layouts gives the tensor
//! that was there before, with no more bytes than the pair needs.

use crate::common::{Local, gather, indices, sbps, scatter};
use flow_global::boxing::plan::{BoxingPlan, TensorLayout};
use flow_global::region::{Region, regions};
use flow_global::{B, P, Placement, S, Sbp};

/// Carries out a plan.
fn run(
    shape: &[usize],
    plan: &BoxingPlan,
    from: TensorLayout,
    to: TensorLayout,
    locals: &[Local],
) -> Vec<Local> {
    let total: usize = shape.iter().product();
    // What each old rank has, spread over the whole tensor.
    let held = regions(from.placement, from.sbp, shape);
    let mut sources: Vec<Vec<Option<i64>>> = held
        .iter()
        .zip(locals)
        .map(|(region, local)| {
            let mut all = vec![None; total];
            indices(region, shape)
                .into_iter()
                .zip(local)
                .for_each(|(index, &value)| all[index] = Some(value));
            all
        })
        .collect();
    if let Some(reduction) = &plan.reduction {
        let before = sources.clone();
        for group in &reduction.groups {
            for &position in group {
                let mut all = vec![None; total];
                let part = reduction.parts[position].iter();
                for index in part.flat_map(|part| indices(part, shape)) {
                    all[index] = Some(group.iter().map(|&peer| before[peer][index].unwrap()).sum());
                }
                sources[position] = all;
            }
        }
    }
    let mut results: Vec<_> = plan
        .results
        .iter()
        .map(|region| {
            let mut all = vec![None; total];
            indices(region, shape).into_iter().for_each(|index| all[index] = Some(0));
            all
        })
        .collect();
    for copy in &plan.copies {
        let source = &sources[from.placement.position(copy.from).unwrap()];
        let target = to.placement.position(copy.to).unwrap();
        for index in indices(&copy.region, shape) {
            assert!(results[target][index].is_some(), "{index} is not in the result");
            results[target][index] = Some(source[index].expect("the source has the element"));
        }
    }
    let regions = plan.results.iter().zip(&results);
    regions
        .map(|(region, all)| {
            indices(region, shape).into_iter().map(|index| all[index].unwrap()).collect()
        })
        .collect()
}

/// What ranks need and do not have, if there are no terms to reduce or to make.
fn missing(shape: &[usize], from: TensorLayout, to: TensorLayout) -> usize {
    let (held, wanted) =
        (regions(from.placement, from.sbp, shape), regions(to.placement, to.sbp, shape));
    let missing = |(&rank, wanted): (&usize, &Region)| {
        let own = from.placement.position(rank);
        wanted.elements()
            - own.and_then(|own| held[own].intersection(wanted)).map_or(0, |both| both.elements())
    };
    to.placement.ranks().iter().zip(&wanted).map(missing).sum()
}

fn check(shape: &[usize], from: TensorLayout, to: TensorLayout) {
    let plan = BoxingPlan::new(shape, from, to);
    let locals = run(shape, &plan, from, to, &scatter(shape, from));
    let expected: Vec<i64> = (1..=shape.iter().product::<usize>() as i64).collect();
    let case = format!("{shape:?}, {from:?} -> {to:?}: {plan:?}");
    assert_eq!(gather(shape, to, &locals), expected, "{case}");
    if !from.sbp.iter().chain(to.sbp).any(|sbp| sbp.is_partial()) {
        assert_eq!(plan.received(), missing(shape, from, to), "{case}");
    }
    if from.placement == to.placement && from.sbp == to.sbp {
        assert_eq!(plan.received(), 0, "{case}");
    }
}

const SHAPES: [&[usize]; 7] = [&[], &[1], &[5], &[4, 6], &[7, 3], &[2, 3, 5], &[0, 4]];

#[test]
fn every_pair_of_sbps_on_one_placement() {
    let placements = [
        Placement::of([0]).unwrap(),
        Placement::of([1, 0]).unwrap(),
        Placement::of([0, 1, 2]).unwrap(),
        Placement::of([[0, 1], [2, 3]]).unwrap(),
        Placement::of([[0, 2, 4], [1, 3, 5]]).unwrap(),
    ];
    let mut count = 0;
    for placement in &placements {
        for shape in SHAPES {
            let sbps = sbps(placement.axes(), shape.len());
            for from in &sbps {
                for to in &sbps {
                    let [from, to] = [from, to].map(|sbp| TensorLayout { placement, sbp });
                    check(shape, from, to);
                    count += 1;
                }
            }
        }
    }
    assert!(count > 2000, "{count}");
}

#[test]
fn every_pair_of_sbps_on_other_placements() {
    let pairs = [
        ([[0, 1], [2, 3]], [[4, 5], [6, 7]]),
        ([[0, 1], [2, 3]], [[2, 3], [0, 1]]),
        ([[0, 1], [2, 3]], [[3, 4], [5, 0]]),
    ];
    for (old, new) in pairs {
        let (old, new) = (Placement::of(old).unwrap(), Placement::of(new).unwrap());
        let line = Placement::of([1, 5, 9]).unwrap();
        for shape in SHAPES {
            for from in &sbps(2, shape.len()) {
                for to in &sbps(2, shape.len()) {
                    check(
                        shape,
                        TensorLayout { placement: &old, sbp: from },
                        TensorLayout { placement: &new, sbp: to },
                    );
                }
                for to in &sbps(1, shape.len()) {
                    check(
                        shape,
                        TensorLayout { placement: &old, sbp: from },
                        TensorLayout { placement: &line, sbp: to },
                    );
                    check(
                        shape,
                        TensorLayout { placement: &line, sbp: to },
                        TensorLayout { placement: &old, sbp: from },
                    );
                }
            }
        }
    }
}

#[test]
fn bytes_of_the_usual_pairs() {
    let four = Placement::of([0, 1, 2, 3]).unwrap();
    let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
    let received = |placement: &Placement, from: &[Sbp], to: &[Sbp]| {
        let [from, to] = [from, to].map(|sbp| TensorLayout { placement, sbp });
        BoxingPlan::new(&[8, 16], from, to).received()
    };
    let total = 8 * 16;
    // All-reduce, reduce-scatter, all-gather and all-to-all.
    assert_eq!(received(&four, &[P], &[B]), 2 * 3 * total);
    assert_eq!(received(&four, &[P], &[S(0)]), 3 * total);
    assert_eq!(received(&four, &[P], &[S(1)]), 3 * total);
    assert_eq!(received(&four, &[S(1)], &[B]), 3 * total);
    assert_eq!(received(&four, &[S(0)], &[S(1)]), 3 * total / 4);
    let layouts = [&[P], &[B], &[S(0)]].map(|sbp| TensorLayout { placement: &four, sbp });
    assert!(BoxingPlan::new(&[8, 16], layouts[0], layouts[1]).is_all_reduce);
    assert!(!BoxingPlan::new(&[8, 16], layouts[0], layouts[2]).is_all_reduce);
    assert!(!BoxingPlan::new(&[8, 16], layouts[2], layouts[1]).is_all_reduce);
    // Local: a slice, and a term that is zero elsewhere.
    for (from, to) in [(B, S(0)), (B, P), (S(0), P), (S(1), P)] {
        assert_eq!(received(&four, &[from], &[to]), 0, "{from} -> {to}");
    }
    // On one axis of two the other one's split is left alone.
    assert_eq!(received(&mesh, &[P, S(1)], &[B, S(1)]), 2 * total);
    assert_eq!(received(&mesh, &[S(0), P], &[S(0), S(1)]), total);
    assert_eq!(received(&mesh, &[P, P], &[S(0), B]), 3 * total + total);
}

/// The least that all ranks together can receive on a line of `ranks`: what they need and do not
/// have; of terms, each element of the sum from all others but one (reduce-scatter), and then, if
/// all need it, from its holder (all-gather).
fn least(total: usize, ranks: usize, from: Sbp, to: Sbp) -> usize {
    match (from, to) {
        (P, B) => 2 * (ranks - 1) * total,
        (P, S(_)) | (S(_), B) => (ranks - 1) * total,
        (S(one), S(other)) if one != other => (ranks - 1) * total / ranks,
        _ => 0,
    }
}

#[test]
fn no_pair_needs_more_than_the_least_bytes() {
    let total = 12 * 12;
    for ranks in [1, 2, 3, 4, 6] {
        let line = Placement::of((0..ranks).collect::<Vec<_>>()).unwrap();
        for from in sbps(1, 2) {
            for to in sbps(1, 2) {
                let [one, other] = [&from, &to].map(|sbp| TensorLayout { placement: &line, sbp });
                let received = BoxingPlan::new(&[12, 12], one, other).received();
                assert_eq!(
                    received,
                    least(total, ranks, from[0], to[0]),
                    "{ranks} {from:?} {to:?}"
                );
                // On a mesh, where the other axis is B, in each of its two rows.
                let mesh: Vec<Vec<usize>> =
                    [0, 1].map(|row| (0..ranks).map(|at| row * ranks + at).collect()).into();
                let mesh = Placement::of(mesh).unwrap();
                let both = [vec![B, from[0]], vec![B, to[0]]];
                let [one, other] =
                    [&both[0], &both[1]].map(|sbp| TensorLayout { placement: &mesh, sbp });
                let received = BoxingPlan::new(&[12, 12], one, other).received();
                assert_eq!(received, 2 * least(total, ranks, from[0], to[0]), "{ranks} {both:?}");
            }
        }
    }
}
