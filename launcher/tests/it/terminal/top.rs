//! The screen of `flow-launch top`, and what `--top` shows.

use std::num::NonZero;
use std::process::Command;

use flow_harness::cli::{Running, children, run, script, until};
use flow_harness::net::{Net, ipv4};
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{Winsize, tcsetwinsize};

use super::{FLOW_LAUNCH, Terminal};

/// Leaves the alternate screen.
const LEAVE: &str = "\x1b[?1049l";

fn with_job(test: impl FnOnce(&Running, Terminal)) {
    let mut job = Running::start(&mut script("--nproc_per_node 2", "echo $$; exec sleep 1000"));
    job.numbers(2);
    let text = format!("exec $0 top {}", job.pid());
    if let Some(terminal) = Terminal::shell(&text) {
        terminal.until_it_shows("2 ranks");
        assert!(!terminal.echoes());
        test(&job, terminal);
    }
    job.signal(Signal::TERM);
    job.finish();
}

#[test]
fn the_screen_is_left_by_q_as_it_was() {
    with_job(|_, mut terminal| {
        terminal.until_it_shows("memory");
        terminal.types("x");
        terminal.types("q");
        until("the echo is on again", || terminal.echoes());
        let (code, shown) = terminal.end();
        assert_eq!(code, Some(0));
        assert!(shown.contains(LEAVE), "{shown:?}");
    });
}

#[test]
fn the_screen_is_left_by_ctrl_c_and_signals_as_it_was() {
    for signal in [None, Some(Signal::TERM)] {
        with_job(|_, mut terminal| {
            match signal {
                None => terminal.types("\x03"),
                Some(signal) => {
                    kill_process(Pid::from_raw(terminal.pid()).unwrap(), signal).unwrap();
                }
            }
            until("the echo is on again", || terminal.echoes());
            let (code, shown) = terminal.end();
            assert_eq!(code, Some(0), "{shown:?}");
            assert!(shown.contains(LEAVE), "{shown:?}");
        });
    }
}

#[test]
fn the_screen_is_left_when_the_job_is_over() {
    with_job(|job, terminal| {
        job.signal(Signal::TERM);
        terminal.until_it_shows("the job is over");
        assert_eq!(terminal.end().0, Some(0));
    });
}

/// What stands on the terminal: its rows, without those at the end that are empty.
fn rows(terminal: &Terminal) -> Vec<String> {
    rows_of(&terminal.shown(), 30)
}

fn rows_of(shown: &str, rows: u16) -> Vec<String> {
    let columns = NonZero::new(100).unwrap();
    let mut parser = vt100::Parser::new(NonZero::new(rows).unwrap(), columns, 0);
    parser.process(shown.as_bytes());
    let mut rows: Vec<String> = parser.screen().rows(0, columns.get()).collect();
    while rows.last().is_some_and(String::is_empty) {
        rows.pop();
    }
    rows
}

/// Whether the table of a job with two ranks is at the foot of so many rows.
fn has_table(rows: &[String], height: usize) -> bool {
    let heading = rows.iter().position(|row| row.ends_with("1 host, 2 ranks"));
    rows.len() == height
        && heading.is_some_and(|heading| rows[heading + 1].starts_with("rank  host"))
}

/// Rank 0 writes lines with the size of its terminal.
const LINES: &str = "exec 3>&1; echo start $RANK; trap 'echo end; exit' INT; n=0
    while :; do n=$((n + 1)); [ $RANK = 0 ] && echo line $n of $(stty size <&3); sleep 0.02; done";

#[test]
fn a_job_shows_what_it_does_below_its_output() {
    let Some(mut terminal) = Terminal::start(&script("--nproc_per_node 2 --top", LINES)) else {
        return;
    };
    until("the table is at the foot", || has_table(&rows(&terminal), 30));
    // The workers know how many rows are theirs.
    terminal.until_it_shows(" of 24 ");
    terminal.until_it_shows("line 99 ");
    let shown = rows(&terminal);
    assert!(has_table(&shown, 30), "{shown:?}");
    assert!(shown[..20].iter().all(|row| row.starts_with("[rank 0] line ")), "{shown:?}");
    terminal.types("\x03");
    let (code, shown) = terminal.end();
    let shown = rows_of(&shown, 30);
    assert_eq!(code, Some(130), "{shown:?}");
    assert!(!shown.concat().contains("2 ranks"), "{shown:?}");
    let last = shown.iter().rev().take(2);
    assert!(
        last.clone().all(|row| row.starts_with("[rank ") && row.ends_with("] end")),
        "{shown:?}"
    );
}

