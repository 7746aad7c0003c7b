//! What a terminal shows of the workers' output.

use flow_harness::cli::{is_alive, script, until, until_gone, wait};
use flow_harness::net::Gate;

use std::fs;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{Winsize, tcgetwinsize, tcsetwinsize};

use super::{FLOW_LAUNCH, Terminal};

#[test]
fn rank_0_writes_to_a_terminal_of_the_width_that_is_left() {
    let text = "trap 'stty size <&1; exit' WINCH
                [ -t 1 ] && [ -t 2 ] && echo $RANK has one of $(stty size <&2) || { echo $RANK has none; exit; }
                while :; do sleep 0.05; done";
    let Some(terminal) = Terminal::start(&script("--nproc_per_node 2", text)) else { return };
    terminal.until_it_shows("[rank 0] 0 has one of 30 91\r\n");
    terminal.until_it_shows("[rank 1] 1 has none\r\n");
    let size = tcgetwinsize(&terminal.keyboard).unwrap();
    tcsetwinsize(&terminal.keyboard, Winsize { ws_col: 60, ws_row: 20, ..size }).unwrap();
    terminal.until_it_shows("[rank 0] 20 51\r\n");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn a_stream_that_is_no_terminal_stays_none() {
    let Some(terminal) =
        Terminal::shell("$0 sh -c '[ -t 1 ] || echo none >&2; [ -t 2 ] && echo one >&2' | cat")
    else {
        return;
    };
    terminal.until_it_shows("none\r\none\r\n");
}

#[test]
fn a_progress_bar_is_drawn_anew_below_the_lines_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let drawn = folder.path().join("drawn");
    let gate = Gate::new();
    let text = format!(
        "if [ $RANK = 1 ]; then until [ -e {0} ]; do sleep 0.02; done; echo hello; exit; fi
         printf '\\r10%%' >&2; printf '\\r20%%' >&2; echo >{0}
         {1}; printf '\\r30%%\\n' >&2",
        drawn.display(),
        gate.wait()
    );
    let Some(terminal) = Terminal::start(&script("--nproc_per_node 2", &text)) else { return };
    terminal.until_it_shows("hello");
    gate.open();
    let (code, shown) = terminal.end();
    let shown = shown.replace("\x1b[m", "").replace("\r\x1b[K", "\r<erase>");
    assert_eq!(code, Some(0), "{shown:?}");
    let bar = "10%\r[rank 0] 20%\r<erase>[rank 1] hello\r\n[rank 0] 20%\r[rank 0] 30%\r\n";
    assert!(shown.ends_with(bar), "{shown:?}");
}

#[test]
fn the_last_words_on_a_terminal_are_not_lost() {
    let Some(terminal) = Terminal::start(&script("", "seq 2000; printf end; kill -9 $$")) else {
        return;
    };
    let (code, shown) = terminal.end();
    assert_eq!(code, Some(137));
    let lines: String = (1..=2000).map(|number| format!("[rank 0] {number}\r\n")).collect();
    assert!(shown.starts_with(&format!("{lines}[rank 0] end\r\nflow-launch: rank 0 ")), "{shown}");
}

/// Whoever keeps the terminal of a worker open does not hold up the end.
#[test]
fn a_terminal_that_is_held_open_does_not_hold_up_the_end() {
    let text = "setsid sleep 1000 & echo pid $!; until [ $(cut -d' ' -f6 /proc/$!/stat) = $! ]; \
                do :; done; echo end";
    let Some(mut terminal) = Terminal::start(&script("", text)) else { return };
    assert_eq!(wait(&mut terminal.child), Some(0));
    terminal.until_it_shows("[rank 0] end\r\n");
    let shown = terminal.shown();
    let pid = shown.split_once("pid ").unwrap().1.split_once('\r').unwrap().0.parse().unwrap();
    assert!(is_alive(pid));
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn what_a_detached_process_writes_when_the_job_is_over_is_shown() {
    let gate = Gate::new();
    let text = format!(
        "setsid sh -c '{}; echo late' & until [ $(cut -d' ' -f6 /proc/$!/stat) = $! ]; do :; done; \
         echo early",
        gate.wait()
    );
    let job = script("", &text);
    // The terminal would close with the launcher if that were the leader of its session.
    let mut shell = Command::new("sh");
    shell.args(["-c", "\"$@\"; echo code $?; read line", "sh"]);
    shell.arg(job.get_program()).args(job.get_args());
    let Some(mut terminal) = Terminal::start(&shell) else { return };
    terminal.until_it_shows("[rank 0] early\r\n");
    terminal.until_it_shows("code 0\r\n");
    gate.open();
    terminal.until_it_shows("[rank 0] late\r\n");
    terminal.types("\n");
    assert_eq!(terminal.end().0, Some(0));
}

/// The processes that read on and have this text in their environment.
fn readers(mark: &str) -> Vec<i32> {
    let has = |process: &fs::DirEntry, name: &str, text: &str| {
        let bytes = fs::read(process.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).contains(text)
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let marked = processes
        .filter(|process| has(process, "cmdline", "--read-on") && has(process, "environ", mark));
    marked.filter_map(|process| process.file_name().to_str()?.parse().ok()).collect()
}

/// What reads on ends with the last process that writes, though the terminal takes nothing.
#[test]
fn a_terminal_that_is_stuck_keeps_no_process() {
    let gate = Gate::new();
    let folder = tempfile::tempdir().unwrap();
    let stuck = folder.path().join("stuck");
    let job = format!(
        "setsid sh -c '{}; echo late; exec sleep 1000' & echo pid $!; until [ $(cut -d' ' -f6 \
         /proc/$!/stat) = $! ]; do :; done; echo end",
        gate.wait()
    );
    let launch = format!(
        "MARK={0} $0 sh -c \"$1\"; echo code $?
         python3 -c 'import termios; termios.tcflow(1, termios.TCOOFF)'; touch {0}; read line
         python3 -c 'import termios; termios.tcflow(1, termios.TCOON)'",
        stuck.display()
    );
    let mut command = Command::new("env");
    command.args(["--default-signal", "sh", "-c", &launch, FLOW_LAUNCH, &job]);
    let Some(mut terminal) = Terminal::start(&command) else { return };
    terminal.until_it_shows("code 0\r\n");
    until("the terminal takes nothing", || stuck.exists());
    let readers = readers(stuck.to_str().unwrap());
    assert!(!readers.is_empty());
    gate.open();
    let shown = terminal.shown();
    let pid = shown.split_once("pid ").unwrap().1.split_once('\r').unwrap().0.parse().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    until_gone(&readers);
    terminal.types("\n");
    assert_eq!(terminal.end().0, Some(0));
}
