//! `FLOW_TRACE=DIR`: everything that a rank did, as one file that Perfetto and Chrome show.
//!
//! Operations and phases are kept in memory. They are written when the rank leaves the job, that is
//! when its last group is dropped or the process exits, and at the first failure of a group.

use std::ffi::c_int;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use flow_store::clock;
use flow_store::fork::{ForkSafe, Process};
use serde::Serialize;
use serde_json::json;

use super::record::Record;
use crate::bucket_name::JOIN_NOTICE;

/// The variable that names the folder.
const VARIABLE: &str = "FLOW_TRACE";
/// Events that are kept; later ones are counted only.
const MAX_EVENTS: usize = 1_000_000;
/// Threads in the file: the program's, and communication.
const PROGRAM: u32 = 0;
const COMMUNICATION: u32 = 1;

unsafe extern "C" {
    /// C's: calls `function` when the process exits.
    fn atexit(function: extern "C" fn()) -> c_int;
}

static ON: AtomicBool = AtomicBool::new(false);
/// Groups that this process is in.
static GROUPS: AtomicUsize = AtomicUsize::new(0);
/// The events of this process. After a fork the child finds its parent's, and must not use it.
static TIMELINE: OnceLock<ForkSafe<Mutex<Timeline>>> = OnceLock::new();

/// This rank's place in its job.
#[derive(Debug, Clone)]
pub struct RankInfo {
    pub rank: usize,
    pub world_size: usize,
    pub host: String,
    /// The time by which rank 0's monotonic clock is ahead of this machine's, in nanoseconds.
    pub clock_offset: i64,
    /// The folder that gets the file.
    pub folder: PathBuf,
    pub pid: u32,
}

struct Timeline {
    info: RankInfo,
    events: Vec<Event>,
    dropped: u64,
}

enum Event {
    Operation(Record),
    Span {
        category: &'static str,
        name: &'static str,
        step: u64,
        bucket: Option<u32>,
        place: Option<(usize, usize)>,
        started: Duration,
        done: Duration,
    },
    /// The tensors of a group's buckets in a backward that ends.
    Buckets {
        group: String,
        step: u64,
        buckets: Vec<BucketTensors>,
        at: Duration,
    },
}

/// The tensors that are reduced together, as one bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BucketTensors {
    /// Only tensors of one class share buckets: those of a type, for instance.
    pub class: u8,
    /// How many bytes are sent of each, in the order in which gradients come; 0 of a sparse gradient,
    /// of which other entries are sent in each step.
    pub tensors: Vec<u64>,
    /// The time from the first gradient of the backward to each of these, in microseconds.
    pub ready: Vec<u64>,
}

/// Returns the folder that `FLOW_TRACE` names.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// Joins a job: this process keeps events from now on.
pub fn join(info: RankInfo) {
    // A forked process has the number of the rank that it was forked from, and would replace its
    // file. It must not wait for a thread of its parent either, which may just have made this.
    if Process::current().forks() > 0 {
        ON.store(false, Ordering::Relaxed);
        return;
    }
    TIMELINE.get_or_init(|| {
        // SAFETY: `write_at_exit` may be called at any time, and by any thread.
        unsafe { atexit(write_at_exit) };
        let timeline = Timeline { info: info.clone(), events: Vec::new(), dropped: 0 };
        ForkSafe::new(Mutex::new(timeline))
    });
    if let Some(mut timeline) = timeline() {
        timeline.info = info;
        ON.store(true, Ordering::Relaxed);
    }
}

/// Whether events are kept: `FLOW_TRACE` is set, and this process has joined a job.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Notes that a group is made.
pub fn enter_group() {
    GROUPS.fetch_add(1, Ordering::Relaxed);
}

/// Notes that a group is dropped.
pub fn leave_group() {
    if GROUPS.fetch_sub(1, Ordering::AcqRel) == 1 {
        write();
    }
}

/// Writes the file of a program that ends in a group: one that Python or a library keeps, for instance.
extern "C" fn write_at_exit() {
    if GROUPS.load(Ordering::Acquire) > 0 {
        write();
    }
}

