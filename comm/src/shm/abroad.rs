//! Members on other nodes: how a group is linked to them, and what its ranks tell each other beside
//! the data.
//!
//! Data goes over the leaders' wire. Everything that is rare goes through the store, where each
//! rank has a connection of its own, so that it is told and heard whatever the leaders are doing:
//! the group's first failure, what ranks say about it, and where those are that have waited long.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::failure::{LOST, NOTICES};
use crate::error::Result;
use crate::transport::{ConnectError, Connections, DisconnectReason};
use crate::world::World;

/// How often a rank that waits asks for news, and how long it has waited when it tells where it is.
pub const NEWS: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(1);

/// A group's part on other nodes.
pub struct Abroad {
    /// Begins the group's keys in the store and the names of its links.
    prefix: String,
    /// The node of each member: they are numbered by their first members.
    pub nodes: Vec<usize>,
    pub here: usize,
    /// The first member on each node.
    pub leaders: Vec<usize>,
    /// In the leader.
    pub carrier: Option<Mutex<Carrier>>,
    /// Collectives that this rank has begun.
    pub sequence: AtomicU64,
    /// The last place that was told.
    told: AtomicU64,
    /// When this rank last asked.
    news: Mutex<Option<Instant>>,
}

/// What a leader carries data with.
pub struct Carrier {
    /// Between the leaders, by node.
    pub wire: Box<dyn Connections>,
    /// Where what is to be reduced comes in.
    pub scratch: Vec<u64>,
}

impl Abroad {
    pub fn new(world: &World, ranks: &[usize], name: &str) -> Self {
        let mut firsts: Vec<usize> = Vec::new();
        let mut leaders = Vec::new();
        let mut nodes = Vec::with_capacity(ranks.len());
        for (member, &rank) in ranks.iter().enumerate() {
            let node =
                firsts.iter().position(|&first| first == world.node(rank)).unwrap_or_else(|| {
                    firsts.push(world.node(rank));
                    leaders.push(member);
                    firsts.len() - 1
                });
            nodes.push(node);
        }
        let here =
            firsts.iter().position(|&first| first == world.node(world.rank)).unwrap_or_default();
        let prefix = format!("{}group/{name}/", world.prefix);
        Self {
            prefix,
            nodes,
            here,
            leaders,
            carrier: None,
            sequence: AtomicU64::new(0),
            told: AtomicU64::new(0),
            news: Mutex::new(None),
        }
    }

    /// The other nodes.
    pub fn others(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.leaders.len()).filter(|&node| node != self.here)
    }
}

impl Engine {
    /// Links the leaders.
    pub fn link(&mut self) -> Result<()> {
        if !self.leads() {
            return Ok(());
        }
        let Some((abroad, here)) = self.abroad.as_ref().map(|abroad| (abroad, abroad.here)) else {
            return Ok(());
        };
        let wire = self.connect("leaders", &abroad.leaders, here, &"linking the nodes")?;
        if let Some(abroad) = &mut self.abroad {
            abroad.carrier = Some(Mutex::new(Carrier { wire, scratch: Vec::new() }));
        }
        Ok(())
    }

