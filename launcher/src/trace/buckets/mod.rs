//! The buckets that backward waited for, and what would have hidden them. Pure.
//!
//! | file | subject |
//! |---|---|
//! | `advice.rs` | what to do about it |
//! | `sizes.rs` | a simulation of other sizes |
//! | `steps.rs` | what the buckets of each group did, step by step |
//! | `waits.rs` | how long ranks waited for each bucket, and for whom |

mod advice;
mod sizes;
mod steps;
#[cfg(test)]
mod tests;
mod waits;

use std::fmt::Write;

use self::advice::{WORTH_IT, advice, ms};
use self::sizes::MIB;
use self::steps::{GroupSteps, Step, has_other_buckets, steps_of_groups};
use self::waits::{Waited, last_to_begin, waited};
use super::format::Timeline;
use super::intervals::median;

/// Steps from which an estimate is made, at least.
const ENOUGH: usize = 5;
/// Buckets in a table, those that were waited for longest.
const LISTED: usize = 5;
/// The share of a step from which a wait is in the table.
const IN_TABLE: f64 = 0.001;

/// Returns a table for each group with buckets that were waited for, and advice.
pub fn describe(timeline: &Timeline) -> String {
    let groups = steps_of_groups(timeline);
    if groups.is_empty() && has_other_buckets(timeline) {
        return "\nbuckets: a communication hook reduces them, or they are sparse: no estimate\n"
            .into();
    }
    let ranks_that_miss = timeline.missing_ranks();
    groups.iter().map(|group| describe_group(group, ranks_that_miss)).collect()
}

fn describe_group(group: &GroupSteps, ranks_that_miss: usize) -> String {
    let count = group.steps.len();
    if count < ENOUGH {
        let doubt = group.doubt.as_ref().map_or(String::new(), |doubt| format!(": {doubt}"));
        return format!(
            "\nbuckets of group {}: {count} steps that can be compared, too few for an estimate{doubt}\n",
            group.group
        );
    }
    let step = median(group.steps.iter().map(|step| step.time).collect());
    let waited = waited(group);
    let wait = Waited::sum(&waited).time();
    let mut text = format!(
        "\nbuckets of group {}: {count} steps of {} ms, of which ranks wait {} ms for buckets\n",
        group.group,
        ms(step),
        ms(wait)
    );
    if wait >= WORTH_IT * step {
        text += &table(group, &waited, step);
    }
    let advice = if let Some(doubt) = &group.doubt {
        format!("no estimate: {doubt}")
    } else if ranks_that_miss > 0 {
        format!(
            "no estimate: the timeline lacks {ranks_that_miss} ranks, which others may wait for"
        )
    } else if wait < WORTH_IT * step {
        format!("nothing to gain: {} ms of {}", ms(wait), ms(step))
    } else {
        advice(group, &waited, step)
    };
    text + &advice + "\n"
}

/// Makes a table with a line for each bucket that was waited for longest; empty where many were, and
/// none of them for long.
fn table(group: &GroupSteps, waited: &[Waited], step: f64) -> String {
    let mut listed: Vec<usize> = (0..waited.len()).collect();
    listed.retain(|&bucket| waited[bucket].time() >= IN_TABLE * step);
    listed.sort_by(|&one, &other| waited[other].time().total_cmp(&waited[one].time()));
    listed.truncate(LISTED);
    if listed.is_empty() {
        return String::new();
    }
    listed.sort_unstable();
    let mut text =
        String::from("bucket      MiB   queued ms   takes ms   wait ms   of a step   for\n");
    for bucket in listed {
        let waited = &waited[bucket];
        let mut queued = Vec::new();
        let mut takes = Vec::new();
        for step in &group.steps {
            let of_ranks = step.ranks.iter();
            queued.extend(of_ranks.map(|rank| rank.reductions[bucket].queued - rank.begin));
            takes.push(time_since_all_began(step, bucket));
        }
        let cause = if waited.network >= waited.late {
            "the network".to_owned()
        } else {
            let late = waited.late_rank();
            late.map_or("each other".to_owned(), |(rank, _)| format!("rank {rank}"))
        };
        let _ = writeln!(
            text,
            "{bucket:>6} {:>8.2} {:>11.1} {:>10.2} {:>9.2} {:>10.1}%   {cause}",
            group.bytes[bucket] as f64 / MIB,
            median(queued) / 1e3,
            median(takes) / 1e3,
            waited.time() / 1e3,
            100.0 * waited.time() / step
        );
    }
    text
}

/// Returns the time from when the last rank began a bucket until the last one saw its end.
fn time_since_all_began(step: &Step, bucket: usize) -> f64 {
    let ends = step.ranks.iter().map(|rank| rank.reductions[bucket].end);
    ends.fold(f64::NEG_INFINITY, f64::max) - last_to_begin(step, bucket).1
}
