//! Schedules with one stage on each rank: GPipe and 1F1B.

use super::action::Action::{self, *};

/// All forwards, then all backwards.
pub(super) fn gpipe(rank: usize, micro_batches: usize) -> Vec<Action> {
    one_f_one_b(rank, micro_batches, micro_batches)
}

/// `warm_up` forwards, then one forward and one backward in turns, then the backwards that are left.
pub(super) fn one_f_one_b(rank: usize, micro_batches: usize, warm_up: usize) -> Vec<Action> {
    let forwards = (0..micro_batches).map(|micro_batch| Forward { stage: rank, micro_batch });
    let backwards = (0..micro_batches).map(|micro_batch| Backward { stage: rank, micro_batch });
    in_turns(forwards, backwards, warm_up)
}

/// `warm_up` of the forwards, then a forward and a backward in turns, then the rest of the backwards.
pub(super) fn in_turns(
    mut forwards: impl Iterator<Item = Action>,
    mut backwards: impl Iterator<Item = Action>,
    warm_up: usize,
) -> Vec<Action> {
    let mut actions: Vec<_> = forwards.by_ref().take(warm_up).collect();
    for forward in forwards {
        actions.push(forward);
        actions.extend(backwards.next());
    }
    actions.extend(backwards);
    actions
}
