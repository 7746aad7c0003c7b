//! The end of a process.

use std::fmt;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::signal;

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum ExitStatus {
    Exit(i32),
    Signal(i32),
}

impl ExitStatus {
    /// Whether the process ended other than with the exit code 0.
    pub fn is_failure(self) -> bool {
        self != ExitStatus::Exit(0)
    }

    /// Whether it was any signal but SIGTERM, which launchers use to stop workers.
    pub fn is_crash(self) -> bool {
        matches!(self, ExitStatus::Signal(signal) if signal != Signal::TERM.as_raw())
    }

    /// Returns the exit code that a shell would report.
    pub fn code(self) -> u8 {
        match self {
            ExitStatus::Exit(code) => code as u8,
            ExitStatus::Signal(signal) => 128u8.wrapping_add(signal as u8),
        }
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitStatus::Exit(code) => write!(f, "exit code {code}"),
            ExitStatus::Signal(signal) => write!(f, "signal {signal} ({})", signal::name(*signal)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_a_shell_reports_it() {
        assert_eq!(
            (ExitStatus::Exit(3).code(), ExitStatus::Exit(3).to_string()),
            (3, "exit code 3".into())
        );
        assert_eq!(
            (ExitStatus::Signal(9).code(), ExitStatus::Signal(9).to_string()),
            (137, "signal 9 (SIGKILL)".into())
        );
        assert_eq!(ExitStatus::Signal(40).to_string(), "signal 40 (real-time signal 40)");
        assert!(
            !ExitStatus::Exit(0).is_failure()
                && ExitStatus::Exit(1).is_failure()
                && ExitStatus::Signal(15).is_failure()
        );
    }
}
