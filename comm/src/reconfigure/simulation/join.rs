//! The join of members, which is the real one, with memory that is not; and the barrier after it.

use std::time::{Duration, Instant};

use super::cluster::{Cluster, JoinMemory, Phase};
use super::process::SimulatedProcess;
use crate::bootstrap::attach::{JoinPlace, LocalJoin, NodeArena, attach};
use crate::bootstrap::lineage::{Lineage, Members, NodeMemory, Process, Seat};
use crate::bootstrap::monitor::BootstrapMonitor;
use crate::bootstrap::system::System;
use crate::bootstrap::{JoinError, locals_of};
use crate::peer_info::PeerInfo;
use crate::reconfigure::membership::place_of;
use crate::world::FIRST_WARNING;

impl SimulatedProcess {
    /// Meets the members.
    pub fn meet_members(
        &self,
        lineage: &Lineage,
        members: &Members,
        own: &Process,
        deadline: Instant,
    ) -> Result<(), JoinError> {
        self.cluster().set_phase(self.index, Phase::Meets(members.epoch));
        let joined = self.join(lineage, members, own, deadline);
        let met = joined.and_then(|()| self.pass_barrier(members, own, deadline));
        if met.is_err() {
            self.cluster().set_phase(self.index, Phase::Calls);
        }
        met
    }

    /// Comes together with the members.
    pub fn join(
        &self,
        lineage: &Lineage,
        members: &Members,
        own: &Process,
        deadline: Instant,
    ) -> Result<(), JoinError> {
        let (membership, memory) = place_of(lineage, members, own)?;
        let seats: Vec<Seat> = members.processes.iter().map(|process| process.seat).collect();
        let Process { pid, host_id, node, host, .. } = own.clone();
        let info = PeerInfo { pid, host_id, node, host, address: Vec::new() };
        let begin = self.now();
        let mut prefix = lineage.epoch_key(members.epoch, "");
        let mut known = &members.processes[..];
        if members.epoch == 0 {
            prefix.clone_from(&lineage.prefix);
            known = &[];
        }
        let mut monitor = BootstrapMonitor {
            rank: membership.rank,
            size: membership.world_size,
            own: &info,
            seats: &seats,
            members: known,
            system: self,
            prefix: &prefix,
            launched: lineage.launched,
            begin,
            timeout: deadline.saturating_duration_since(begin),
            next_poll: begin,
            next_warning: begin + FIRST_WARNING,
            long: None,
        };
        let infos = monitor.introduce(membership.local_world_size)?;
        let locals = locals_of(&infos, &info);
        let has_memory = own.memory.is_some();
        let mut arena = Arena { process: self, memory, has_memory, locals: locals.len() };
        attach(membership.rank, &locals, &mut arena, Some(&mut monitor)).map(drop)
    }

    /// Waits until all members are here. A rank sees when another one has ended on its host, or by the
    /// launcher's word; and when one has left that has been here, or that is on another host. Once all
    /// have come, some may still see that others have ended since.
    fn pass_barrier(
        &self,
        members: &Members,
        own: &Process,
        deadline: Instant,
    ) -> Result<(), JoinError> {
        let epoch = members.epoch;
        let mut cluster = self.cluster();
        cluster.slots[self.index].entered = Some(epoch);
        loop {
            if cluster.note_meeting(members) {
                let mut all = members.processes.iter();
                if all.all(|process| cluster.slot_of(process.pid).is_with(epoch))
                    || cluster.random.bool()
                {
                    return Ok(());
                }
                return Err("a rank has ended in the barrier".to_owned().into());
            }
            if let Some(process) = cluster.lost_in_barrier(members, own) {
                return Err(format!("{} has ended or left", process.describe()).into());
            }
            if cluster.take_interrupt(self.index) {
                return Err(JoinError::Interrupted);
            }
            if cluster.instant() >= deadline {
                return Err("the barrier took too long".to_owned().into());
            }
            let time = cluster.up_to(Duration::from_millis(100));
            cluster = self.alive(self.pause(cluster, time));
        }
    }
}

impl Cluster {
    /// Returns a member of which `own` can see that it does not come to the barrier, or has left it.
    fn lost_in_barrier<'m>(&self, members: &'m Members, own: &Process) -> Option<&'m Process> {
        members.processes.iter().find(|process| {
            let slot = self.slot_of(process.pid);
            let is_near = process.host_id == own.host_id;
            if slot.is_alive {
                let is_seen = !is_near || slot.entered == Some(members.epoch);
                return is_seen && !slot.is_with(members.epoch);
            }
            is_near || self.values.contains_key(&process.seat.exit_key())
        })
    }
}

/// The memory of a node, as a process has it.
struct Arena<'a> {
    process: &'a SimulatedProcess,
    memory: NodeMemory,
    /// Whether the process has the memory that the members of before have.
    has_memory: bool,
    locals: usize,
}

impl Arena<'_> {
    /// Opens what another process has.
    fn open(&self, pid: u32) -> Result<(), String> {
        self.process.step();
        if self.process.has_ended(pid) {
            return Err(format!("cannot open the shared memory of process {pid}"));
        }
        Ok(())
    }
}

impl NodeArena for Arena<'_> {
    type Join = Join;

    fn make(&mut self) -> Result<(Join, Option<JoinPlace>), String> {
        if let NodeMemory::Kept { pid, .. } = self.memory
            && !self.has_memory
        {
            self.open(pid)?;
        }
        let mut cluster = self.process.cluster();
        let pid = cluster.slots[self.process.index].process.pid;
        let number = cluster.joins.len();
        cluster.joins.push(JoinMemory { pids: vec![0; self.locals], failure: None });
        let place = JoinPlace { pid, fd: 3, inode: 1, region: 1 << 30, regions: 6, offset: number };
        Ok((Join { process: self.process.clone(), number }, Some(place)))
    }

    fn map(&mut self, place: &JoinPlace) -> Result<Join, String> {
        if !(self.has_memory && self.memory != NodeMemory::New) {
            self.open(place.pid)?;
        }
        Ok(Join { process: self.process.clone(), number: place.offset })
    }
}

/// The memory of a join, as a process has mapped it.
struct Join {
    process: SimulatedProcess,
    number: usize,
}

impl LocalJoin for Join {
    fn attach(&self, index: usize) {
        self.process.step();
        let mut cluster = self.process.cluster();
        let pid = cluster.slots[self.process.index].process.pid;
        let pids = &mut cluster.joins[self.number].pids;
        pids[index] = pid;
        if pids.iter().all(|&pid| pid > 0) {
            for process in 0..cluster.slots.len() {
                if cluster.slots[process].sleeps_in == Some(self.number) {
                    cluster.wake_after(Duration::ZERO, process);
                }
            }
        }
    }

    fn pid(&self, index: usize) -> u32 {
        self.process.step();
        self.process.cluster().joins[self.number].pids[index]
    }

    fn failure(&self) -> Option<String> {
        self.process.step();
        self.process.cluster().joins[self.number].failure.clone()
    }

    fn fail(&self, reason: &str) -> String {
        self.process.step();
        let mut cluster = self.process.cluster();
        cluster.joins[self.number].failure.get_or_insert_with(|| reason.to_owned()).clone()
    }

    fn sleep(&self, time: Duration) {
        let mut cluster = self.process.cluster();
        if cluster.joins[self.number].pids.contains(&0) {
            cluster.slots[self.process.index].sleeps_in = Some(self.number);
            cluster = self.process.alive(self.process.pause(cluster, time));
            cluster.slots[self.process.index].sleeps_in = None;
        }
    }
}
