//! Schedules of forwards and whole backwards: GPipe, 1F1B and interleaved 1F1B.

use std::ops::Range;

use super::action::Action::{self, *};

/// Lists the computations of a rank in GPipe: all forwards, then all backwards.
pub(super) fn gpipe(stage: usize, micro_batches: usize) -> Vec<Action> {
    let forwards = (0..micro_batches).map(|micro_batch| Forward { stage, micro_batch });
    let backwards = (0..micro_batches).map(|micro_batch| Backward { stage, micro_batch });
    forwards.chain(backwards).collect()
}

/// Lists the computations of a rank in interleaved 1F1B, or with one chunk in 1F1B. They are some
/// forwards to warm up, then a forward and a backward in turns, then the other backwards.
pub(super) fn interleaved(
    rank: usize,
    ranks: usize,
    chunks: usize,
    micro_batches: usize,
) -> Vec<Action> {
    let mut forwards = Vec::new();
    let mut backwards = Vec::new();
    let groups = groups(ranks, micro_batches);
    let largest = groups[0].len();
    for group in groups {
        for chunk in 0..chunks {
            let forward_stage = chunk * ranks + rank;
            let backward_stage = (chunks - 1 - chunk) * ranks + rank;
            for micro_batch in group.clone() {
                forwards.push(Forward { stage: forward_stage, micro_batch });
                backwards.push(Backward { stage: backward_stage, micro_batch });
            }
        }
    }
    // A gradient takes a forward and a backward for each hop from the last rank to this one. With
    // several chunks there are forwards to do in both these times, with one chunk there are not.
    let hops = ranks - 1 - rank;
    let warm_up = if chunks == 1 { hops } else { (chunks - 1) * largest + 2 * hops };
    in_turns(forwards, backwards, warm_up)
}

/// Divides the micro-batches into groups that pass a rank's stages together. The first group is the
/// largest. Groups have as many micro-batches as there are ranks, or more. So the first micro-batch of
/// a group is back from the last rank when the last of the group has left.
fn groups(ranks: usize, micro_batches: usize) -> Vec<Range<usize>> {
    let count = (micro_batches / ranks).max(1);
    let mut groups = Vec::with_capacity(count);
    let mut start = 0;
    for group in 0..count {
        let longer = usize::from(group < micro_batches % count);
        let end = start + micro_batches / count + longer;
        groups.push(start..end);
        start = end;
    }
    groups
}

/// Lists `warm_up` of the forwards, then a forward and a backward in turns, then the other backwards.
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
