//! `FLOW_TRACE=DIR`: everything that a rank did, as one file that Perfetto and Chrome show.
//!
//! Operations and phases are kept in memory. They are written when the rank leaves the job, that is
//! when its last group is dropped, and when an operation fails.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use super::clock;
use super::record::Record;

/// The variable that names the folder.
const VARIABLE: &str = "FLOW_TRACE";
/// Events that are kept; later ones are counted only.
const MAX_EVENTS: usize = 1_000_000;
/// Threads in the file: the program's, and communication.
const PROGRAM: u32 = 0;
const COMMUNICATION: u32 = 1;

static ON: AtomicBool = AtomicBool::new(false);
/// Groups that this process is in.
static GROUPS: AtomicUsize = AtomicUsize::new(0);
static TIMELINE: Mutex<Timeline> =
    Mutex::new(Timeline { job: None, events: Vec::new(), dropped: 0 });

/// This rank's place in its job.
#[derive(Debug, Clone)]
pub struct Job {
    pub rank: usize,
    pub world_size: usize,
    pub host: String,
    /// What rank 0's monotonic clock shows more than this machine's, in nanoseconds.
    pub clock_offset: i64,
    /// Where the file goes.
    pub folder: PathBuf,
    /// The process: those that are forked from it write nothing.
    pub pid: u32,
}

struct Timeline {
    job: Option<Job>,
    events: Vec<Event>,
    dropped: u64,
}

enum Event {
    Operation {
        record: Record,
        done: Duration,
        has_failed: bool,
    },
    Span {
        category: &'static str,
        name: &'static str,
        args: Value,
        started: Duration,
        done: Duration,
    },
}

/// The folder that `FLOW_TRACE` names.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// This process joins a job, and keeps events from now on.
pub fn join(job: Job) {
    let mut timeline = timeline();
    // One that was forked from a rank has that rank's number, and would replace its file.
    if timeline.job.as_ref().is_some_and(|before| before.pid != job.pid) {
        ON.store(false, Ordering::Relaxed);
        return;
    }
    timeline.job = Some(job);
    ON.store(true, Ordering::Relaxed);
}

/// Whether events are kept: `FLOW_TRACE` is set, and this process has joined a job.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// A group is made.
pub fn enter_group() {
    GROUPS.fetch_add(1, Ordering::Relaxed);
}

/// A group is dropped.
pub fn leave_group() {
    if GROUPS.fetch_sub(1, Ordering::AcqRel) == 1 {
        write();
    }
}

/// An operation is over.
pub fn add_operation(record: Record) {
    let Some(done) = record.done else { return };
    timeline().add(Event::Operation { record, done, has_failed: false });
}

/// An operation has failed: the file is written at once, as the program may not come to its end.
pub fn add_failed_operation(record: Record) {
    let done = clock::monotonic_of(Instant::now());
    timeline().add(Event::Operation { record, done, has_failed: true });
    write();
}

/// Writes the file, if there is anything to write it for.
fn write() {
    if !is_on() {
        return;
    }
    let timeline = timeline();
    let Some(job) = timeline.job.as_ref().filter(|job| job.pid == std::process::id()) else {
        return;
    };
    if let Err(error) = write_whole(job, &timeline.to_json(job)) {
        log::warn!("rank {}: no trace in {}: {error}", job.rank, job.folder.display());
    }
}

/// Readers find the whole file or none.
fn write_whole(job: &Job, trace: &Value) -> std::io::Result<()> {
    std::fs::create_dir_all(&job.folder)?;
    let path = |name: String| -> PathBuf { Path::join(&job.folder, name) };
    let unfinished = path(format!(".rank{}.json.{}", job.rank, job.pid));
    std::fs::write(&unfinished, serde_json::to_vec(trace)?)?;
    std::fs::rename(&unfinished, path(format!("rank{}.json", job.rank)))
}

fn timeline() -> MutexGuard<'static, Timeline> {
    TIMELINE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Timeline {
    fn add(&mut self, event: Event) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(event);
        } else {
            self.dropped += 1;
        }
    }

    /// Chrome's trace event format, as a JSON object.
    fn to_json(&self, job: &Job) -> Value {
        let name = |kind: &str, thread: u32, name: &str| {
            let args = json!({ "name": name });
            json!({ "name": kind, "ph": "M", "pid": job.rank, "tid": thread, "args": args })
        };
        let process = format!("rank {} on {}", job.rank, job.host);
        let mut events = vec![
            name("process_name", PROGRAM, &process),
            name("thread_name", PROGRAM, "program"),
            name("thread_name", COMMUNICATION, "communication"),
        ];
        let begins = self.begins();
        events
            .extend(self.events.iter().zip(begins).map(|(event, begin)| event.to_json(job, begin)));
        json!({
            "traceEvents": events,
            "otherData": {
                "rank": job.rank, "world_size": job.world_size, "host": job.host, "pid": job.pid,
                "dropped": self.dropped,
            },
        })
    }

    /// Where each event begins in the file. Operations that are under way together, such as
    /// buckets, may begin later there than they did: viewers want events of a thread to lie within
    /// or after each other.
    fn begins(&self) -> Vec<Duration> {
        let mut begins: Vec<Duration> = self.events.iter().map(Event::started).collect();
        let mut operations: Vec<usize> = (0..self.events.len())
            .filter(|&index| matches!(self.events[index], Event::Operation { .. }))
            .collect();
        let done = |index: usize| self.events[index].done();
        operations.sort_by_key(|&index| (begins[index], std::cmp::Reverse(done(index))));
        let mut open: Vec<Duration> = Vec::new();
        for index in operations {
            while let Some(&end) = open.last() {
                if end > begins[index] && end < done(index) {
                    begins[index] = end;
                } else if end > begins[index] {
                    break;
                }
                open.pop();
            }
            open.push(done(index));
        }
        begins
    }
}

