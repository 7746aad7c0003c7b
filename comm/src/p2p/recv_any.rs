//! Receiving from whichever rank sends first.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::matching::{Found, Matcher, Probe, ProbeWait};
use crate::descriptor::MessageDescriptor;
use crate::error::{Error, Result};
use crate::failure::remote::POLL_INTERVAL;
use crate::memory::BufferView;
use crate::transport::DisconnectReason;
use crate::world::EXIT_REPORT_TIMEOUT;

/// The longest sleep of a receive from any rank before it looks at its connections to other nodes.
const CONNECTION_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// flow-launch's report of a process that exited with success.
const ENDED_WELL: &str = "exit code 0";

/// Senders on other nodes that have never sent anything, as far as they are known.
#[derive(Default)]
struct NeverSent {
    asked: Option<Instant>,
    suspects: Vec<usize>,
    gone: Vec<(usize, DisconnectReason)>,
}

/// Receives messages from any rank.
pub struct AnyReceiver {
    matcher: Arc<Matcher>,
    /// The sender at which a receive begins to look, so that each has its turn.
    next_sender: AtomicUsize,
}

impl AnyReceiver {
    /// Receives what `matcher` finds.
    pub fn new(matcher: Arc<Matcher>) -> Self {
        Self { matcher, next_sender: AtomicUsize::new(0) }
    }

    /// Returns the rank whose message it was.
    pub fn recv(&self, data: BufferView, what: &MessageDescriptor) -> Result<usize> {
        let (from, found) = match self.probe_all(what)? {
            Some(found) => found,
            None => self.wait_for_any(what)?,
        };
        self.next_sender.store((from + 1) % self.matcher.core.size(), Ordering::Relaxed);
        self.matcher.finish(found, from, data, what)?;
        Ok(from)
    }

