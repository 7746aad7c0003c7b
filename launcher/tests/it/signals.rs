//! Signals to the launcher, and its sudden death.

use flow_harness::cli::{Running, children, is_alive, run, script, until, until_gone, wait};
use flow_harness::net::Gate;

use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

#[test]
fn signals_are_passed_on() {
    for (signal, name, code) in
        [(Signal::TERM, "TERM", 143), (Signal::INT, "INT", 130), (Signal::HUP, "HUP", 129)]
    {
        let text = format!(
            "trap 'echo got {name}; exit 0' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let mut running = Running::start(&mut script("--nproc_per_node 2", &text));
        assert_eq!((running.line(), running.line()), ("ready".into(), "ready".into()));
        running.signal(signal);
        let finished = running.finish();
        assert_eq!(finished.code, Some(code));
        assert_eq!(finished.stdout, format!("got {name}\ngot {name}\n"));
        let again = if name == "INT" { "; again to kill them" } else { "" };
        let said: Vec<_> =
            finished.stderr.lines().filter(|line| line.contains("flow-launch")).collect();
        assert_eq!(
            said,
            [format!("flow-launch: SIG{name}: waiting up to 30 s for the ranks to stop{again}")]
        );
    }
}

#[test]
fn who_does_not_stop_on_a_signal_is_killed_and_named() {
    let text = "[ $RANK = 1 ] && trap '' INT; echo $$; while :; do sleep 0.05; done";
    let mut running = Running::start(&mut script("--nproc_per_node 2 --grace 0.2", text));
    let pids = running.numbers(2);
    running.signal(Signal::INT);
    let finished = running.finish();
    assert_eq!(finished.code, Some(130));
    let report = "flow-launch: rank 1 did not stop on SIGINT and had to be killed\n";
    assert!(finished.stderr.ends_with(report), "{}", finished.stderr);
    until_gone(&pids);
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let text = "trap 'echo no' INT; echo $$; while :; do sleep 0.05; done";
    let mut running = Running::start(&mut script("--grace 1000000", text));
    let pids = running.numbers(1);
    running.signal(Signal::INT);
    assert_eq!(running.line(), "no");
    // One that comes together with the first counts as the same.
    until("a later one ends it", || {
        running.signal(Signal::INT);
        !is_alive(running.pid())
    });
    let finished = running.finish();
    assert_eq!(finished.code, Some(130));
    assert!(
        finished.stderr.contains("flow-launch: SIGINT: killing the ranks\n"),
        "{}",
        finished.stderr
    );
    until_gone(&pids);
}

#[test]
fn a_signal_that_comes_before_any_worker_gets_a_line_too() {
    // Nobody is there.
    let flags = "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 1 true";
    let running =
        Running::start(&mut flow_harness::cli::launcher(&flags.split(' ').collect::<Vec<_>>()));
    until("it waits for others", || children(running.pid()).len() == 1);
    running.signal(Signal::TERM);
    let finished = running.finish();
    assert_eq!(finished.code, Some(143));
    assert!(
        finished.stderr.contains("flow-launch: SIGTERM: ending; no rank is running\n"),
        "{finished:?}"
    );
}

/// As GNU timeout does, which signals the launcher and right after that the launcher's process
/// group.
#[test]
fn signals_that_come_together_are_one() {
    let text = "trap 'sleep 0.3; echo saved; exit 0' INT; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(&mut script("", text));
    assert_eq!(running.line(), "ready");
    // They wait for it together.
    for signal in [Signal::STOP, Signal::INT, Signal::TERM, Signal::CONT] {
        running.signal(signal);
    }
    let finished = running.finish();
    assert_eq!(
        (finished.code, finished.stdout.as_str()),
        (Some(130), "saved\n"),
        "{}",
        finished.stderr
    );
}

fn ignoring(signal: &str, script: &str) -> Command {
    let mut command = Command::new("env");
    command.args([
        &format!("--ignore-signal={signal}"),
        env!("CARGO_BIN_EXE_flow-launch"),
        "sh",
        "-c",
        script,
    ]);
    command
}

#[test]
fn only_sighup_stays_ignored_where_it_was_so_at_the_start() {
    for (name, signal, code) in
        [("INT", Signal::INT, 130), ("QUIT", Signal::QUIT, 131), ("TERM", Signal::TERM, 143)]
    {
        let text = format!(
            "trap 'echo got {name}; exit 0' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let mut running = Running::start(&mut ignoring(name, &text));
        assert_eq!(running.line(), "ready");
        running.signal(signal);
        let finished = running.finish();
        assert_eq!(
            (finished.code, finished.stdout),
            (Some(code), format!("got {name}\n")),
            "{}",
            finished.stderr
        );
    }

    let mut running = Running::start(&mut ignoring("HUP", "echo ready; sleep 0.5; echo done"));
    assert_eq!(running.line(), "ready");
    running.signal(Signal::HUP);
    let finished = running.finish();
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "done\n"));
}

