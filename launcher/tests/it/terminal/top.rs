//! The screen of `flow-launch top`.

use flow_harness::cli::{Running, script, until};
use rustix::process::{Pid, Signal, kill_process};

use super::Terminal;

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
