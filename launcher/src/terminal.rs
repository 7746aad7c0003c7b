//! The modes of the user's terminal: as they were before the job they shall be after it. A worker may turn the echo
//! off, for a password, and be killed.

use std::fmt;
use std::io;

use rustix::process::{getpgrp, Pid};
use rustix::termios::{tcgetattr, tcgetpgrp, tcsetattr, InputModes, LocalModes, OptionalActions, OutputModes, Termios};

/// What the modes are to be, while this process group has the terminal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Modes {
    group: Pid,
    input: InputModes,
    output: OutputModes,
    local: LocalModes,
}

impl Modes {
    /// Those of the terminal that is our standard input, if it is one and we have it: in the background it may be in
    /// whatever state a shell needs.
    pub fn of_input() -> Option<Modes> {
        let group = getpgrp();
        if tcgetpgrp(io::stdin()).ok()? != group {
            return None;
        }
        Some(Modes::of(group, &tcgetattr(io::stdin()).ok()?))
    }

    fn of(group: Pid, terminal: &Termios) -> Modes {
        let Termios { input_modes: input, output_modes: output, local_modes: local, .. } = *terminal;
        Modes { group, input, output, local }
    }

    /// Gives them back to the terminal that is our standard error. We may be in the background: SIGTTOU must be blocked.
    pub fn restore(self) {
        let terminal = io::stderr();
        let Ok(mut now) = tcgetattr(&terminal) else { return };
        if Modes::of(self.group, &now) == self || tcgetpgrp(&terminal) != Ok(self.group) {
            return;
        }
        (now.input_modes, now.output_modes, now.local_modes) = (self.input, self.output, self.local);
        // Fails only where the terminal has gone.
        let _ = tcsetattr(&terminal, OptionalActions::Now, &now);
    }

    /// From what `Display` writes.
    pub fn parse(text: &str) -> Option<Modes> {
        let mut numbers = text.split(',');
        let group = Pid::from_raw(numbers.next()?.parse().ok()?)?;
        let mut bits = || numbers.next()?.parse().ok();
        let (input, output, local) = (bits()?, bits()?, bits()?);
        Some(Modes {
            group,
            input: InputModes::from_bits_retain(input),
            output: OutputModes::from_bits_retain(output),
            local: LocalModes::from_bits_retain(local),
        })
    }
}

impl fmt::Display for Modes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{},{}", self.group, self.input.bits(), self.output.bits(), self.local.bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_survive_the_way_to_another_process() {
        let modes = Modes {
            group: Pid::INIT,
            input: InputModes::ICRNL,
            output: OutputModes::OPOST,
            local: LocalModes::ECHO | LocalModes::ICANON,
        };
        assert_eq!(Modes::parse(&modes.to_string()), Some(modes));
        assert_eq!(Modes::parse(""), None);
    }
}
