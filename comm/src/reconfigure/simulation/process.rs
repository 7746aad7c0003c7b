//! A process of the job: a thread that runs while the cluster lets it, and its program.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use rustix::thread::sched_setaffinity;

use super::cluster::{Cluster, PREFIX, Phase};
use crate::bootstrap::lineage::{Lineage, Members, MemoryPlace, Seat};
use crate::bootstrap::system::System;
use crate::env::{Membership, Rendezvous};
use crate::error::{Error, Result};
use crate::reconfigure::agreement::{Agreement, store_failed};

/// What a thread unwinds with when its process has ended.
struct Ended;

#[derive(Clone)]
pub struct SimulatedProcess {
    cluster: Arc<Mutex<Cluster>>,
    pub index: usize,
}

impl SimulatedProcess {
    /// Starts the processes of a job, which then runs until it is over.
    pub fn start_job(cluster: &Arc<Mutex<Cluster>>) {
        let mut locked = lock(cluster);
        let mut processes = Vec::new();
        for rank in 0..locked.faults.size {
            let index = locked.add(Seat::first(rank));
            locked.slots[index].has_state = true;
            processes.push(locked.slots[index].process.clone());
        }
        let members = Members { processes, ..nobody() };
        locked.begin_with(&members);
        for index in 0..members.processes.len() {
            Self::spawn(cluster, &mut locked, index, Some(members.clone()));
        }
        Self::go_on(cluster, locked);
    }

    fn spawn(
        cluster: &Arc<Mutex<Cluster>>,
        locked: &mut Cluster,
        index: usize,
        members: Option<Members>,
    ) {
        let this = Self { cluster: Arc::clone(cluster), index };
        locked.wake_after(Duration::ZERO, index);
        let processor = locked.processor;
        let thread = thread::spawn(move || {
            // Only one thread runs at a time, and the next one is sooner there on the same processor.
            let _ = sched_setaffinity(None, &processor);
            let program = AssertUnwindSafe(|| {
                drop(this.alive(this.resume()));
                this.run(members);
            });
            if let Err(cause) = catch_unwind(program)
                && !cause.is::<Ended>()
            {
                this.cluster().fail(format!("process {} panics", this.index));
            }
            let mut cluster = this.cluster();
            cluster.end(this.index);
            // Nothing wakes it any more.
            cluster.slots[this.index].suspensions += 1;
            Self::go_on(&this.cluster, cluster);
        });
        locked.slots[index].thread = Some(thread.thread().clone());
        locked.threads.push(thread);
    }

    /// Lets the cluster go on until a process runs, and starts those that it wants.
    fn go_on(cluster: &Arc<Mutex<Cluster>>, mut locked: MutexGuard<'_, Cluster>) {
        locked.running = None;
        while locked.running.is_none() && !locked.is_over {
            locked.go_on();
            while let Some(seat) = locked.next_start() {
                let index = locked.add(seat);
                Self::spawn(cluster, &mut locked, index, None);
            }
        }
        let woken: Vec<Thread> = (0..locked.slots.len())
            .filter(|&index| locked.is_over || locked.running == Some(index))
            .filter_map(|index| locked.slots[index].thread.clone())
            .collect();
        drop(locked);
        woken.iter().for_each(Thread::unpark);
    }

