//! torchelastic's watchdog and health check, by environment variables. Workers that use torch's own
//! client are in `pytorch.rs`.

use flow_harness::cli::{Running, is_alive, run, script, until, until_gone};
use flow_harness::free_port;

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::process::Signal;

/// What a shell writes to set a timer of a process: pid, time, signal.
const SET: &str = r#"set_timer() { echo "{\"version\": 1, \"pid\": $1, \"scope_id\": \"step\", \"expiration_time\": $2, \"signal\": $3}" >$TORCHELASTIC_TIMER_FILE; }"#;

/// Workers of a job with a watchdog.
fn watched(flags: &str, text: &str) -> Command {
    let mut command = script(flags, &format!("{SET}\n{text}"));
    command.env("TORCHELASTIC_ENABLE_FILE_TIMER", "1").env_remove("TORCHELASTIC_TIMER_FILE");
    command
}

fn is_pipe(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}

#[test]
fn a_worker_whose_timer_runs_out_is_killed_and_named() {
    let text = "[ $RANK = 0 ] && exec sleep 1000; set_timer $$ $(date +%s) 9; exec sleep 1000";
    let finished = run(&mut watched("--nproc_per_node 2", text));
    assert_eq!(finished.code, Some(137), "{finished:?}");
    let (_, reported) =
        finished.stderr.split_once("flow-launch: rank 1: the timer 'step' of process ").unwrap();
    assert!(reported.contains(" s ago; SIGKILL is sent to it, as it asked\n"), "{reported}");
    assert!(
        reported.contains("flow-launch: rank 1 (local rank 1, ")
            && reported.contains("was killed by signal 9"),
        "{reported}"
    );
}

#[test]
fn a_job_with_a_watchdog_starts_anew() {
    let text =
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit; set_timer $$ $(date +%s) 15; exec sleep 1000";
    let finished = run(&mut watched("--max-restarts 1", text));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert!(
        finished.stderr.contains("SIGTERM is sent to it")
            && finished.stderr.contains("restart 1 of 1")
    );
}

#[test]
fn a_timer_that_is_released_or_has_no_signal_kills_nobody() {
    let text = "set_timer $$ $(($(date +%s) + 1)) 9; set_timer $$ -1 0; sleep 2; set_timer $$ 5 0; sleep \
         0.5; echo done";
    let finished = run(&mut watched("", text));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "done\n"), "{finished:?}");
    assert_eq!(finished.stderr.lines().count(), 1);
    assert!(finished.stderr.contains("it asked for no signal"), "{finished:?}");
}

#[test]
fn what_a_worker_has_started_is_killed_too_and_nobody_elses() {
    let mut stranger = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = stranger.id();
    // One that has left its worker's process group, and a process that is none of the job's.
    let text = format!(
        "setsid sleep 1001 & set_timer $! 5 9; wait $!; echo child $?
         printf '%s\\n' '{{\"pid\": {pid}, \"scope_id\": \"\\u001b[2J\", \"expiration_time\": 5, \"signal\": 9}}' \
         >$TORCHELASTIC_TIMER_FILE
         set_timer 1 5 9; set_timer -1 5 9; echo nonsense >$TORCHELASTIC_TIMER_FILE; sleep 0.5"
    );
    let finished = run(&mut watched("", &text));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "child 137\n"), "{finished:?}");
    for text in [
        &format!(r"the timer '\u{{1b}}[2J' of process {pid} expired"),
        "of process 1 expired",
        "a malformed timer request",
    ] {
        assert!(finished.stderr.contains(text), "{text}: {finished:?}");
    }
    assert_eq!(finished.stderr.matches("is left alone").count(), 2, "{finished:?}");
    assert!(is_alive(pid as i32));
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn the_pipe_is_where_it_is_wanted_and_gone_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timers");
    let text = "[ -p $TORCHELASTIC_TIMER_FILE ] && echo $TORCHELASTIC_TIMER_FILE";
    let stdout = |command: &mut Command| run(command).stdout.trim_end().to_string();
    assert_eq!(
        stdout(watched("", text).env("TORCHELASTIC_TIMER_FILE", &path)),
        path.to_str().unwrap()
    );
    assert!(!path.exists());
    // Without a wish, in a folder that is gone at the end.
    let own = stdout(&mut watched("", text));
    assert!(own.contains("flow-launch_") && !Path::new(&own).exists(), "{own}");
    // No watchdog: the variable is the user's.
    let mut command = script("", "echo $TORCHELASTIC_TIMER_FILE");
    assert_eq!(stdout(command.env("TORCHELASTIC_TIMER_FILE", "mine")), "mine");
    assert!(!Path::new("mine").exists());
    // A file is not ours to remove, and workers get another pipe.
    fs::write(&path, "text").unwrap();
    let finished = run(watched("", text).env("TORCHELASTIC_TIMER_FILE", &path));
    assert!(
        finished.stdout.contains("flow-launch_") && finished.stderr.contains("no named pipe"),
        "{finished:?}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), "text");
}