/// Notes that an operation is over, or has failed; None if there is no record of it.
pub fn add_operation(record: Option<Record>) {
    if let Some(mut timeline) = timeline() {
        match record.filter(|record| record.done.is_some()) {
            Some(record) => timeline.add(Event::Operation(record)),
            None => timeline.dropped += 1,
        }
    }
}

/// Notes which tensors were in the buckets of the group of this name in a backward that ends.
pub fn add_buckets(group: &str, step: u64, buckets: Vec<BucketTensors>) {
    if is_on() {
        let at = clock::monotonic_of(Instant::now());
        add(Event::Buckets { group: group.to_owned(), step, buckets, at });
    }
}

/// Writes the file, if there is anything to write it for.
pub fn write() {
    if !is_on() {
        return;
    }
    let Some(timeline) = timeline() else { return };
    let info = &timeline.info;
    if let Err(error) = write_whole(&timeline) {
        log::warn!("rank {}: no trace in {}: {error}", info.rank, info.folder.display());
    }
}

/// Readers find the whole file or none.
fn write_whole(timeline: &Timeline) -> std::io::Result<()> {
    let info = &timeline.info;
    std::fs::create_dir_all(&info.folder)?;
    let unfinished = info.folder.join(format!(".rank{}.json.{}", info.rank, info.pid));
    let file = info.folder.join(format!("rank{}.json", info.rank));
    let written = write_to(&unfinished, timeline).and_then(|()| std::fs::rename(&unfinished, file));
    // A full disk gets its space back.
    written.inspect_err(|_| drop(std::fs::remove_file(&unfinished)))
}

fn write_to(path: &Path, timeline: &Timeline) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    timeline.write_json(&mut file)?;
    file.flush()
}

/// Returns None in a process that has joined no job, and in one that was forked from a rank.
fn timeline() -> Option<MutexGuard<'static, Timeline>> {
    let timeline = TIMELINE.get().filter(|timeline| timeline.is_ours())?;
    Some(timeline.lock().unwrap_or_else(PoisonError::into_inner))
}

fn add(event: Event) {
    if let Some(mut timeline) = timeline() {
        timeline.add(event);
    }
}

impl Timeline {
    fn add(&mut self, event: Event) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(event);
        } else {
            self.dropped += 1;
        }
    }

    /// Writes Chrome's trace event format, a JSON object, one event after the other: there may be
    /// very many.
    fn write_json(&self, mut out: impl Write) -> std::io::Result<()> {
        let info = &self.info;
        let process = format!("rank {} on {}", info.rank, info.host);
        let names = [
            name_in_file(info, "process_name", PROGRAM, &process),
            name_in_file(info, "thread_name", PROGRAM, "program"),
            name_in_file(info, "thread_name", COMMUNICATION, "communication"),
        ];
        out.write_all(b"{\"traceEvents\":[")?;
        for (index, name) in names.iter().enumerate() {
            out.write_all(if index == 0 { b"\n" } else { b",\n" })?;
            serde_json::to_writer(&mut out, name)?;
        }
        for (event, begin) in self.events.iter().zip(self.begins()) {
            out.write_all(b",\n")?;
            serde_json::to_writer(&mut out, &event.in_file(info, begin))?;
        }
        let about = json!({
            "rank": info.rank, "world_size": info.world_size, "host": info.host, "pid": info.pid,
            "dropped": self.dropped,
        });
        write!(out, "\n],\"otherData\":{about}}}")
    }

    /// Returns where each event begins in the file. Operations that are under way together, such as
    /// buckets, may begin later there than they did. Viewers want events of a thread to lie within
    /// or after each other.
    fn begins(&self) -> Vec<Duration> {
        let mut begins: Vec<Duration> = self.events.iter().map(Event::started).collect();
        let mut operations: Vec<usize> = (0..self.events.len())
            .filter(|&index| matches!(self.events[index], Event::Operation(_)))
            .collect();
        operations
            .sort_by_key(|&index| (begins[index], std::cmp::Reverse(self.events[index].done())));
        let mut open: Vec<Duration> = Vec::new();
        for index in operations {
            let done = self.events[index].done();
            while let Some(&end) = open.last() {
                if end > begins[index] && end < done {
                    begins[index] = end;
                } else if end > begins[index] {
                    break;
                }
                open.pop();
            }
            open.push(done);
        }
        begins
    }
}

