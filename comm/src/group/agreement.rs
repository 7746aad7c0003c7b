//! The members of a group to be agree on it, over keys in the store.
//!
//! The first member to come sets an [`Announcement`] under the key. All members answer it. The last
//! deletes it, so that the key can be used again, and writes the [`Outcome`]. A member that gives
//! up writes an outcome too. The first outcome counts, for all: nobody uses the memory of a group
//! that another has given up. Each member that has read a good outcome raises a counter, and the
//! last one deletes the outcome. Until then the rank that hosts the store stays.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use flow_store::{Error as StoreError, Store};
use serde::{Deserialize, Serialize};

use super::new_group_call::{AbortReason, NewGroupCall};
use crate::error::{Error, Result};
use crate::internode::presence::Presence;
use crate::interrupt::is_interrupted;
use crate::json::{from_json, to_json};
use crate::shm::arena::no_room;
use crate::stall::Stall;
use crate::world::FIRST_WARNING;

/// The time to wait for the outcome before looking whether the others still live. Others may then
/// have the connection to the store for as long.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const PAUSE: Duration = Duration::from_millis(1);
/// The longest time that the rank that hosts the store waits for the others to read the outcome.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval at which the launcher is asked how ranks on other nodes have ended.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The call of the first member to come, which it sets under the key.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Announcement {
    /// The name of the group to be.
    name: String,
    /// The rank in the job that has come first.
    rank: usize,
    /// The members, by their ranks in the group that they are of.
    ranks: Vec<usize>,
}

/// The end of an agreement.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Outcome {
    /// The group is made: its memory on each node, from the first member there.
    Made { offsets: BTreeMap<usize, usize> },
    /// The group is not made.
    Failed(AbortReason),
}

/// The keys that the members of a group to be use.
struct Keys {
    /// The group's name.
    name: String,
    prefix: String,
}

impl Keys {
    fn answer(&self, member: usize) -> String {
        format!("{}answer/{member}", self.prefix)
    }

    /// Returns the key that counts the members that have answered.
    fn answers(&self) -> String {
        format!("{}answers", self.prefix)
    }

    fn outcome(&self) -> String {
        format!("{}outcome", self.prefix)
    }

    /// Returns the key that counts the members that have read the outcome.
    fn read(&self) -> String {
        format!("{}read", self.prefix)
    }
}

/// The part of one rank in an agreement.
pub struct Agreement<'a> {
    call: &'a NewGroupCall<'a>,
    store: &'a Store,
    wait: MemberWait<'a>,
    /// This rank has answered, and the outcome, as far as it knows that, is good.
    pub may_succeed: bool,
}

impl<'a> Agreement<'a> {
    /// Returns the agreement that a call begins.
    pub fn new(call: &'a NewGroupCall<'a>, store: &'a Store) -> Self {
        let begin = Instant::now();
        let wait = MemberWait {
            begin,
            last_exit_poll: begin,
            warning: FIRST_WARNING,
            long: call.group.core.world.long_wait(),
        };
        Self { call, store, wait, may_succeed: false }
    }

    /// Waits for all members. Returns this rank's presence in the group, and where on this node the
    /// group's memory is: at the `offset` that member `first` gives.
    pub fn reach(
        &mut self,
        first: usize,
        offset: Option<usize>,
    ) -> Result<(Presence, Option<usize>)> {
        let (keys, presence) = self.answer(offset)?;
        let outcome = self.wait_outcome(&keys);
        let mut pending =
            self.call.core().pending_groups.lock().unwrap_or_else(PoisonError::into_inner);
        pending.retain(|name| *name != keys.name);
        drop(pending);
        match outcome? {
            Outcome::Made { offsets } => {
                self.take_leave(&keys)?;
                Ok((presence, offsets.get(&first).copied()))
            }
            Outcome::Failed(cause) => Err(self.call.error(cause)),
        }
    }

