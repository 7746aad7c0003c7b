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
use super::failure::{ERROR_DETAILS, LOST};
use crate::error::Result;
use crate::transport::{Connections, DisconnectReason};
use crate::world::World;

/// How often a rank that waits looks into the store for failures on other nodes.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long a rank has waited when it publishes its progress.
const PROGRESS_AFTER: Duration = Duration::from_secs(1);

/// A group's part on other nodes.
pub struct InterNode {
    /// Begins the group's keys in the store and the names of its links.
    prefix: String,
    /// The node of each member: they are numbered by their first members.
    pub nodes: Vec<usize>,
    pub node: usize,
    /// The first member on each node.
    pub leaders: Vec<usize>,
    /// In the leader.
    pub links: Option<Mutex<LeaderLinks>>,
    /// Collectives that this rank has begun.
    pub sequence: AtomicU64,
    /// The progress that was published last.
    published: AtomicU64,
    /// When this rank last polled the store.
    last_poll: Mutex<Option<Instant>>,
}

/// What a leader carries data with.
pub struct LeaderLinks {
    /// Between the leaders, by node.
    pub wire: Box<dyn Connections>,
    /// Where what is to be reduced comes in.
    pub scratch: Vec<u64>,
}

impl InterNode {
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
            node: here,
            leaders,
            links: None,
            sequence: AtomicU64::new(0),
            published: AtomicU64::new(0),
            last_poll: Mutex::new(None),
        }
    }

    /// The other nodes.
    pub fn remote_nodes(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.leaders.len()).filter(|&node| node != self.node)
    }
}

impl Engine {
    /// Connects the leaders, in the leader.
    pub fn connect_leaders(&mut self) -> Result<()> {
        let Some(inter_node) = self.inter_node.as_ref().filter(|_| self.is_leader()) else {
            return Ok(());
        };
        let (leaders, own) = (&inter_node.leaders, inter_node.node);
        let mut wire = self.connect("leaders", leaders, own, &"connecting the nodes")?;
        // From here on leaders see each other end: to ask for that has the transport connect, without
        // waiting.
        for node in inter_node.remote_nodes() {
            let _ = wire.disconnect_reason(node);
        }
        if let Some(inter_node) = &mut self.inter_node {
            inter_node.links = Some(Mutex::new(LeaderLinks { wire, scratch: Vec::new() }));
        }
        Ok(())
    }

    /// In the leader: the connections to the other leaders.
    pub fn links(&self) -> Result<(&InterNode, &Mutex<LeaderLinks>)> {
        let inter_node = self.inter_node.as_ref();
        inter_node.and_then(|inter_node| Some((inter_node, inter_node.links.as_ref()?))).ok_or_else(
            || {
                let reason = "this rank does not lead its node".into();
                self.caller().argument("connecting the nodes", reason)
            },
        )
    }

    /// Connects members of the group.
    pub fn connect(
        &self,
        channel: &str,
        members: &[usize],
        own: usize,
        operation: &dyn std::fmt::Display,
    ) -> Result<Box<dyn Connections>> {
        let (Some(inter_node), Some(transport)) = (&self.inter_node, &self.world.transport) else {
            return Err(self.caller().argument("connect", "there is no other node".into()));
        };
        let ranks: Vec<usize> = members.iter().map(|&member| self.ranks[member]).collect();
        let channel = format!("{}{channel}", inter_node.prefix);
        transport
            .connect(&channel, &ranks, own)
            .map_err(|loss| self.handle_disconnect(members[loss.member], loss.how, operation))
    }

    /// How the connection to a leader on another node has ended, as far as this rank can see. If
    /// because of a failure of which that leader has told, that is heard.
    pub fn disconnect_reason(&self, rank: usize) -> Option<DisconnectReason> {
        let inter_node =
            self.inter_node.as_ref().filter(|inter_node| inter_node.leaders.contains(&rank))?;
        // Whoever drives the wire sees that for himself.
        let mut links = inter_node.links.as_ref()?.try_lock().ok()?;
        match links.wire.disconnect_reason(inter_node.nodes[rank])? {
            DisconnectReason::Failed(why) => {
                self.apply_failure(&why);
                None
            }
            departure => Some(departure),
        }
    }

    /// Tells the other nodes of the group's first failure.
    pub fn publish_failure(&self, kind: u32, text: &str) {
        let Some(inter_node) = &self.inter_node else { return };
        // Those who wait for this rank are told at once; if this is about the wire in use, by
        // whoever uses that.
        if let Some(Ok(mut links)) = inter_node.links.as_ref().map(Mutex::try_lock) {
            self.abandon(&mut *links.wire);
        }
        self.publish("failure", &self.encode_failure(kind, text));
    }

    /// Gives a wire up, with the group's failure as the reason, or because this rank leaves.
    pub fn abandon(&self, wire: &mut dyn Connections) {
        match self.control.header().poison.read() {
            Some((kind, text)) => wire.abort(&self.encode_failure(kind, &text)),
            None => {
                if self.is_cancelled() {
                    wire.shutdown();
                }
                wire.abort("");
            }
        }
    }

