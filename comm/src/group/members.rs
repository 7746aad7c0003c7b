//! Groups that only their members make, over keys in the store.
//!
//! The first member to come sets a *call* under the key: the list of members, and the name of the
//! group to be. All answer it. The last deletes the call, so that the key can serve again, and
//! writes the *outcome*: where on each node the group's memory is. A member that gives up writes an
//! outcome too. The first outcome counts, for all: nobody uses the memory of a group that another
//! has given up. Each member that has read a good outcome raises a counter, and the last one
//! deletes the outcome; until then the rank that hosts the store stays.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use flow_store::{Error as StoreError, Store};
use serde_json::{json, Value};

use super::parts::{NewGroup, Parts};
use super::ProcessGroup;
use crate::error::{Error, Result};
use crate::internode::presence::Presence;
use crate::shm::arena::Block;
use crate::shm::control::Control;
use crate::stall::Stall;
use crate::world::FIRST_WARNING;

/// How long to wait for the outcome before looking whether the others still live; and how long
/// others may then have the connection to the store.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const PAUSE: Duration = Duration::from_millis(1);
/// How long the rank that hosts the store waits at most for the others to read the outcome.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the launcher is asked how ranks on other nodes have ended.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(500);

impl ProcessGroup {
    /// A group of some of this group's ranks, given by their ranks in this group, which only they
    /// call: all with the same list. They are numbered in its order: with `[4, 2, 3]`, rank 4
    /// becomes rank 0.
    ///
    /// They use `key`, which no other group that is being made has. It may serve again for a
    /// group none of whose members can come before the earlier one is made. Who makes several
    /// groups one after the other makes them in the same order on all ranks, or waits until the
    /// time is over; threads may make several at once. Over NCCL the members connect when they
    /// first call [`ProcessGroup::nccl`].
    ///
    /// Errors: lists that differ, on all members that have come; a member that has ended or left
    /// this group, or does not come in time. This group stays usable. The key of an attempt that
    /// failed does not serve again. Where this group has failed, it works all the same: those that
    /// are left can make a group of their own.
    ///
    /// Over several nodes without flow-launch, only the first ranks of nodes see each other die;
    /// else a member on another node that has died is missed when the time is over.
    pub fn new_group_of(&self, ranks: &[usize], key: &str) -> Result<Self> {
        let group = self.member(&"new_group_of")?;
        let core = &group.core;
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != ranks.len()
            || sorted.last() >= Some(&self.world_size())
            || !ranks.contains(&self.rank())
        {
            let (last, own) = (self.world_size() - 1, self.rank());
            let reason = format!(
                "{ranks:?} must be different ranks from 0 to {last}, this one ({own}) among them"
            );
            return Err(self.caller().argument("new_group_of", reason));
        }
        let locals: Vec<usize> =
            ranks.iter().copied().filter(|member| core.locals.contains(member)).collect();
        let first = locals[0]; // this rank is one of them
        let block = || core.world.new_control_block(ranks.len(), locals.len());
        let mut block = (first == self.rank()).then(block).flatten();
        let own = Call { group, ranks, key, may_succeed: Cell::new(false) };
        let (presence, offset) = match core.world.store() {
            Some(store) if ranks.len() > 1 => {
                let agree = || own.agree(store, first, block.as_ref());
                core.within(self.timeout, agree).inspect_err(|_| {
                    // The others may use it.
                    if let Some(block) = block.take_if(|_| own.may_succeed.get()) {
                        block.leak();
                    }
                })?
            }
            _ => (Presence::new(&core.world, own.new_name()), block.as_ref().map(Block::offset)),
        };
        let bytes = Control::bytes(ranks.len(), locals.len());
        let reachable = |&offset: &usize| core.is_reachable(first, offset, bytes);
        let offset = offset
            .filter(reachable)
            .ok_or_else(|| own.failed("the shared memory region is full".into()))?;
        let world = Arc::clone(&core.world);
        let new_group = NewGroup {
            control: Control::attach(Arc::clone(&world.arena), offset, ranks.len(), locals.len()),
            ranks: ranks.iter().map(|&member| core.ranks[member]).collect(),
            timeout: self.timeout(),
            world,
            block,
            name: presence.group.clone(),
            presence,
        };
        let parts = group.sub_group(new_group, "new_group_of")?;
        Ok(Self::of(parts, self.inner.local_rank, self.apart()))
    }
}

