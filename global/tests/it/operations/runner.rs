//! Runs cases on ranks that are threads, for SBPs of all their inputs.

use std::collections::BTreeMap;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flow_global::trace::Trace;
use flow_global::{Placement, Result, Sbp};
use flow_tensor::ProcessGroup;

use super::cases::case::Case;
use super::cases::check::{Check, Own};

/// Makes a rank's placement.
pub type Place = fn(&ProcessGroup) -> Result<Placement>;

/// After so many failures a case is left.
const FAILURES: usize = 3;

/// Ranks that call different things fail at once. Only one that never comes is waited for so long:
/// a hang fails too.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The operations with rules that ran in each case, and whether one of their tensors was not B.
pub type Used = BTreeMap<String, BTreeMap<String, bool>>;

/// What a rank finds.
#[derive(Default)]
struct Report {
    /// Combinations that ran.
    count: usize,
    /// By case.
    failures: BTreeMap<String, Vec<String>>,
    used: Used,
}

/// What all ranks see.
struct Shared {
    /// For the ranks to take.
    groups: Mutex<Vec<Option<ProcessGroup>>>,
    /// Of the combination at hand: each rank's error.
    errors: Mutex<Vec<Option<String>>>,
    barrier: Barrier,
}

/// Ranks, and what is tried on them.
#[derive(Clone, Copy)]
pub struct Ranks {
    pub size: usize,
    pub place: Place,
    /// Combinations of SBPs of a case's inputs; `COMBINATIONS` of the environment counts instead.
    pub tried: usize,
}

/// Runs all cases on ranks; those that have `CASE` in their name, if the environment has it. Panics
/// with a list of all failures. `records`: returns the operations that ran on rank 0.
pub fn run(cases: &[Case], mut ranks: Ranks, records: bool) -> Used {
    let size = ranks.size;
    if let Ok(count) = std::env::var("COMBINATIONS") {
        ranks.tried = count.parse().expect("COMBINATIONS is a number");
    }
    let wanted = std::env::var("CASE").unwrap_or_default();
    let cases: Vec<&Case> = cases.iter().filter(|case| case.name.contains(&wanted)).collect();
    tch::set_num_threads(1);
    let shared = Shared {
        groups: Mutex::new(groups(size)),
        errors: Mutex::new(vec![None; size]),
        barrier: Barrier::new(size),
    };
    let Report { count, failures, used } = std::thread::scope(|scope| {
        let start = |rank| {
            let (cases, shared, records) = (&cases, &shared, records && rank == 0);
            scope.spawn(move || run_rank(cases, rank, ranks, shared, records))
        };
        let mut ranks = (0..size).map(start).collect::<Vec<_>>().into_iter();
        let first = ranks.next().unwrap().join().unwrap();
        ranks.for_each(|rank| drop(rank.join().unwrap()));
        first
    });
    println!("{count} combinations of SBPs on {size} ranks");
    println!("gathered: {}", flow_global::gathered_operations().join(" "));
    let list: Vec<String> = failures.into_values().flatten().collect();
    assert!(list.is_empty(), "{} failures:\n{}", list.len(), list.join("\n"));
    used
}

/// New ones for each rank.
fn groups(size: usize) -> Vec<Option<ProcessGroup>> {
    let groups = ProcessGroup::in_process(size).unwrap().into_iter();
    groups.inspect(|group| group.set_timeout(TIMEOUT)).map(Some).collect()
}

fn run_rank(cases: &[&Case], rank: usize, ranks: Ranks, shared: &Shared, records: bool) -> Report {
    let take = || {
        let group = lock(&shared.groups)[rank].take().unwrap();
        (ranks.place)(&group).unwrap()
    };
    let mut placement = take();
    let mesh = placement.shape().to_vec();
    let mut report = Report::default();
    for case in cases {
        let check = match Check::new(case) {
            Ok(check) => check,
            Err(error) => {
                report.failures.insert(case.name.clone(), vec![format!("{}: {error}", case.name)]);
                continue;
            }
        };
        for (index, sbps) in check.combinations(&mesh, ranks.tried).into_iter().enumerate() {
            report.count += 1;
            let run = || check.run(Own { rank, placement: &placement }, &sbps, index);
            let mut first = || {
                if records {
                    let (result, trace) = flow_global::record(run);
                    note(&trace, report.used.entry(case.name.clone()).or_default());
                    result
                } else {
                    run()
                }
            };
            // The second time, operations are known and may go a shorter way.
            let error = first().and_then(|_| run()).err();
            let errors = exchange(shared, rank, error, &mut placement);
            if errors.iter().all(Option::is_none) {
                continue;
            }
            placement = take();
            let refusal = |error: &String| case.refusal.is_some_and(|words| error.contains(words));
            if errors.iter().flatten().any(refusal) {
                continue;
            }
            let of_case = report.failures.entry(case.name.clone()).or_default();
            of_case.push(format!("{} {sbps:?}: {}", case.name, summary(&errors)));
            if of_case.len() == FAILURES {
                break;
            }
        }
    }
    report
}

/// Adds the operations that ran by a rule.
fn note(trace: &Trace, used: &mut BTreeMap<String, bool>) {
    for call in trace.calls.iter().filter(|call| call.has_rule) {
        let results = call.outputs.iter().flatten().flat_map(|&id| &trace.values[id].sbp);
        let mut sbps = call.boxed.iter().flatten().chain(results);
        *used.entry(call.name.clone()).or_default() |= sbps.any(|&sbp| sbp != Sbp::Broadcast);
    }
}

/// All ranks' errors. If there is one, ranks may have stopped at different collectives: then there
/// are new groups for them to take.
fn exchange(
    shared: &Shared,
    rank: usize,
    error: Option<String>,
    placement: &mut Placement,
) -> Vec<Option<String>> {
    if error.is_some() {
        // This rank leaves its group, so that none waits for it.
        *placement = Placement::of([0]).unwrap();
    }
    lock(&shared.errors)[rank] = error;
    shared.barrier.wait();
    let errors = lock(&shared.errors).clone();
    // All have read before one writes.
    let is_leader = shared.barrier.wait().is_leader();
    if errors.iter().any(Option::is_some) {
        if is_leader {
            *lock(&shared.groups) = groups(errors.len());
        }
        shared.barrier.wait();
    }
    errors
}

/// One error of all ranks, or each rank's.
fn summary(errors: &[Option<String>]) -> String {
    if errors.iter().all(|error| *error == errors[0]) {
        return errors[0].clone().unwrap_or_default();
    }
    let each = errors.iter().enumerate();
    each.map(|(rank, error)| format!("\n    rank {rank}: {}", error.as_deref().unwrap_or("-")))
        .collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
