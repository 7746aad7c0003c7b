//! The file of events: `--events`.

use flow_harness::cli::{Running, events, named, run, script};

use std::path::Path;

use rustix::process::Signal;

/// Flags that write events to this file, and what else there is.
fn to(path: &Path, flags: &str) -> String {
    format!("--events {} {flags}", path.display())
}

#[test]
fn starts_and_ends_are_events() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events");
    let finished = run(&mut script(&to(&path, "--nproc-per-node 2"), "echo $RANK $$"));
    let reported = events(&path);
    let (starts, exits) = (named(&reported, "start"), named(&reported, "exit"));
    assert_eq!((reported.len(), starts.len(), exits.len()), (5, 2, 2), "{reported:?}");
    for line in finished.stdout.lines() {
        let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        for list in [&starts, &exits] {
            let event = list.iter().find(|event| event["rank"] == numbers[0]).unwrap();
            assert_eq!(
                (&event["local_rank"], &event["pid"]),
                (&numbers[0].into(), &numbers[1].into())
            );
        }
    }
    assert!(
        exits.iter().all(|exit| exit["code"] == 0 && exit.get("signal").is_none()),
        "{exits:?}"
    );
    assert_eq!(
        (&reported[4]["event"], &reported[4]["code"], reported[4].get("rank")),
        (&"end".into(), &0.into(), None)
    );
    for event in &reported {
        let time = event["time"].as_str().unwrap();
        assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 24, "{time}");
        assert!(
            event["host"].is_string() && event["node"] == 0 && event["restart_count"] == 0,
            "{event}"
        );
    }
}

#[test]
fn failures_and_restarts_are_events() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events");
    let text = "[ $RANK = 1 ] && exit 3; exec sleep 1000";
    let finished = run(&mut script(&to(&path, "--nproc-per-node 2 --max-restarts 1"), text));
    assert_eq!(finished.code, Some(3));
    let reported = events(&path);
    let names: Vec<_> = reported.iter().map(|event| event["event"].as_str().unwrap()).collect();
    let round = ["start", "start", "exit", "stop", "exit"];
    assert_eq!(names, [&round[..], &["restart"], &round, &["end"]].concat());
    assert_eq!((&reported[2]["rank"], &reported[2]["code"]), (&1.into(), &3.into()));
    assert!(reported[3]["reason"].as_str().unwrap().starts_with("rank 1 "), "{}", reported[3]);
    assert_eq!((&reported[4]["rank"], &reported[4]["signal"]), (&0.into(), &15.into()));
    let counts: Vec<_> =
        reported.iter().map(|event| event["restart_count"].as_u64().unwrap()).collect();
    assert_eq!(counts, [[0; 5].as_slice(), &[1; 7]].concat());
    assert_eq!((&reported[11]["code"], &reported[11]["rank"]), (&3.into(), &1.into()));
}

#[test]
fn signals_are_the_reason_of_events() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events");
    let mut running = Running::start(&mut script(&to(&path, ""), "echo ready; exec sleep 1000"));
    assert_eq!(running.line(), "ready");
    running.signal(Signal::TERM);
    assert_eq!(running.finish().code, Some(143));
    let reported = events(&path);
    assert_eq!(named(&reported, "stop")[0]["reason"], "signal 15 (SIGTERM)");
    assert_eq!(named(&reported, "end")[0]["code"], 143);
}

#[test]
fn a_file_that_cannot_be_opened_is_an_error_before_the_start() {
    let finished = run(&mut script("--events /no/such/folder/events", "echo started"));
    assert_eq!(
        (finished.code, finished.stdout.as_str(), finished.stderr.lines().count()),
        (Some(1), "", 1)
    );
    assert!(
        finished.stderr.contains("cannot open /no/such/folder/events for --events"),
        "{finished:?}"
    );
}

#[test]
fn a_full_disk_is_one_warning() {
    let finished = run(&mut script("--nproc-per-node 2 --events /dev/full", "echo done"));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "done\ndone\n"));
    assert_eq!(finished.stderr.matches("/dev/full").count(), 1, "{}", finished.stderr);
}