    /// Answers the announcement under the key, which may be this rank's own. While the key is
    /// another group's, waits until that deletes it.
    fn answer(&mut self, offset: Option<usize>) -> Result<(Keys, Presence)> {
        let call = self.call;
        let core = call.core();
        let own = Announcement {
            name: call.new_name(),
            rank: core.world.rank,
            ranks: call.ranks.to_vec(),
        };
        loop {
            // Locked until the announcement is answered: that of a group which this rank has joined
            // is deleted.
            let mut pending = core.pending_groups.lock().unwrap_or_else(PoisonError::into_inner);
            let announced = self.announce(&own)?;
            let prefix = format!("{}group/{}/", core.world.prefix, announced.name);
            let keys = Keys { name: announced.name.clone(), prefix };
            self.check_outcome(&announced, &own, &keys)?;
            if announced.ranks == own.ranks && !pending.contains(&announced.name) {
                let presence = self.join(&keys, offset, &mut pending)?;
                return Ok((keys, presence));
            }
            drop(pending);
            self.wait_for_key(&announced, &keys)?;
        }
    }

    /// Returns what is announced under the key: this rank's own announcement, if there was none.
    fn announce(&self, own: &Announcement) -> Result<Announcement> {
        let set = self.store.compare_and_set(&self.call_key(), None, &to_json(own));
        match set.map_err(|error| self.call.store_failed(error))? {
            Ok(()) => Ok(own.clone()),
            Err(other) => self.read(&other.unwrap_or_default(), "announcement"),
        }
    }

    fn call_key(&self) -> String {
        self.call.core().key(&format!("call/{}", self.call.key))
    }

    fn read<T: serde::de::DeserializeOwned>(&self, bytes: &[u8], what: &str) -> Result<T> {
        from_json(bytes, &format!("{what} of a group in the store"))
            .map_err(|reason| self.call.failed(reason))
    }

    /// Returns the error of a group that has failed under the key. If its members are others and
    /// this rank is one of them, that is an error of its own.
    fn check_outcome(
        &self,
        announced: &Announcement,
        own: &Announcement,
        keys: &Keys,
    ) -> Result<()> {
        if announced.name == own.name {
            return Ok(());
        }
        let outcome = self.store.try_get(&keys.outcome());
        let Some(outcome) = outcome.map_err(|error| self.call.store_failed(error))? else {
            return Ok(());
        };
        let Outcome::Failed(cause) = self.read(&outcome, "outcome")? else { return Ok(()) };
        let error = self.call.error(cause);
        if announced.ranks == own.ranks {
            Err(error)
        } else if !announced.ranks.contains(&self.call.core().rank) {
            Err(self.call.failed(format!("others had the key and failed: {error}")))
        } else {
            Ok(())
        }
    }

    /// Answers, and concludes the agreement if all others have.
    fn join(
        &mut self,
        keys: &Keys,
        offset: Option<usize>,
        pending: &mut Vec<String>,
    ) -> Result<Presence> {
        let call = self.call;
        let core = call.core();
        self.may_succeed = true;
        let presence = Presence::new(&core.world, keys.name.clone());
        self.store
            .set(&keys.answer(core.rank), &to_json(&offset))
            .map_err(|error| call.store_failed(error))?;
        pending.push(keys.name.clone());
        let answers = self.store.add(&keys.answers(), 1);
        if answers.map_err(|error| call.store_failed(error))? == call.ranks.len() as i64 {
            self.conclude(keys)?;
        }
        Ok(presence)
    }

    /// Waits a moment for the key, which another group has.
    fn wait_for_key(&mut self, announced: &Announcement, keys: &Keys) -> Result<()> {
        let call = self.call;
        let core = call.core();
        let Announcement { rank: caller, ranks, .. } = announced;
        if *ranks != call.ranks && ranks.contains(&core.rank) {
            let rank = core.world.rank;
            let detail =
                format!("rank {rank} called {call}, rank {caller} called it with {ranks:?}");
            self.decide(keys, Outcome::Failed(AbortReason::Differ { detail: detail.clone() }))?;
            return Err(Error::Mismatch { rank, detail });
        }
        if let Some(cause) = self.find_cause(&|| call.others())? {
            return Err(call.error(cause));
        }
        if is_interrupted() {
            return Err(call.interrupted());
        }
        let what = format!("the group of {ranks:?}, which has the key as rank {caller} called it");
        if self.wait.begin.elapsed() >= core.timeout() {
            return Err(call.timed_out(what));
        }
        let mut holders = ranks.clone();
        holders.retain(|&member| member < core.size());
        self.wait.report(call, &|| holders.clone(), &|| what.clone());
        std::thread::sleep(POLL_INTERVAL.min(core.timeout() / 4));
        Ok(())
    }

