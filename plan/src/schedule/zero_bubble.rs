//! Schedules with halved backwards: ZB-H1 and ZB-V.

use std::collections::HashMap;

use super::action::Action::{self, *};

/// Lists the computations of a rank in ZB-H1. The gradients of weights wait until the rank holds p
/// activations.
pub(super) fn zb_h1(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let [forward, input, weight] = computations(rank);
    // With fewer micro-batches than ranks, those that do not exist are left out.
    let all = micro_batches.max(ranks);
    let phases: [(usize, &[Action]); 5] = [
        (ranks - 1 - rank, &[forward]),
        (rank, &[forward, input]),
        (all + 1 - ranks, &[forward, input, weight]),
        (ranks - 1 - rank, &[input, weight]),
        (rank, &[weight]),
    ];
    in_phases(&phases, micro_batches)
}

/// Lists the computations of a rank in ZB-V. The rank warms up until it holds 2 p activations. From then
/// on it holds as many.
pub(super) fn zb_v(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let [down_f, down_b, down_w] = computations(rank);
    let [up_f, up_b, up_w] = computations(2 * ranks - 1 - rank);
    let to_tip = ranks - rank;
    // With fewer micro-batches than it takes to warm up, those that do not exist are left out.
    let all = micro_batches.max(2 * ranks - 1);
    let phases: [(usize, &[Action]); 9] = [
        (2 * to_tip - 1, &[down_f]),
        (rank, &[up_f, down_f]),
        (to_tip, &[up_f, up_b, up_w]),
        (all + 1 - ranks - to_tip, &[down_f, down_b, down_w, up_f, up_b, up_w]),
        (to_tip - 1, &[down_b, down_w, up_f, up_b, up_w]),
        (rank, &[down_b, up_b]),
        (to_tip, &[down_b, down_w]),
        (rank, &[up_w]),
        (rank, &[down_w]),
    ];
    in_phases(&phases, micro_batches)
}

/// Returns the computations of a stage.
fn computations(stage: usize) -> [Action; 3] {
    let micro_batch = 0;
    [
        Forward { stage, micro_batch },
        BackwardInput { stage, micro_batch },
        BackwardWeight { stage, micro_batch },
    ]
}

/// Lists the computations of phases, each with its number of repetitions. Each time that a computation
/// comes, it is that of the next micro-batch. It is left out once there are no more micro-batches.
fn in_phases(phases: &[(usize, &[Action])], micro_batches: usize) -> Vec<Action> {
    let mut next: HashMap<Action, usize> = HashMap::new();
    let mut actions = Vec::new();
    for &(times, phase) in phases {
        for &computation in std::iter::repeat_n(phase, times.min(micro_batches)).flatten() {
            let next = next.entry(computation).or_default();
            if *next < micro_batches {
                actions.push(computation.of_micro_batch(*next));
            }
            *next += 1;
        }
    }
    actions
}
