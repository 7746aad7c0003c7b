//! A pseudoterminal for a worker's output, used where flow-launch itself writes to a terminal. The
//! worker draws progress bars and uses colours as it would alone. Nobody can type into it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{
    LocalModes, OptionalActions, OutputModes, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize,
};

pub use rustix::termios::Winsize;

/// The most bytes that a pseudoterminal holds.
pub const HOLDS: u64 = 1 << 17;

/// Opens a pseudoterminal: our side, which does not block, and the worker's. Output arrives as it
/// was written.
pub fn open(size: Winsize) -> io::Result<(OwnedFd, File)> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    let theirs = rustix::fs::open(ptsname(&ours, Vec::new())?, flags, Mode::empty())?;
    let mut modes = tcgetattr(&theirs)?;
    modes.output_modes.remove(OutputModes::OPOST);
    modes.local_modes.remove(LocalModes::ECHO);
    tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    tcsetwinsize(&ours, size)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs.into()))
}

/// Returns the size of a terminal without the columns of a prefix.
pub fn beside(size: Winsize, prefix: usize) -> Winsize {
    let columns = size.ws_col.saturating_sub(prefix.try_into().unwrap_or(u16::MAX));
    // 0 means unknown.
    Winsize { ws_col: columns.max(size.ws_col.min(1)), ..size }
}

/// Sets the size; false if it is the same already. The caller signals the worker (SIGWINCH).
pub fn resize(ours: &OwnedFd, size: Winsize) -> bool {
    let Ok(old) = tcgetwinsize(ours) else { return false };
    let is_new = old.ws_col != size.ws_col || old.ws_row != size.ws_row;
    is_new && tcsetwinsize(ours, size).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_width_is_left_beside_any_prefix() {
        let width = |columns, prefix| {
            let size = Winsize { ws_col: columns, ws_row: 24, ws_xpixel: 0, ws_ypixel: 0 };
            beside(size, prefix).ws_col
        };
        assert_eq!((width(80, 9), width(5, 9), width(0, 9), width(80, 1 << 20)), (71, 1, 0, 1));
    }
}