    /// Links members of the group.
    pub fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        operation: &dyn std::fmt::Display,
    ) -> Result<Box<dyn Connections>> {
        let (Some(abroad), Some(transport)) = (&self.abroad, &self.world.transport) else {
            return Err(self.caller().argument("link", "there is no other node".into()));
        };
        let ranks: Vec<usize> = members.iter().map(|&member| self.ranks[member]).collect();
        let (mut waiting, mut asked, mut suspect) = (self.begin_to_wait(), Instant::now(), None);
        let mut patience = |missing: &[usize]| {
            let missing: Vec<usize> = missing.iter().map(|&missing| members[missing]).collect();
            self.check_failure(operation, true)?;
            let mut gone = missing.iter().find_map(|&r| Some((r, self.how_cut_off(r)?)));
            if gone.is_none() && asked.elapsed() >= NEWS {
                asked = Instant::now();
                let report =
                    |&&r: &&usize| self.world.exit_report(self.ranks[r], Duration::ZERO).is_some();
                gone = missing.iter().find(report).map(|&r| (r, DisconnectReason::Ended));
            }
            match gone {
                // Before it went it may have connected: there is another look at the connections in
                // between.
                Some((peer, how)) if suspect.replace(peer) == Some(peer) => {
                    Err(self.lose_member(peer, how, operation))
                }
                _ => self.look(&mut waiting, operation, &|| missing.clone()),
            }
        };
        let linked =
            transport.connect(&format!("{}{channel}", abroad.prefix), &ranks, own, &mut patience);
        linked.map_err(|unlinked| match unlinked {
            ConnectError::Cancelled(error) => error,
            ConnectError::PeerDown(loss) => {
                self.lose_member(members[loss.member], loss.how, operation)
            }
        })
    }

    /// Whether those of `members` that come after this one have connected, so that
    /// [`Engine::connect`] need not wait.
    pub fn have_connected(&self, channel: &str, members: &[usize], own: usize) -> bool {
        let (Some(abroad), Some(transport)) = (&self.abroad, &self.world.transport) else {
            return false;
        };
        let ranks: Vec<usize> = members.iter().map(|&member| self.ranks[member]).collect();
        transport.have_connected(&format!("{}{channel}", abroad.prefix), &ranks, own)
    }

    /// How the connection to a leader on another node has ended, as far as this rank can see. If
    /// because of a failure of which that leader has told, that is heard.
    pub fn how_cut_off(&self, rank: usize) -> Option<DisconnectReason> {
        let abroad = self.abroad.as_ref().filter(|abroad| abroad.leaders.contains(&rank))?;
        // Whoever drives the wire sees that for himself.
        let mut carrier = abroad.carrier.as_ref()?.try_lock().ok()?;
        match carrier.wire.disconnect_reason(abroad.nodes[rank])? {
            DisconnectReason::Failed(why) => {
                self.hear_words(&why);
                None
            }
            departure => Some(departure),
        }
    }

    /// Tells the other nodes of the group's first failure.
    pub fn tell_failure(&self, kind: u32, text: &str) {
        let Some(abroad) = &self.abroad else { return };
        // Those who wait for this rank are told at once; if this is about the wire in use, by
        // whoever uses that.
        if let Some(Ok(mut carrier)) = abroad.carrier.as_ref().map(Mutex::try_lock) {
            self.abandon(&mut *carrier.wire);
        }
        self.tell("failure", &self.words(kind, text));
    }

    /// Gives a wire up, with the group's failure as the reason, or because this rank leaves.
    pub fn abandon(&self, wire: &mut dyn Connections) {
        match self.control.header().poison.read() {
            Some((kind, text)) => wire.abort(&self.words(kind, &text)),
            None => {
                if self.has_given_up() {
                    wire.shutdown();
                }
                wire.abort("");
            }
        }
    }

    /// A failure in words, for other nodes: its kind, whether it is about a rank that has left, and
    /// its text.
    fn words(&self, kind: u32, text: &str) -> String {
        let lost =
            kind.checked_sub(LOST).map(|rank| rank as usize).filter(|&rank| rank < self.size());
        format!("{kind} {} {text}", u8::from(lost.is_some_and(|rank| self.has_left(rank))))
    }

    /// Takes note of a failure on another node.
    pub fn hear_words(&self, words: &str) {
        let mut parts = words.splitn(3, ' ');
        let (Some(Ok(kind)), Some(left), Some(text)) =
            (parts.next().map(str::parse), parts.next(), parts.next())
        else {
            return;
        };
        let lost = u32::checked_sub(kind, LOST)
            .map(|rank| rank as usize)
            .filter(|&rank| rank < self.size());
        if let Some(rank) = lost.filter(|_| left == "1") {
            self.control.rank(rank).left.store(1, Ordering::SeqCst);
        }
        self.hear_of(kind, text);
    }

    /// Asks for failures on other nodes, now and then.
    pub fn hear(&self) {
        let Some(abroad) = &self.abroad else { return };
        let mut last = abroad.news.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last.get_or_insert_with(Instant::now);
        if last.elapsed() >= NEWS {
            *last = Instant::now();
            self.hear_within(Duration::ZERO);
        }
    }

    /// Waits for news of a failure on another node.
    pub fn hear_within(&self, time: Duration) {
        if self.control.header().poison.is_set() {
            return;
        }
        if let Some(words) = self.told("failure", time) {
            self.hear_words(&words);
        }
    }

    /// Says something about a failure.
    pub fn notify(&self, own: &str) {
        self.control.rank(self.rank).notice.write(0, own);
        self.tell(&format!("notice/{}", self.rank), own);
    }

    /// Brings what ranks on other nodes say.
    pub fn fetch_notices(&self) {
        for rank in self.ranks_where(|rank| {
            !self.locals.contains(&rank) && !self.control.rank(rank).notice.is_set()
        }) {
            if let Some(notice) = self.told(&format!("notice/{rank}"), Duration::ZERO) {
                self.control.rank(rank).notice.write(0, &notice);
            }
        }
    }

    /// Whether the group did not fail for another reason on other nodes.
    pub fn others_await_notices(&self) -> bool {
        self.told("failure", Duration::ZERO)
            .is_none_or(|words| words.starts_with(&format!("{NOTICES} ")))
    }

    /// Tells in which collective this rank is, when it has waited long.
    pub fn tell_place(&self, waited: Duration, timeout: Duration) {
        let Some(abroad) = &self.abroad else { return };
        let place = abroad.sequence.load(Ordering::Relaxed);
        if waited >= PATIENCE.min(timeout / 4)
            && abroad.told.swap(place, Ordering::Relaxed) != place
        {
            if let Some(store) = self.world.store() {
                let _ = store.set(
                    &format!("{}at/{}", abroad.prefix, self.rank),
                    place.to_string().as_bytes(),
                );
            }
        }
    }

    /// Without those members on other nodes that are known to be where this rank is: they wait as
    /// well.
    pub fn not_in_place(&self, missing: Vec<usize>) -> Vec<usize> {
        let Some(abroad) = &self.abroad else { return missing };
        let own = abroad.sequence.load(Ordering::Relaxed);
        let there = |&rank: &usize| {
            let place = self
                .told(&format!("at/{rank}"), Duration::ZERO)
                .and_then(|place| place.parse::<u64>().ok());
            !self.locals.contains(&rank) && place.is_some_and(|place| place >= own)
        };
        let late: Vec<usize> = missing.iter().copied().filter(|rank| !there(rank)).collect();
        if late.is_empty() {
            missing
        } else {
            late
        }
    }

    /// Tells those that this rank is linked with that it leaves, and why if the group has failed.
    pub fn say_goodbye(&self) {
        let has_failed = self.control.header().poison.is_set();
        let leave = |wire: &mut dyn Connections| {
            if has_failed {
                self.abandon(wire)
            } else {
                wire.shutdown()
            }
        };
        let carrier = self.abroad.as_ref().and_then(|abroad| abroad.carrier.as_ref());
        if let Some(Ok(mut carrier)) = carrier.map(Mutex::try_lock) {
            leave(&mut *carrier.wire);
        }
        for mut link in self.outgoing.iter().filter_map(|link| link.try_lock().ok()) {
            if let Some(wire) = &mut *link {
                leave(&mut **wire);
            }
        }
        for mut inbox in self
            .inboxes
            .iter()
            .filter_map(|inbox| inbox.open(&self.control.rank(self.rank).doorbell))
        {
            if let Some(wire) = &mut inbox.link {
                leave(&mut **wire);
            }
        }
    }

    /// Leaves word under one of the group's keys, unless somebody has.
    fn tell(&self, key: &str, text: &str) {
        if let (Some(abroad), Some(store)) = (&self.abroad, self.world.store()) {
            // If the store is gone, so is the rank, or the launcher, that served it: the others see
            // that.
            let _ =
                store.compare_and_set(&format!("{}{key}", abroad.prefix), None, text.as_bytes());
        }
    }

    fn told(&self, key: &str, time: Duration) -> Option<String> {
        let value = self
            .world
            .store()?
            .get(&format!("{}{key}", self.abroad.as_ref()?.prefix), time)
            .ok()?;
        Some(String::from_utf8_lossy(&value).into_owned())
    }
}
