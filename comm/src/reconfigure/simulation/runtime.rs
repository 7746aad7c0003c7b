//! What the agreement needs, as the cluster has it.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use flow_store::{Address, Error as StoreError, Result as StoreResult};

use super::cluster::{Cluster, Event, Phase, Write};
use super::process::SimulatedProcess;
use crate::bootstrap::JoinError;
use crate::bootstrap::lineage::{Lineage, Members, Process};
use crate::reconfigure::agreement::epoch_key;
use crate::reconfigure::runtime::Runtime;
use crate::stall::Stall;

/// A client asks whether it is to wait on when an answer is so late.
const OVERDUE: Duration = Duration::from_millis(500);

impl Runtime for SimulatedProcess {
    type Group = Members;

    fn now(&self) -> Instant {
        self.cluster().instant()
    }

    fn set(&self, key: &str, value: &[u8]) -> StoreResult<()> {
        self.write(Write { key: key.into(), value: value.into(), is_first: false })?;
        Ok(())
    }

    fn set_first(&self, key: &str, value: &[u8]) -> StoreResult<bool> {
        self.write(Write { key: key.into(), value: value.into(), is_first: true })
    }

    fn try_get(&self, key: &str) -> StoreResult<Option<Vec<u8>>> {
        let cluster = self.send(None)?;
        let value = cluster.values.get(key).cloned();
        self.receive(cluster)?;
        Ok(value)
    }

    fn wait(&self, keys: &[String], timeout: Duration) -> StoreResult<()> {
        let mut cluster = self.send(None)?;
        let deadline = cluster.now + timeout;
        while !cluster.are_set(keys) && cluster.now < deadline {
            cluster.slots[self.index].waits_for = keys.to_vec();
            let left = deadline - cluster.now;
            cluster = self.alive(self.pause(cluster, left));
            cluster.slots[self.index].waits_for.clear();
        }
        let unset = keys.iter().filter(|key| !cluster.values.contains_key(*key));
        let missing: Vec<String> = unset.cloned().collect();
        self.receive(cluster)?;
        if missing.is_empty() {
            return Ok(());
        }
        let operation = "wait".into();
        Err(StoreError::Timeout { address: address(), operation, timeout, missing })
    }

    fn has_ended(&self, process: &Process) -> bool {
        !self.cluster().slot_of(process).is_alive
    }

    fn is_interrupted(&self) -> bool {
        self.cluster().take_interrupt(self.index)
    }

    fn begin_wait(&self) -> Option<Stall<'_>> {
        None
    }

    fn meet(
        &self,
        lineage: &Lineage,
        members: &Members,
        own: &Process,
        deadline: Instant,
    ) -> Result<Members, JoinError> {
        let failure = epoch_key(lineage, members.epoch, "failure");
        let met = self.wait_for_members(members, own, deadline, &failure);
        let mut cluster = self.cluster();
        if let Err(error) = &met {
            cluster.set_phase(self.index, Phase::Calls);
            if matches!(error, JoinError::Interrupted) {
                let value = b"interrupted".to_vec();
                cluster.write(Write { key: failure, value, is_first: true });
            }
        }
        met.map(|()| members.clone())
    }
}

impl SimulatedProcess {
    /// As ranks join: those that wait see who has ended on their host or by the launcher's word, and
    /// who has given up. Once all have come, some may still see that others have ended since.
    fn wait_for_members(
        &self,
        members: &Members,
        own: &Process,
        deadline: Instant,
        failure: &String,
    ) -> Result<(), JoinError> {
        if !members.processes.iter().any(|process| process.is(own)) {
            return Err(format!("process {} is no member any more", own.seat.number).into());
        }
        let mut cluster = self.cluster();
        cluster.set_phase(self.index, Phase::Meets(members.epoch));
        let mut has_come = false;
        loop {
            let time = cluster.up_to(Duration::from_millis(100));
            cluster = self.alive(self.pause(cluster, time));
            let has_failed = cluster.values.contains_key(failure);
            if cluster.take_interrupt(self.index) {
                return Err(JoinError::Interrupted);
            }
            if has_failed && !has_come {
                return Err("another rank has given up".to_owned().into());
            }
            has_come = true;
            if cluster.note_meeting(members) {
                let are_there = members
                    .processes
                    .iter()
                    .all(|process| cluster.slot_of(process).is_with(members.epoch));
                if are_there || cluster.random.bool() {
                    return Ok(());
                }
                return Err("a rank has ended in the barrier".to_owned().into());
            }
            if has_failed {
                return Err("another rank has given up".to_owned().into());
            }
            let mut dead =
                members.processes.iter().filter(|process| !cluster.slot_of(process).is_alive);
            let seen = dead.find(|process| {
                let has_notice = cluster.values.contains_key(&process.seat.exit_key());
                process.host_id == own.host_id || has_notice
            });
            if let Some(process) = seen {
                return Err(format!("{} has ended", process.describe()).into());
            }
            if cluster.instant() >= deadline {
                return Err("ranks have not joined in time".to_owned().into());
            }
        }
    }

    fn write(&self, write: Write) -> StoreResult<bool> {
        let mut cluster = self.send(Some(&write))?;
        let is_written = cluster.write(write);
        self.receive(cluster)?;
        Ok(is_written)
    }

    /// Sends a request to the store. That of a process that ends meanwhile may arrive all the same.
    fn send(&self, write: Option<&Write>) -> StoreResult<MutexGuard<'_, Cluster>> {
        let mut cluster = self.cluster();
        if cluster.crashes_now() {
            cluster.end(self.index);
        }
        let delay = cluster.message_delay(self.index);
        cluster = self.pause(cluster, delay);
        if !cluster.slots[self.index].is_alive
            && let Some(write) = write
            && cluster.random.bool()
        {
            let late = cluster.message_delay(self.index);
            cluster.after(late, Event::Write(write.clone()));
        }
        self.check_connection(self.alive(cluster))
    }

    /// Gets the answer to a request.
    fn receive<'a>(&'a self, mut cluster: MutexGuard<'a, Cluster>) -> StoreResult<()> {
        if cluster.random.bool() {
            return Ok(());
        }
        let delay = cluster.message_delay(self.index);
        cluster = self.check_connection(self.alive(self.pause(cluster, delay)))?;
        let slot = &mut cluster.slots[self.index];
        if delay > OVERDUE && slot.is_interrupted {
            slot.has_store = false;
            return Err(StoreError::Interrupted { address: address(), operation: "call".into() });
        }
        Ok(())
    }

    /// Ends the connection to the store once in a while.
    fn check_connection<'a>(
        &self,
        mut cluster: MutexGuard<'a, Cluster>,
    ) -> StoreResult<MutexGuard<'a, Cluster>> {
        if cluster.faults.loss_rate > 0.0 && cluster.random.f64() < cluster.faults.loss_rate {
            cluster.slots[self.index].has_store = false;
        }
        if cluster.slots[self.index].has_store {
            return Ok(cluster);
        }
        let cause = "the connection has ended".into();
        Err(StoreError::Lost { address: address(), operation: "call".into(), cause })
    }
}

fn address() -> Address {
    Address::Unix("simulated".into())
}
