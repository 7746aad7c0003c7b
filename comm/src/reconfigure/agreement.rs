//! One process' part in agreeing on the next members.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use flow_store::Error as StoreError;

use super::decision::next_members;
use super::membership::OPERATION;
use super::runtime::Runtime;
use crate::bootstrap::lineage::{Lineage, Members, Process, Seat};
use crate::bootstrap::system::System;
use crate::bootstrap::{JoinError, info_key, join_failed};
use crate::error::{Error, Result};
use crate::interrupt::has_ended_call;
use crate::json::{from_json, to_json};

/// The interval between looks who has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The interval at which a newcomer looks whether somebody is left to join with.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// A process that cannot join with the others after so many attempts says why.
const MAX_ATTEMPTS: usize = 16;

/// The part of one process.
pub struct Agreement<R> {
    runtime: R,
    lineage: Lineage,
    own: Process,
    begin: Instant,
    timeout: Duration,
}

impl<R: Runtime> Agreement<R> {
    /// Begins the part of this process.
    pub fn new(runtime: R, lineage: Lineage, own: Process, timeout: Duration) -> Self {
        Self { begin: runtime.system().now(), runtime, lineage, own, timeout }
    }

    /// Goes on from the members of before: returns the group of the next ones.
    pub fn go_on(self) -> Result<R::Group> {
        let members = self.agree(&self.lineage.members)?;
        self.meet(members)
    }

    /// Joins a running job as a newcomer.
    pub fn join_running(self) -> Result<R::Group> {
        let number = self.apply()?;
        let members = self.wait_for_membership(number).inspect_err(|_| {
            // Or the members would wait for it. A store that does not answer has nothing to tell them.
            let _ = self.set(&self.newcomer_key(number), &to_json(&None::<Process>));
        })?;
        self.meet(members)
    }

    /// Meets the members, and the next ones if some of these end meanwhile.
    fn meet(mut self, mut members: Members) -> Result<R::Group> {
        self.begin = self.runtime.system().now();
        let deadline = self.begin + self.timeout;
        let mut attempts = 0;
        loop {
            self.check_state_is_left(&members)?;
            let reason = match self.runtime.meet(&self.lineage, &members, &self.own, deadline) {
                Ok(group) => return Ok(group),
                Err(JoinError::Interrupted) => {
                    return Err(join_failed(self.seat(), JoinError::Interrupted));
                }
                Err(JoinError::Failed(reason)) => reason,
            };
            // For those that still wait.
            let _ = self
                .runtime
                .system()
                .set_first(&self.key(members.epoch, "failure"), reason.as_bytes());
            attempts += 1;
            if attempts == MAX_ATTEMPTS || self.runtime.system().now() >= deadline {
                return Err(system(self.seat(), reason));
            }
            log::info!("rank {}: reconfigure once more: {reason}", self.seat());
            // Members that have the group may ask whether the ranks change.
            self.set(&self.key(members.epoch + 1, "begun"), b"")?;
            members = self.agree(&members)?;
        }
    }

    /// Checks that one of the members has been one before: else nothing is left of what the job has
    /// done.
    fn check_state_is_left(&self, members: &Members) -> Result<()> {
        if members.processes.iter().any(|process| process.memory.is_some()) {
            return Ok(());
        }
        let reason = "all ranks that had joined the job have ended: start it from a checkpoint";
        Err(system(self.seat(), reason.into()))
    }

