//! Waiting for ranks that have yet to join: how long, and whether they still can.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use flow_store::Error as StoreError;

use super::join_error::JoinError;
use super::lineage::{Process, Seat};
use super::system::System;
use crate::internode::presence::ALL_RANKS;
use crate::json::{from_json, to_json};
use crate::peer_info::PeerInfo;
use crate::stall::Stall;
use crate::transport::{DisconnectReason, Transport};
use crate::world::{EXIT_REPORT_TIMEOUT, FIRST_WARNING};

/// The interval between looks whether ranks have ended, and the number of missing ranks for which
/// to ask the store.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// That of ranks which have been together before: another one has just ended, and they are to go on. It is for so many
/// ranks, and longer for more, as all ask the store.
const POLL_INTERVAL_OF_MEMBERS: Duration = Duration::from_millis(50);
const MEMBERS: usize = 64;
const MAX_QUERIES: usize = 4;

/// Watches over one rank's join: how long it may take, and whether the others can still come.
pub struct BootstrapMonitor<'a, S> {
    pub rank: usize,
    pub size: usize,
    /// How this rank describes itself.
    pub own: &'a PeerInfo,
    /// The ranks as the launcher numbers them.
    pub seats: &'a [Seat],
    /// The ranks, if they have agreed on who they are.
    pub members: &'a [Process],
    pub system: &'a S,
    /// Begins the keys of this world.
    pub prefix: &'a str,
    /// Whether flow-launch says in the store which ranks have ended.
    pub launched: bool,
    pub begin: Instant,
    pub timeout: Duration,
    pub next_poll: Instant,
    pub next_warning: Instant,
    /// Reports to flow-launch, if it listens, when this takes long.
    pub long: Option<Stall<'a>>,
}

