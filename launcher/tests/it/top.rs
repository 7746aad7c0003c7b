//! `flow-launch top`: what it shows of jobs whose workers are shell scripts, and how it finds them.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use flow_harness::cli::{Running, launcher, run, script, until, until_gone};
use flow_harness::{Finished, TEST_TIMEOUT, assert_contains, free_port};
use flow_store::Store;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn top(arguments: &[&str]) -> Finished {
    run(&mut launcher(&[&["top"], arguments].concat()))
}

/// The name of a job by which `top` finds it among all that run.
fn name(job: &Running) -> String {
    job.pid().to_string()
}

/// What `top` shows of a job once so many of its nodes are silent. Any may be late.
fn view_with_silent(silent: usize, arguments: &[&str]) -> Value {
    let mut view = Value::Null;
    until(&format!("{silent} nodes are silent"), || {
        let finished = top(&[&["--json", "--once"], arguments].concat());
        assert_eq!((finished.code, &finished.stderr[..]), (Some(0), ""), "{finished:?}");
        view = serde_json::from_str(&finished.stdout).unwrap();
        view["silent"].as_array().unwrap().len() == silent
    });
    view
}

/// What `top` shows of a job.
fn view(arguments: &[&str]) -> Value {
    view_with_silent(0, arguments)
}

/// A job whose workers say their process numbers and stay.
fn job(flags: &str) -> Running {
    Running::start(&mut script(flags, "echo $$; exec sleep 1000"))
}

#[test]
fn a_program_without_flow_is_shown() {
    let mut running = job("--nproc_per_node 2");
    let mut pids = running.numbers(2);
    let view = view(&[&name(&running)]);
    let ranks = view["ranks"].as_array().unwrap();
    let mut shown: Vec<_> = ranks.iter().map(|rank| rank["pid"].as_i64().unwrap() as i32).collect();
    pids.sort_unstable();
    shown.sort_unstable();
    assert_eq!(shown, pids, "{view}");
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!((&rank["rank"], &rank["state"]), (&number.into(), &"running".into()));
        assert_eq!((&rank["steps"], &rank["operation"]), (&Value::Null, &Value::Null));
        assert!(rank["memory_bytes"].as_u64().unwrap() > 0, "{rank}");
        assert!(rank["uptime_seconds"].as_f64().unwrap() > 0.0, "{rank}");
        assert!(rank["cpu_seconds"].as_f64().is_some(), "{rank}");
    }
    // By its process number, and by its id.
    let id = view["job"].as_str().unwrap();
    for name in [running.pid().to_string(), id.to_string()] {
        assert_eq!(self::view(&[&name])["job"], id);
    }
    running.signal(Signal::TERM);
    running.finish();
    let after = top(&["--json", id]);
    assert_contains(&after.stderr, &["no job of yours"]);
    assert_eq!((after.code, after.stderr.lines().count()), (Some(2), 1), "{after:?}");
}

#[test]
fn who_watches_sees_the_end() {
    let mut running = job("--nproc_per_node 1");
    running.numbers(1);
    let mut watching = Running::start(&mut launcher(&["top", "--json", &name(&running)]));
    for _ in 0..2 {
        let line: Value = serde_json::from_str(&watching.line()).unwrap();
        let [ranks, silent] = ["ranks", "silent"].map(|key| line[key].as_array().unwrap().len());
        assert_eq!(ranks + silent, 1, "{line}");
    }
    running.signal(Signal::TERM);
    running.finish();
    let end = watching.finish();
    assert_eq!((end.code, &end.stderr[..]), (Some(0), ""), "{end:?}");
}

