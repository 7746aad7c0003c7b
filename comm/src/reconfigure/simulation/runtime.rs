//! What the agreement needs, as the cluster has it.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use flow_store::{Address, Error as StoreError, Result as StoreResult};

use super::cluster::{Cluster, Event, Write};
use super::process::SimulatedProcess;
use crate::bootstrap::JoinError;
use crate::bootstrap::lineage::{Lineage, Members, Process};
use crate::bootstrap::system::System;
use crate::reconfigure::runtime::Runtime;
use crate::stall::Stall;

/// A client asks whether it is to wait on when an answer is so late.
const OVERDUE: Duration = Duration::from_millis(500);

impl System for SimulatedProcess {
    fn now(&self) -> Instant {
        self.cluster().instant()
    }

    fn set(&self, key: &str, value: &[u8]) -> StoreResult<()> {
        self.write(Write { key: key.into(), value: value.into(), is_first: false })?;
        Ok(())
    }

    fn set_first(&self, key: &str, value: &[u8]) -> StoreResult<Option<Vec<u8>>> {
        self.write(Write { key: key.into(), value: value.into(), is_first: true })
    }

    fn try_get(&self, key: &str) -> StoreResult<Option<Vec<u8>>> {
        let cluster = self.send(None)?;
        let value = cluster.values.get(key).cloned();
        self.receive(cluster)?;
        Ok(value)
    }

    fn get(&self, key: &str, timeout: Duration) -> StoreResult<Vec<u8>> {
        let keys = [key.to_owned()];
        let cluster = self.wait_for(&keys, timeout)?;
        let value = cluster.values.get(key).cloned();
        self.receive(cluster)?;
        value.ok_or_else(|| timed_out(timeout, keys.into()))
    }

    fn wait(&self, keys: &[String], timeout: Duration) -> StoreResult<()> {
        let cluster = self.wait_for(keys, timeout)?;
        let unset = keys.iter().filter(|key| !cluster.values.contains_key(*key));
        let missing: Vec<String> = unset.cloned().collect();
        self.receive(cluster)?;
        if missing.is_empty() { Ok(()) } else { Err(timed_out(timeout, missing)) }
    }

    fn has_ended(&self, pid: u32) -> bool {
        pid > 0 && !self.cluster().slot_of(pid).is_alive
    }

    fn is_interrupted(&self) -> bool {
        self.cluster().take_interrupt(self.index)
    }
}

impl Runtime for SimulatedProcess {
    type System = Self;
    type Group = Members;

    fn system(&self) -> &Self {
        self
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
        self.meet_members(lineage, members, own, deadline)?;
        Ok(members.clone())
    }
}

impl SimulatedProcess {
    /// Writes a value; returns the one that is there instead, if one is.
    fn write(&self, write: Write) -> StoreResult<Option<Vec<u8>>> {
        let mut cluster = self.send(Some(&write))?;
        let other = cluster.values.get(&write.key).filter(|_| write.is_first).cloned();
        cluster.write(write);
        self.receive(cluster)?;
        Ok(other)
    }

    /// Waits in the store until all keys are set, or the time is over.
    fn wait_for(&self, keys: &[String], timeout: Duration) -> StoreResult<MutexGuard<'_, Cluster>> {
        let mut cluster = self.send(None)?;
        let deadline = cluster.now + timeout;
        while !cluster.are_set(keys) && cluster.now < deadline {
            cluster.slots[self.index].waits_for = keys.to_vec();
            let left = deadline - cluster.now;
            cluster = self.alive(self.pause(cluster, left));
            cluster.slots[self.index].waits_for.clear();
        }
        Ok(cluster)
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

fn timed_out(timeout: Duration, missing: Vec<String>) -> StoreError {
    StoreError::Timeout { address: address(), operation: "wait".into(), timeout, missing }
}

fn address() -> Address {
    Address::Unix("simulated".into())
}