impl Event {
    fn started(&self) -> Duration {
        match self {
            Event::Operation(record) => record.started,
            Event::Span { started, .. } => *started,
            Event::Buckets { at, .. } => *at,
        }
    }

    fn done(&self) -> Duration {
        match self {
            Event::Operation(record) => record.done.unwrap_or(record.started),
            Event::Span { done, .. } => *done,
            Event::Buckets { at, .. } => *at,
        }
    }

    fn in_file(&self, info: &RankInfo, begin: Duration) -> EventInFile<'_> {
        let (cat, name, tid, args) = match self {
            Event::Operation(record) => {
                let is_notice = record.bucket == Some(JOIN_NOTICE);
                let args = Args::Operation {
                    group: &record.group,
                    sequence: record.sequence,
                    bytes: record.bytes,
                    bucket: record.bucket.filter(|_| !is_notice),
                    notice: is_notice.then_some(true),
                    backend: record.backend,
                    queued: info.timestamp(record.queued),
                    started: info.timestamp(record.started),
                    failed: record.has_failed.then_some(true),
                };
                ("comm", record.operation, COMMUNICATION, args)
            }
            Event::Span { category, name, step, bucket, place, .. } => {
                let (stage, micro_batch) = place.unzip();
                let args = Args::Span { step: *step, bucket: *bucket, stage, micro_batch };
                (*category, *name, PROGRAM, args)
            }
            Event::Buckets { group, step, buckets, .. } => {
                ("buckets", "buckets", PROGRAM, Args::Buckets { group, step: *step, buckets })
            }
        };
        let ts = info.timestamp(begin);
        let is_instant = matches!(self, Event::Buckets { .. });
        let dur = self.done().saturating_sub(begin).as_nanos() as f64 / 1000.0;
        let (ph, dur) = if is_instant { ("i", None) } else { ("X", Some(dur)) };
        EventInFile { name, cat, ph, ts, dur, pid: info.rank, tid, args }
    }
}

/// Returns the name of the process, or of one of its threads, as Chrome's format has it.
fn name_in_file(info: &RankInfo, kind: &str, thread: u32, name: &str) -> serde_json::Value {
    let args = json!({ "name": name });
    json!({ "name": kind, "ph": "M", "pid": info.rank, "tid": thread, "args": args })
}

impl RankInfo {
    /// Returns a time on this machine's monotonic clock in the file: microseconds on rank 0's.
    fn timestamp(&self, time: Duration) -> f64 {
        (time.as_nanos() as i128 + i128::from(self.clock_offset)) as f64 / 1000.0
    }
}

/// An event, as Chrome's format has it.
#[derive(Serialize)]
struct EventInFile<'a> {
    name: &'static str,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    /// None of an event that is a moment.
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: usize,
    tid: u32,
    args: Args<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args<'a> {
    Operation {
        group: &'a str,
        sequence: u64,
        bytes: u64,
        bucket: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        notice: Option<bool>,
        backend: &'static str,
        queued: f64,
        started: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        failed: Option<bool>,
    },
    Span {
        step: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        bucket: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        stage: Option<usize>,
        #[serde(skip_serializing_if = "Option::is_none")]
        micro_batch: Option<usize>,
    },
    Buckets {
        group: &'a str,
        step: u64,
        buckets: &'a [BucketTensors],
    },
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
    /// The bucket that the span waits for.
    bucket: Option<u32>,
    /// The stage and the micro-batch, in a pipeline.
    place: Option<(usize, usize)>,
    /// None if no events are kept.
    started: Option<Instant>,
}