    /// Agrees with the members of before, who all call this, on the next ones.
    fn agree(&self, before: &Members) -> Result<Members> {
        let epoch = before.epoch + 1;
        let members_key = self.key(epoch, "membership");
        self.set(&self.present_key(epoch, self.seat()), &to_json(&self.own))?;
        let mut stall = self.runtime.begin_wait();
        let mut lost = BTreeSet::new();
        loop {
            if let Some(members) = self.read::<Members>(&members_key)? {
                return self.check_membership(members);
            }
            let here: Vec<&Process> = before
                .processes
                .iter()
                .filter(|process| !lost.contains(&process.seat.number))
                .collect();
            let keys: Vec<String> =
                here.iter().map(|process| self.present_key(epoch, process.seat.number)).collect();
            let missing = self.missing(&keys, POLL_INTERVAL)?;
            let absent: Vec<&Process> = here
                .iter()
                .zip(&keys)
                .filter(|(_, key)| missing.contains(key))
                .map(|(process, _)| *process)
                .collect();
            // One that has come may have ended since.
            let ended = self.ended(if absent.is_empty() { &here } else { &absent }, epoch)?;
            if !ended.is_empty() {
                lost.extend(ended);
                continue;
            }
            if absent.is_empty() {
                // One proposal is enough, unless the first process ends just now.
                let is_first = here.first().is_some_and(|process| process.is(&self.own));
                if is_first
                    || !self.missing(std::slice::from_ref(&members_key), POLL_INTERVAL)?.is_empty()
                {
                    self.propose(before, &lost)?;
                }
                continue;
            }
            if self.runtime.system().is_interrupted() {
                let operation = OPERATION.to_owned();
                return Err(Error::Interrupted { rank: self.seat(), operation });
            }
            let waited = self.runtime.system().now().saturating_duration_since(self.begin);
            if let Some(stall) = &mut stall {
                stall.check(waited, &OPERATION, || {
                    absent.iter().map(|process| process.seat.number).collect()
                });
            }
            if waited >= self.timeout {
                let missing: Vec<String> =
                    absent.iter().map(|process| process.describe()).collect();
                return Err(Error::Timeout {
                    rank: self.seat(),
                    operation: OPERATION.into(),
                    timeout: self.timeout,
                    missing: missing.join("; "),
                });
            }
        }
    }

    /// Proposes the next members, all of whom are there.
    fn propose(&self, before: &Members, lost: &BTreeSet<usize>) -> Result<()> {
        let epoch = before.epoch + 1;
        let mut present = Vec::with_capacity(before.processes.len());
        for process in
            before.processes.iter().filter(|process| !lost.contains(&process.seat.number))
        {
            let key = self.present_key(epoch, process.seat.number);
            // It is the process of before, or a newcomer could take its place.
            present.extend(self.read::<Process>(&key)?);
        }
        let newcomers = self.newcomers(before.newcomers)?;
        let next = next_members(before, present, &newcomers);
        let key = self.key(epoch, "membership");
        self.runtime
            .system()
            .set_first(&key, &to_json(&next))
            .map_err(|error| self.failed(error))?;
        Ok(())
    }

    /// Returns the newcomers from a number on; None for those that have given up.
    fn newcomers(&self, first: usize) -> Result<Vec<Option<Process>>> {
        let mut newcomers = Vec::new();
        while let Some(newcomer) = self.read(&self.newcomer_key(first + newcomers.len()))? {
            newcomers.push(newcomer);
        }
        Ok(newcomers)
    }

    /// Asks to join; returns this newcomer's number.
    fn apply(&self) -> Result<usize> {
        let own = to_json(&self.own);
        let mut number = 0;
        while self
            .runtime
            .system()
            .set_first(&self.newcomer_key(number), &own)
            .map_err(|error| self.failed(error))?
            .is_some()
        {
            number += 1;
        }
        Ok(number)
    }

    /// Returns the members when this newcomer is one.
    fn wait_for_membership(&self, number: usize) -> Result<Members> {
        let mut epoch = 1;
        let mut last: Option<Members> = None;
        let mut next_look = self.runtime.system().now() + LOOK_INTERVAL;
        loop {
            if let Some(members) = self.read::<Members>(&self.key(epoch, "membership"))? {
                let refused = members.refused.iter().find(|(refused, _)| *refused == number);
                if let Some((_, reason)) = refused {
                    return Err(system(self.seat(), format!("cannot join the job: {reason}")));
                }
                if members.processes.iter().any(|process| process.is(&self.own)) {
                    return Ok(members);
                }
                epoch += 1;
                last = Some(members);
                continue;
            }
            if self.missing(&[self.key(epoch, "membership")], POLL_INTERVAL)?.is_empty() {
                continue;
            }
            if self.runtime.system().is_interrupted() {
                return Err(join_failed(self.seat(), JoinError::Interrupted));
            }
            if self.runtime.system().now() >= next_look {
                if self.is_over(last.as_ref())? {
                    let reason = "cannot join the job: all its ranks have ended".into();
                    return Err(system(self.seat(), reason));
                }
                next_look = self.runtime.system().now() + LOOK_INTERVAL;
            }
            let waited = self.runtime.system().now().saturating_duration_since(self.begin);
            if waited >= self.timeout {
                let reason = format!(
                    "the job has not taken this process in within {:?}: its ranks call \
                     ProcessGroup::reconfigure for that",
                    self.timeout
                );
                return Err(system(self.seat(), reason));
            }
        }
    }

