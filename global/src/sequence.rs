//! What this rank has done on each placement, to be compared with what other ranks have done.
//!
//! Each thread counts the operations on a placement and keeps a digest of them all. Boxing compares
//! it: ranks that run different operations get an error there, and find out from each other where
//! they part.

use std::cell::RefCell;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use flow_autograd::global::Node;
use flow_comm::digest;
use flow_tensor::ProcessGroup;

use crate::error::Error;
use crate::groups::Groups;
use crate::line::line;
use crate::placement::Placement;

/// The last operations, among which ranks look for the first one that differs.
const KEPT: usize = 512;
/// More placements than this in one thread are forgotten, the first one first.
const MAX_PLACEMENTS: usize = 1024;
/// The time for which a rank waits for what the others have done, once they differ.
const REPORTS: Duration = Duration::from_secs(5);

/// An operation, the same on all ranks.
pub struct AgreedOperation {
    placement: u64,
    digest: u64,
    text: String,
    is_copy: bool,
}

impl AgreedOperation {
    /// Makes an operation on this placement; `what` all ranks agree on, and `text` is for errors.
    /// `is_copy`: it copies a tensor as it is. Autograd does so with the gradient of a leaf where
    /// something else uses it, which may be so on some ranks only.
    pub fn new(placement: &Placement, what: impl Hash, text: String, is_copy: bool) -> Arc<Self> {
        let placement = digest(placement);
        let digest = digest(&what);
        Arc::new(Self { placement, digest, text, is_copy })
    }

    fn is_of_autograd(&self) -> bool {
        /// The number of the nodes that accumulate gradients.
        const ACCUMULATE: u64 = u64::MAX;
        self.is_copy && Node::now(false).number == Some(ACCUMULATE)
    }

    /// Returns the number of the placement that it is on.
    pub fn placement(&self) -> u64 {
        self.placement
    }
}

/// The operations of this thread on a placement.
struct Sequence {
    groups: u64,
    placement: u64,
    count: usize,
    digest: u64,
    /// Each with the digest after it; operation `n`, from 1 on, is at `n % KEPT`.
    last: Vec<(u64, Arc<AgreedOperation>)>,
}

thread_local! {
    static SEQUENCES: RefCell<Vec<Sequence>> = const { RefCell::new(Vec::new()) };
}

/// Counts an operation. Returns false if a rank may run it alone.
pub fn note(groups: &Groups, operation: &Arc<AgreedOperation>) -> bool {
    if operation.is_of_autograd() {
        return false;
    }
    SEQUENCES.with_borrow_mut(|all| {
        match all.iter_mut().find(|sequence| sequence.is_of(groups, operation.placement)) {
            Some(sequence) => sequence.add(operation),
            None => {
                if all.len() == MAX_PLACEMENTS {
                    all.remove(0);
                }
                let groups = groups.number();
                let placement = operation.placement;
                let none = (0, operation.clone());
                let mut new = Sequence { groups, placement, count: 0, digest: 0, last: vec![none] };
                new.add(operation);
                all.push(new);
            }
        }
    });
    true
}

impl Sequence {
    fn is_of(&self, groups: &Groups, placement: u64) -> bool {
        self.placement == placement && self.groups == groups.number()
    }

    /// Returns the last operations, each with the digest after it.
    fn last(&self) -> Vec<(u64, String)> {
        let first = (self.count + 1).saturating_sub(KEPT).max(1);
        let entries = (first..=self.count).map(|number| &self.last[number % KEPT]);
        entries.map(|(digest, operation)| (*digest, operation.text.clone())).collect()
    }

    fn add(&mut self, operation: &Arc<AgreedOperation>) {
        self.count += 1;
        self.digest =
            (self.digest.rotate_left(5) ^ operation.digest).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let entry = (self.digest, operation.clone());
        match self.last.get_mut(self.count % KEPT) {
            Some(place) => *place = entry,
            None => self.last.push(entry),
        }
    }
}

/// Returns the digest of what this thread has done on a placement.
pub fn digest_of(groups: &Groups, placement: u64) -> u64 {
    with(groups, placement, |sequence| sequence.digest).unwrap_or(0)
}

/// Returns how many operations this thread has done on a placement.
pub fn count(groups: &Groups, placement: u64) -> usize {
    with(groups, placement, |sequence| sequence.count).unwrap_or(0)
}