#[test]
fn the_table_goes_with_the_job_however_that_ends() {
    for (signal, key) in [(None, "\x1a"), (Some(Signal::TERM), ""), (Some(Signal::KILL), "")] {
        let text = "set -m; $0 --nproc_per_node 2 --top sh -c 'echo ready; exec sleep 1000'; echo over; exec cat";
        let Some(mut terminal) = Terminal::shell(text) else { return };
        until("the table is at the foot", || has_table(&rows(&terminal), 30));
        match signal {
            None => terminal.types(key),
            Some(signal) => {
                let launcher = Pid::from_raw(children(terminal.pid())[0]).unwrap();
                kill_process(launcher, signal).unwrap();
            }
        }
        terminal.until_it_shows("over");
        until("the table has gone", || !rows(&terminal).concat().contains("2 ranks"));
        // All rows scroll again.
        terminal.types(&"row\n".repeat(30));
        until("the terminal is full", || {
            rows(&terminal).len() >= 29 && rows(&terminal).iter().all(|row| row == "row")
        });
        terminal.types("\x04");
        terminal.end();
    }
}

#[test]
fn the_table_follows_the_size_of_the_terminal() {
    let Some(mut terminal) = Terminal::start(&script("--nproc_per_node 2 --top", LINES)) else {
        return;
    };
    until("the table is at the foot", || has_table(&rows(&terminal), 30));
    let before = terminal.shown().len();
    tcsetwinsize(
        &terminal.keyboard,
        Winsize { ws_row: 20, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 },
    )
    .unwrap();
    until("the table is at the new foot", || {
        has_table(&rows_of(&terminal.shown()[before..], 20), 20)
    });
    terminal.until_it_shows(" of 14 ");
    terminal.types("\x03");
    terminal.end();
}

#[test]
fn a_table_needs_a_terminal() {
    let finished = run(&mut script("--top", "exit 3"));
    assert_eq!(finished.code, Some(2));
    assert!(
        finished.stderr.starts_with("flow-launch: --top needs standard error to be a terminal"),
        "{finished:?}"
    );
    let mut dumb = Command::new("env");
    dumb.args(["TERM=dumb", FLOW_LAUNCH, "--top", "sh", "-c", "exit 3"]);
    let Some(terminal) = Terminal::start(&dumb) else { return };
    let (code, shown) = terminal.end();
    assert_eq!(code, Some(2));
    assert!(!shown.contains('\x1b') && shown.contains("with TERM other than dumb"), "{shown:?}");
}

#[test]
fn a_job_on_several_hosts_is_shown_where_it_was_started() {
    for is_killed in [false, true] {
        let Some(net) = Net::new(2) else { return };
        let (_folder, ssh) = net.remote_shell();
        let flags = format!("--rsh {ssh} --hosts node0,node1 --master-addr {} --top", ipv4(0));
        let command = script(&flags, "echo ready; exec sleep 1000");
        let Some(mut terminal) = net.within(0, || Terminal::start(&command)) else { return };
        until("the table is at the foot", || {
            let rows = rows(&terminal);
            rows.len() == 30 && rows.iter().any(|row| row.ends_with("2 hosts, 2 ranks"))
        });
        if is_killed {
            kill_process(Pid::from_raw(terminal.pid()).unwrap(), Signal::KILL).unwrap();
        } else {
            terminal.types("\x03");
        }
        let (code, shown) = terminal.end();
        assert_eq!(code, (!is_killed).then_some(130), "{shown:?}");
        assert!(!rows_of(&shown, 30).concat().contains("2 ranks"), "{shown:?}");
        net.until_nothing_is_left();
    }
}

#[test]
fn one_host_alone_is_no_case_for_a_table() {
    let finished = run(&mut script("--hosts localhost --top", "exit 3"));
    assert_eq!(finished.code, Some(2));
    assert!(finished.stderr.contains("--top needs two hosts or more"), "{finished:?}");
}
