//! Boxing of real tensors between ranks that are threads: every pair of layouts gives the tensor
//! that was there before.

mod common;

use common::{gather, sbps, scatter, Local};
use flow_global::boxing::execute::Boxing;
use flow_global::boxing::plan::Layout;
use flow_global::{Groups, Placement};
use flow_tensor::ProcessGroup;
use tch::{Device, Kind, Tensor};

/// A placement, and an SBP of each of its axes.
type Lying = (Placement, Vec<flow_global::Sbp>);

fn layout((placement, sbp): &Lying) -> Layout<'_> {
    Layout { placement, sbp }
}

/// Each rank's results of all cases: None where the rank is outside the new placement.
fn run(
    size: usize,
    make: fn(&ProcessGroup) -> Groups,
    cases: &[(Vec<usize>, Lying, Lying)],
) -> Vec<Vec<Option<Local>>> {
    let groups = ProcessGroup::in_process(size).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let (groups, rank) = (make(&group), group.rank());
                    let one = |(shape, from, to): &(Vec<usize>, Lying, Lying)| {
                        let (from, to) = (layout(from), layout(to));
                        let boxing = Boxing::new(rank, shape, from, to);
                        let local = from.placement.position(rank).map(|position| {
                            let region =
                                flow_global::region::regions(from.placement, from.sbp, shape);
                            let sizes = region[position].shape();
                            let sizes: Vec<i64> = sizes.iter().map(|&size| size as i64).collect();
                            Tensor::from_slice(&scatter(shape, from)[position]).view(&sizes[..])
                        });
                        let options = (Kind::Int64, Device::Cpu);
                        let result = boxing.run(&groups, options, local.as_ref());
                        result.unwrap().map(|result| {
                            Vec::<i64>::try_from(result.contiguous().view([-1])).unwrap()
                        })
                    };
                    cases.iter().map(one).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
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
