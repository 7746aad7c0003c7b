//! The memory in which a worker of Flow's has its flight recorders, and its steps:
//! [`flow_store::flight`] says what is where. It is read only when somebody watches the job.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use flow_store::clock::Scale;
use flow_store::flight::{self, header, slot};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pread;

use crate::control::status::{Activity, GroupActivity, Operation};
use crate::report::text::printable;
use crate::trace::intervals::{total, union};

/// A worker's memory. It is there as long as this, whatever becomes of the worker.
pub struct FlightFile(OwnedFd);

impl FlightFile {
    /// Makes it; None where the kernel refuses. It has no pages until the worker writes there.
    pub fn new() -> Option<FlightFile> {
        if !flight::is_allowed() {
            log::info!(
                "no memory for a flight recorder: the limit on files (ulimit -f) is too low"
            );
            return None;
        }
        let made = memfd_create(flight::NAME, MemfdFlags::CLOEXEC)
            .and_then(|file| ftruncate(&file, flight::BYTES as u64).map(|()| file));
        made.inspect_err(|error| log::info!("no memory for a flight recorder: {error}"))
            .ok()
            .map(FlightFile)
    }

    /// Returns the variable with the path of a worker's memory. It is empty if there is none, so that a
    /// worker does not use that of a launcher around this one.
    pub fn variable(memory: Option<&FlightFile>) -> (&'static str, OsString) {
        let path = memory
            .map(|memory| format!("/proc/{}/fd/{}", std::process::id(), memory.0.as_raw_fd()));
        (flight::VARIABLE, path.unwrap_or_default().into())
    }

    /// Reads what the worker does; None if it is no program of Flow's, or one of another version.
    pub fn read(&self) -> Option<Activity> {
        let head = self.bytes(0, flight::RINGS_AT)?;
        if word(&head, header::LAYOUT) != flight::LAYOUT {
            return None;
        }
        let mut rings = Vec::new();
        for number in 0..flight::RINGS {
            let at = flight::RINGS_AT + number * flight::RING_BYTES;
            if word(&self.bytes(at, 8)?, 0) != 0 {
                rings.push(self.bytes(at, flight::RING_BYTES)?);
            }
        }
        // After the reading, so that nothing that was read is later.
        let clock = WorkerClock::now(&head);
        Some(clock.map_or_else(|| without_times(&head), |clock| activity(&head, &rings, &clock)))
    }

    fn bytes(&self, at: usize, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        // A file in memory is read whole.
        let count = pread(&self.0, &mut bytes, at as u64).ok()?;
        (count == length).then_some(bytes)
    }
}

/// The time of a worker's ticks.
struct WorkerClock {
    scale: Scale,
    zero: Option<Duration>,
    now: Duration,
}

impl WorkerClock {
    /// Returns that of a worker; None if this process cannot know it.
    fn now(head: &[u8]) -> Option<WorkerClock> {
        let zero = word(head, header::ZERO).checked_sub(1).map(Duration::from_nanos);
        let is_known = zero.is_some() || flow_store::clock::zero().is_none();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
        is_known.then(|| WorkerClock { scale: Scale::now(), zero, now })
    }

    fn time(&self, ticks: u64) -> Duration {
        match self.zero {
            Some(zero) => zero + Duration::from_nanos(ticks),
            None => self.scale.monotonic(ticks),
        }
    }

    /// Returns the seconds between two moments, in ticks.
    fn between(&self, start: u64, end: u64) -> f64 {
        self.time(end).saturating_sub(self.time(start)).as_secs_f64()
    }

    /// Returns how many seconds ago that was.
    fn ago(&self, ticks: u64) -> f64 {
        self.now.saturating_sub(self.time(ticks)).as_secs_f64()
    }
}

/// Returns what is known without a clock.
fn without_times(head: &[u8]) -> Activity {
    Activity {
        pid: word(head, header::PID) as i32,
        steps: word(head, header::STEPS),
        step_seconds: None,
        since_step: None,
        communication: None,
        groups: Vec::new(),
        resumed: Vec::new(),
    }
}

fn activity(head: &[u8], rings: &[Vec<u8>], clock: &WorkerClock) -> Activity {
    let steps = word(head, header::STEPS);
    let end = word(head, header::STEP_END);
    let time = word(head, header::STEP_TIME);
    let resumed = word(head, header::RESUMED) as usize;
    let kept = (resumed.saturating_sub(flight::RESUMED)..resumed)
        .map(|number| word(head, header::RESUMED_AT + number % flight::RESUMED));
    let groups: Vec<Group> = rings.iter().map(|ring| Group::read(ring)).collect();
    Activity {
        pid: word(head, header::PID) as i32,
        steps,
        step_seconds: (steps > 1).then(|| clock.between(end.saturating_sub(time), end)),
        since_step: (steps > 0).then(|| clock.ago(end)),
        communication: communication(&groups, clock),
        groups: groups.iter().map(|group| group.activity(head, clock)).collect(),
        resumed: kept.map(|at| clock.ago(at)).collect(),
    }
}

