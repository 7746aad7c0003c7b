//! Keys that send signals, the terminal's modes, and its end.

use flow_harness::cli::{children, script, until, until_gone, wait};

use std::fs;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use super::{FLOW_LAUNCH, Terminal};

/// Also where flow-launch itself is killed: then the guard does it.
#[test]
fn the_terminal_is_as_it_was_whatever_is_killed() {
    for signal in [Signal::TERM, Signal::KILL] {
        let change = "stty raw -echo intr ^X min 0 time 7 cstopb";
        let launch = format!(
            "modes=$(stty -a); $0 --grace 0.3 sh -c \"trap '' TERM; {change}; echo ready; while :; do sleep 0.05; done\"
             echo over; read line; [ \"$modes\" = \"$(stty -a)\" ] && echo same; cat"
        );
        let Some(mut terminal) = Terminal::shell(&launch) else { return };
        terminal.until_it_shows("[rank 0] ready");
        assert!(!terminal.echoes());
        let launcher = Pid::from_raw(children(terminal.pid())[0]).unwrap();
        kill_process(launcher, signal).unwrap();
        terminal.until_it_shows("over");
        until(&format!("the terminal echoes after {signal:?}"), || terminal.echoes());
        terminal.types("\n");
        terminal.until_it_shows("same");
        terminal.types("\x04");
        terminal.end();
    }
}

/// As a pager does, which may read the keys before we start and after we end.
#[test]
fn whoever_reads_the_output_may_set_the_modes() {
    let folder = tempfile::tempdir().unwrap();
    let launch =
        "cd $1; { until [ -e ready ]; do sleep 0.02; done; $0 sh -c 'until [ -e set ]; do sleep 0.02; done'; } | {
                  stty $2 </dev/tty; touch ready; sleep 0.5; stty $3 </dev/tty; touch set; cat; stty -a </dev/tty; }";
    for (before, after) in [("-echo", "echo"), ("echo", "-echo")] {
        let mut command = Command::new("env");
        let folder = folder.path().to_str().unwrap();
        command.args(["--default-signal", "sh", "-c", launch, FLOW_LAUNCH, folder, before, after]);
        let Some(terminal) = Terminal::start(&command) else { return };
        let (_, shown) = terminal.end();
        assert!(shown.contains(&format!(" {after} ")), "{shown:?}");
        fs::remove_file(format!("{folder}/ready")).unwrap();
        fs::remove_file(format!("{folder}/set")).unwrap();
    }
}

#[test]
fn ctrl_c_is_passed_on_once_and_says_what_a_second_does() {
    let text = "trap 'echo got it; exit' INT; echo ready; while :; do sleep 0.05; done";
    let Some(mut terminal) = Terminal::start(&script("--nproc_per_node 2", text)) else { return };
    until("both are ready", || terminal.shown().matches("ready").count() == 2);
    terminal.types("\x03");
    let (code, shown) = terminal.end();
    assert_eq!((code, shown.matches("got it").count()), (Some(130), 2), "{shown:?}");
    let line =
        "flow-launch: SIGINT: waiting up to 30 s for the ranks to stop; again to kill them\r\n";
    assert!(shown.contains(line), "{shown:?}");
}

#[test]
fn ctrl_c_twice_kills() {
    let text = "trap 'echo no' INT; echo $RANK pid $$; while :; do sleep 0.05; done";
    let Some(mut terminal) = Terminal::start(&script("", text)) else { return };
    terminal.until_it_shows("[rank 0] 0 pid ");
    terminal.until_it_shows("\r\n");
    let workers = children(terminal.pid());
    terminal.types("\x03");
    terminal.until_it_shows("again to kill them");
    terminal.until_it_shows("no");
    // One that comes together with the first counts as the same.
    until("a later one kills", || {
        terminal.types("\x03");
        terminal.shown().contains("SIGINT: killing the ranks")
    });
    assert_eq!(terminal.end().0, Some(130));
    until_gone(&workers);
}

/// Whether a process is stopped, or a shell whose child (by vfork) is and has not become its
/// program yet.
fn is_stopped(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().trim_start().starts_with(['T', 'D'])
}

#[test]
fn ctrl_z_stops_all_and_fg_goes_on() {
    let launch =
        "set -m; $0 --nproc_per_node 2 sh -c 'echo pid $$; until [ -e $1 ]; do sleep 0.05; done; echo done' sh $1
                  echo stopped $?; read line; fg >/dev/null; echo ended $?";
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let mut command = Command::new("env");
    command.args(["--default-signal", "sh", "-c", launch, FLOW_LAUNCH, gate.to_str().unwrap()]);
    let Some(mut terminal) = Terminal::start(&command) else { return };
    until("both are there", || terminal.shown().matches("pid").count() == 2);
    let shown = terminal.shown();
    let numbers =
        shown.lines().filter_map(|line| line.split_once("pid ")?.1.trim().parse::<i32>().ok());
    let workers: Vec<_> = numbers.collect();
    assert_eq!(workers.len(), 2, "{shown:?}");
    terminal.types("\x1a");
    terminal.until_it_shows("stopped 1");
    until("the workers are stopped", || workers.iter().all(|pid| is_stopped(*pid)));
    fs::write(&gate, "").unwrap();
    terminal.types("\n");
    terminal.until_it_shows("[rank 0] done\r\n");
    terminal.until_it_shows("[rank 1] done\r\n");
    terminal.until_it_shows("ended 0");
    terminal.end();
}

#[test]
fn in_the_background_output_comes_even_where_that_stops_others() {
    let Some(terminal) =
        Terminal::shell("set -m; stty tostop; $0 sh -c 'echo hello' & wait; echo over")
    else {
        return;
    };
    terminal.until_it_shows("[rank 0] hello\r\n");
    terminal.until_it_shows("over");
    terminal.end();
}

#[test]
fn nothing_survives_a_terminal_that_is_closed() {
    let Some(terminal) = Terminal::start(&script(
        "--nproc_per_node 2 --grace 0.3",
        "trap '' HUP; echo pid $$; sleep 1000",
    )) else {
        return;
    };
    until("both are there", || terminal.shown().matches("pid").count() == 2);
    let mut pids = children(terminal.pid());
    pids.extend(pids.clone().iter().flat_map(|pid| children(*pid)));
    let Terminal { keyboard, shown, mut child, .. } = terminal;
    drop((keyboard, shown));
    assert_eq!(wait(&mut child), Some(129));
    until_gone(&pids);
}

#[test]
fn each_worker_leads_a_session_without_a_terminal() {
    let text =
        "echo $$ $(cut -d' ' -f6,7 /proc/$$/stat); cat /dev/tty 2>/dev/null; exec sleep 1000";
    let Some(terminal) = Terminal::start(&script("--nproc_per_node 2", text)) else { return };
    until("both are there", || terminal.shown().matches(" 0\r\n").count() == 2);
    for line in terminal.shown().lines() {
        let numbers: Vec<_> = line.split_once("] ").unwrap().1.trim().split(' ').collect();
        assert_eq!((numbers[0], numbers[2]), (numbers[1], "0"), "{line}");
    }
    let pids = children(terminal.pid());
    kill_process(Pid::from_child(&terminal.child), Signal::KILL).unwrap();
    terminal.end();
    until_gone(&pids);
}