#[test]
fn exit_codes_that_cannot_be_seen_are_an_error() {
    let finished = run(&mut ignoring("CHLD", "exit 0"));
    assert_eq!(finished.code, Some(1));
    assert!(finished.stderr.contains("SIGCHLD is ignored"), "{finished:?}");
}

#[test]
fn nothing_survives_a_killed_launcher() {
    let text = "trap '' TERM HUP INT; sh -c 'trap \"\" TERM HUP; echo $$ $PPID; while :; do sleep \
                1000; done' & wait";
    let mut running = Running::start(&mut script("--nproc_per_node 3", text));
    let mut pids = running.numbers(3);
    // The workers and the guard.
    let direct = children(running.pid());
    assert_eq!(direct.len(), 4);
    pids.extend(direct);
    pids.extend(pids.clone().iter().filter(|pid| is_alive(**pid)).flat_map(|pid| children(*pid)));
    running.signal(Signal::KILL);
    assert_eq!(running.finish().code, None);
    until_gone(&pids);
}

#[test]
fn grandchildren_that_left_the_group_are_found() {
    let text = "setsid sleep 1000 & timeout 1000 sleep 1001 & echo $$; wait";
    for signal in [Signal::KILL, Signal::TERM] {
        let mut running = Running::start(&mut script("--grace 0.3", text));
        let worker = running.numbers(1)[0];
        let group_of =
            |pid: i32| rustix::process::getpgid(rustix::process::Pid::from_raw(pid)).unwrap();
        until("both have left the group", || {
            children(worker).iter().filter(|p| group_of(**p) != group_of(worker)).count() == 2
        });
        let pids = children(worker);
        until("timeout has a child", || pids.iter().any(|pid| !children(*pid).is_empty()));
        let all: Vec<i32> =
            pids.iter().flat_map(|pid| children(*pid)).chain(pids.clone()).collect();
        running.signal(signal);
        running.finish();
        until_gone(&all);
    }
}

#[test]
fn what_a_job_that_ended_well_leaves_on_purpose_may_stay() {
    let text =
        "setsid sleep 1000 & until [ $(cut -d' ' -f6 /proc/$!/stat) = $! ]; do :; done; echo $!";
    let mut running = Running::start(&mut script("", text));
    let pid = running.numbers(1)[0];
    assert_eq!(running.finish().code, Some(0));
    assert!(is_alive(pid));
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL)
        .unwrap();
}

/// Its output goes where that of the job goes, but a reader of a pipe need not wait for it.
#[test]
fn a_detached_process_can_write_when_the_job_is_over() {
    for flags in ["", "--tee 3"] {
        let folder = tempfile::tempdir().unwrap();
        let gate = Gate::new();
        let end = folder.path().join("end");
        let text = format!(
            "setsid sh -c '{}; echo late; echo later >&2; >{}' & until [ $(cut -d' ' -f6 \
             /proc/$!/stat) = $! ]; do :; done; echo early",
            gate.wait(),
            end.display()
        );
        let mut command = script(flags, &text);
        command.env("PET_LOG_DIR", folder.path());
        let finished = if flags.is_empty() {
            let console = std::fs::File::create(folder.path().join("console")).unwrap();
            let status = command.stdout(console.try_clone().unwrap()).stderr(console).status();
            assert_eq!(status.unwrap().code(), Some(0));
            None
        } else {
            Some(run(&mut command))
        };
        gate.open();
        until("the detached process ends well", || end.exists());
        if let Some(finished) = finished {
            assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "[default0]:early\n"));
            let launch = std::fs::read_dir(folder.path()).unwrap().flatten();
            let mut launch = launch.filter(|entry| entry.file_type().unwrap().is_dir());
            let logs = launch.next().unwrap().path().join("attempt_0/0");
            let log = |name| std::fs::read_to_string(logs.join(name)).unwrap();
            until("its output is in the files", || {
                log("stdout.log") == "early\nlate\n" && log("stderr.log") == "later\n"
            });
        } else {
            let console = || std::fs::read_to_string(folder.path().join("console")).unwrap();
            until("its output is shown", || console().lines().count() == 3);
            let console = console();
            assert!(console.starts_with("early\n"), "{console}");
            assert!(console.contains("late\n") && console.contains("later\n"), "{console}");
        }
    }
}