/// What a group's ring holds.
struct Group {
    name: String,
    records: Vec<Record>,
}

struct Record {
    stamp: u64,
    sequence: u64,
    what: u64,
    started: u64,
    /// The time of its end; None while it is under way.
    done: Option<u64>,
}

impl Group {
    fn read(ring: &[u8]) -> Group {
        let name = text(&ring[8..8 + flight::NAME_BYTES]);
        let (slots, _) = ring[flight::RING_HEAD..].as_chunks::<{ flight::SLOT_BYTES }>();
        Group { name, records: slots.iter().filter_map(|slot| Record::read(slot)).collect() }
    }

    fn activity(&self, head: &[u8], clock: &WorkerClock) -> GroupActivity {
        let (messages, collectives): (Vec<&Record>, Vec<&Record>) =
            self.records.iter().partition(|record| record.is_message());
        let collective = collectives.into_iter().max_by_key(|record| record.stamp);
        let under_way = messages.iter().filter(|record| record.done.is_none());
        let message = under_way
            .min_by_key(|record| record.stamp)
            .or_else(|| messages.iter().max_by_key(|record| record.stamp));
        let operation = |record: &Record| self.operation(record, head, clock);
        GroupActivity {
            name: self.name.clone(),
            collective: collective.map(operation),
            message: message.map(|record| operation(record)),
        }
    }

    fn operation(&self, record: &Record, head: &[u8], clock: &WorkerClock) -> Operation {
        let code = record.what as u8 as usize % flight::NAMES;
        let name = flight::NAMES_AT + code * flight::NAME_BYTES;
        Operation {
            group: self.name.clone(),
            name: text(&head[name..name + flight::NAME_BYTES]),
            sequence: record.sequence,
            bucket: ((record.what >> 16) as u32).checked_sub(1),
            is_collective: !record.is_message(),
            is_under_way: record.done.is_none(),
            seconds: clock.ago(record.done.unwrap_or(record.started)),
        }
    }
}

impl Record {
    /// Returns the record of a slot; None if there is none, or it is just written.
    fn read(bytes: &[u8]) -> Option<Record> {
        let stamp = word(bytes, slot::STAMP);
        let started = word(bytes, slot::STARTED);
        let end = word(bytes, slot::DONE);
        let is_under_way = end & slot::UNDER_WAY != 0;
        let done = end & !slot::FAILED;
        // The slot's next operation claims the end before it writes the stamp.
        let is_other = if is_under_way { end != slot::UNDER_WAY | stamp } else { done < started };
        (stamp != 0 && !is_other).then(|| Record {
            stamp,
            sequence: word(bytes, slot::SEQUENCE),
            what: word(bytes, slot::WHAT),
            started,
            done: (!is_under_way).then_some(done),
        })
    }

    fn is_message(&self) -> bool {
        self.what & slot::MESSAGE != 0
    }
}

/// Returns the share of the time in which an operation was under way, of the time since the oldest that
/// all groups have kept. None without operations.
fn communication(groups: &[Group], clock: &WorkerClock) -> Option<f64> {
    let now = clock.now.as_secs_f64();
    let seconds = |ticks| clock.time(ticks).as_secs_f64();
    let oldest = |group: &Group| group.records.iter().map(|record| record.started).min();
    // A group that has forgotten operations says nothing of the time before those it has.
    let full = groups.iter().filter(|group| group.records.len() + 1 >= flight::SLOTS);
    let begin = full.filter_map(oldest).max().or_else(|| groups.iter().filter_map(oldest).min())?;
    let begin = seconds(begin);
    let mut busy = Vec::new();
    for record in groups.iter().flat_map(|group| &group.records) {
        let end = record.done.map_or(now, seconds).min(now);
        let start = seconds(record.started).max(begin);
        if start < end {
            busy.push((start, end));
        }
    }
    let share = total(&union(busy)) / (now - begin);
    share.is_finite().then(|| share.clamp(0.0, 1.0))
}

/// Returns the word with this number.
fn word(bytes: &[u8], number: usize) -> u64 {
    let word = bytes.get(number * 8..).and_then(|rest| rest.first_chunk());
    word.map_or(0, |word| u64::from_ne_bytes(*word))
}

/// Returns a text that ends with its bytes or a zero.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    printable(&String::from_utf8_lossy(&bytes[..end]))
}
