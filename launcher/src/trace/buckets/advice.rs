//! What to do about buckets that ranks wait for. Pure.

use std::fmt::Write;

use super::sizes::{Choice, MIB, Simulation, reduction_times};
use super::steps::GroupSteps;
use super::waits::Waited;
use crate::trace::intervals::median;

/// The share of a step that is worth a change.
pub const WORTH_IT: f64 = 0.01;
/// The share of the wait that a change must save.
const SAVES: f64 = 0.1;
/// The share of the wait from which it is a rank's that comes late, rather than the network's.
const LATE: f64 = 0.75;
/// The share of the wait by which a simulation of the recorded buckets may be wrong.
const WRONG: f64 = 0.3;
/// The share of backward for which a full bucket is held back where it is to be reduced at the end.
const HELD_BACK: f64 = 0.1;

/// Says what to do about buckets that ranks wait for, in steps that take so long.
pub fn advice(group: &GroupSteps, waited: &[Waited], step: f64) -> String {
    let all = Waited::sum(waited);
    if all.late >= LATE * all.time() {
        return late_advice(group, waited, &all);
    }
    let ranks = || group.steps.iter().flat_map(|step| &step.ranks);
    let backward = median(ranks().map(|rank| rank.computed - rank.begin).collect());
    let held =
        ranks().map(|rank| rank.reductions[0].queued - rank.begin - group.first_is_full(rank));
    if median(held.collect()) > HELD_BACK * backward {
        return "no estimate: buckets are reduced at the end of backward, as some communication hooks \
                want it"
            .into();
    }
    let communication = group.steps.iter().map(|step| reduction_times(step).iter().sum());
    let communication = median(communication.collect());
    let mut text = String::new();
    if communication > backward {
        let _ = writeln!(
            text,
            "communication takes longer than backward ({} ms of {}): no size hides all of it; send \
             less by a communication hook (docs/ddp.md)",
            ms(communication),
            ms(backward)
        );
    }
    text + &size_advice(group, waited, step)
}

fn late_advice(group: &GroupSteps, waited: &[Waited], all: &Waited) -> String {
    let Some((rank, time)) = all.late_rank() else {
        return "ranks wait for each other, now for one and now for another: no size of buckets helps"
            .into();
    };
    let buckets = waited.iter().enumerate();
    let most = buckets.max_by(|one, other| one.1.for_rank(rank).total_cmp(&other.1.for_rank(rank)));
    let bucket = most.map_or(0, |(bucket, _)| bucket);
    let ranks = group.steps[0].ranks.len() as f64;
    format!(
        "the others wait {} ms for rank {rank}, which begins bucket {bucket} late: no size of buckets \
         helps",
        ms(time * ranks / (ranks - 1.0).max(1.0))
    )
}

fn size_advice(group: &GroupSteps, waited: &[Waited], step: f64) -> String {
    let buckets = waited.iter().enumerate();
    let most = buckets.max_by(|one, other| one.1.time().total_cmp(&other.1.time()));
    let Some((bucket, of_bucket)) = most else { return String::new() };
    let place = match group.bytes.len() {
        1 => ", the only one",
        count if bucket + 1 == count => ", the last one that backward completes",
        _ => "",
    };
    let longest = format!(
        "{} ms of {} are a wait for bucket {bucket} ({:.1} MiB{place})",
        ms(of_bucket.time()),
        ms(step),
        group.bytes[bucket] as f64 / MIB
    );
    let tensors = group.tensors.get(bucket).map_or(0, Vec::len);
    format!("{longest}; {}", better_sizes(group, Waited::sum(waited).time(), step, tensors))
}

/// Says which sizes would be better. The bucket that is waited for longest has so many tensors.
fn better_sizes(group: &GroupSteps, wait: f64, step: f64, tensors: usize) -> String {
    if group.tensors.is_empty() {
        return "no estimate: the timeline does not say which tensors it has".into();
    }
    if group.bytes.len() == 1 && tensors > 1 {
        return "smaller ones would begin earlier: try a quarter of that as bucket_cap_mb".into();
    }
    let Some(simulation) = Simulation::new(group) else {
        return "no estimate: all buckets are of about one size, or larger ones take no longer"
            .into();
    };
    let error = (simulation.recorded() - wait).abs();
    if error > WRONG * wait {
        return "no estimate: sizes do not explain the times".into();
    }
    let worth_it = (SAVES * wait).max(WORTH_IT * step).max(2.0 * error);
    let best = simulation.best().filter(|best| simulation.recorded() - best.wait >= worth_it);
    match best {
        Some(Choice { caps, wait: left }) => {
            let call = match &caps[..] {
                [cap] => format!("bucket_cap_mb({cap:.1})"),
                caps => format!("bucket_cap_mb_list(&{caps:.1?})"),
            };
            format!("{call} would leave about {} ms of {}", ms(left), ms(wait))
        }
        None if tensors == 1 => "no other size would leave much less: one gradient fills it".into(),
        None => "no other size would leave much less".into(),
    }
}

/// Returns a time in milliseconds, for people.
pub fn ms(time: f64) -> String {
    let time = time / 1e3;
    if time < 9.95 { format!("{time:.1}") } else { format!("{time:.0}") }
}