    /// Whether all members have ended: the last ones, or those with which the job began.
    fn is_over(&self, last: Option<&Members>) -> Result<bool> {
        let mut first = Vec::new();
        if last.is_none() {
            for rank in 0..self.lineage.membership.world_size {
                let Some(info) = self.read(&info_key(&self.lineage.prefix, rank))? else {
                    return Ok(false);
                };
                first.push(Process::of(Seat::first(rank), info, None));
            }
        }
        let (epoch, members) = last.map_or((0, &first), |last| (last.epoch, &last.processes));
        for process in members {
            if !self.has_ended(process, epoch + 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the members if this process is one of them.
    fn check_membership(&self, members: Members) -> Result<Members> {
        if members.processes.iter().any(|process| process.is(&self.own)) {
            return Ok(members);
        }
        Err(system(self.seat(), "the other ranks go on without this one, as it had ended".into()))
    }

    /// Returns the seats of those that have ended, and tells the other members.
    fn ended(&self, processes: &[&Process], epoch: u64) -> Result<Vec<usize>> {
        let mut ended = Vec::new();
        for process in processes {
            if self.has_ended(process, epoch)? {
                self.set(&self.lost_key(epoch, process.seat.number), b"")?;
                ended.push(process.seat.number);
            }
        }
        Ok(ended)
    }

    /// Whether a member of before has ended, as far as this process, flow-launch, or another member
    /// has seen. On its own host a process is seen itself: flow-launch may have started another program
    /// that started it.
    fn has_ended(&self, process: &Process, epoch: u64) -> Result<bool> {
        if process.host_id == self.own.host_id {
            return Ok(self.runtime.system().has_ended(process.pid));
        }
        let is_lost = self.is_set(&self.lost_key(epoch, process.seat.number))?;
        Ok(is_lost || self.lineage.launched && self.is_set(&process.seat.exit_key())?)
    }

    /// Returns this process' number as the launcher knows it, for errors.
    fn seat(&self) -> usize {
        self.own.seat.number
    }

    fn key(&self, epoch: u64, what: &str) -> String {
        self.lineage.epoch_key(epoch, what)
    }

    fn present_key(&self, epoch: u64, seat: usize) -> String {
        self.key(epoch, &format!("present/{seat}"))
    }

    fn lost_key(&self, epoch: u64, seat: usize) -> String {
        self.key(epoch, &format!("lost/{seat}"))
    }

    fn newcomer_key(&self, number: usize) -> String {
        newcomer_key(&self.lineage, number)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.runtime.system().set(key, value).map_err(|error| self.failed(error))
    }

    fn is_set(&self, key: &str) -> Result<bool> {
        let value = self.runtime.system().try_get(key).map_err(|error| self.failed(error))?;
        Ok(value.is_some())
    }

    /// Returns the keys that are not set within `time`.
    fn missing(&self, keys: &[String], time: Duration) -> Result<Vec<String>> {
        match self.runtime.system().wait(keys, time) {
            Ok(()) => Ok(Vec::new()),
            Err(StoreError::Timeout { missing, .. }) => Ok(missing),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn read<T: serde::de::DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let value = self.runtime.system().try_get(key).map_err(|error| self.failed(error))?;
        let Some(value) = value else { return Ok(None) };
        from_json(&value, key).map(Some).map_err(|reason| system(self.seat(), reason))
    }

    /// Returns the error of a process whose store does not answer, or that was interrupted meanwhile: in this
    /// call, or in one before whose error was left out.
    fn failed(&self, error: StoreError) -> Error {
        if self.runtime.system().is_interrupted() {
            return Error::Interrupted { rank: self.seat(), operation: OPERATION.into() };
        }
        store_failed(self.seat(), error)
    }
}

pub fn newcomer_key(lineage: &Lineage, number: usize) -> String {
    format!("{}newcomer/{number}", lineage.prefix)
}

/// Returns the error of a process whose store does not answer, or that was interrupted meanwhile.
pub fn store_failed(seat: usize, error: StoreError) -> Error {
    if let StoreError::Interrupted { .. } = error {
        // This error says so: the thread's next wait does not.
        has_ended_call();
        return Error::Interrupted { rank: seat, operation: OPERATION.into() };
    }
    system(seat, format!("the rendezvous store does not answer: {error}"))
}

pub fn system(seat: usize, reason: String) -> Error {
    Error::System { rank: seat, operation: OPERATION.into(), reason }
}
