//! flow-launch on a terminal, as its user sees it and types into it.

mod job_control;
mod output;
mod prompts;
mod top;

use flow_harness::cli::{until, wait};

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

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
        let (keyboard, terminal) = open_terminal();
        tcsetwinsize(&keyboard, Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 })
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

/// Opens a terminal: the side of the keyboard, and that of programs. Nobody inherits either.
pub fn open_terminal() -> (OwnedFd, OwnedFd) {
    let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    unlockpt(&keyboard).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let name = ptsname(&keyboard, Vec::new()).unwrap();
    let programs = rustix::fs::open(name, flags, Mode::empty()).unwrap();
    (keyboard, programs)
}

/// Makes a file with a Python program.
fn python(folder: &tempfile::TempDir, text: &str) -> String {
    let path = folder.path().join("program.py");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().into()
}
