//! `--trace FILE` and `flow-launch trace FILE`. The workers here write timelines as Flow's process
//! groups do.

use std::fs;
use std::path::Path;

use flow_harness::cli::{launcher, run, script};
use flow_harness::executable;
use flow_harness::net::{Net, ipv4};
use serde_json::Value;

/// A worker whose timeline has one operation, for which rank 2 arrives last.
const WORKER: &str = r#"echo '{"traceEvents":[{"ph":"X","cat":"comm","name":"all_reduce","pid":'$RANK',"tid":1,
    "ts":'$RANK',"dur":2000,"args":{"group":"world","sequence":1}}],
    "otherData":{"rank":'$RANK',"host":"é"}}' > $FLOW_TRACE/rank$RANK.json"#;

fn ranks_in(file: &Path) -> Vec<u64> {
    let timeline: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    events.iter().map(|event| event["pid"].as_u64().unwrap()).collect()
}

#[test]
fn one_file_has_all_ranks_and_is_summarized() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let flags = format!("--nproc_per_node 3 --trace {}", file.display());
    let finished = run(&mut script(&flags, WORKER));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), ""), "{finished:?}");
    assert_eq!(ranks_in(&file), [0, 1, 2]);
    let summary = run(&mut launcher(&["trace", file.to_str().unwrap()]));
    assert_eq!(summary.code, Some(0), "{summary:?}");
    assert!(summary.stdout.starts_with("3 ranks, 0 steps, 1 collectives\n"), "{summary:?}");
    let row = summary.stdout.lines().find(|line| line.trim_start().starts_with("2 ")).unwrap();
    assert_eq!(
        row.split_whitespace().collect::<Vec<_>>(),
        ["2", "2.0", "0%", "0.0", "0.0", "0", "1"]
    );
}

#[test]
fn ranks_without_a_timeline_are_named_and_a_restart_begins_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let flags = format!("--nproc_per_node 2 --max-restarts 1 --trace {}", file.display());
    // In the first round both write one, and rank 0 fails; in the second only rank 1 does.
    let text = format!(
        "[ $TORCHELASTIC_RESTART_COUNT$RANK = 10 ] && exit 0; {WORKER}; \
         [ $TORCHELASTIC_RESTART_COUNT$RANK != 00 ]"
    );
    let finished = run(&mut script(&flags, &text));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert!(finished.stderr.contains("trace.json lacks rank 0: "), "{finished:?}");
    assert_eq!(ranks_in(&file), [1]);
}

#[test]
fn no_folder_is_an_error_before_the_start() {
    let finished = run(&mut script("--trace /no/such/folder/x.json", "echo started"));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{finished:?}");
    assert!(finished.stderr.contains("/no/such/folder/x.json: there is no such folder"));
}

#[test]
fn followers_send_theirs_to_the_leader() {
    let Some(net) = Net::new(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    // More than one piece.
    let large = format!(
        "{WORKER}; sed -i 's/all_reduce/'$(head -c 100000 /dev/zero | tr '\\0' x)'/' \
         $FLOW_TRACE/rank$RANK.json"
    );
    let agents = [0, 1].map(|node| {
        let flags = format!(
            "--nnodes 2 --node_rank {node} --master_addr {} --nproc_per_node 2 --trace {}",
            ipv4(0),
            file.display()
        );
        net.start(node, &script(&flags, &large))
    });
    for agent in agents {
        let finished = agent.finish();
        assert_eq!(finished.code, Some(0), "{finished:?}");
    }
    assert_eq!(ranks_in(&file), [0, 1, 2, 3]);
    assert!(fs::metadata(&file).unwrap().len() > 4 * 100_000);
}

#[test]
fn a_program_called_trace_is_not_hidden_silently() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("trace");
    executable(&program, "#!/bin/sh\necho traced\n");
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let with_program = |arguments: &[&str]| run(launcher(arguments).env("PATH", &path));
    let finished = with_program(&["trace"]);
    assert_eq!(finished.code, Some(2), "{finished:?}");
    let hint = format!("to start {} write flow-launch -- trace", program.display());
    assert!(finished.stderr.contains(&hint), "{finished:?}");
    assert_eq!(with_program(&["--", "trace"]).stdout, "traced\n");
    assert_eq!(with_program(&["--nproc_per_node=1", "trace"]).stdout, "traced\n");
    let finished = run(&mut launcher(&["trace", "/etc/passwd"]));
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stderr.contains("/etc/passwd is no timeline: "), "{finished:?}");
}
