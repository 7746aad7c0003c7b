//! The control stream of an agent that `--hosts` has started: its standard input, written by the
//! *head*.
//!
//! The head first writes the variables for the agent's environment, among them the job's secret, as
//! a line of JSON. Then it writes `signal N` for each signal that it passes on, and an empty line
//! as a heartbeat. If the stream ends or is silent for too long, the head is gone or cannot be
//! reached. The agent then ends its job as at SIGTERM, or at the signal that `at-end N` has named. The
//! agent's first output is a line that says that it has started.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal, setsid};

use crate::agent::process;
use crate::signal;

/// First argument of an agent that reads a control stream.
pub const HIDDEN_FLAG: &str = "--control-stdin";

/// First argument of a flow-launch process that is about to become a remote shell.
pub const REMOTE_SHELL_FLAG: &str = "--exec-remote-shell";

/// The agent's first line.
pub const GREETING: &str = "flow-launch is here\n";

/// The head's heartbeat, and its interval.
pub const HEARTBEAT: &str = "\n";
/// The interval at which the head sends a heartbeat.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Silence after which the head counts as gone.
const HEARTBEAT_TIMEOUT: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

const SIGNAL: &str = "signal ";
const AT_END: &str = "at-end ";

/// Returns the line that passes on a signal.
pub fn signal(signal: i32) -> String {
    format!("{SIGNAL}{signal}\n")
}

/// Returns the line that says which signal the agent gets when the stream ends.
pub fn at_end(signal: Signal) -> String {
    format!("{AT_END}{}\n", signal.as_raw())
}

/// Returns the line with the variables.
pub fn environment(variables: &BTreeMap<String, String>) -> anyhow::Result<String> {
    Ok(serde_json::to_string(variables)? + "\n")
}

/// Becomes a remote shell, in a new process with a control stream; the kernel kills it when the
/// head dies. It has no terminal, so it cannot ask questions.
pub fn exec_remote_shell(command: impl Iterator<Item = OsString>) -> ExitCode {
    process::become_program(end_with_the_head(), command)
}

fn end_with_the_head() -> io::Result<()> {
    leave_terminal()?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let stdin = io::stdin();
    let mut stream = [PollFd::new(&stdin, PollFlags::empty())];
    poll(&mut stream, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if stream[0].revents().contains(PollFlags::HUP) {
        return Err(io::Error::other("whoever has started it is gone"));
    }
    Ok(())
}

/// Leaves the terminal: its signals go to the head, which passes them on.
fn leave_terminal() -> io::Result<()> {
    match setsid() {
        // If ssh has started it, it leads a session already.
        Ok(_) | Err(Errno::PERM) => signal::unblock_all(),
        Err(error) => Err(error.into()),
    }
}

/// Takes standard input as the control stream and replaces it by `/dev/null`, so that workers do
/// not inherit it. Call it while there is only one thread.
pub fn take() -> anyhow::Result<()> {
    leave_terminal()?;
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    let mut stream = ControlStream::new(input);
    let Some(line) = stream.line() else { bail!("whoever has started this agent is gone") };
    let variables: BTreeMap<String, String> =
        serde_json::from_str(&line).context("malformed variables on the control stream")?;
    for (name, value) in variables {
        // Not by another exec: /proc would show the job's secret.
        // SAFETY: there is only this thread.
        unsafe { std::env::set_var(name, value) };
    }
    io::stdout().write_all(GREETING.as_bytes())?;
    io::stdout().flush()?;
    thread::Builder::new()
        .name("flow-control".into())
        .spawn(|| stream.forward_signals())
        .context("cannot start a thread")?;
    Ok(())
}

/// Returns the signal whose number follows this word in a line.
fn signal_after(line: &str, word: &str) -> Option<Signal> {
    Signal::from_named_raw(line.strip_prefix(word)?.parse().ok()?)
}

fn send_to_this_process(signal: Signal) {
    if let Err(error) = kill_process(getpid(), signal) {
        log::warn!("cannot signal this process: {error}");
    }
}

struct ControlStream {
    input: OwnedFd,
    unread: Vec<u8>,
    /// The longest time in which the head sends nothing.
    heartbeat_timeout: Timespec,
}

impl ControlStream {
    fn new(input: OwnedFd) -> ControlStream {
        ControlStream { input, unread: Vec::new(), heartbeat_timeout: HEARTBEAT_TIMEOUT }
    }

    /// Sends this process the signals that the head passes on, until the stream ends.
    fn forward_signals(mut self) {
        // Signals are handled by the main thread.
        if let Err(error) = signal::block_all() {
            log::warn!("cannot block signals: {error}");
        }
        let mut at_end = Signal::TERM;
        while let Some(line) = self.line() {
            if let Some(signal) = signal_after(&line, SIGNAL) {
                send_to_this_process(signal);
            }
            at_end = signal_after(&line, AT_END).unwrap_or(at_end);
        }
        send_to_this_process(at_end);
    }

    /// Reads the next line, without its end; None when the stream has ended.
    fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let mut buffer = [0; 4096];
            match poll(
                &mut [PollFd::new(&self.input, PollFlags::IN)],
                Some(&self.heartbeat_timeout),
            ) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => return None,
            }
            match rustix::io::read(&self.input, &mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.unread.extend_from_slice(&buffer[..count]),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> (ControlStream, io::PipeWriter) {
        let (input, output) = io::pipe().unwrap();
        (ControlStream::new(input.into()), output)
    }

    #[test]
    fn lines_end_with_the_leash() {
        let (mut stream, mut output) = stream();
        let variables = BTreeMap::from([("A".to_string(), "1\n2".to_string())]);
        output
            .write_all(
                (environment(&variables).unwrap() + HEARTBEAT + &signal(15) + "half").as_bytes(),
            )
            .unwrap();
        drop(output);
        let lines: Vec<_> = std::iter::from_fn(|| stream.line()).collect();
        assert_eq!(lines, [r#"{"A":"1\n2"}"#, "", "signal 15"]);
    }

    #[test]
    fn silence_is_an_end() {
        let (mut stream, mut output) = stream();
        stream.heartbeat_timeout = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        output.write_all(HEARTBEAT.as_bytes()).unwrap();
        assert_eq!((stream.line().as_deref(), stream.line()), (Some(""), None));
    }
}