    /// Decides when all have answered, and deletes the announcement and the answers.
    fn conclude(&mut self, keys: &Keys) -> Result<()> {
        let call = self.call;
        let core = call.core();
        self.delete(&[self.call_key()])?;
        let mut offsets = BTreeMap::new();
        let mut full = None;
        for member in call.first_on_nodes() {
            let answer = self.store.get(&keys.answer(member), Duration::ZERO);
            let answer = answer.map_err(|error| call.store_failed(error))?;
            match self.read::<Option<usize>>(&answer, "answer")? {
                Some(offset) => drop(offsets.insert(member, offset)),
                None => full = full.or(Some(core.ranks[member])),
            }
        }
        let outcome = match full {
            Some(rank) => Outcome::Failed(AbortReason::Other { reason: no_room("a group", rank) }),
            None => Outcome::Made { offsets },
        };
        self.decide(keys, outcome)?;
        let mut answers: Vec<String> =
            call.ranks.iter().map(|&member| keys.answer(member)).collect();
        answers.push(keys.answers());
        self.delete(&answers)
    }

    fn delete(&self, keys: &[String]) -> Result<()> {
        self.store.delete(keys).map_err(|error| self.call.store_failed(error))?;
        Ok(())
    }

    /// Writes an outcome down, unless there is one. Returns the one that counts.
    fn decide(&mut self, keys: &Keys, outcome: Outcome) -> Result<Outcome> {
        let set = self.store.compare_and_set(&keys.outcome(), None, &to_json(&outcome));
        let counts = match set.map_err(|error| self.call.store_failed(error))? {
            Ok(()) => outcome,
            Err(first) => self.read(&first.unwrap_or_default(), "outcome")?,
        };
        Ok(self.learn(counts))
    }

    /// Takes note of the outcome that counts.
    fn learn(&mut self, outcome: Outcome) -> Outcome {
        if matches!(outcome, Outcome::Failed(_)) {
            self.may_succeed = false;
        }
        outcome
    }

