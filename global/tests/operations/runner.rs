//! Runs cases on ranks that are threads, for SBPs of all their inputs.

use std::collections::BTreeMap;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flow_global::{Placement, Result};
use flow_tensor::ProcessGroup;

use crate::cases::case::Case;
use crate::cases::check::{Check, Own};

/// Makes a rank's placement.
pub type Place = fn(&ProcessGroup) -> Result<Placement>;

/// After so many failures a case is left.
const FAILURES: usize = 3;

/// A rank that waits longer for another one has lost it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The number of combinations that ran, and the failures by case.
type Report = (usize, BTreeMap<String, Vec<String>>);

/// What all ranks see.
struct Shared {
    /// For the ranks to take.
    groups: Mutex<Vec<Option<ProcessGroup>>>,
    /// Of the combination at hand: each rank's error.
    errors: Mutex<Vec<Option<String>>>,
    barrier: Barrier,
}

/// Runs all cases on `size` ranks; those that have `CASE` in their name, if the environment has it.
/// Panics with a list of all failures.
pub fn run(cases: &[Case], size: usize, place: Place) {
    let wanted = std::env::var("CASE").unwrap_or_default();
    let cases: Vec<&Case> = cases.iter().filter(|case| case.name.contains(&wanted)).collect();
    tch::set_num_threads(1);
    let shared = Shared {
        groups: Mutex::new(groups(size)),
        errors: Mutex::new(vec![None; size]),
        barrier: Barrier::new(size),
    };
    let (count, failures) = std::thread::scope(|scope| {
        let start = |rank| {
            let (cases, shared) = (&cases, &shared);
            scope.spawn(move || run_rank(cases, rank, place, shared))
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).next_back().unwrap()
    });
    println!("{count} combinations of SBPs on {size} ranks");
    println!("gathered: {}", flow_global::gathered_operations().join(" "));
    let list: Vec<String> = failures.into_values().flatten().collect();
    assert!(list.is_empty(), "{} failures:\n{}", list.len(), list.join("\n"));
}

/// New ones for each rank.
fn groups(size: usize) -> Vec<Option<ProcessGroup>> {
    let groups = ProcessGroup::in_process(size).unwrap().into_iter();
    groups.inspect(|group| group.set_timeout(TIMEOUT)).map(Some).collect()
}

fn run_rank(cases: &[&Case], rank: usize, place: Place, shared: &Shared) -> Report {
    let take = || {
        let group = lock(&shared.groups)[rank].take().unwrap();
        place(&group).unwrap()
    };
    let mut placement = take();
    let mesh = placement.shape().to_vec();
    let (mut count, mut failures) = Report::default();
    for case in cases {
        let check = match Check::new(case) {
            Ok(check) => check,
            Err(error) => {
                failures.insert(case.name.clone(), vec![format!("{}: {error}", case.name)]);
                continue;
            }
        };
        for (index, sbps) in check.combinations(&mesh).into_iter().enumerate() {
            count += 1;
            let run = || check.run(Own { rank, placement: &placement }, &sbps, index);
            // The second time, operations are known and may go a shorter way.
            let error = run().and_then(|_| run()).err();
            let errors = exchange(shared, rank, error, &mut placement);
            if errors.iter().all(Option::is_none) {
                continue;
            }
            placement = take();
            let refusal = |error: &String| case.refusal.is_some_and(|words| error.contains(words));
            if errors.iter().flatten().any(refusal) {
                continue;
            }
            let of_case = failures.entry(case.name.clone()).or_default();
            of_case.push(format!("{} {sbps:?}: {}", case.name, summary(&errors)));
            if of_case.len() == FAILURES {
                break;
            }
        }
    }
    (count, failures)
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
