//! `FLOW_TRACE`: each rank's timeline, of jobs that end well and of one that fails.

use std::collections::BTreeMap;
use std::path::Path;

use flow_tests::{rank_commands, Process, TEST_TIMEOUT};
use serde_json::Value;

const WORKER: &str = "examples/collectives";

/// Runs two ranks of `WORKER`, started by hand: nobody stops one when the other fails. Returns
/// whether rank 0 succeeded, and the folder of the traces.
fn traced(arguments: &[&str]) -> (bool, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let started = rank_commands(&[2], WORKER, arguments).into_iter().map(|mut command| {
        command.env("FLOW_TRACE", folder.path().join("new"));
        Process::start(command)
    });
    let started: Vec<Process> = started.collect();
    let mut finished = started.into_iter().map(|process| process.finish(TEST_TIMEOUT));
    let succeeded = finished.next().is_some_and(|rank_0| rank_0.status.success());
    finished.for_each(drop);
    (succeeded, folder)
}

/// The complete events of a rank.
fn events(folder: &Path, rank: usize) -> Vec<Value> {
    let path = folder.join(format!("new/rank{rank}.json"));
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let trace: Value = serde_json::from_slice(&text).expect("it is whole");
    assert_eq!(trace["otherData"]["rank"], rank);
    assert_eq!(trace["otherData"]["world_size"], 2);
    assert_eq!(trace["otherData"]["dropped"], 0);
    let events = trace["traceEvents"].as_array().expect("a list");
    let name = events[0]["args"]["name"].as_str().expect("a process has a name");
    assert!(name.starts_with(&format!("rank {rank} on ")), "{name}");
    events.iter().filter(|event| event["ph"] == "X").cloned().collect()
}

/// When an event began and ended, in microseconds.
fn span(event: &Value) -> (f64, f64) {
    let [begin, time] = [&event["ts"], &event["dur"]].map(|time| time.as_f64().expect("a time"));
    (begin, begin + time)
}

/// The collectives of a rank by group and sequence number.
fn collectives(events: &[Value]) -> BTreeMap<(String, u64), &Value> {
    let is_message = |event: &&Value| event["name"] == "send" || event["name"] == "recv";
    let key = |event: &Value| {
        let args = &event["args"];
        let group = args["group"].as_str().expect("a name").to_owned();
        (group, args["sequence"].as_u64().expect("a number"))
    };
    events.iter().filter(|event| !is_message(event)).map(|event| (key(event), event)).collect()
}

#[test]
fn each_rank_writes_what_it_did_and_when() {
    let (succeeded, folder) = traced(&[]);
    assert!(succeeded);
    let both = [0, 1].map(|rank| events(folder.path(), rank));
    let [first, second] = [&both[0], &both[1]].map(|events| collectives(events));
    let numbers: Vec<u64> =
        first.keys().filter(|(group, _)| group == "0").map(|(_, number)| *number).collect();
    assert!(numbers.len() > 50, "{numbers:?}");
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>(), "numbers are missing");
    let mut shared = 0;
    for (key, event) in &first {
        assert_eq!(event["cat"], "comm");
        assert_eq!(event["args"]["backend"], "shm");
        assert!(event["args"]["queued"].as_f64() <= event["ts"].as_f64(), "{event}");
        let Some(other) = second.get(key) else { continue };
        shared += 1;
        assert_eq!(event["name"], other["name"], "{key:?}");
        // A barrier ends on no rank before it has begun on all.
        if event["name"] == "barrier" {
            let ((begin, end), (other_begin, other_end)) = (span(event), span(other));
            let slack = 1000.0; // of the clocks
            assert!(end + slack >= other_begin && other_end + slack >= begin, "{event} {other}");
        }
    }
    assert!(shared >= numbers.len(), "the ranks' groups have different names");
    let sent = both[0].iter().filter(|event| event["name"] == "send").count();
    let received = both[1].iter().filter(|event| event["name"] == "recv").count();
    assert_eq!(sent, received);
}

#[test]
fn a_rank_that_sees_a_failure_writes_what_failed() {
    let (succeeded, folder) = traced(&["killed", "1"]);
    assert!(!succeeded);
    let events = events(folder.path(), 0);
    let failed: Vec<&Value> =
        events.iter().filter(|event| event["args"]["failed"] == true).collect();
    assert_eq!(failed.len(), 1, "{events:?}");
    assert_eq!(failed[0]["name"], "all_reduce");
    assert_eq!(failed[0]["args"]["sequence"], 1);
    assert!(!folder.path().join("new/rank1.json").exists(), "rank 1 was killed");
}