    /// Waits for the outcome, while all members live.
    fn wait_outcome(&mut self, keys: &Keys) -> Result<Outcome> {
        let call = self.call;
        let store = self.store;
        let timeout = call.core().timeout();
        let missing = || missing_answers(call, store, keys);
        loop {
            match store.get(&keys.outcome(), POLL_INTERVAL.min(timeout / 4)) {
                Ok(outcome) => {
                    let outcome = self.read(&outcome, "outcome")?;
                    return Ok(self.learn(outcome));
                }
                Err(StoreError::Timeout { .. }) => {}
                Err(error) => return Err(call.store_failed(error)),
            }
            // Before the outcome nobody comes back from this call, so a member that has left will
            // never take part.
            if let Some(cause) = self.find_cause(&missing)? {
                return self.decide(keys, Outcome::Failed(cause));
            }
            if is_interrupted() {
                let error = call.interrupted();
                // Where this fails there is nobody left to be told.
                let reason = error.to_string();
                let _ = self.decide(keys, Outcome::Failed(AbortReason::Other { reason }));
                return Err(error);
            }
            if self.wait.begin.elapsed() >= timeout {
                let error = call.timed_out(call.describe(&missing()));
                let reason = error.to_string();
                let decided = self.decide(keys, Outcome::Failed(AbortReason::Other { reason }))?;
                return match decided {
                    Outcome::Made { .. } => Ok(decided),
                    Outcome::Failed(_) => Err(error),
                };
            }
            self.wait.report(call, &missing, &|| call.describe(&missing()));
            // The lock of the connection goes to whoever is quickest: other threads of this rank
            // are to have their turn.
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns why members will not come, if they will not.
    fn find_cause(&mut self, missing: &dyn Fn() -> Vec<usize>) -> Result<Option<AbortReason>> {
        let call = self.call;
        if let Some(member) = self.wait.find_departed(call, missing) {
            return Ok(Some(AbortReason::Departed { member }));
        }
        let lineage = call.core().world.lineage.as_ref();
        let may_change = lineage.filter(|lineage| lineage.membership.rendezvous.outlives_ranks());
        let Some(lineage) = may_change else { return Ok(None) };
        let begun = self.store.try_get(&lineage.begun_key());
        let begun = begun.map_err(|error| call.store_failed(error))?;
        Ok(begun.map(|_| AbortReason::Reconfigured))
    }

    /// Notes that this rank has read a good outcome: the last one deletes it.
    fn take_leave(&self, keys: &Keys) -> Result<()> {
        let call = self.call;
        let read = self.store.add(&keys.read(), 1).map_err(|error| call.store_failed(error))?;
        if read == call.ranks.len() as i64 {
            return self.delete(&[keys.read(), keys.outcome()]);
        }
        if call.core().world.hosts_store() {
            // The store ends with this process, which may be over right after this.
            let begin = Instant::now();
            while begin.elapsed() < FAREWELL_TIMEOUT
                && matches!(self.store.try_get(&keys.outcome()), Ok(Some(_)))
            {
                if is_interrupted() {
                    return Err(call.interrupted());
                }
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }
}

/// Returns the members that have not answered; all others, if the last of them has not written
/// down the outcome.
fn missing_answers(call: &NewGroupCall, store: &Store, keys: &Keys) -> Vec<usize> {
    let answers: Vec<String> = call.ranks.iter().map(|&member| keys.answer(member)).collect();
    match store.wait(&answers, Duration::ZERO) {
        Err(StoreError::Timeout { missing, .. }) => {
            let members = call.ranks.iter().zip(&answers);
            members.filter(|(_, key)| missing.contains(key)).map(|(&member, _)| member).collect()
        }
        _ => call.others(),
    }
}

/// The wait of one rank for the others.
struct MemberWait<'a> {
    begin: Instant,
    last_exit_poll: Instant,
    /// The time at which the wait is next worth a line in the log.
    warning: Duration,
    long: Option<Stall<'a>>,
}

impl MemberWait<'_> {
    /// Reports a wait that has become long.
    fn report(
        &mut self,
        call: &NewGroupCall,
        missing: &dyn Fn() -> Vec<usize>,
        what: &dyn Fn() -> String,
    ) {
        let core = call.core();
        let waited = self.begin.elapsed();
        if waited >= self.warning {
            let rank = core.world.rank;
            log::warn!("rank {rank}: {call} has waited {} s for {}", waited.as_secs(), what());
            self.warning *= 2;
        }
        if let Some(long) = &mut self.long {
            long.check(waited, call, || {
                missing()
                    .iter()
                    .map(|&member| core.world.seats[core.ranks[member]].number)
                    .collect()
            });
        }
    }

    /// Returns a member that has left the group that the members are of, or has ended.
    fn find_departed(
        &mut self,
        call: &NewGroupCall,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Option<usize> {
        let core = call.core();
        let departed = call.group.failure.departed_peers();
        let departed = departed.into_iter().find(|member| call.ranks.contains(member));
        if departed.is_some() || self.last_exit_poll.elapsed() < EXIT_POLL_INTERVAL {
            return departed;
        }
        self.last_exit_poll = Instant::now();
        missing()
            .into_iter()
            .find(|&member| core.world.exit_report(core.ranks[member], Duration::ZERO).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_read_as_they_were_written() {
        let outcomes = [
            Outcome::Made { offsets: BTreeMap::from([(0, 4096), (3, 0)]) },
            Outcome::Failed(AbortReason::Departed { member: 2 }),
            Outcome::Failed(AbortReason::Differ { detail: "rank 0 called \"x\"\n".into() }),
            Outcome::Failed(AbortReason::Reconfigured),
            Outcome::Failed(AbortReason::Other { reason: "the store ended".into() }),
        ];
        for outcome in outcomes {
            assert_eq!(from_json::<Outcome>(&to_json(&outcome), "outcome"), Ok(outcome));
        }
        let error = from_json::<Outcome>(b"{}", "outcome").unwrap_err();
        assert!(error.starts_with("malformed outcome: got \"{}\""), "{error}");
    }
}