/// Begins a phase of step `step`.
pub fn phase(phase: Phase, step: u64) -> Span {
    let name = match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimizer => "optimizer",
    };
    let started = is_on().then(Instant::now);
    Span { category: "phase", name, step, bucket: None, place: None, started }
}

/// Begins a wait at the end of backward: for a bucket, or for another operation.
pub fn wait(step: u64, bucket: impl Into<Option<u32>>) -> Span {
    let started = is_on().then(Instant::now);
    Span { category: "wait", name: "wait", step, bucket: bucket.into(), place: None, started }
}

impl Span {
    /// Notes that the phase is a part of a pipeline's step.
    pub fn of_stage(mut self, stage: usize, micro_batch: usize) -> Self {
        self.place = Some((stage, micro_batch));
        self
    }

    /// Leaves no event: what began has not come to its end.
    pub fn cancel(mut self) {
        self.started = None;
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(started) = self.started else { return };
        let done = clock::monotonic_of(Instant::now());
        let started = clock::monotonic_of(started);
        let Span { category, name, step, bucket, place, .. } = *self;
        add(Event::Span { category, name, step, bucket, place, started, done });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

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
            has_failed: false,
        };
        Event::Operation(record)
    }

    fn rank_info() -> RankInfo {
        let (rank, world_size, host, pid) = (3, 4, "host".into(), 42);
        RankInfo {
            rank,
            world_size,
            host,
            clock_offset: -2_000_000,
            folder: "/nowhere".into(),
            pid,
        }
    }

    #[test]
    fn events_have_the_time_of_rank_0() {
        let span = Event::Span {
            category: "phase",
            name: "forward",
            step: 5,
            bucket: None,
            place: Some((1, 6)),
            started: 3 * MS,
            done: 4 * MS,
        };
        let events = vec![span, operation(7, 10, 12)];
        let timeline = Timeline { info: rank_info(), events, dropped: 1 };
        let mut file = Vec::new();
        timeline.write_json(&mut file).expect("memory takes everything");
        let trace: Value = serde_json::from_slice(&file).expect("it is JSON");
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
        let expected = json!({
            "name": "forward", "cat": "phase", "ph": "X", "ts": 1000.0, "dur": 1000.0,
            "pid": 3, "tid": 0, "args": { "step": 5, "stage": 1, "micro_batch": 6 },
        });
        assert_eq!(events[3], expected);
        assert_eq!(events.len(), 5);
        let about = json!({ "rank": 3, "world_size": 4, "host": "host", "pid": 42, "dropped": 1 });
        assert_eq!(trace["otherData"], about);
    }

    #[test]
    fn a_notice_of_a_join_is_no_bucket() {
        let Event::Operation(mut record) = operation(7, 10, 12) else { panic!("it is one") };
        record.bucket = Some(JOIN_NOTICE);
        let notice = Event::Operation(record);
        let notice = serde_json::to_value(notice.in_file(&rank_info(), notice.started()));
        let arguments = &notice.expect("it is JSON")["args"];
        assert_eq!((&arguments["bucket"], &arguments["notice"]), (&Value::Null, &json!(true)));
    }

    #[test]
    fn tensors_of_buckets_are_a_moment() {
        let buckets = vec![BucketTensors { class: 0, tensors: vec![8, 4], ready: vec![0, 15] }];
        let described = Event::Buckets { group: "0.0:0".into(), step: 5, buckets, at: 3 * MS };
        let described = serde_json::to_value(described.in_file(&rank_info(), described.started()));
        let expected = json!({
            "name": "buckets", "cat": "buckets", "ph": "i", "ts": 1000.0, "pid": 3, "tid": 0,
            "args": {
                "group": "0.0:0", "step": 5,
                "buckets": [{ "class": 0, "tensors": [8, 4], "ready": [0, 15] }],
            },
        });
        assert_eq!(described.expect("it is JSON"), expected);
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
        let timeline = Timeline { info: rank_info(), events, dropped: 0 };
        assert_eq!(timeline.begins(), [0, 10, 11, 14, 15].map(|ms| ms * MS));
    }
}