impl<S: System> BootstrapMonitor<'_, S> {
    /// Returns the interval between looks whether ranks have ended.
    pub fn poll_interval(&self) -> Duration {
        if self.members.is_empty() {
            return POLL_INTERVAL;
        }
        let times = self.size.div_ceil(MEMBERS) as u32;
        POLL_INTERVAL.min(times * POLL_INTERVAL_OF_MEMBERS)
    }

    /// Returns the time that is left, at most `slice`.
    pub fn left(&self, slice: Duration) -> Duration {
        self.timeout.saturating_sub(self.elapsed()).min(slice)
    }

    /// Returns for how long this rank has been joining.
    fn elapsed(&self) -> Duration {
        self.system.now().saturating_duration_since(self.begin)
    }

    /// Checks the `missing` ranks once; callers repeat it while ranks are missing. `pid` is that of
    /// a rank that has come, 0 for others.
    ///
    /// # Errors
    /// When the time is over, a rank has ended or has given up, or the program is interrupted.
    pub fn check(
        &mut self,
        missing: &dyn Fn() -> Vec<usize>,
        pid: &dyn Fn(usize) -> u32,
    ) -> Result<(), JoinError> {
        if self.system.is_interrupted() {
            self.cancel(&self.interruption());
            return Err(JoinError::Interrupted);
        }
        let now = self.system.now();
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
            return Err(format!("{ranks} not joined within {:?}", self.timeout).into());
        }
        if now >= self.next_warning {
            log::warn!("rank {}: {ranks} not joined yet", self.rank);
            self.next_warning = now + FIRST_WARNING;
        }
        let elapsed = self.elapsed();
        if let Some(long) = &mut self.long {
            long.check(elapsed, &"joining the process group", || {
                absent.iter().map(|&rank| self.seats[rank].number).collect()
            });
        }
        if now < self.next_poll {
            return Ok(());
        }
        self.next_poll = now + self.poll_interval();
        if let Some(reason) = self.cancel_reason() {
            return Err(reason.into());
        }
        let come = (0..self.size)
            .filter(|&rank| rank != self.rank)
            .find_map(|rank| self.exit_cause(rank, pid(rank)));
        let ended = come.or_else(|| {
            missing()
                .into_iter()
                .take(MAX_QUERIES)
                .find_map(|rank| self.exit_cause_of_missing(rank))
        });
        match ended {
            // It may have ended because all were there, and it had nothing else to do.
            Some(exit_cause) if !missing().is_empty() => {
                Err(format!("{exit_cause} before all ranks had joined").into())
            }
            _ => Ok(()),
        }
    }

    /// Returns how a rank that has come has ended, if it has.
    fn exit_cause(&self, rank: usize, pid: u32) -> Option<String> {
        if !self.system.has_ended(pid) {
            return None;
        }
        let mut report = None;
        if self.launched {
            report = self.value(&self.seats[rank].exit_key(), EXIT_REPORT_TIMEOUT);
        }
        Some(match report {
            Some(end) => format!("rank {rank} ended with {end}"),
            None => format!("rank {rank} (pid {pid}) died"),
        })
    }

    fn exit_cause_of_missing(&self, rank: usize) -> Option<String> {
        let member = self.members.get(rank);
        if let Some(Process { host_id, pid, .. }) = member
            && self.has_ended_here(host_id, *pid)
        {
            return Some(format!("rank {rank} (pid {pid}) died"));
        }
        if self.launched {
            return Some(format!(
                "rank {rank} ended with {}",
                self.value(&self.seats[rank].exit_key(), Duration::ZERO)?
            ));
        }
        let info = self.value(&self.info_key(rank), Duration::ZERO)?;
        let info: PeerInfo = from_json(info.as_bytes(), "peer info").ok()?;
        let ended = self.has_ended_here(&info.host_id, info.pid);
        ended.then(|| format!("rank {rank} (pid {}) died", info.pid))
    }

    /// Whether a process of this host has ended. Those of other hosts are not seen.
    fn has_ended_here(&self, host_id: &str, pid: u32) -> bool {
        host_id == self.own.host_id && self.system.has_ended(pid)
    }

    /// Publishes this rank's own description. Returns those of all ranks, `local_size` of which are to be on this
    /// node; on one node each of these is this rank's, as what else there is to know is in the arena.
    ///
    /// # Errors
    /// Another process has joined as this rank; other ranks are on this node than should be; those of
    /// [`check`](Self::check).
    pub fn introduce(&mut self, local_size: usize) -> Result<Vec<PeerInfo>, JoinError> {
        self.register()?;
        if local_size == self.size {
            return Ok(vec![self.own.clone(); self.size]);
        }
        let infos = self.exchange_peer_info()?;
        let local_ranks = infos.iter().filter(|info| info.node == self.own.node).count();
        if local_ranks != local_size {
            let reason = format!(
                "{local_size} ranks should be on this node ({}), and {local_ranks} are: give all ranks of a \
                 node, and no others, the same GROUP_RANK",
                self.own.host
            );
            return Err(reason.into());
        }
        Ok(infos)
    }

    fn register(&self) -> Result<(), JoinError> {
        let announced = self.system.set_first(&self.info_key(self.rank), &to_json(self.own));
        let Some(other) = announced.map_err(|error| self.failed(error))? else { return Ok(()) };
        let other = from_json::<PeerInfo>(&other, "peer info").ok();
        let other = other.map(|other| format!("process {}", other.pid));
        let reason = format!(
            "{} has joined as rank {} before: every process needs its own RANK",
            other.as_deref().unwrap_or("another process"),
            self.rank
        );
        Err(reason.into())
    }

    /// Returns all ranks' descriptions once all have published theirs. Rank 0 collects them, so that the
    /// others ask for one key.
    fn exchange_peer_info(&mut self) -> Result<Vec<PeerInfo>, JoinError> {
        let system = self.system;
        let key = format!("{}members", self.prefix);
        let keys: Vec<String> = (0..self.size).map(|rank| self.info_key(rank)).collect();
        let rank = self.rank;
        // Once all have come the others still wait for rank 0.
        let missing = || {
            let absent = unset(system, &keys);
            if rank > 0 && absent.is_empty() && matches!(system.try_get(&key), Ok(None)) {
                return vec![0];
            }
            absent
        };
        let text = loop {
            let poll_timeout = self.left(self.poll_interval());
            let reply = match self.rank {
                0 => publish_all(system, &keys, &key, poll_timeout),
                _ => system.get(&key, poll_timeout),
            };
            match reply {
                Ok(text) => break text,
                Err(StoreError::Timeout { .. }) => {}
                Err(error) => return Err(self.failed(error)),
            }
            if let Some(reason) = self.cancel_reason() {
                return Err(reason.into());
            }
            if let Err(error) = self.check(&missing, &|_| 0) {
                return Err(self.give_up(error));
            }
        };
        let infos: Vec<PeerInfo> = from_json(&text, "member list of rank 0")?;
        if infos.len() != self.size {
            return Err(JoinError::Failed(format!(
                "malformed member list of rank 0: got {} members instead of {}",
                infos.len(),
                self.size
            )));
        }
        Ok(infos)
    }

    /// Notes that all ranks of this node have mapped their arena. Rank 0 serves the store: it waits
    /// until the first rank of every node has noted this, as its program may end at once, while
    /// others still ask the store.
    ///
    /// # Errors
    /// For rank 0 when the time is over, another rank has given up, or such a first rank has ended,
    /// as far as the `transport` can tell.
    pub fn wait_for_nodes(
        &mut self,
        infos: &[PeerInfo],
        transport: Option<&dyn Transport>,
    ) -> Result<(), JoinError> {
        let system = self.system;
        let first = first_ranks(infos);
        let keys: Vec<String> = first.iter().map(|&rank| self.mapped_key(rank)).collect();
        if first.contains(&self.rank) {
            system.set(&self.mapped_key(self.rank), b"").map_err(|error| self.failed(error))?;
        }
        let mut connections = None;
        while self.rank == 0 {
            match system.wait(&keys, self.left(self.poll_interval())) {
                Ok(()) => break,
                Err(StoreError::Timeout { .. }) => {
                    self.check(&|| unset(system, &keys), &|_| 0)
                        .map_err(|error| self.give_up(error))?;
                }
                Err(error) => return Err(self.failed(error)),
            }
            // The others do not use these connections, which show whether their processes are there.
            if connections.is_none() {
                connections =
                    transport.and_then(|to| to.connect(ALL_RANKS, "join", &first, 0).ok());
            }
            let Some(connections) = &mut connections else { continue };
            let missing = unset(system, &keys);
            let mut nodes = (1..first.len()).filter(|&node| missing.contains(&first[node]));
            let lost = nodes.find_map(|node| {
                let reason = connections.disconnect_reason(node)?;
                Some((first[node], reason))
            });
            if let Some((rank, reason)) = lost {
                let PeerInfo { pid, host, .. } = &infos[rank];
                let how = match reason {
                    DisconnectReason::Left | DisconnectReason::Ended => "ended".to_owned(),
                    DisconnectReason::Failed(why) => format!("failed ({why})"),
                    DisconnectReason::OutOfReach(why) | DisconnectReason::Refused(why) => {
                        format!("cannot be reached ({why})")
                    }
                };
                let reason =
                    format!("rank {rank} (pid {pid} on {host}) {how} before all ranks had joined");
                return Err(self.give_up(reason.into()));
            }
        }
        Ok(())
    }

    fn mapped_key(&self, rank: usize) -> String {
        format!("{}mapped/{rank}", self.prefix)
    }

    fn info_key(&self, rank: usize) -> String {
        info_key(self.prefix, rank)
    }

    /// Returns the words for the other ranks if this rank's program is interrupted.
    pub fn interruption(&self) -> String {
        format!("rank {} was interrupted while it waited", self.rank)
    }

    /// Publishes why this rank gives up. Returns the error of the rank that was first to do so.
    pub fn give_up(&self, error: JoinError) -> JoinError {
        let JoinError::Failed(reason) = error else { return error };
        self.cancel(&reason);
        JoinError::Failed(self.cancel_reason().unwrap_or(reason))
    }

    /// Publishes why this rank gives up, for those that come later.
    pub fn cancel(&self, reason: &str) {
        // Fails if rank 0 served the store and has ended: then no rank reads it any more.
        let _ = self.system.set_first(&format!("{}failure", self.prefix), reason.as_bytes());
    }

    /// Returns why another rank gave up.
    pub fn cancel_reason(&self) -> Option<String> {
        self.value(&format!("{}failure", self.prefix), Duration::ZERO)
    }

    /// Returns the error of a join whose store does not answer, or that was interrupted meanwhile: in this
    /// call, or in one before whose error was left out.
    pub fn failed(&self, error: StoreError) -> JoinError {
        let asks = self.system.is_interrupted();
        if asks || matches!(error, StoreError::Interrupted { .. }) {
            return JoinError::Interrupted;
        }
        JoinError::Failed(error.to_string())
    }

    /// Returns the value of a key; a store that does not answer reports no ends.
    fn value(&self, key: &str, timeout: Duration) -> Option<String> {
        let value = self.system.get(key, timeout).ok()?;
        Some(String::from_utf8_lossy(&value).into_owned())
    }
}

