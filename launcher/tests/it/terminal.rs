//! flow-launch on a terminal, as its user sees it and types into it.

use flow_harness::cli::{children, is_alive, launcher, script, until, until_gone, wait};
use flow_harness::net::Gate;
use flow_harness::python::have;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcgetwinsize, tcsetwinsize};

const FLOW_LAUNCH: &str = env!("CARGO_BIN_EXE_flow-launch");

/// A terminal with 30 lines of 100 columns, and what runs on it as the leader of its session.
struct Terminal {
    keyboard: File,
    shown: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
    child: Child,
}

impl Terminal {
    /// None, and a line that says why, where there is no setsid.
    fn start(command: &Command) -> Option<Terminal> {
        // Nobody inherits either side unless it is meant to: the terminal closes with us.
        let keyboard =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        unlockpt(&keyboard).unwrap();
        tcsetwinsize(&keyboard, Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 })
            .unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal =
            rustix::fs::open(ptsname(&keyboard, Vec::new()).unwrap(), flags, Mode::empty())
                .unwrap();
        let stream = || Stdio::from(terminal.try_clone().unwrap());
        let mut leader = Command::new("setsid");
        leader
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args())
            .env("TERM", "xterm");
        leader.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let spawned = leader.stdin(stream()).stdout(stream()).stderr(stream()).spawn();
        let Ok(child) = spawned
            .inspect_err(|error| println!("SKIPPED: what happens on a terminal: setsid: {error}"))
        else {
            return None;
        };
        drop((leader, terminal));
        let shown = Arc::new(Mutex::new(String::new()));
        let (mut screen, text) = (File::from(keyboard.try_clone().unwrap()), Arc::clone(&shown));
        // Reading ends with an error when nobody has the terminal any more, or when we look no
        // longer.
        let reader = thread::spawn(move || {
            let (mut bytes, timeout) = ([0; 4096], Timespec { tv_sec: 0, tv_nsec: 20_000_000 });
            while Arc::strong_count(&text) > 1 {
                if poll(&mut [PollFd::new(&screen, PollFlags::IN)], Some(&timeout)).unwrap() > 0 {
                    let Ok(count @ 1..) = screen.read(&mut bytes) else { return };
                    text.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
                }
            }
        });
        Some(Terminal { keyboard: keyboard.into(), shown, reader, child })
    }

    /// A shell script, which finds flow-launch as `$0`.
    fn shell(text: &str) -> Option<Terminal> {
        Terminal::start(Command::new("env").args([
            "--default-signal",
            "sh",
            "-c",
            text,
            FLOW_LAUNCH,
        ]))
    }

    fn shown(&self) -> String {
        self.shown.lock().unwrap().clone()
    }

    fn until_it_shows(&self, text: &str) {
        until(&format!("the terminal shows {text:?}; it shows {:?}", self.shown()), || {
            let is_over = self.reader.is_finished();
            let is_shown = self.shown().contains(text);
            assert!(is_shown || !is_over, "{text:?} is not in {:?}", self.shown());
            is_shown
        });
    }

    fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn echoes(&self) -> bool {
        tcgetattr(&self.keyboard).unwrap().local_modes.contains(LocalModes::ECHO)
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until nobody has the terminal any more; the exit code and all that was shown.
    fn end(mut self) -> (Option<i32>, String) {
        let code = wait(&mut self.child);
        until("nobody has the terminal", || self.reader.is_finished());
        (code, self.shown())
    }
}

/// A file with a Python program.
fn python(folder: &tempfile::TempDir, text: &str) -> String {
    let path = folder.path().join("program.py");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().into()
}

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

/// On the stream of the prompt: at the prompt, of which another rank's line may have come between.
#[test]
fn what_follows_an_answered_prompt_is_shown_at_it() {
    let text = "[ $RANK = 0 ] || { until [ -e $0 ]; do sleep 0.02; done; echo working; exit; }
                printf 'name? '; read name; touch $0; read again; echo hello $name $again; echo bye";
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let mut command = launcher(&["--stdin", "0", "--nproc_per_node", "2", "sh", "-c", text]);
    let Some(mut terminal) = Terminal::start(command.arg(&gate)) else { return };
    terminal.until_it_shows("[rank 0] name? ");
    terminal.types("Ann\n");
    terminal.until_it_shows("[rank 1] working\r\n[rank 0] name? ");
    terminal.types("Lee\n");
    let (code, shown) = terminal.end();
    let end = "[rank 1] working\r\n[rank 0] name? Lee\r\nhello Ann Lee\r\n[rank 0] bye\r\n";
    assert!(code == Some(0) && shown.ends_with(end), "{shown:?}");
}

#[test]
fn input_is_asked_for_and_typed() {
    let folder = tempfile::tempdir().unwrap();
    let program = python(&folder, "print('hello', input('name? '))");
    let Some(mut terminal) = Terminal::start(&launcher(&[&program])) else { return };
    terminal.until_it_shows("[rank 0] name? ");
    terminal.types("Ann\n");
    terminal.until_it_shows("hello Ann\r\n");
    assert_eq!(terminal.end().0, Some(0));
}