    pub fn cluster(&self) -> MutexGuard<'_, Cluster> {
        lock(&self.cluster)
    }

    /// Waits until the cluster lets this process run.
    fn resume(&self) -> MutexGuard<'_, Cluster> {
        let mut cluster = self.cluster();
        while cluster.running != Some(self.index) && !cluster.is_over {
            drop(cluster);
            thread::park();
            cluster = self.cluster();
        }
        cluster.slots[self.index].suspensions += 1;
        cluster
    }

    /// Lets others run until something wakes this process.
    pub fn suspend<'a>(&'a self, cluster: MutexGuard<'a, Cluster>) -> MutexGuard<'a, Cluster> {
        Self::go_on(&self.cluster, cluster);
        self.resume()
    }

    /// Lets others run for `time`; shorter if the process ends.
    pub fn pause<'a>(
        &'a self,
        mut cluster: MutexGuard<'a, Cluster>,
        time: Duration,
    ) -> MutexGuard<'a, Cluster> {
        cluster.wake_after(time, self.index);
        self.suspend(cluster)
    }

    /// Lets others run now and then, as a system does between two instructions of a process.
    pub fn step(&self) {
        let mut cluster = self.cluster();
        if cluster.random.u8(..8) > 0 {
            return;
        }
        if cluster.crashes_now() {
            cluster.end(self.index);
        }
        let time = cluster.up_to(Duration::from_millis(5)) * cluster.slots[self.index].slowness;
        drop(self.alive(self.pause(cluster, time)));
    }

    /// Ends the thread if the process has ended.
    pub fn alive<'a>(&self, cluster: MutexGuard<'a, Cluster>) -> MutexGuard<'a, Cluster> {
        if cluster.is_over || !cluster.slots[self.index].is_alive {
            drop(cluster);
            resume_unwind(Box::new(Ended));
        }
        cluster
    }

    /// The program: trains, and reconfigures when something has changed, until an error.
    fn run(&self, first: Option<Members>) {
        if first.as_ref().is_none_or(|members| self.begin(members)) {
            self.train_and_change(first);
        }
        let mut cluster = self.cluster();
        cluster.set_phase(self.index, Phase::GivesUp);
        cluster.slots[self.index].gave_up = Some(cluster.now);
        let rest = cluster.up_to(Duration::from_secs(1));
        drop(self.alive(self.pause(cluster, rest)));
    }

    /// Joins those with which the job begins, without a barrier. Returns whether it does.
    fn begin(&self, members: &Members) -> bool {
        let mut cluster = self.cluster();
        let late = cluster.up_to(Duration::from_secs(1));
        cluster = self.alive(self.pause(cluster, late));
        let begin = cluster.now;
        let own = cluster.slots[self.index].process.clone();
        let lineage = cluster.lineage(own.seat, nobody());
        let deadline = cluster.instant() + cluster.faults.timeout;
        cluster.set_phase(self.index, Phase::Meets(members.epoch));
        drop(cluster);
        let joined = self.join(&lineage, members, &own, deadline);
        let mut cluster = self.cluster();
        let took = cluster.now - begin;
        cluster.check_begun(self.index, &joined, took);
        joined.is_ok()
    }

    fn train_and_change(&self, first: Option<Members>) {
        let mut members = first;
        loop {
            if let Some(members) = &members
                && !self.train(members)
            {
                break;
            }
            let mut changed = self.change(members.as_ref());
            // A program may try once more when others have not come in time.
            if matches!(changed, Err(Error::Timeout { .. })) && self.cluster().random.bool() {
                changed = self.change(members.as_ref());
            }
            match changed {
                Ok(next) => members = Some(next),
                Err(_) => break,
            }
        }
    }

    /// Trains until something has changed. Returns whether the program goes on: not if it was interrupted, as its
    /// first operation says.
    fn train(&self, members: &Members) -> bool {
        let mut cluster = self.cluster();
        cluster.set_phase(self.index, Phase::Trains(members.clone()));
        if cluster.take_interrupt(self.index) {
            return false;
        }
        while !cluster.is_disturbed(self.index) {
            cluster = self.alive(self.suspend(cluster));
        }
        cluster.set_phase(self.index, Phase::Calls);
        true
    }

    /// Goes on from the members of before, or joins as a newcomer.
    fn change(&self, before: Option<&Members>) -> Result<Members> {
        let cluster = self.cluster();
        let begin = cluster.now;
        let mut own = cluster.slots[self.index].process.clone();
        let timeout = cluster.faults.timeout;
        let lineage = cluster.lineage(own.seat, before.cloned().unwrap_or_else(nobody));
        drop(cluster);
        own.memory = before.map(|_| memory(own.seat.number));
        let agreement = Agreement::new(self.clone(), lineage.clone(), own.clone(), timeout);
        let changed = match before {
            Some(members) => self
                .set(&lineage.epoch_key(members.epoch + 1, "begun"), b"")
                .map_err(|error| store_failed(own.seat.number, error))
                .and_then(|()| agreement.go_on()),
            None => agreement.join_running(),
        };
        let mut cluster = self.cluster();
        let took = cluster.now - begin;
        match &changed {
            Ok(members) => cluster.check_returned(self.index, members, took),
            Err(error) => cluster.check_error(self.index, error, took),
        }
        changed
    }
}

impl Cluster {
    fn lineage(&self, seat: Seat, members: Members) -> Lineage {
        Lineage {
            membership: Membership {
                rank: seat.number,
                world_size: self.faults.size,
                local_rank: 0,
                local_world_size: 1,
                node: None,
                rendezvous: Rendezvous::None,
            },
            launched: self.faults.launched,
            prefix: PREFIX.into(),
            members,
        }
    }
}

pub fn lock(cluster: &Mutex<Cluster>) -> MutexGuard<'_, Cluster> {
    cluster.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nobody() -> Members {
    Members { epoch: 0, processes: Vec::new(), newcomers: 0, refused: Vec::new() }
}

fn memory(region: usize) -> MemoryPlace {
    let roomy = (0..6).collect();
    MemoryPlace { inode: 1, fd: 3, regions: 6, region_bytes: 1 << 30, own_region: region, roomy }
}
