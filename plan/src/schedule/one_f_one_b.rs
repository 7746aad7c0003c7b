//! Schedules of forwards and whole backwards: GPipe, 1F1B and interleaved 1F1B.

use std::ops::Range;

use super::action::Action::{self, *};

/// What a rank does in GPipe: all forwards, then all backwards.
pub(super) fn gpipe(stage: usize, micro_batches: usize) -> Vec<Action> {
    let forwards = (0..micro_batches).map(|micro_batch| Forward { stage, micro_batch });
    let backwards = (0..micro_batches).map(|micro_batch| Backward { stage, micro_batch });
    forwards.chain(backwards).collect()
}

/// What a rank does in interleaved 1F1B, and with one chunk in 1F1B: some forwards to warm up, then
/// a forward and a backward in turns, then the backwards that are left.
pub(super) fn interleaved(
    rank: usize,
    ranks: usize,
    chunks: usize,
    micro_batches: usize,
) -> Vec<Action> {
    let stage = |chunk| chunk * ranks + rank;
    let (mut forwards, mut backwards) = (Vec::new(), Vec::new());
    let (groups, largest) = groups(ranks, micro_batches);
    for group in groups {
        for chunk in 0..chunks {
            for micro_batch in group.clone() {
                forwards.push(Forward { stage: stage(chunk), micro_batch });
                backwards.push(Backward { stage: stage(chunks - 1 - chunk), micro_batch });
            }
        }
    }
    // A gradient takes a forward and a backward for each hop from the last rank to this one. With
    // several chunks there are forwards to do in both these times, with one chunk there are not.
    let hops = ranks - 1 - rank;
    let warm_up = match chunks {
        1 => hops,
        _ => (chunks - 1) * largest + 2 * hops,
    };
    in_turns(forwards, backwards, warm_up)
}

/// The micro-batches in groups that pass a rank's stages together, and the size of the largest, the
/// first. Groups have as many micro-batches as there are ranks, or more, so that the first is back
/// from the last rank when the last of the group has left.
fn groups(ranks: usize, micro_batches: usize) -> (impl Iterator<Item = Range<usize>>, usize) {
    let count = (micro_batches / ranks).max(1);
    let start = move |group| group * (micro_batches / count) + (micro_batches % count).min(group);
    let groups = (0..count).map(move |group| start(group)..start(group + 1));
    (groups, micro_batches.div_ceil(count))
}

/// `warm_up` of the forwards, then a forward and a backward in turns, then the other backwards.
fn in_turns(forwards: Vec<Action>, backwards: Vec<Action>, warm_up: usize) -> Vec<Action> {
    let mut actions = Vec::with_capacity(2 * forwards.len());
    let mut backwards = backwards.into_iter();
    for (index, forward) in forwards.into_iter().enumerate() {
        actions.push(forward);
        if index >= warm_up {
            actions.extend(backwards.next());
        }
    }
    actions.extend(backwards);
    actions
}