/// On the console, where the log file cannot have it.
#[test]
fn what_a_full_disk_takes_of_a_detached_process_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let gate = Gate::new();
    std::fs::create_dir(folder.path().join("local_rank_0")).unwrap();
    symlink("/dev/full", folder.path().join("local_rank_0/stdout")).unwrap();
    let text = format!(
        "setsid sh -c '{}; echo late' & until [ $(cut -d' ' -f6 /proc/$!/stat) = $! ]; do :; done",
        gate.wait()
    );
    let path = folder.path().join("console");
    let console = std::fs::File::create(&path).unwrap();
    let mut command = script(&format!("--logdir {} --tee 1", folder.path().display()), &text);
    let status = command.stdout(console.try_clone().unwrap()).stderr(console).status();
    assert_eq!(status.unwrap().code(), Some(0));
    gate.open();
    let said = "flow-launch: /dev/full lacks the last 5 bytes of output: No space left on device";
    until("its output is shown, and what is missing", || {
        let console = std::fs::read_to_string(&path).unwrap();
        console.contains("[default0]:late\n") && console.contains(said)
    });
}

#[test]
fn a_killed_launcher_takes_the_launchers_it_has_started_with_it() {
    let launcher = env!("CARGO_BIN_EXE_flow-launch");
    let mut running = Running::start(&mut script(
        "",
        &format!("exec {launcher} sh -c 'sleep 1000 & echo $! $$; wait'"),
    ));
    let pids = running.numbers(1);
    running.signal(Signal::KILL);
    until_gone(&pids);
}

#[test]
fn a_launcher_killed_while_it_starts_leaves_nothing() {
    for delay in 0..20 {
        // Workers name themselves by an argument that no other process has.
        let mark = format!("{}.{delay}", 1000 + std::process::id());
        let mut running = Running::start(&mut script(
            "--nproc_per_node 8",
            &format!("sleep {mark} & sleep {mark}"),
        ));
        std::thread::sleep(Duration::from_micros(delay * 700));
        running.child.kill().unwrap();
        running.child.wait().unwrap();
        until("no worker is left", || !any_command_line_has(&mark));
    }
}

/// Workers get it whether they lead their session yet or not.
#[test]
fn a_signal_while_workers_start_is_not_lost() {
    for delay in 0..20 {
        let mark = format!("{}.{delay}", 100_000_000 + std::process::id());
        let text = format!("exec sleep {mark}");
        let mut running = Running::start(&mut script("--nproc_per_node 8 --grace 1000000", &text));
        std::thread::sleep(Duration::from_micros(delay * 700));
        running.signal(Signal::TERM);
        wait(&mut running.child);
        until("no worker is left", || !any_command_line_has(&mark));
    }
}

fn any_command_line_has(mark: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()))
        .any(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            is_alive(pid) && String::from_utf8_lossy(&line).contains(mark)
        })
}

#[test]
fn the_guard_outlives_signals_to_the_launchers_group() {
    let mut command = script("", "trap '' TERM; sleep 1000 & echo $$ $!; wait; wait");
    let mut running = Running::start(command.process_group(0));
    let mut pids = running.numbers(1);
    pids.extend(children(running.pid()));
    for pid in children(running.pid()) {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
    }
    running.signal(Signal::KILL);
    running.finish();
    until_gone(&pids);
}

#[test]
fn nothing_is_left_of_a_job_that_ends_well() {
    let gate = Gate::new();
    let mut running =
        Running::start(&mut script("--nproc_per_node 2", &format!("echo $$; {}", gate.wait())));
    let mut pids = running.numbers(2);
    pids.extend(children(running.pid()));
    gate.open();
    assert_eq!(running.finish().code, Some(0));
    assert!(!pids.iter().any(|pid| is_alive(*pid)));
    assert_eq!(run(&mut script("", "exit 0")).code, Some(0));
}