/// Returns the key under which a rank of the join with this prefix describes itself.
pub fn info_key(prefix: &str, rank: usize) -> String {
    format!("{prefix}rank/{rank}")
}

/// Returns the first rank of each node.
fn first_ranks(infos: &[PeerInfo]) -> Vec<usize> {
    let mut nodes = HashSet::new();
    (0..infos.len()).filter(|&rank| nodes.insert(&infos[rank].node)).collect()
}

/// Returns the ranks whose keys are not set, by the numbers at the ends of these.
fn unset(system: &impl System, keys: &[String]) -> Vec<usize> {
    match system.wait(keys, Duration::ZERO) {
        Err(StoreError::Timeout { missing, .. }) => {
            missing.iter().filter_map(|key| key.rsplit('/').next()?.parse().ok()).collect()
        }
        _ => Vec::new(),
    }
}

/// Waits for the descriptions under `keys`, and publishes all of them under `key` as one list.
fn publish_all(
    system: &impl System,
    keys: &[String],
    key: &str,
    timeout: Duration,
) -> Result<Vec<u8>, StoreError> {
    system.wait(keys, timeout)?;
    let mut infos = Vec::with_capacity(keys.len());
    for key in keys {
        infos.push(system.get(key, Duration::ZERO)?);
    }
    let list = [&b"["[..], &infos.join(&b','), b"]"].concat();
    system.set(key, &list)?;
    Ok(list)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use flow_store::{Address, Store};

    use super::*;
    use crate::env::{Membership, Rendezvous};
    use crate::transport;
    use crate::world::World;

    /// Ranks 1 and 2 of this test are played by hand. Rank 1 notes that its node has mapped its
    /// arena, and ends. Rank 2 does so, or waits, or ends before.
    #[test]
    fn rank_0_joins_once_no_other_node_needs_its_store() {
        for (rank_2, timeout, expected) in [
            ("has mapped", 60, Ok(())),
            ("waits", 3, Err("rank 2 has not joined within 3s")),
            ("ends", 60, Err("before all ranks had joined")),
        ] {
            let address = Address::Tcp(format!("127.0.0.1:{}", flow_harness::free_port()));
            let membership = |rank| Membership {
                rank,
                world_size: 3,
                local_rank: 0,
                local_world_size: 1,
                node: Some(rank),
                rendezvous: Rendezvous::RankZero {
                    address: address.clone(),
                    token: "token".into(),
                },
            };
            let zero = membership(0);
            let prefix = format!("world/{rank_2:?}/0/");
            let timeout = Duration::from_secs(timeout);
            let joining = thread::spawn(move || World::join(&zero, rank_2, timeout).map(drop));
            let store = Store::connect(&address, "token", Duration::from_secs(60)).unwrap();
            let by_hand = [(1, "has mapped, and ends"), (2, rank_2)];
            let transports = by_hand.map(|(rank, does)| {
                let own = membership(rank);
                let reachable = transport::open(&own).unwrap();
                reachable.join_group(ALL_RANKS);
                let info = PeerInfo::own(&own, reachable.address());
                store.set(&format!("{prefix}rank/{rank}"), &to_json(&info)).unwrap();
                if does.starts_with("has mapped") {
                    store.set(&format!("{prefix}mapped/{rank}"), b"").unwrap();
                }
                (!does.ends_with("ends")).then_some(reachable)
            });
            let joined = joining.join().unwrap().map_err(|error| error.to_string());
            let is_expected = match (&joined, expected) {
                (Ok(()), Ok(())) => true,
                (Err(error), Err(text)) => error.contains(text),
                _ => false,
            };
            assert!(is_expected, "{rank_2}: {joined:?}");
            drop(transports);
        }
    }
}
