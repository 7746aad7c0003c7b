//! What the user asks for by signals, and what stands on the terminal.

use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::agent::exit_status::ExitStatus;
use crate::agent::signals::{self, Request};
use crate::agent::stop_policy::Action;
use crate::agent::worker_group::WorkerGroup;
use crate::control::protocol::AgentEvent;
use crate::report::events::JobEvent;
use crate::report::failure;
use crate::signal;

impl Agent {
    pub(super) fn take_signals(&mut self) {
        while let Some(request) = self.signals.next() {
            match request {
                Request::End(signal) => self.terminate(signal),
                Request::Suspend => self.suspend(),
                Request::Resize => self.resize(),
            }
        }
    }

    fn terminate(&mut self, signal: i32) {
        let now = Instant::now();
        if let Some(group) = &mut self.group {
            let action = group.policy.signalled(signal, now);
            group.act(action.unwrap_or(Action::Nothing));
            if let Some(action) = action {
                self.sinks.say(&failure::stopping(signal, action, group.policy.time_left(now)));
            }
            if let Some(Action::Send(_)) = action {
                let reason = ExitStatus::Signal(signal).to_string();
                self.events.record(&JobEvent::Stop { reason: &reason }, &mut self.sinks);
            }
        } else if self.signalled.is_none() && self.result.is_none() {
            self.sinks.say(&format!("{}: ending; no rank is running", signal::name(signal)));
        }
        if self.signalled.is_none() {
            self.signalled = Some(signal);
            self.control.send(AgentEvent::Leaving { signal });
        }
    }

    /// Ctrl-Z: stops the workers, which the terminal does not stop, and this process, until the
    /// user continues it.
    fn suspend(&mut self) {
        self.group.iter().for_each(WorkerGroup::pause);
        self.sinks.erase_footer();
        while self.sinks.can_write_footer() {
            self.write_sink(self.sinks.of_footer());
        }
        let stopped = signals::suspend().unwrap_or_else(|error| {
            log::warn!("cannot stop: {error}");
            Duration::ZERO
        });
        self.control.paused(stopped);
        self.reaper.paused(stopped);
        if let Some(group) = &mut self.group {
            group.policy.paused(stopped);
            group.resume();
        }
        self.sinks.redraw();
        self.resize();
    }

    /// Draws what is at the foot of the terminal for its present size, and tells the workers their part.
    fn resize(&mut self) {
        self.panel.iter().for_each(|panel| panel.draw(&mut self.sinks));
        self.fit_output();
    }

    /// Shows what the job does.
    pub(super) fn show(&mut self) {
        self.panel.iter_mut().for_each(|panel| panel.take(&mut self.sinks));
        self.fit_output();
    }

    /// Tells the workers which part of the terminal is theirs.
    fn fit_output(&mut self) {
        self.reaper.note_footer(&self.sinks);
        self.group.iter_mut().for_each(|group| group.resize(&self.sinks));
    }

    /// Writes to one of our own outputs. If its reader has gone, the workers get SIGPIPE as they
    /// would without flow-launch.
    pub(super) fn write_sink(&mut self, sink: usize) {
        for which in self.sinks.write(sink) {
            self.group.iter_mut().for_each(|group| group.leave_console(*which));
        }
        self.reaper.note_footer(&self.sinks);
    }
}