#[test]
fn a_wrong_call_is_told_in_a_line() {
    let refused = |arguments: &[&str], code: i32, parts: &[&str]| {
        let finished = top(arguments);
        assert_eq!((finished.code, &finished.stdout[..]), (Some(code), ""), "{finished:?}");
        assert_eq!(finished.stderr.lines().count(), 1, "{finished:?}");
        assert_contains(&finished.stderr, parts);
    };
    refused(&[], 2, &["needs a terminal", "--json"]);
    refused(&["--once"], 2, &["--once needs --json"]);
    let elsewhere = format!("127.0.0.1:{}", free_port());
    refused(&["--json", "--rdzv-endpoint", &elsewhere], 1, &[&elsewhere, "no connection"]);
    refused(&["--json", "nosuch"], 2, &["no job of yours"]);
}

/// No answer of the leader means that it is lost, not that the job is over.
#[test]
fn who_watches_is_told_that_the_launcher_was_killed() {
    for output in [&["--json"][..], &["--http", "0"]] {
        let mut running = job("--nproc_per_node 1");
        let pids = running.numbers(1);
        let name = name(&running);
        let arguments = [&["top", &name], output].concat();
        let mut watching = Running::start(&mut launcher(&arguments));
        // Of a page nobody asks for.
        watching.line();
        running.signal(Signal::KILL);
        let end = watching.finish();
        assert_eq!(end.code, Some(1), "{end:?}");
        assert_contains(&end.stderr, &["the leading node is lost"]);
        running.finish();
        until_gone(&pids);
    }
}

