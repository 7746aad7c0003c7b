//! `--events`: what happens to a job, one JSON object a line, for programs to read.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Context;
use jiff::Timestamp;
use rustix::fs::OFlags;
use serde::Serialize;

use crate::agent::exit_status::ExitStatus;
use crate::control::protocol::ClusterEvent;
use crate::output::sink::Sinks;

/// The variable with an event file besides the user's: the Python interface names its own by it.
pub const VARIABLE: &str = "FLOW_LAUNCHER_EVENTS";

/// Something that has happened.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum JobEvent<'a> {
    /// A worker was started.
    Start { rank: u32, local_rank: u32, pid: i32 },
    /// A worker has ended.
    Exit {
        rank: u32,
        local_rank: u32,
        pid: i32,
        #[serde(flatten)]
        end: EndFields,
    },
    /// The workers are started again, after a failure or with other nodes.
    Restart { round: u32, world_size: u32 },
    /// The workers of this node are asked to stop.
    Stop { reason: &'a str },
    /// Another node has joined. The leading node records this and the next two.
    NodeJoined { node_host: &'a str },
    /// Another node is gone before the job's end.
    NodeLost { node_host: &'a str, reason: &'a str },
    /// Workers wait long for each other.
    Hang { report: &'a str },
    /// flow-launch ends with this exit code.
    End {
        code: u8,
        /// The worker of this node that failed first, if one did.
        #[serde(skip_serializing_if = "Option::is_none")]
        rank: Option<u32>,
    },
}

/// The end of a process: one of the two fields.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndFields {
    Code(i32),
    Signal(i32),
}

impl From<ExitStatus> for EndFields {
    fn from(end: ExitStatus) -> EndFields {
        match end {
            ExitStatus::Exit(code) => EndFields::Code(code),
            ExitStatus::Signal(signal) => EndFields::Signal(signal),
        }
    }
}

#[derive(Serialize)]
struct Record<'a> {
    time: String,
    host: &'a str,
    node: u32,
    restart_count: u32,
    #[serde(flatten)]
    event: &'a JobEvent<'a>,
}

/// The files of events.
pub struct EventLog {
    files: Vec<(File, PathBuf)>,
    host: String,
    /// This node's number and the number of restarts, which are part of each event.
    pub node: u32,
    pub restart_count: u32,
}

impl EventLog {
    /// Opens the files, which other launchers may be writing too.
    pub fn open(paths: &[PathBuf], host: &str) -> anyhow::Result<EventLog> {
        // Never wait for the reader of a pipe: it must be there, and a full pipe is given up.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let mut files = Vec::new();
        for path in paths {
            let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
            let file =
                file.with_context(|| format!("cannot open {} for --events", path.display()))?;
            files.push((file, path.clone()));
        }
        Ok(EventLog { files, host: host.into(), node: 0, restart_count: 0 })
    }

    /// Writes an event. An error closes the file, so that it is printed once.
    pub fn record(&mut self, event: &JobEvent, sinks: &mut Sinks) {
        if let Err(error) = self.write(event) {
            sinks.say(&error);
        }
    }

    /// Writes what the leader has learnt.
    pub fn record_cluster(&mut self, event: &ClusterEvent, sinks: &mut Sinks) {
        let event = match event {
            ClusterEvent::Joined { host } => JobEvent::NodeJoined { node_host: host },
            ClusterEvent::Lost { host, reason } => JobEvent::NodeLost { node_host: host, reason },
            ClusterEvent::Hang { report } => JobEvent::Hang { report },
            ClusterEvent::Trace(_) => return,
        };
        self.record(&event, sinks);
    }

    fn write(&mut self, event: &JobEvent) -> Result<(), String> {
        let EventLog { files, host, node, restart_count } = self;
        let record =
            Record { time: now(), host, node: *node, restart_count: *restart_count, event };
        let mut messages = Vec::new();
        files.retain(|(file, path)| {
            let written = write(file, &record);
            messages.extend(written.as_ref().err().map(|error| {
                format!("cannot write to {}: {error}; it will lack further events", path.display())
            }));
            written.is_ok()
        });
        messages.is_empty().then_some(()).ok_or_else(|| messages.join("; "))
    }
}

/// Writes a line at once, so that lines of several launchers do not mix.
fn write(mut file: &File, record: &Record) -> io::Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    match file.write(&line)? {
        count if count == line.len() => Ok(()),
        _ => Err(io::Error::from(io::ErrorKind::StorageFull)),
    }
}

/// Returns the time by RFC 3339: 2026-01-31T12:00:00.123Z.
fn now() -> String {
    Timestamp::try_from(SystemTime::now()).map_or_else(|_| String::new(), |now| format!("{now:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn events_are_lines_of_json() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let written = [
            JobEvent::Start { rank: 3, local_rank: 1, pid: 7 },
            JobEvent::Exit { rank: 3, local_rank: 1, pid: 7, end: ExitStatus::Signal(9).into() },
            JobEvent::End { code: 137, rank: Some(3) },
        ];
        for event in &written {
            // Each time anew: nothing is lost.
            let mut events = EventLog::open(std::slice::from_ref(&path), "node0").unwrap();
            events.node = 1;
            events.write(event).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let mut lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for line in &mut lines {
            let time = line.as_object_mut().unwrap().remove("time").unwrap();
            let time = time.as_str().unwrap();
            assert!(time.len() == 24 && time.parse::<Timestamp>().is_ok(), "{time}");
        }
        let common = |mut value: Value| {
            let fields = json!({"host": "node0", "node": 1, "restart_count": 0});
            value.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            value
        };
        assert_eq!(
            lines[0],
            common(json!({"event": "start", "rank": 3, "local_rank": 1, "pid": 7}))
        );
        assert_eq!(
            lines[1],
            common(json!({"event": "exit", "rank": 3, "local_rank": 1, "pid": 7, "signal": 9}))
        );
        assert_eq!(lines[2], common(json!({"event": "end", "code": 137, "rank": 3})));
    }

    #[test]
    fn a_full_disk_is_reported_once() {
        let mut events = EventLog::open(&["/dev/full".into()], "node0").unwrap();
        assert!(
            events.write(&JobEvent::End { code: 0, rank: None }).unwrap_err().contains("/dev/full")
        );
        assert_eq!(events.write(&JobEvent::End { code: 0, rank: None }), Ok(()));
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_an_error() {
        let error = EventLog::open(&["/no/such/folder/events".into()], "node0").err().unwrap();
        assert!(
            format!("{error:#}").starts_with("cannot open /no/such/folder/events for --events: "),
            "{error:#}"
        );
    }
}
