//! Receiving from one rank.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use super::matching::{Found, Matcher, Probe, ProbeWait};
use crate::descriptor::MessageDescriptor;
use crate::error::Result;
use crate::memory::BufferView;
use crate::shm::control::{Counter, sleep_on};
use crate::transport::DisconnectReason;

/// Receives messages from a rank.
pub struct Receiver {
    matcher: Arc<Matcher>,
}

impl Receiver {
    /// Receives what `matcher` finds.
    pub fn new(matcher: Arc<Matcher>) -> Self {
        Self { matcher }
    }

    /// Receives the next message that fits.
    pub fn recv(&self, data: BufferView, what: &MessageDescriptor, from: usize) -> Result<()> {
        let found = match self.matcher.probe(from, what, ProbeWait::None)? {
            Probe::Found(found) => found,
            probe => self
                .wait_for(from, probe, what)
                .inspect_err(|_| self.matcher.abort_connection(from))?,
        };
        self.matcher.finish(found, from, data, what)
    }

    fn wait_for<'a>(
        &'a self,
        from: usize,
        mut probe: Probe<'a>,
        what: &MessageDescriptor,
    ) -> Result<Found<'a>> {
        let queue = &self.matcher.queues[from];
        let sent = queue
            .sender
            .map(|sender| &self.matcher.control.mailbox(sender, self.matcher.core.local).sent);
        let mut outcome = None;
        let is_suspect = Cell::new(false);
        self.matcher.failure.wait_until(
            what,
            &|| vec![from],
            &|| self.lost_sender(from, what.tag, &is_suspect),
            &mut |time| {
                match (&probe, sent) {
                    (Probe::Nothing(next), Some(sent)) if !comes(sent, *next, time) => {
                        return Ok(false);
                    }
                    (Probe::Busy, _) if time.is_zero() => std::thread::yield_now(),
                    (Probe::Busy, _) => self.matcher.doorbell().sleep_unless(time, || {
                        queue.has(what.tag) || queue.open(self.matcher.doorbell()).is_some()
                    }),
                    _ => {}
                }
                match self.matcher.probe(from, what, ProbeWait::For(time)) {
                    Ok(Probe::Found(found)) => outcome = Some(Ok(found)),
                    Ok(Probe::Gone(how)) => {
                        outcome = Some(Err(self.matcher.failure.handle_disconnect(from, how, what)))
                    }
                    Ok(nothing) => probe = nothing,
                    Err(error) => outcome = Some(Err(error)),
                }
                Ok(outcome.is_some())
            },
        )?;
        outcome.expect("the wait is over because of it") // invariant
    }

    /// Whether, and how, a sender is gone without having sent a message with this tag. The
    /// connection to one on another node reports that after all that it has sent. If that is
    /// nothing, the sender may have left the group, as the leaders know.
    fn lost_sender(
        &self,
        from: usize,
        tag: u32,
        is_suspect: &Cell<bool>,
    ) -> Option<(usize, DisconnectReason)> {
        let Matcher { failure, queues, .. } = &*self.matcher;
        if queues[from].sender.is_none() {
            let how = failure.disconnect_reason(from);
            let how = how.filter(|_| self.matcher.has_never_sent(from))?;
            // It may have sent before it left: its connection is looked at once more in between.
            return is_suspect.replace(true).then_some((from, how));
        }
        let lost = failure.find_lost_peer(&|| vec![from])?;
        self.matcher.has_nothing(from, tag).then_some(lost)
    }
}

/// Whether `sent` has come to `next`; sleeps first if there is time for that.
fn comes(sent: &Counter, next: u32, time: Duration) -> bool {
    if !time.is_zero() {
        sleep_on(sent, next, time);
    }
    sent.reached(next)
}