/// A process that makes a larger file than it may is killed by the kernel.
#[test]
fn a_job_that_may_not_make_large_files_runs() {
    let job = script("--nproc_per_node 2", "echo well; exec sleep 1000");
    let mut command = Command::new("sh");
    command.args(["-c", r#"ulimit -f 100; exec "$0" "$@""#]);
    command.arg(job.get_program()).args(job.get_args());
    let mut running = Running::start(&mut command);
    assert_eq!([running.line(), running.line()], ["well", "well"]);
    let view = view(&[&name(&running)]);
    assert_eq!(view["ranks"].as_array().unwrap().len(), 2, "{view}");
    running.signal(Signal::TERM);
    running.finish();
}

#[test]
fn workers_that_are_replaced_leave_no_descriptors() {
    let flags = "--nproc_per_node 2 --elastic in-place --max-restarts 3";
    let mut running = job(flags);
    let launcher = running.pid();
    let held = || {
        let descriptors = Path::new(&format!("/proc/{launcher}/fd")).read_dir().unwrap();
        let targets =
            descriptors.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        let targets = targets.map(|target| target.to_string_lossy().into_owned());
        let of_workers =
            |target: &String| target.contains("flow-flight-recorder") || target.contains("pidfd");
        targets.filter(of_workers).count()
    };
    let mut last = running.numbers(2)[0];
    let before = held();
    assert!(before >= 4, "{before}");
    for restarts in 1..=3 {
        kill_process(Pid::from_raw(last).unwrap(), Signal::KILL).unwrap();
        last = running.numbers(1)[0];
        until("no more descriptors are held than before", || held() == before);
        let view = view(&[&name(&running)]);
        let ranks = view["ranks"].as_array().unwrap().iter();
        let mut counts: Vec<u64> = ranks.map(|it| it["restarts"].as_u64().unwrap()).collect();
        counts.sort_unstable();
        assert_eq!(counts, [0, restarts], "{view}");
    }
    running.signal(Signal::TERM);
    running.finish();
}

#[test]
fn nodes_are_shown_together_from_anywhere() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let id = format!("run-{endpoint}");
    let flags = format!(
        "--nnodes 2 --nproc_per_node 2 --rdzv-endpoint {endpoint} --rdzv-id {id} --rdzv-conf heartbeat_timeout=600"
    );
    let leader = job(&flags);
    until("the first leads", || top(&["--json", "--once", &name(&leader)]).code == Some(0));
    let mut nodes = [leader, job(&flags)];
    nodes.iter_mut().for_each(|node| drop(node.numbers(2)));
    let by_endpoint = ["--rdzv-endpoint", &endpoint, "--rdzv-id", &id];
    let views = [view(&[&id]), view(&by_endpoint)];
    for view in &views {
        let ranks = view["ranks"].as_array().unwrap();
        let numbers: Vec<_> = ranks.iter().map(|rank| rank["rank"].as_u64().unwrap()).collect();
        assert_eq!((numbers, &view["job"]), (vec![0, 1, 2, 3], &Value::from(&id[..])), "{view}");
        let joined = view["changes"].as_array().unwrap().iter();
        let joined = joined.filter(|change| change["what"].as_str().unwrap().ends_with("joined"));
        assert_eq!(joined.count(), 2, "{view}");
    }
    let mut stranger = launcher(&["top", "--json", "--rdzv-endpoint", &endpoint]);
    let refused = run(stranger.env("FLOW_TOKEN", "another"));
    assert_eq!((refused.code, refused.stderr.lines().count()), (Some(1), 1), "{refused:?}");
    // A node that is stopped does not answer, and is named.
    let follower = &nodes[1];
    follower.signal(Signal::STOP);
    until("the other node's ranks are shown", || {
        let view = view_with_silent(1, &[&name(&nodes[0])]);
        view["ranks"].as_array().unwrap().len() == 2
    });
    follower.signal(Signal::CONT);
    nodes[0].signal(Signal::TERM);
    nodes.into_iter().for_each(|node| drop(node.finish()));
}

/// What a browser gets: the status and the rest. None if the connection is closed.
fn try_get(address: &str, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let status = answer.split(' ').nth(1)?.parse().unwrap();
    Some((status, answer.split_once("\r\n\r\n").unwrap().1.to_string()))
}

fn get(address: &str, path: &str) -> (u16, String) {
    try_get(address, path).expect("the connection is closed")
}

#[test]
fn a_page_is_served_to_who_knows_its_token() {
    let mut running = job("--nproc_per_node 2");
    running.numbers(2);
    let mut command = launcher(&["top", "--http", "0", &name(&running)]);
    let mut watching = Running::start(&mut command);
    let line = watching.line();
    let (address, query) = line.strip_prefix("http://").unwrap().split_once('/').unwrap();
    assert!(address.starts_with("127.0.0.1:") && query.len() > 30, "{line}");
    for path in ["/", "/top.json", "/top.txt?token=", "/?token=another"] {
        let (status, text) = get(address, path);
        assert_eq!((status, text.lines().count()), (403, 1), "{path}: {text}");
    }
    let (status, text) = get(address, &format!("/{query}"));
    assert!(status == 200 && text.contains("<!doctype html>"), "{text}");
    until("both ranks are shown", || {
        let (status, text) = get(address, &format!("/top.json{query}"));
        let view: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(status, 200);
        view["ranks"].as_array().unwrap().len() == 2
    });
    until("both ranks are shown as text", || {
        let (status, text) = get(address, &format!("/top.txt{query}"));
        assert_eq!(status, 200);
        text.contains("2 ranks") && text.contains("memory")
    });
    assert_eq!(get(address, &format!("/other{query}")).0, 404);
    // Those that say nothing, or too much, do not keep others from asking.
    let silent = [(); 8].map(|()| TcpStream::connect(address).unwrap());
    let mut loud = TcpStream::connect(address).unwrap();
    let _ = loud.write_all(&[b'x'; 100_000]);
    assert_eq!(get(address, &format!("/{query}")).0, 200);
    drop(silent);
    // Too many are closed at once, and others are served when they have gone.
    let many = [(); 100].map(|()| TcpStream::connect(address).unwrap());
    drop(many);
    until("others are served again", || try_get(address, &format!("/{query}")).is_some());
    running.signal(Signal::TERM);
    running.finish();
    let end = watching.finish();
    assert_eq!((end.code, &end.stderr[..]), (Some(0), ""), "{end:?}");
}

#[test]
fn a_node_that_leaves_is_shown() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let flags =
        format!("--nnodes 1:2 --rdzv-endpoint {endpoint} --rdzv-conf last_call_timeout=0.01");
    let leader = job(&flags);
    until("the first leads", || top(&["--json", "--once", &name(&leader)]).code == Some(0));
    let mut nodes = [leader, job(&flags)];
    nodes[1].numbers(1);
    nodes[1].signal(Signal::TERM);
    until("the change is shown", || {
        let view = view(&[&name(&nodes[0])]);
        let changes = view["changes"].as_array().unwrap();
        let left = |change: &Value| change["what"].as_str().unwrap().contains("has left");
        changes.iter().any(left)
    });
    nodes[0].signal(Signal::TERM);
    nodes.into_iter().for_each(|node| drop(node.finish()));
}