    fn wait_for_any<'a>(&'a self, what: &MessageDescriptor) -> Result<(usize, Found<'a>)> {
        let mut outcome = None;
        let absent = RefCell::default();
        let deserted = Cell::new(false);
        let missing = || {
            self.matcher.core.ranks_where(|rank| {
                rank != self.matcher.core.rank && !self.matcher.failure.has_left(rank)
            })
        };
        let lost = || {
            let (lost, is_last) = self.lost_senders(what.tag, &mut absent.borrow_mut())?;
            deserted.set(is_last);
            Some(lost)
        };
        let waited = self.matcher.failure.wait_until(what, &missing, &lost, &mut |time| {
            let mut is_found = || {
                outcome = self.probe_all(what).transpose();
                outcome.is_some()
            };
            if time.is_zero() {
                return Ok(is_found());
            }
            let time = if self.matcher.core.is_inter_node() {
                time.min(CONNECTION_POLL_INTERVAL)
            } else {
                time
            };
            let mut is_over = false;
            self.matcher.doorbell().sleep_unless(time, || {
                is_over = is_found();
                is_over
            });
            Ok(is_over || is_found())
        });
        match waited {
            Ok(()) => outcome.expect("the wait is over because of it"), // invariant
            Err(Error::PeerLost { rank, operation, peer }) if deserted.get() => {
                Err(Error::PeerLost {
                    rank,
                    operation,
                    peer: format!("nobody is left to send it: {peer}"),
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Looks for a message of any rank, beginning with the one after that which was served last.
    fn probe_all(&self, what: &MessageDescriptor) -> Result<Option<(usize, Found<'_>)>> {
        let first = self.next_sender.load(Ordering::Relaxed);
        let mut died = None;
        for from in (first..self.matcher.core.size())
            .chain(0..first)
            .filter(|&rank| rank != self.matcher.core.rank)
        {
            match self.matcher.probe(from, what, ProbeWait::None)? {
                Probe::Found(found) => return Ok(Some((from, found))),
                // Others may still send.
                Probe::Nothing(_) | Probe::Busy | Probe::Gone(DisconnectReason::Left) => {}
                // It may have left before in good order.
                Probe::Gone(DisconnectReason::Ended | DisconnectReason::Refused(_))
                    if self.matcher.has_never_sent(from) => {}
                // Others may have sent.
                Probe::Gone(how) => died = died.or(Some((from, how))),
            }
        }
        died.map_or(Ok(None), |(from, how)| {
            Err(self.matcher.failure.handle_disconnect(from, how, what))
        })
    }

    /// Whether a sender has died, or all have left, without having sent a message with this tag.
    /// Returns one of them, how it went, and whether nobody is left.
    fn lost_senders(
        &self,
        tag: u32,
        absent: &mut NeverSent,
    ) -> Option<((usize, DisconnectReason), bool)> {
        self.ask(absent);
        let ended = self.matcher.core.world.ended(&self.matcher.core.ranks, Duration::ZERO);
        // Only now is it certain that a rank that has ended, and has not left, has died.
        let senders = self.matcher.core.ranks_where(|rank| rank != self.matcher.core.rank);
        let mut gone = Vec::new();
        let mut died = Vec::new();
        for &rank in &senders {
            match self.end_of_sender(rank, &ended, absent) {
                Some(DisconnectReason::Left) => gone.push((rank, DisconnectReason::Left)),
                Some(how) => died.push((rank, how)),
                None => {}
            }
        }
        if died.is_empty() {
            // The others may have left as well: one after the other is asked, until one is there.
            for &rank in &senders {
                if gone.iter().any(|(known, _)| *known == rank) {
                    continue;
                }
                let Some(how) = self.matcher.connect_to_silent(rank) else { break };
                if self.is_lost(rank, &how) {
                    died.push((rank, how));
                    break;
                }
                gone.push((rank, how));
            }
        }
        let is_last = gone.len() + died.len() == senders.len();
        let lost = died.first().or(gone.last().filter(|_| is_last))?;
        let is_silent = died.iter().chain(&gone).all(|&(r, _)| self.matcher.has_nothing(r, tag));
        is_silent.then(|| (lost.clone(), is_last))
    }

    /// Returns how a sender has gone, as far as this rank knows; `ended` are the ranks of the job
    /// on this node that have ended.
    fn end_of_sender(
        &self,
        rank: usize,
        ended: &[usize],
        absent: &NeverSent,
    ) -> Option<DisconnectReason> {
        let queue = &self.matcher.queues[rank];
        if queue.sender.is_some() {
            if self.matcher.failure.has_left(rank) {
                return Some(DisconnectReason::Left);
            }
            let has_ended = ended.contains(&self.matcher.core.ranks[rank]);
            return has_ended.then_some(DisconnectReason::Ended);
        }
        if queue.open(self.matcher.doorbell())?.has_left {
            return Some(DisconnectReason::Left);
        }
        absent.gone.iter().find(|(gone, _)| *gone == rank).map(|(_, how)| how.clone())
    }

    /// Returns how a rank that has never sent has gone, if it has.
    fn end_of_silent(&self, rank: usize) -> Option<DisconnectReason> {
        let core = &self.matcher.core;
        let report = core.world.exit_report(core.ranks[rank], Duration::ZERO);
        if self.matcher.failure.has_left(rank) {
            return Some(DisconnectReason::Left);
        }
        match report {
            Some(report) if report == ENDED_WELL => Some(DisconnectReason::Left),
            Some(_) => Some(DisconnectReason::Ended),
            None => match self.matcher.failure.disconnect_reason(rank)? {
                DisconnectReason::Ended | DisconnectReason::Refused(_)
                    if core.world.has_left(core.ranks[rank]) == Some(true) =>
                {
                    Some(DisconnectReason::Left)
                }
                how => Some(how),
            },
        }
    }

    /// Whether a rank that has never sent is gone without having left, where its connection went
    /// like this. That of a rank that has left may go the same way: the store and flow-launch know
    /// which it was.
    fn is_lost(&self, rank: usize, how: &DisconnectReason) -> bool {
        if !matches!(how, DisconnectReason::Ended | DisconnectReason::Refused(_)) {
            return false;
        }
        let world = &self.matcher.core.world;
        let rank = self.matcher.core.ranks[rank];
        world.has_left(rank) == Some(false)
            && world.exit_report(rank, EXIT_REPORT_TIMEOUT).as_deref() != Some(ENDED_WELL)
    }

    /// Asks, every [`POLL_INTERVAL`], which members on other nodes are gone and have never sent.
    fn ask(&self, absent: &mut NeverSent) {
        if !self.matcher.core.is_inter_node()
            || absent.asked.is_some_and(|asked| asked.elapsed() < POLL_INTERVAL)
        {
            return;
        }
        absent.asked = Some(Instant::now());
        let silent = self.matcher.core.ranks_where(|rank| self.matcher.has_never_sent(rank));
        let gone: Vec<_> =
            silent.into_iter().filter_map(|rank| Some((rank, self.end_of_silent(rank)?))).collect();
        // It may have sent before it ended: its connection is looked at once more in between.
        let suspects = gone.iter().map(|(rank, _)| *rank).collect();
        let suspects = std::mem::replace(&mut absent.suspects, suspects);
        absent.gone = gone.into_iter().filter(|(rank, _)| suspects.contains(rank)).collect();
    }
}