    /// A failure in words, for other nodes: its kind, whether it is about a rank that has left, and
    /// its text.
    fn encode_failure(&self, kind: u32, text: &str) -> String {
        let lost =
            kind.checked_sub(LOST).map(|rank| rank as usize).filter(|&rank| rank < self.size());
        format!("{kind} {} {text}", u8::from(lost.is_some_and(|rank| self.has_left(rank))))
    }

    /// Takes note of a failure on another node.
    pub fn apply_failure(&self, words: &str) {
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
        self.record_failure(kind, text);
    }

    /// Asks for failures on other nodes, now and then.
    pub fn poll_failure(&self) {
        let Some(inter_node) = &self.inter_node else { return };
        let mut last = inter_node.last_poll.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last.get_or_insert_with(Instant::now);
        if last.elapsed() >= POLL_INTERVAL {
            *last = Instant::now();
            self.wait_failure(Duration::ZERO);
        }
    }

    /// Waits for news of a failure on another node.
    pub fn wait_failure(&self, time: Duration) {
        if self.control.header().poison.is_set() {
            return;
        }
        if let Some(words) = self.lookup("failure", time) {
            self.apply_failure(&words);
        }
    }

    /// Says something about a failure.
    pub fn publish_error_detail(&self, own: &str) {
        self.control.rank(self.rank).error_detail.write(0, own);
        self.publish(&format!("notice/{}", self.rank), own);
    }

    /// Brings what ranks on other nodes say.
    pub fn fetch_error_details(&self) {
        for rank in self.ranks_where(|rank| {
            !self.locals.contains(&rank) && !self.control.rank(rank).error_detail.is_set()
        }) {
            if let Some(notice) = self.lookup(&format!("notice/{rank}"), Duration::ZERO) {
                self.control.rank(rank).error_detail.write(0, &notice);
            }
        }
    }

    /// Whether the group did not fail for another reason on other nodes.
    pub fn others_await_error_details(&self) -> bool {
        self.lookup("failure", Duration::ZERO)
            .is_none_or(|words| words.starts_with(&format!("{ERROR_DETAILS} ")))
    }

    /// Publishes in the store which collective this rank is in, once it has waited long.
    pub fn publish_progress(&self, waited: Duration, timeout: Duration) {
        let Some(inter_node) = &self.inter_node else { return };
        let place = inter_node.sequence.load(Ordering::Relaxed);
        if waited >= PROGRESS_AFTER.min(timeout / 4)
            && inter_node.published.swap(place, Ordering::Relaxed) != place
        {
            if let Some(store) = self.world.store() {
                let _ = store.set(
                    &format!("{}at/{}", inter_node.prefix, self.rank),
                    place.to_string().as_bytes(),
                );
            }
        }
    }

    /// Without those members on other nodes that are known to be where this rank is: they wait as
    /// well.
    pub fn lagging(&self, missing: Vec<usize>) -> Vec<usize> {
        let Some(inter_node) = &self.inter_node else { return missing };
        let own = inter_node.sequence.load(Ordering::Relaxed);
        let there = |&rank: &usize| {
            let place = self
                .lookup(&format!("at/{rank}"), Duration::ZERO)
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
    pub fn disconnect(&self) {
        let has_failed = self.control.header().poison.is_set();
        let leave = |wire: &mut dyn Connections| {
            if has_failed {
                self.abandon(wire)
            } else {
                wire.shutdown()
            }
        };
        let links = self.inter_node.as_ref().and_then(|inter_node| inter_node.links.as_ref());
        if let Some(Ok(mut links)) = links.map(Mutex::try_lock) {
            leave(&mut *links.wire);
        }
        for mut link in self.outgoing.iter().filter_map(|link| link.try_lock().ok()) {
            if let Some(wire) = &mut *link {
                leave(&mut **wire);
            }
        }
        for mut queue in self
            .queues
            .iter()
            .filter_map(|queue| queue.open(&self.control.rank(self.rank).doorbell))
        {
            if let Some(wire) = &mut queue.link {
                leave(&mut **wire);
            }
        }
    }

    /// Leaves word under one of the group's keys, unless somebody has.
    fn publish(&self, key: &str, text: &str) {
        if let (Some(inter_node), Some(store)) = (&self.inter_node, self.world.store()) {
            // If the store is gone, so is the rank, or the launcher, that served it: the others see
            // that.
            let _ = store.compare_and_set(
                &format!("{}{key}", inter_node.prefix),
                None,
                text.as_bytes(),
            );
        }
    }

    fn lookup(&self, key: &str, time: Duration) -> Option<String> {
        let value = self
            .world
            .store()?
            .get(&format!("{}{key}", self.inter_node.as_ref()?.prefix), time)
            .ok()?;
        Some(String::from_utf8_lossy(&value).into_owned())
    }
}
