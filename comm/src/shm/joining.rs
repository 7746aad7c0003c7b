//! Waiting for ranks that have yet to join: how long, and whether they still can.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use super::meeting::{machine, Card};
use super::world::{EXIT_REPORT, FIRST_WARNING};
use crate::store::{Error as StoreError, Store};
use crate::waits::LongWait;

/// How often to look whether ranks have ended, and how many of those that are missing to ask the
/// store for.
pub const LOOK: Duration = Duration::from_millis(500);
const ASKED: usize = 4;

/// One rank's patience while its world comes together.
pub struct Joining<'a> {
    pub rank: usize,
    pub size: usize,
    pub store: &'a Store,
    /// Begins the keys of this world.
    pub prefix: &'a str,
    /// Whether flow-launch says in the store which ranks have ended.
    pub launched: bool,
    pub begin: Instant,
    pub timeout: Duration,
    pub next_look: Instant,
    pub next_warning: Instant,
    /// Tells flow-launch, if it listens, when this takes long.
    pub long: Option<LongWait<'a>>,
}

impl Joining<'_> {
    /// The time that is left, at most `slice`.
    pub fn left(&self, slice: Duration) -> Duration {
        self.timeout.saturating_sub(self.begin.elapsed()).min(slice)
    }

    /// To be called again and again while ranks are `missing`; fine if none is. `pid` is that of a
    /// rank that has come, 0 for others.
    ///
    /// # Errors
    /// When the time is over, or a rank has ended.
    pub fn look(
        &mut self,
        missing: &dyn Fn() -> Vec<usize>,
        pid: &dyn Fn(usize) -> u32,
    ) -> Result<(), String> {
        let now = Instant::now();
        let absent = missing();
        let ranks = match &absent[..] {
            [] => return Ok(()),
            [one] => format!("rank {one} has"),
            all => format!(
                "ranks {} have",
                all.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
            ),
        };
        if self.left(self.timeout).is_zero() {
            return Err(format!("{ranks} not joined within {:?}", self.timeout));
        }
        if now >= self.next_warning {
            log::warn!("rank {}: {ranks} not joined yet", self.rank);
            self.next_warning = now + FIRST_WARNING;
        }
        if let Some(long) = &mut self.long {
            long.look(self.begin.elapsed(), &"joining the process group", || absent);
        }
        if now < self.next_look {
            return Ok(());
        }
        self.next_look = now + LOOK;
        let come = (0..self.size)
            .filter(|&rank| rank != self.rank)
            .find_map(|rank| self.fate(rank, pid(rank)));
        let ended = come.or_else(|| {
            missing().into_iter().take(ASKED).find_map(|rank| self.fate_of_missing(rank))
        });
        match ended {
            // It may have ended because all were there, and it had nothing else to do.
            Some(fate) if !missing().is_empty() => {
                Err(format!("{fate} before all ranks had joined"))
            }
            _ => Ok(()),
        }
    }

    /// How a rank that has come has ended, if it has.
    fn fate(&self, rank: usize, pid: u32) -> Option<String> {
        let report =
            || self.launched.then(|| self.value(&format!("exit/{rank}"), EXIT_REPORT)).flatten();
        has_ended(pid).then(|| match report() {
            Some(end) => format!("rank {rank} ended with {end}"),
            None => format!("rank {rank} (pid {pid}) died"),
        })
    }

    fn fate_of_missing(&self, rank: usize) -> Option<String> {
        if self.launched {
            return Some(format!(
                "rank {rank} ended with {}",
                self.value(&format!("exit/{rank}"), Duration::ZERO)?
            ));
        }
        let card = Card::from_text(&self.value(&self.card_of(rank), Duration::ZERO)?)?;
        let ended = card.machine == machine() && has_ended(card.pid);
        ended.then(|| format!("rank {rank} (pid {}) died", card.pid))
    }

    /// Tells the others of this rank.
    pub fn announce(&self, own: &Card) -> Result<(), String> {
        let announced =
            self.store.compare_and_set(&self.card_of(self.rank), None, own.to_text().as_bytes());
        match announced.map_err(|e| e.to_string())? {
            Ok(()) => Ok(()),
            Err(other) => {
                let other = Card::from_text(&String::from_utf8_lossy(&other.unwrap_or_default()));
                let other = other.map(|other| format!("process {}", other.pid));
                Err(format!(
                    "{} has joined as rank {} before: every process needs its own RANK",
                    other.as_deref().unwrap_or("another process"),
                    self.rank
                ))
            }
        }
    }

    /// What all ranks tell of themselves, once all have. Rank 0 collects it: the others have one
    /// thing to ask for.
    pub fn all_cards(&mut self) -> Result<Vec<Card>, String> {
        let lost = |error: StoreError| error.to_string();
        let (store, key) = (self.store, format!("{}members", self.prefix));
        let cards: Vec<String> = (0..self.size).map(|rank| self.card_of(rank)).collect();
        let missing = || match store.wait(&cards, Duration::ZERO) {
            Err(StoreError::Timeout { missing, .. }) => {
                missing.iter().filter_map(|key| key.rsplit('/').next()?.parse().ok()).collect()
            }
            _ => Vec::new(),
        };
        let text = loop {
            let patience = self.left(LOOK);
            let told = match self.rank {
                0 => store.wait(&cards, patience).and_then(|()| {
                    let texts = cards
                        .iter()
                        .map(|card| store.get(card, Duration::ZERO))
                        .collect::<Result<Vec<_>, _>>()?;
                    let text = texts.join(&b'\n');
                    store.set(&key, &text).map(|()| text)
                }),
                _ => store.get(&key, patience),
            };
            match told {
                Ok(text) => break text,
                Err(StoreError::Timeout { .. }) => {}
                Err(error) => return Err(lost(error)),
            }
            if let Some(reason) = self.given_up() {
                return Err(reason);
            }
            if let Err(reason) = self.look(&missing, &|_| 0) {
                self.give_up(&reason);
                return Err(self.given_up().unwrap_or(reason));
            }
            if self.left(self.timeout).is_zero() {
                return Err(format!(
                    "rank 0 has not told within {:?} who has joined",
                    self.timeout
                ));
            }
        };
        let text = String::from_utf8_lossy(&text).into_owned();
        let cards: Option<Vec<Card>> = text.lines().map(Card::from_text).collect();
        cards
            .filter(|cards| cards.len() == self.size)
            .ok_or_else(|| "rank 0 told nonsense of who has joined".into())
    }

    fn card_of(&self, rank: usize) -> String {
        format!("{}rank/{rank}", self.prefix)
    }

    /// Leaves word of why this rank gives up, for those who come later.
    pub fn give_up(&self, reason: &str) {
        // It is gone together with rank 0 if that serves it: then there is nothing to tell.
        let _ =
            self.store.compare_and_set(&format!("{}failure", self.prefix), None, reason.as_bytes());
    }

    /// Why others gave up.
    pub fn given_up(&self) -> Option<String> {
        self.value(&format!("{}failure", self.prefix), Duration::ZERO)
    }

    /// A store that does not answer has no news.
    fn value(&self, key: &str, timeout: Duration) -> Option<String> {
        let value = self.store.get(key, timeout).ok()?;
        Some(String::from_utf8_lossy(&value).into_owned())
    }
}

/// Whether the process is gone; 0 is none.
pub fn has_ended(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now))
                .is_ok_and(|ready| ready > 0)
        }
        Err(error) => error == Errno::SRCH,
    }
}
