//! `--top`: what the job does, at the foot of the terminal on which it was started.

use std::io::{PipeReader, Read, stderr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, TryRecvError};

use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;

use crate::cli::usage::Usage;
use crate::output::footer::Footer;
use crate::output::sink::Sinks;
use crate::report::text::printable;
use crate::top::table::{self, Before};
use crate::top::view::View;
use crate::top::watcher::{self, Look};

/// Beyond so many bytes that the terminal has not taken, nothing is drawn.
const MAX_QUEUED_BYTES: usize = 1 << 16;

/// The panel, which shows the last look at the job.
pub struct Panel {
    looks: Receiver<Look>,
    /// None once nobody looks any more.
    woken: Option<PipeReader>,
    before: Before,
    was_seen: bool,
    shown: Shown,
}

enum Shown {
    Nothing,
    Job(View, Vec<Option<f64>>),
    /// Why the job cannot be looked at.
    Error(String),
}

impl Panel {
    /// Checks that there is a terminal for a panel.
    pub fn check_terminal(sinks: &Sinks) -> Result<(), Usage> {
        if sinks.of(1).queue.is_screen() {
            return Ok(());
        }
        let text = "--top needs standard error to be a terminal, with TERM other than dumb; `flow-launch top` \
                    shows the job on another one";
        Err(Usage(text.into()))
    }

    /// Looks again and again at the job whose leading agent is at this address, or known there.
    pub fn start(address: String, token: String) -> anyhow::Result<Panel> {
        let (looks, woken) = watcher::watch_always(address, token)?;
        Ok(Panel {
            looks,
            woken: Some(woken),
            before: Before::default(),
            was_seen: false,
            shown: Shown::Nothing,
        })
    }

    /// Returns what is readable when [`Panel::take`] has something to show.
    pub fn watch(&self) -> Option<BorrowedFd<'_>> {
        self.woken.as_ref().map(AsFd::as_fd)
    }

    /// Shows a look at the job.
    pub fn take(&mut self, sinks: &mut Sinks) {
        let _ = self.woken.as_ref().map(|mut woken| woken.read(&mut [0]));
        match self.looks.try_recv() {
            Ok(Ok(Some(status))) => {
                let view = View::of(&status);
                let cpu_shares = self.before.cpu_shares(&view);
                self.was_seen = true;
                self.shown = Shown::Job(view, cpu_shares);
            }
            Ok(Err(error)) => {
                let since = if self.was_seen { "any more" } else { "yet" };
                self.shown = Shown::Error(format!("the job is not seen {since}: {error:#}"));
            }
            Ok(Ok(None)) | Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => self.woken = None,
        }
        self.draw(sinks);
    }

    /// Draws the panel for the terminal's present size, unless it is the foreground of another job of the shell.
    pub fn draw(&self, sinks: &mut Sinks) {
        if tcgetpgrp(stderr()).is_ok_and(|foreground| foreground != getpgrp()) {
            return;
        }
        let terminal = sinks.of_mut(1);
        if terminal.queue.len() > MAX_QUEUED_BYTES {
            return;
        }
        let Some(size) = terminal.terminal_size() else { return };
        let rows = usize::from(size.ws_row);
        let columns = usize::from(size.ws_col);
        let most = Footer::most_lines(rows);
        let lines = match &self.shown {
            Shown::Nothing => return,
            Shown::Job(view, cpu_shares) => table::lines(view, cpu_shares, most, columns, ""),
            Shown::Error(error) => vec![printable(error)],
        };
        terminal.queue.draw_footer(&lines, (rows, columns));
    }
}