#[test]
fn a_page_at_a_wrong_address_is_an_error_in_a_line() {
    let mut running = job("--nproc_per_node 1");
    running.numbers(1);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (address, reason) in [(&port[..], "in use"), ("no-such-host.invalid:80", "no-such-host")] {
        let finished = top(&["--http", address, &name(&running)]);
        assert_eq!((finished.code, finished.stderr.lines().count()), (Some(1), 1), "{finished:?}");
        assert_contains(&finished.stderr, &["cannot serve a page", reason]);
    }
    running.signal(Signal::TERM);
    running.finish();
}

/// What makes no sense is told in the log, and the job goes on.
#[test]
fn malformed_questions_do_not_end_the_job() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let flags =
        format!("--nnodes 1:2 --rdzv-endpoint {endpoint} --rdzv-conf last_call_timeout=0.01");
    let mut running = job(&flags);
    running.numbers(1);
    let address = format!("tcp://{endpoint}").parse().unwrap();
    let store = Store::connect(&address, "secret", Duration::from_secs(60)).unwrap();
    let number = |text: &str| store.send(text.as_bytes()).unwrap();
    number("nonsense");
    number(r#"[77, {"Watch": {"number": -1}}]"#);
    number(r#"[77, {"Status": {"number": 5, "status": {"host": 7}}}]"#);
    number(
        r#"[77, {"Status": {"number": 5, "status":
            {"host": "h", "restarts": 0, "workers": [], "resumed": []}}}]"#,
    );
    number(r#"[0, {"Watch": {"number": 1}}]"#);
    assert_eq!(view(&[&name(&running)])["ranks"].as_array().unwrap().len(), 1);
    running.signal(Signal::TERM);
    let end = running.finish();
    assert_eq!(end.stderr.matches("malformed event").count(), 4, "{end:?}");
}

/// Commands that an agent has taken are gone from the store, and answers that nobody has.
#[test]
fn nothing_piles_up_while_somebody_watches() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let flags = format!("--nnodes 2 --rdzv-endpoint {endpoint}");
    let mut nodes = [(); 2].map(|()| job(&flags));
    nodes.iter_mut().for_each(|node| drop(node.numbers(1)));
    for _ in 0..3 {
        view(&[&name(&nodes[0])]);
    }
    let address = format!("tcp://{endpoint}").parse().unwrap();
    let store = Store::connect(&address, "secret", Duration::from_secs(60)).unwrap();
    let watching = Store::connect(&address, "secret", Duration::from_secs(60)).unwrap();
    let id = watching.add("agents", 1).unwrap();
    let gone = format!(r#"[{id}, {{"Gone": {{"why": "it does not look"}}}}]"#);
    watching.will(gone.as_bytes(), Duration::from_secs(600)).unwrap();
    watching.send(format!(r#"[{id}, {{"Watch": {{"number": 1}}}}]"#).as_bytes()).unwrap();
    store.get(&format!("status/{id}"), Duration::from_secs(60)).unwrap();
    drop(watching);
    until("commands and answers are gone", || {
        let mut keys = (0..=id).flat_map(|agent| {
            (0..8)
                .map(move |number| format!("commands/{agent}/{number}"))
                .chain([format!("status/{agent}")])
        });
        keys.all(|key| store.try_get(&key).unwrap().is_none())
    });
    nodes[0].signal(Signal::TERM);
    nodes.into_iter().for_each(|node| drop(node.finish()));
}
