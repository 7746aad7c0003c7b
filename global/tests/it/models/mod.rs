//! Models as for one device, trained on global tensors in any layout: after several steps of an
//! optimizer all parameters are those of one process.

mod training;

use std::panic::{AssertUnwindSafe, catch_unwind};

use flow_global::Placement;
use flow_tensor::ProcessGroup;
use training::layouts::{self, Layout};
use training::{Optimizer, Training};

/// Trains on ranks that are threads. Returns what the ranks say where they differ from one process.
fn failures(
    training: Training,
    size: usize,
    place: fn(&ProcessGroup) -> flow_global::Result<Placement>,
    layouts: &[Layout],
) -> Vec<String> {
    tch::set_num_threads(1);
    let reference = training.reference();
    let on_ranks = |layout: &Layout| {
        let groups = ProcessGroup::in_process(size).unwrap();
        std::thread::scope(|scope| {
            let start = |group: ProcessGroup| {
                let reference = reference.clone();
                scope.spawn(move || {
                    let rank = group.rank();
                    let placement = place(&group).unwrap();
                    drop(group);
                    let check = || training.check(&placement, layout, &reference);
                    let result = catch_unwind(AssertUnwindSafe(check)).err()?;
                    let message = result.downcast_ref::<String>().cloned().unwrap_or_default();
                    let (network, optimizer) = (training.name, training.optimizer);
                    Some(format!(
                        "{network} {optimizer:?}, {}, rank {rank}: {message}",
                        layout.name
                    ))
                })
            };
            let ranks: Vec<_> = groups.into_iter().map(start).collect();
            ranks.into_iter().filter_map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    layouts.iter().flat_map(on_ranks).collect()
}

fn check(all: impl IntoIterator<Item = Vec<String>>) {
    let all: Vec<String> = all.into_iter().flatten().collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}

fn on_two(training: Training, layouts: &[Layout]) -> Vec<String> {
    failures(training, 2, |group| Placement::new(group, [0, 1]), layouts)
}

fn on_three(training: Training, layouts: &[Layout]) -> Vec<String> {
    failures(training, 3, |group| Placement::new(group, [2, 0, 1]), layouts)
}

fn on_one_axis(training: Training, layouts: &[Layout]) -> Vec<String> {
    [on_two(training, layouts), on_three(training, layouts)].concat()
}

fn on_a_mesh(training: Training) -> Vec<String> {
    let place = |group: &ProcessGroup| Placement::new(group, [[0, 1], [2, 3]]);
    failures(training, 4, place, &layouts::hybrid())
}

fn all_of<const N: usize>(layouts: [Vec<Layout>; N]) -> Vec<Layout> {
    layouts.into_iter().flatten().collect()
}

#[test]
fn mlp() {
    let layouts =
        all_of([layouts::of_data(), layouts::of_tensors(), layouts::odd(), layouts::of_terms()]);
    check(Optimizer::ALL.map(|optimizer| on_one_axis(Training::mlp(optimizer), &layouts)));
    check([on_one_axis(Training::uneven_mlp(), &layouts)]);
}

#[test]
fn mlp_on_a_mesh() {
    check(Optimizer::ALL.map(|optimizer| on_a_mesh(Training::mlp(optimizer))));
    check([on_a_mesh(Training::uneven_mlp())]);
}

/// Rank 1 has nothing, and knows all.
#[test]
fn mlp_on_three_of_four_ranks() {
    let layouts = all_of([layouts::of_data(), layouts::of_tensors()]);
    let place = |group: &ProcessGroup| Placement::new(group, [2, 0, 3]);
    check([failures(Training::mlp(Optimizer::Adam), 4, place, &layouts)]);
}

#[test]
fn cnn() {
    let layouts = all_of([layouts::of_data(), layouts::of_channels(), layouts::odd()]);
    check([Training::cnn(), Training::cnn_with_dropout()].map(|one| on_one_axis(one, &layouts)));
    check([on_a_mesh(Training::cnn()), on_a_mesh(Training::cnn_with_dropout())]);
}

#[test]
fn gpt() {
    let layouts = all_of([layouts::of_data(), layouts::of_tensors(), layouts::odd()]);
    check([on_one_axis(Training::gpt(), &layouts), on_a_mesh(Training::gpt())]);
}

#[test]
fn mobilenet() {
    check([on_three(Training::mobilenet(), &layouts::of_data())]);
}

#[test]
fn resnet() {
    check([on_two(Training::resnet(), &layouts::of_data())]);
}
