//! Commands that may hang: each has a time limit, and ends with the doctor.

use std::ffi::OsString;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::hosts::control_stream;

/// Runs a command, without input, and returns what it has written; an error says why it has not
/// ended. It leads a session, which is killed when the time is over or the doctor ends.
pub fn output(command: Vec<OsString>, timeout: Duration) -> Result<Output, String> {
    let mut becoming = Command::new("/proc/self/exe");
    becoming.arg(control_stream::REMOTE_SHELL_FLAG).args(command);
    becoming.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = becoming.spawn().map_err(|error| format!("cannot start a process: {error}"))?;
    let group = Pid::from_child(&child);
    let (sender, ended) = mpsc::channel();
    // The receiver is gone if the time is over.
    thread::Builder::new()
        .spawn(move || sender.send(child.wait_with_output()))
        .map_err(|error| format!("cannot start a thread: {error}"))?;
    match ended.recv_timeout(timeout) {
        Ok(output) => output.map_err(|error| format!("its output cannot be read: {error}")),
        Err(_) => {
            let _ = kill_process_group(group, Signal::KILL); // it may have ended just now
            Err(format!("no answer in {} s", timeout.as_secs_f64()))
        }
    }
}

/// Returns the last line that a command has written, for a message.
pub fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it says nothing").into()
}
