//! The flight recorders of all groups of this process, for the report of a hang.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flow_store::fork::PerProcess;

use super::ring::{Ring, name};

/// The number of operations under way that [`activity`] names.
const SHOWN: usize = 4;

static RINGS: PerProcess<Mutex<Vec<Weak<Ring>>>> = PerProcess::empty();

fn rings() -> MutexGuard<'static, Vec<Weak<Ring>>> {
    RINGS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that a group is made.
pub fn register(ring: &Arc<Ring>) {
    let mut rings = rings();
    rings.retain(|ring| ring.strong_count() > 0);
    rings.push(Arc::downgrade(ring));
}

/// Says what this process is in, in all its groups, and what completed and failed last, for the
/// report of a hang. Empty if nothing is recorded.
pub fn activity() -> String {
    let rings: Vec<_> = rings().iter().filter_map(Weak::upgrade).collect();
    activity_of(&rings)
}

fn activity_of(rings: &[Arc<Ring>]) -> String {
    let mut records: Vec<_> = rings.iter().flat_map(|ring| ring.records()).collect();
    records.sort_by_key(|record| record.started);
    // A name says of which group it is where there are several.
    let names: Vec<String> = records
        .iter()
        .map(|record| match rings.len() {
            1 => name(record),
            _ => format!("{} of group {}", name(record), record.group),
        })
        .collect();
    let mut under_way = Vec::new();
    let mut completed = None;
    let mut failed = None;
    for (record, name) in records.iter().zip(names) {
        let Some(done) = record.done else {
            under_way.push(name);
            continue;
        };
        let last = if record.has_failed { &mut failed } else { &mut completed };
        if last.as_ref().is_none_or(|(before, _)| *before <= done) {
            *last = Some((done, name));
        }
    }
    if under_way.len() > SHOWN {
        let more = format!("{} more", under_way.len() - SHOWN);
        under_way.truncate(SHOWN);
        under_way.push(more);
    }
    let mut texts = Vec::new();
    if !under_way.is_empty() {
        texts.push(format!("under way: {}", under_way.join(", ")));
    }
    texts.extend(completed.map(|(_, name)| format!("last completed: {name}")));
    texts.extend(failed.map(|(_, name)| format!("last failed: {name}")));
    texts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::recorder::{Recorder, Start};
    use super::*;
    use crate::kind::Kind;

    fn start(sequence: u64, bucket: Option<u32>) -> Start {
        let kind = Kind::AllReduce;
        Start { kind, sequence, bytes: 4000, bucket, is_cuda: false, queued: None }
    }

    /// Other tests have groups in this process, too.
    #[test]
    fn the_activity_of_a_process_names_what_all_groups_are_in() {
        let groups = ["first", "second"].map(|name| Recorder::new(name.into(), "shm", true));
        groups[0].finish(groups[0].start(&start(6, None)));
        groups[0].start(&start(7, None));
        groups[1].start(&start(3, Some(2)));
        let activity_of_both = || {
            let rings = rings().iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
            let is_own = |ring: &Arc<Ring>| ["first", "second"].contains(&&*ring.group);
            activity_of(&rings.into_iter().filter(is_own).collect::<Vec<_>>())
        };
        let expected = "under way: all_reduce #7 of group first, \
                        all_reduce #3 (bucket 2) of group second; \
                        last completed: all_reduce #6 of group first";
        assert_eq!(activity_of_both(), expected);
        assert!(activity().starts_with("under way: "));
        let failed = groups[1].start(&start(4, None));
        groups[1].fail([failed]);
        let expected = format!("{expected}; last failed: all_reduce #4 of group second");
        assert_eq!(activity_of_both(), expected);
        drop(groups);
        assert!(!activity().contains("of group first"));
    }
}