#[test]
fn a_killed_launchers_pipe_is_gone_and_one_in_use_is_another_launchers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timers");
    let start = |text: &str| {
        let mut command = watched("", text);
        command.env("TORCHELASTIC_TIMER_FILE", &path);
        Running::start(&mut command)
    };
    let mut first = start("echo $$; exec sleep 1000");
    let pids = first.numbers(1);
    assert!(is_pipe(&path));
    let second = start("echo $TORCHELASTIC_TIMER_FILE").finish();
    assert!(
        second.stdout.contains("flow-launch_") && second.stderr.contains("in use"),
        "{second:?}"
    );
    assert!(is_pipe(&path));
    first.signal(Signal::KILL);
    first.finish();
    until_gone(&pids);
    until("the pipe is gone", || !path.exists());
    // One that somebody has left is taken over.
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    assert_eq!(
        start("echo $TORCHELASTIC_TIMER_FILE").finish().stdout.trim_end(),
        path.to_str().unwrap()
    );
    let flags = OFlags::NONBLOCK.bits() as i32;
    assert!(OpenOptions::new().write(true).custom_flags(flags).open(&path).is_err());
}

fn ask(port: u16, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let _ = stream.write_all(request); // whom it is too long closes it
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn health_is_served_by_http_while_the_job_runs() {
    let port = free_port();
    let mut command = script("--nproc_per_node 2", "echo $$; exec sleep 1000");
    let mut running =
        Running::start(command.env("TORCHELASTIC_HEALTH_CHECK_PORT", port.to_string()));
    let pids = running.numbers(2);
    // Some that only connect are in nobody's way for long.
    let idle: Vec<_> = (0..40).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    for _ in 0..3 {
        let answer = ask(port, b"GET /health HTTP/1.1\r\nHost: node\r\n\r\n");
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nok\n"),
            "{answer}"
        );
    }
    drop(idle);
    assert_eq!(ask(port, &vec![b'x'; 1 << 20]), "");
    running.signal(Signal::TERM);
    assert_eq!(running.finish().code, Some(143));
    until_gone(&pids);
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}

#[test]
fn a_port_that_cannot_be_had_is_a_line_and_the_job_goes_on() {
    let taken = TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let taken = taken.local_addr().unwrap().port().to_string();
    for port in ["0", "x", "70000", &taken] {
        let finished = run(script("", "echo ran").env("TORCHELASTIC_HEALTH_CHECK_PORT", port));
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "ran\n"), "{finished:?}");
        assert_eq!(finished.stderr.lines().count(), 1, "{finished:?}");
        assert!(
            finished.stderr.contains(&format!("TORCHELASTIC_HEALTH_CHECK_PORT is '{port}'")),
            "{finished:?}"
        );
    }
}