/// A call of [`ProcessGroup::new_group_of`].
struct Call<'a> {
    group: &'a Parts,
    ranks: &'a [usize],
    key: &'a str,
    /// This rank has answered, and the outcome, as far as it knows that, is good.
    may_succeed: Cell<bool>,
}

impl std::fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "new_group_of({:?}, {:?})", self.ranks, self.key)
    }
}

/// The keys that the members of a group to be use.
struct Keys {
    name: String,
    prefix: String,
}

impl Keys {
    fn of(&self, what: &str) -> String {
        format!("{}{what}", self.prefix)
    }

    fn answer(&self, member: usize) -> String {
        self.of(&format!("answer/{member}"))
    }

    fn outcome(&self) -> String {
        self.of("outcome")
    }
}

/// One rank's wait.
struct WaitState<'a> {
    begin: Instant,
    last_exit_poll: Instant,
    warning: Duration,
    long: Option<Stall<'a>>,
}

impl Call<'_> {
    /// For a group to be, which no other has.
    fn new_name(&self) -> String {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        format!(
            "{}.{}-{}",
            self.group.core.name,
            self.group.core.world.rank,
            NUMBER.fetch_add(1, Ordering::Relaxed)
        )
    }

    fn keys(&self, name: &str) -> Keys {
        Keys { name: name.into(), prefix: format!("{}group/{name}/", self.group.core.world.prefix) }
    }

    fn call_key(&self) -> String {
        format!("{}group/{}/call/{}", self.group.core.world.prefix, self.group.core.name, self.key)
    }

    fn failed(&self, reason: String) -> Error {
        Error::System { rank: self.group.core.world.rank, operation: self.to_string(), reason }
    }

    /// This rank in the group, and where on this node the group's memory is: in the `block` of
    /// member `first`.
    fn agree(
        &self,
        store: &Store,
        first: usize,
        block: Option<&Block>,
    ) -> Result<(Presence, Option<usize>)> {
        let fail = |error: StoreError| self.failed(error.to_string());
        let (begin, warning) = (Instant::now(), FIRST_WARNING);
        let mut wait = WaitState {
            begin,
            last_exit_poll: begin,
            warning,
            long: self.group.core.world.long_wait(),
        };
        let (keys, presence) = self.answer(store, block, &mut wait)?;
        let outcome = self.outcome(store, &keys, &mut wait);
        self.group
            .core
            .pending_groups
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|name| *name != keys.name);
        let outcome = outcome?;
        let offsets = outcome["offsets"].as_object().ok_or_else(|| self.error(&outcome))?;
        if store.add(&keys.of("read"), 1).map_err(fail)? == self.ranks.len() as i64 {
            store.delete(&[keys.of("read"), keys.outcome()]).map_err(fail)?;
        } else if self.group.core.world.hosts_store() {
            // The store ends with this process, which may be over right after this.
            let begin = Instant::now();
            while begin.elapsed() < FAREWELL_TIMEOUT
                && matches!(store.try_get(&keys.outcome()), Ok(Some(_)))
            {
                std::thread::sleep(PAUSE);
            }
        }
        let offset = offsets.get(&first.to_string()).and_then(Value::as_u64);
        Ok((presence, offset.map(|offset| offset as usize)))
    }

    /// Answers the call under the key, which may be this rank's own. If there is another there,
    /// waits until it is deleted.
    fn answer(
        &self,
        store: &Store,
        block: Option<&Block>,
        wait: &mut WaitState,
    ) -> Result<(Keys, Presence)> {
        let fail = |error: StoreError| self.failed(error.to_string());
        let own = json!({"name": self.new_name(), "rank": self.group.core.world.rank, "ranks": self.ranks});
        loop {
            // Locked until the call is answered: a call of a group that this rank has joined is
            // deleted.
            let mut pending =
                self.group.core.pending_groups.lock().unwrap_or_else(PoisonError::into_inner);
            let called = store
                .compare_and_set(&self.call_key(), None, own.to_string().as_bytes())
                .map_err(fail)?;
            let (is_own, call) = match called {
                Ok(()) => (true, own.clone()),
                Err(other) => (false, read(&other.unwrap_or_default())),
            };
            let name = call["name"].as_str().unwrap_or_default();
            let (keys, caller, ranks) = (self.keys(name), &call["rank"], numbers(&call["ranks"]));
            let outcome =
                if is_own { None } else { store.try_get(&keys.outcome()).map_err(fail)? };
            let failure = outcome
                .map(|outcome| read(&outcome))
                .filter(|outcome| outcome["offsets"].is_null());
            let is_ours = ranks == self.ranks;
            if let Some(outcome) =
                failure.filter(|_| is_ours || !ranks.contains(&self.group.core.rank))
            {
                let cause = self.error(&outcome);
                return Err(if is_ours {
                    cause
                } else {
                    self.failed(format!("others had the key and failed: {cause}"))
                });
            }
            if is_ours && !pending.iter().any(|other| other == name) {
                let offset = json!(block.map(Block::offset));
                self.may_succeed.set(true);
                let presence = Presence::new(&self.group.core.world, name.into());
                store
                    .set(&keys.answer(self.group.core.rank), offset.to_string().as_bytes())
                    .map_err(fail)?;
                pending.push(name.into());
                if store.add(&keys.of("answers"), 1).map_err(fail)? == self.ranks.len() as i64 {
                    self.conclude(store, &keys)?;
                }
                return Ok((keys, presence));
            }
            drop(pending);
            if !is_ours && ranks.contains(&self.group.core.rank) {
                let rank = self.group.core.world.rank;
                let detail =
                    format!("rank {rank} called {self}, rank {caller} called it with {ranks:?}");
                self.decide(store, &keys, json!({ "differ": detail }))?;
                return Err(Error::Mismatch { rank, detail });
            }
            let others = || {
                self.ranks
                    .iter()
                    .copied()
                    .filter(|&member| member != self.group.core.rank)
                    .collect()
            };
            if let Some(departed) = self.find_departed(wait, &others) {
                return Err(self.error(&json!({ "departed": departed })));
            }
            let holders = || {
                ranks.iter().copied().filter(|&member| member < self.group.core.size()).collect()
            };
            let what =
                || format!("the group of {ranks:?}, which has the key as rank {caller} called it");
            if wait.begin.elapsed() >= self.group.core.timeout() {
                return Err(self.timed_out(what()));
            }
            self.report(wait, &holders, &what);
            std::thread::sleep(POLL_INTERVAL.min(self.group.core.timeout() / 4));
        }
    }

    /// All have answered.
    fn conclude(&self, store: &Store, keys: &Keys) -> Result<()> {
        let fail = |error: StoreError| self.failed(error.to_string());
        store.delete(&[self.call_key()]).map_err(fail)?;
        let world = &self.group.core.world;
        let node = |member: usize| world.node(self.group.core.ranks[member]);
        let is_first = |&&member: &&usize| {
            self.ranks.iter().find(|&&other| node(other) == node(member)) == Some(&member)
        };
        let offset = |&member: &usize| {
            let offset = read(&store.get(&keys.answer(member), Duration::ZERO).map_err(fail)?);
            Ok((member.to_string(), offset))
        };
        let offsets = self
            .ranks
            .iter()
            .filter(is_first)
            .map(offset)
            .collect::<Result<serde_json::Map<_, _>>>()?;
        let full = offsets
            .iter()
            .find(|(_, offset)| offset.is_null())
            .and_then(|(member, _)| member.parse().ok());
        let outcome = match full.map(|member: usize| self.group.core.ranks[member]) {
            Some(rank) => {
                json!({ "failed": format!("the shared memory region of rank {rank} is full") })
            }
            None => json!({ "offsets": offsets }),
        };
        self.decide(store, keys, outcome)?;
        let answers =
            self.ranks.iter().map(|&member| keys.answer(member)).chain([keys.of("answers")]);
        store.delete(&answers.collect::<Vec<_>>()).map_err(fail)?;
        Ok(())
    }

    /// Writes an outcome down, unless there is one: the one that counts.
    fn decide(&self, store: &Store, keys: &Keys, outcome: Value) -> Result<Value> {
        let decided = store.compare_and_set(&keys.outcome(), None, outcome.to_string().as_bytes());
        match decided.map_err(|error| self.failed(error.to_string()))? {
            Ok(()) => Ok(self.learn(outcome)),
            Err(first) => Ok(self.learn(read(&first.unwrap_or_default()))),
        }
    }

    /// An outcome that counts.
    fn learn(&self, outcome: Value) -> Value {
        if outcome["offsets"].is_null() {
            self.may_succeed.set(false);
        }
        outcome
    }

    /// Waits for the outcome, while all members live.
    fn outcome(&self, store: &Store, keys: &Keys, wait: &mut WaitState) -> Result<Value> {
        let timeout = self.group.core.timeout();
        loop {
            match store.get(&keys.outcome(), POLL_INTERVAL.min(timeout / 4)) {
                Ok(outcome) => return Ok(self.learn(read(&outcome))),
                Err(StoreError::Timeout { .. }) => {}
                Err(error) => return Err(self.failed(error.to_string())),
            }
            let missing = || self.missing(store, keys);
            // Before the outcome nobody comes back from this call, so a member that has left will
            // never take part.
            if let Some(departed) = self.find_departed(wait, &missing) {
                return self.decide(store, keys, json!({ "departed": departed }));
            }
            if wait.begin.elapsed() >= timeout {
                let error = self.timed_out(self.describe(&missing()));
                let decided = self.decide(store, keys, json!({ "failed": error.to_string() }))?;
                return if decided["offsets"].is_null() { Err(error) } else { Ok(decided) };
            }
            self.report(wait, &missing, &|| self.describe(&missing()));
            // The lock of the connection goes to whoever is quickest: other threads of this rank
            // are to have their turn.
            std::thread::sleep(PAUSE);
        }
    }

    /// Reports a wait that has become long.
    fn report(
        &self,
        wait: &mut WaitState,
        missing: &dyn Fn() -> Vec<usize>,
        what: &dyn Fn() -> String,
    ) {
        let (world, waited) = (&self.group.core.world, wait.begin.elapsed());
        if waited >= wait.warning {
            log::warn!(
                "rank {}: {self} has waited {} s for {}",
                world.rank,
                waited.as_secs(),
                what()
            );
            wait.warning *= 2;
        }
        if let Some(long) = &mut wait.long {
            long.check(waited, self, || {
                missing().iter().map(|&member| self.group.core.ranks[member]).collect()
            });
        }
    }

    /// A member that has left the group or ended.
    fn find_departed(
        &self,
        wait: &mut WaitState,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Option<usize> {
        let departed = self
            .group
            .failure
            .departed_peers()
            .into_iter()
            .find(|member| self.ranks.contains(member));
        if departed.is_some() || wait.last_exit_poll.elapsed() < EXIT_POLL_INTERVAL {
            return departed;
        }
        wait.last_exit_poll = Instant::now();
        let world = &self.group.core.world;
        let has_ended = |member: &usize| {
            world.exit_report(self.group.core.ranks[*member], Duration::ZERO).is_some()
        };
        missing().into_iter().find(has_ended)
    }

    /// The members that have not answered; all others, if the last of them has not written down the
    /// outcome.
    fn missing(&self, store: &Store, keys: &Keys) -> Vec<usize> {
        let answers: Vec<String> = self.ranks.iter().map(|&member| keys.answer(member)).collect();
        match store.wait(&answers, Duration::ZERO) {
            Err(StoreError::Timeout { missing, .. }) => {
                missing.iter().filter_map(|key| key.rsplit('/').next()?.parse().ok()).collect()
            }
            _ => self
                .ranks
                .iter()
                .copied()
                .filter(|&member| member != self.group.core.rank)
                .collect(),
        }
    }

    fn describe(&self, members: &[usize]) -> String {
        let one = |&member: &usize| self.group.core.world.describe(self.group.core.ranks[member]);
        members.iter().map(one).collect::<Vec<_>>().join("; ")
    }

    fn timed_out(&self, missing: String) -> Error {
        let (rank, timeout) = (self.group.core.world.rank, self.group.core.timeout());
        Error::Timeout { rank, operation: self.to_string(), timeout, missing }
    }

    /// The error in an outcome.
    fn error(&self, outcome: &Value) -> Error {
        let (group, rank) = (self.group, self.group.core.world.rank);
        let departed = outcome["departed"]
            .as_u64()
            .map(|member| member as usize)
            .filter(|&member| member < group.core.size());
        if let Some(member) = departed {
            let end = group
                .core
                .world
                .loss_cause(group.core.ranks[member], group.failure.has_left(member));
            let peer = format!("{} {end}", group.core.world.describe(group.core.ranks[member]));
            return Error::PeerLost { rank, operation: self.to_string(), peer };
        }
        match (outcome["differ"].as_str(), outcome["failed"].as_str()) {
            (Some(detail), _) => Error::Mismatch { rank, detail: detail.into() },
            (_, reason) => self.failed(reason.map_or_else(
                || format!("malformed outcome in the store: got {outcome}"),
                Into::into,
            )),
        }
    }
}

fn numbers(list: &Value) -> Vec<usize> {
    let number = |value: &Value| value.as_u64().map(|number| number as usize);
    list.as_array().map_or(Vec::new(), |list| list.iter().filter_map(number).collect())
}

fn read(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_default()
}