/// Python asks on standard error and goes on on standard output.
#[test]
fn a_prompt_that_was_answered_is_over() {
    let text =
        "[ $RANK = 0 ] && { printf 'name? ' >&2; read name; echo hello $name; touch $0; sleep 1.5; echo end; exit; }
                until [ -e $0 ]; do sleep 0.02; done; echo ready; printf 'age? '; read age; echo $age";
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    for (tail, term) in [("", "xterm"), ("", "dumb"), (" 2>&1 | cat", "xterm")] {
        let launch =
            format!("TERM={term} $0 --stdin all --prefix --nproc_per_node 2 sh -c \"$1\" $2{tail}");
        let mut command = Command::new("env");
        command.args([
            "--default-signal",
            "sh",
            "-c",
            &launch,
            FLOW_LAUNCH,
            text,
            gate.to_str().unwrap(),
        ]);
        let Some(mut terminal) = Terminal::start(&command) else { return };
        terminal.until_it_shows("[rank 0] name? ");
        terminal.types("Ann\n");
        terminal.until_it_shows("[rank 0] hello Ann\r\n");
        terminal.until_it_shows("[rank 1] age? ");
        terminal.types("7\n");
        let (_, shown) = terminal.end();
        assert_eq!(shown.matches("name? ").count(), 1, "{shown:?}");
        fs::remove_file(&gate).unwrap();
    }
}

/// Whoever never answers rank 0 sees all the same what rank 1 asks.
#[test]
fn a_prompt_waits_only_a_moment_for_anothers() {
    let text = "[ $RANK = 0 ] && { printf 'name? '; exec sleep 1000; }; sleep 0.5; printf 'age? \
                '; exec sleep 1000";
    for tail in ["", " 2>&1 | cat"] {
        let launch = format!("$0 --stdin all --prefix --nproc_per_node 2 sh -c \"$1\"{tail}");
        let mut command = Command::new("env");
        command.args(["--default-signal", "sh", "-c", &launch, FLOW_LAUNCH, text]);
        let Some(mut terminal) = Terminal::start(&command) else { return };
        terminal.until_it_shows("[rank 1] age? ");
        terminal.until_it_shows("[rank 0] name? ");
        terminal.types("\x03");
        terminal.end();
    }
}

#[test]
fn pdb_takes_commands() {
    let folder = tempfile::tempdir().unwrap();
    let text =
        "import os\nx = 41\nif os.environ['RANK'] == '0':\n    breakpoint()\n    print('x is', x)";
    let Some(mut terminal) =
        Terminal::start(&launcher(&["--nproc_per_node", "2", &python(&folder, text)]))
    else {
        return;
    };
    terminal.until_it_shows("(Pdb) ");
    terminal.types("x + 100\n");
    terminal.until_it_shows("141\r\n");
    terminal.types("x = 42\n");
    terminal.types("c\n");
    terminal.until_it_shows("x is 42\r\n");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn pytorchs_breakpoint_works() {
    let folder = tempfile::tempdir().unwrap();
    if !have("torch") {
        return;
    }
    let text = "import torch.distributed as dist\ndist.init_process_group('gloo')\nx = \
                dist.get_rank() + 41\n\
                dist.breakpoint(0)\nprint('x is', x)\ndist.destroy_process_group()";
    let mut command = launcher(&["--nproc_per_node", "2", &python(&folder, text)]);
    let Some(mut terminal) =
        Terminal::start(command.env("PYTHON_EXEC", flow_harness::python::python()))
    else {
        return;
    };
    terminal.until_it_shows("(Pdb) ");
    terminal.types("up\n");
    terminal.until_it_shows("program.py(4)");
    terminal.types("x += 100\n");
    terminal.types("c\n");
    terminal.until_it_shows("x is 141\r\n");
    terminal.until_it_shows("x is 42\r\n");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn a_password_is_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    // One write: its pieces could come between those of the prompt, which is on stderr.
    let text = "import getpass, os\nif os.environ['RANK'] == '0':\n  \
                os.write(1, b'%d letters\\n' % len(getpass.getpass()))";
    let program = python(&folder, text);
    let Some(mut terminal) =
        Terminal::start(&launcher(&["--stdin", "0", "--nproc_per_node", "2", &program]))
    else {
        return;
    };
    terminal.until_it_shows("[rank 0] Password: ");
    until("the echo is off", || !terminal.echoes());
    terminal.types("sesame\n");
    terminal.until_it_shows("6 letters\r\n");
    let keyboard = terminal.keyboard.try_clone().unwrap();
    let (_, shown) = terminal.end();
    assert!(!shown.contains("sesame"), "{shown:?}");
    assert!(tcgetattr(&keyboard).unwrap().local_modes.contains(LocalModes::ECHO));
}

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