fn with<T>(groups: &Groups, placement: u64, read: impl FnOnce(&Sequence) -> T) -> Option<T> {
    SEQUENCES
        .with_borrow(|all| all.iter().find(|sequence| sequence.is_of(groups, placement)).map(read))
}

/// Returns the error of a collective of a placement's ranks, with what this rank, and the others if
/// they do something else, were doing. Every rank of the group comes here if they do; None if it is
/// not made. A group fails once: of a later collective, the error says what this rank was doing.
pub fn explained(
    error: Error,
    groups: &Groups,
    group: Option<(&ProcessGroup, &[usize])>,
    placement: u64,
) -> Error {
    let comm = match &error {
        Error::Comm(comm)
        | Error::Tensor(flow_tensor::Error::Comm(comm))
        | Error::Buckets(flow_ddp::Error::Comm(comm)) => comm,
        _ => return error,
    };
    let what = match group {
        Some(group) if comm.is_mismatch() && groups.is_first_mismatch(group.1) => {
            differences("mismatch", groups, group, placement)
        }
        _ => own(groups, placement).now(groups.rank()),
    };
    Error::OutOfStep { what, source: Box::new(error) }
}

/// Finds what ranks do that differ, as far as they say. All ranks of the group call this with one
/// `key`, each time another one.
pub fn differences(
    key: &str,
    groups: &Groups,
    (group, ranks): (&ProcessGroup, &[usize]),
    placement: u64,
) -> String {
    let own = own(groups, placement);
    let bytes = serde_json::to_vec(&own).unwrap_or_default();
    let time = REPORTS.min(group.timeout());
    let reports = group.exchange_reports(key, &bytes, time);
    let reports = reports.iter().zip(ranks).filter_map(|(report, &rank)| {
        Some((rank, serde_json::from_slice::<Report>(report.as_deref()?).ok()?))
    });
    let reports: Vec<(usize, Report)> = reports.collect();
    let now: Vec<String> = reports.iter().map(|(rank, report)| report.now(*rank)).collect();
    match parting(&reports) {
        Some(parting) => format!("{parting}; now {}", now.join(", ")),
        None => now.join(", "),
    }
}

/// The report of a rank to the others.
#[derive(serde::Serialize, serde::Deserialize)]
struct Report {
    count: usize,
    line: Option<String>,
    /// The digest after each of the last operations, and the operation.
    last: Vec<(u64, String)>,
}

/// Returns what this thread has done on a placement, and where the program is.
fn own(groups: &Groups, placement: u64) -> Report {
    let done = with(groups, placement, |sequence| (sequence.count, sequence.last()));
    let (count, last) = done.unwrap_or_default();
    Report { count, line: line(), last }
}

impl Report {
    /// Operation `number`, if it is known.
    fn operation(&self, number: usize) -> Option<&(u64, String)> {
        let first = self.count + 1 - self.last.len();
        self.last.get(number.checked_sub(first)?)
    }

    /// Returns the digest after operation `number`, if it is known.
    fn digest(&self, number: usize) -> Option<u64> {
        self.operation(number).map(|(digest, _)| *digest)
    }

    /// Says where the rank is.
    fn now(&self, rank: usize) -> String {
        let line = self.line.as_ref().map_or(String::new(), |line| format!(" at {line}"));
        match self.last.last() {
            Some((_, text)) => format!("rank {rank} is at operation {}, {text},{line}", self.count),
            None => format!("rank {rank} is before its first operation{line}"),
        }
        .trim_end_matches(',')
        .to_owned()
    }
}

/// Says which operation is the first that differs.
fn parting(reports: &[(usize, Report)]) -> Option<String> {
    let last = reports.iter().map(|(_, report)| report.count).max()?;
    let first = reports.iter().map(|(_, report)| report.count + 1 - report.last.len()).max()?;
    let number = (first..=last).find(|&number| {
        let of_first = reports[0].1.digest(number);
        reports.iter().any(|(_, report)| report.digest(number) != of_first)
    })?;
    // What was before may differ already.
    let since = if number == first && first > 1 { " or an earlier one" } else { "" };
    let all: Vec<String> = reports
        .iter()
        .map(|(rank, report)| match report.operation(number) {
            Some((_, text)) => format!("{text} on rank {rank}"),
            None => format!("still to come on rank {rank}"),
        })
        .collect();
    Some(format!("operation {number}{since} is {}", all.join(", ")))
}
