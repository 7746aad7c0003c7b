//! The modes of the user's terminal, which are restored after the job: a worker may turn off the
//! echo, for a password, and be killed.

use std::fmt;
use std::io;

use rustix::process::{Pid, getpgrp};
use rustix::termios::{
    ControlModes, InputModes, LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios,
    isatty, tcgetattr, tcgetpgrp, tcsetattr,
};

/// Keys with a meaning, and how reads wait.
const CODES: [SpecialCodeIndex; 17] = [
    SpecialCodeIndex::VINTR,
    SpecialCodeIndex::VQUIT,
    SpecialCodeIndex::VERASE,
    SpecialCodeIndex::VKILL,
    SpecialCodeIndex::VEOF,
    SpecialCodeIndex::VTIME,
    SpecialCodeIndex::VMIN,
    SpecialCodeIndex::VSWTC,
    SpecialCodeIndex::VSTART,
    SpecialCodeIndex::VSTOP,
    SpecialCodeIndex::VSUSP,
    SpecialCodeIndex::VEOL,
    SpecialCodeIndex::VREPRINT,
    SpecialCodeIndex::VDISCARD,
    SpecialCodeIndex::VWERASE,
    SpecialCodeIndex::VLNEXT,
    SpecialCodeIndex::VEOL2,
];

/// The modes to restore, while this process group has the terminal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Modes {
    group: Pid,
    /// For input, output, control and the line.
    flags: [u32; 4],
    codes: [u8; CODES.len()],
}

impl Modes {
    /// Reads the modes of the terminal that is our standard input. None if we are in the
    /// background, where the shell decides about the modes. None if an output is not the terminal:
    /// a pager there sets modes of its own, which we cannot tell from our workers'.
    pub fn of_input() -> Option<Modes> {
        let group = getpgrp();
        if tcgetpgrp(io::stdin()).ok()? != group || !isatty(io::stdout()) || !isatty(io::stderr()) {
            return None;
        }
        Some(Modes::of(group, &tcgetattr(io::stdin()).ok()?))
    }

    fn of(group: Pid, terminal: &Termios) -> Modes {
        let Termios { input_modes, output_modes, control_modes, local_modes, .. } = *terminal;
        let flags =
            [input_modes.bits(), output_modes.bits(), control_modes.bits(), local_modes.bits()];
        Modes { group, flags, codes: CODES.map(|code| terminal.special_codes[code]) }
    }

    /// Restores the modes of the terminal that is our standard error. SIGTTOU must be blocked, as
    /// we may be in the background.
    pub fn restore(self) {
        let terminal = io::stderr();
        let Ok(mut now) = tcgetattr(&terminal) else { return };
        if Modes::of(self.group, &now) == self || tcgetpgrp(&terminal) != Ok(self.group) {
            return;
        }
        let [input, output, control, local] = self.flags;
        now.input_modes = InputModes::from_bits_retain(input);
        now.output_modes = OutputModes::from_bits_retain(output);
        now.control_modes = ControlModes::from_bits_retain(control);
        now.local_modes = LocalModes::from_bits_retain(local);
        CODES.into_iter().zip(self.codes).for_each(|(index, code)| now.special_codes[index] = code);
        // Fails only where the terminal has gone.
        let _ = tcsetattr(&terminal, OptionalActions::Now, &now);
    }

    /// Parses the text that `Display` writes.
    pub fn parse(text: &str) -> Option<Modes> {
        let mut numbers = text.split(',').map(str::parse::<u32>);
        let group = Pid::from_raw(numbers.next()?.ok()?.try_into().ok()?)?;
        let mut flags = [0; 4];
        let mut codes = [0; CODES.len()];
        for flag in &mut flags {
            *flag = numbers.next()?.ok()?;
        }
        for code in &mut codes {
            *code = numbers.next()?.ok()?.try_into().ok()?;
        }
        Some(Modes { group, flags, codes })
    }
}

impl fmt::Display for Modes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.group)?;
        self.flags
            .into_iter()
            .chain(self.codes.map(u32::from))
            .try_for_each(|number| write!(f, ",{number}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_survive_the_way_to_another_process() {
        let codes = std::array::from_fn(|index| 200 + index as u8);
        let modes = Modes { group: Pid::INIT, flags: [1, 2, u32::MAX, 0], codes };
        assert_eq!(Modes::parse(&modes.to_string()), Some(modes));
        assert_eq!(Modes::parse(""), None);
    }
}