impl Event {
    fn started(&self) -> Duration {
        match self {
            Event::Operation { record, .. } => record.started,
            Event::Span { started, .. } => *started,
        }
    }

    fn done(&self) -> Duration {
        match self {
            Event::Operation { done, .. } | Event::Span { done, .. } => *done,
        }
    }

    fn to_json(&self, job: &Job, begin: Duration) -> Value {
        let ts = |time: Duration| {
            (time.as_nanos() as i128 + i128::from(job.clock_offset)) as f64 / 1000.0
        };
        let (category, name, thread, args) = match self {
            Event::Operation { record, has_failed, .. } => {
                let mut args = json!({
                    "group": record.group, "sequence": record.sequence, "bytes": record.bytes,
                    "bucket": record.bucket, "backend": record.backend,
                    "queued": ts(record.queued), "started": ts(record.started),
                });
                if *has_failed {
                    args["failed"] = Value::Bool(true);
                }
                ("comm", record.operation, COMMUNICATION, args)
            }
            Event::Span { category, name, args, .. } => (*category, *name, PROGRAM, args.clone()),
        };
        let dur = self.done().saturating_sub(begin).as_nanos() as f64 / 1000.0;
        json!({
            "name": name, "cat": category, "ph": "X", "ts": ts(begin), "dur": dur,
            "pid": job.rank, "tid": thread, "args": args,
        })
    }
}

/// A part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The model computes its output.
    Forward,
    /// Gradients are computed, and reduced.
    Backward,
    /// The optimizer updates the parameters.
    Optimizer,
}

/// Something that the program does, from when this is made until it is dropped.
#[must_use = "it ends when it is dropped"]
#[derive(Debug)]
pub struct Span {
    category: &'static str,
    name: &'static str,
    step: u64,
    /// Of a wait.
    bucket: Option<u32>,
    /// None if no events are kept.
    started: Option<Instant>,
}

/// A phase of step `step` begins.
pub fn phase(phase: Phase, step: u64) -> Span {
    let name = match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimizer => "optimizer",
    };
    let started = is_on().then(Instant::now);
    Span { category: "phase", name, step, bucket: None, started }
}

/// The program begins to wait for a bucket, at the end of backward.
pub fn wait(step: u64, bucket: u32) -> Span {
    let started = is_on().then(Instant::now);
    Span { category: "wait", name: "wait", step, bucket: Some(bucket), started }
}

impl Span {
    /// Leaves no event: what began has not come to its end.
    pub fn cancel(mut self) {
        self.started = None;
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(started) = self.started else { return };
        let args = match self.bucket {
            Some(bucket) => json!({ "step": self.step, "bucket": bucket }),
            None => json!({ "step": self.step }),
        };
        let done = clock::monotonic_of(Instant::now());
        let started = clock::monotonic_of(started);
        let (category, name) = (self.category, self.name);
        timeline().add(Event::Span { category, name, args, started, done });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn operation(sequence: u64, started: u32, done: u32) -> Event {
        let record = Record {
            group: "0".into(),
            sequence,
            operation: "all_reduce",
            bytes: 8,
            bucket: None,
            backend: "shm",
            queued: started * MS,
            started: started * MS,
            done: Some(done * MS),
        };
        Event::Operation { record, done: done * MS, has_failed: false }
    }

    fn job() -> Job {
        let (rank, world_size, host, pid) = (3, 4, "host".into(), 42);
        Job { rank, world_size, host, clock_offset: -2_000_000, folder: "/nowhere".into(), pid }
    }

    #[test]
    fn events_have_the_time_of_rank_0() {
        let timeline = Timeline { job: None, events: vec![operation(7, 10, 12)], dropped: 1 };
        let trace = timeline.to_json(&job());
        let events = trace["traceEvents"].as_array().expect("a list");
        assert_eq!(events[0]["args"]["name"], "rank 3 on host");
        let expected = json!({
            "name": "all_reduce", "cat": "comm", "ph": "X", "ts": 8000.0, "dur": 2000.0,
            "pid": 3, "tid": 1, "args": {
                "group": "0", "sequence": 7, "bytes": 8, "bucket": null, "backend": "shm",
                "queued": 8000.0, "started": 8000.0,
            },
        });
        assert_eq!(events.last(), Some(&expected));
        let about = json!({ "rank": 3, "world_size": 4, "host": "host", "pid": 42, "dropped": 1 });
        assert_eq!(trace["otherData"], about);
    }

    #[test]
    fn operations_that_overlap_follow_each_other_or_lie_within() {
        let events = vec![
            operation(0, 0, 10),
            operation(1, 5, 15),  // begins when the first is over
            operation(2, 11, 12), // lies within the second
            operation(3, 14, 14),
            operation(4, 13, 20),
        ];
        let timeline = Timeline { job: None, events, dropped: 0 };
        assert_eq!(timeline.begins(), [0, 10, 11, 14, 15].map(|ms| ms * MS));
    }
}
