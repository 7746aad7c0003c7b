//! What the processes share: virtual time, the store, the launcher.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::thread::{CpuSet, sched_getcpu};

use super::faults::Faults;
use crate::bootstrap::info_key;
use crate::bootstrap::lineage::{Members, Process, Seat};

/// The time in which processes crash, are interrupted and are started.
const FAULTS: Duration = Duration::from_secs(15);
/// Begins the keys of all epochs.
pub const PREFIX: &str = "world/0/";
/// So many processes live at one time, and are started in all.
const MAX_PROCESSES: usize = 6;
const MAX_STARTS: usize = 14;

/// A message to or from the store that is not late takes so long at most.
pub const USUAL_DELAY: Duration = Duration::from_millis(20);

/// What a process does.
#[derive(Clone, Debug)]
pub enum Phase {
    /// It reconfigures or waits to be taken in.
    Calls,
    /// It meets the members of this epoch.
    Meets(u64),
    Trains(Members),
    /// It has got an error, and will end.
    GivesUp,
}

/// A process, as the cluster knows it.
pub struct Slot {
    pub process: Process,
    pub phase: Phase,
    pub is_alive: bool,
    /// It has been a member of a group that all its members had.
    pub has_state: bool,
    /// Its connection to the store stands.
    pub has_store: bool,
    /// Why the members have not taken it in.
    pub refusal: Option<String>,
    /// It is interrupted, and has not noticed it.
    pub is_interrupted: bool,
    /// When it was interrupted.
    pub interrupted: Option<Duration>,
    /// When it gave up.
    pub gave_up: Option<Duration>,
    /// Its messages take so many times as long.
    pub slowness: u32,
    /// The keys that it waits for.
    pub waits_for: Vec<String>,
    /// The memory of a join in which it waits for others.
    pub sleeps_in: Option<usize>,
    /// The last epoch in whose barrier it has been.
    pub entered: Option<u64>,
    /// The number of times that it has been suspended: an older wake-up is void.
    pub suspensions: u64,
    pub thread: Option<Thread>,
}

impl Slot {
    /// Whether it is in the group of this epoch, or on its way there.
    pub fn is_with(&self, epoch: u64) -> bool {
        match &self.phase {
            Phase::Meets(met) => self.is_alive && *met == epoch,
            Phase::Trains(members) => self.is_alive && members.epoch == epoch,
            Phase::Calls | Phase::GivesUp => false,
        }
    }
}

pub enum Event {
    Wake {
        process: usize,
        suspension: u64,
    },
    Write(Write),
    /// A process ends without having a say.
    Crash,
    Interrupt,
    Start(Seat),
    /// All must be well.
    Settled,
}

/// The memory of a join on a node.
pub struct JoinMemory {
    /// The processes that have mapped it; 0 for those that have not.
    pub pids: Vec<u32>,
    pub failure: Option<String>,
}

/// A change of the store.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: String,
    pub value: Vec<u8>,
    /// Only if it is not set yet.
    pub is_first: bool,
}

pub struct Cluster {
    pub random: Rng,
    pub faults: Faults,
    begin: Instant,
    pub now: Duration,
    events: BTreeMap<(Duration, u64), Event>,
    next_event: u64,
    pub values: BTreeMap<String, Vec<u8>>,
    pub joins: Vec<JoinMemory>,
    pub slots: Vec<Slot>,
    pub threads: Vec<JoinHandle<()>>,
    /// The processor on which they run.
    pub processor: CpuSet,
    /// The process that runs.
    pub running: Option<usize>,
    /// Processes that are to be started now.
    pub starting: Vec<Seat>,
    starts: usize,
    /// A process has joined those with which the job begins.
    pub has_begun: bool,
    /// Nobody runs any more.
    pub is_over: bool,
    pub failure: Option<String>,
    /// What the store has, and what processes have returned, for each epoch.
    pub decided: BTreeMap<u64, Members>,
    pub returned: BTreeMap<u64, Members>,
    /// When the first member of before came.
    pub came: BTreeMap<u64, Duration>,
    /// The epochs whose members have met.
    met: BTreeSet<u64>,
    pub errors: usize,
    is_verbose: bool,
}

impl Cluster {
    pub fn new(mut random: Rng, faults: Faults, is_verbose: bool) -> Self {
        let crashes = random.usize(..=faults.crashes);
        let mut processor = CpuSet::new();
        processor.set(sched_getcpu());
        let mut cluster = Self {
            begin: Instant::now(),
            now: Duration::ZERO,
            events: BTreeMap::new(),
            next_event: 0,
            values: BTreeMap::new(),
            joins: Vec::new(),
            slots: Vec::new(),
            threads: Vec::new(),
            processor,
            running: None,
            starting: Vec::new(),
            starts: 0,
            has_begun: false,
            is_over: false,
            failure: None,
            decided: BTreeMap::new(),
            returned: BTreeMap::new(),
            came: BTreeMap::new(),
            met: BTreeSet::new(),
            errors: 0,
            is_verbose,
            random,
            faults,
        };
        // Often soon after one another.
        let mut time = Duration::ZERO;
        for _ in 0..crashes {
            time = (time + FAULTS.mul_f64(cluster.random.f64().powi(3))).min(FAULTS);
            cluster.after(time, Event::Crash);
        }
        for _ in 0..cluster.faults.interrupts {
            let time = cluster.up_to(FAULTS);
            cluster.after(time, Event::Interrupt);
        }
        for number in cluster.faults.size..MAX_PROCESSES {
            if cluster.random.bool() {
                let time = cluster.up_to(FAULTS);
                cluster.after(time, Event::Start(Seat::first(number)));
            }
        }
        if !cluster.faults.launched && cluster.random.bool() {
            let time = cluster.up_to(FAULTS);
            let number = cluster.random.usize(..cluster.faults.size);
            cluster.after(time, Event::Start(Seat::first(number)));
        }
        let settled = FAULTS + 2 * cluster.faults.bound() + 2 * cluster.faults.notice;
        cluster.after(settled, Event::Settled);
        cluster
    }

    pub fn instant(&self) -> Instant {
        self.begin + self.now
    }

    pub fn up_to(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.random.f64())
    }

    pub fn log(&self, text: impl FnOnce() -> String) {
        if self.is_verbose {
            println!("{:>12?} {}", self.now, text());
        }
    }

    pub fn fail(&mut self, failure: String) {
        self.failure.get_or_insert(failure);
    }

    pub fn living(&self) -> Vec<&Slot> {
        self.slots.iter().filter(|slot| slot.is_alive).collect()
    }

    pub fn epochs(&self) -> u64 {
        self.returned.keys().last().copied().unwrap_or(0)
    }

    pub fn after(&mut self, delay: Duration, event: Event) {
        self.events.insert((self.now + delay, self.next_event), event);
        self.next_event += 1;
    }

    pub fn wake_after(&mut self, delay: Duration, process: usize) {
        let Slot { is_alive, suspensions, .. } = self.slots[process];
        if is_alive {
            self.after(delay, Event::Wake { process, suspension: suspensions });
        }
    }

    /// Adds a process, which runs when it is woken.
    pub fn add(&mut self, seat: Seat) -> usize {
        let index = self.slots.len();
        let host = format!("host{}", seat.number % self.faults.hosts);
        let process = Process {
            seat,
            pid: 100 + index as u32,
            host_id: host.clone(),
            node: host.clone(),
            host,
            memory: None,
        };
        self.log(|| format!("{} is replacement {}", process.describe(), seat.replacement));
        self.slots.push(Slot {
            process,
            phase: Phase::Calls,
            is_alive: true,
            has_state: false,
            has_store: true,
            refusal: None,
            is_interrupted: false,
            interrupted: None,
            gave_up: None,
            slowness: if self.random.u8(..6) == 0 { 10 } else { 1 },
            waits_for: Vec::new(),
            sleeps_in: None,
            entered: None,
            suspensions: 0,
            thread: None,
        });
        index
    }

    /// Begins a job with the members that train at first.
    pub fn begin_with(&mut self, members: &Members) {
        self.decided.insert(0, members.clone());
        self.returned.insert(0, members.clone());
    }

    /// Lets events happen until one lets a process run, or all is over.
    pub fn go_on(&mut self) {
        while self.failure.is_none() && !self.is_over {
            let Some(((time, _), event)) = self.events.pop_first() else {
                self.fail("nothing happens any more".into());
                break;
            };
            self.now = time;
            match event {
                Event::Wake { process, suspension } => {
                    if self.slots[process].suspensions == suspension {
                        self.running = Some(process);
                        return;
                    }
                }
                Event::Write(write) => {
                    self.write(write);
                }
                Event::Crash => {
                    if let Some(victim) = self.any(|slot| slot.is_alive) {
                        self.end(victim);
                    }
                }
                Event::Interrupt => {
                    let victim = self.any(|slot| {
                        slot.is_alive && matches!(slot.phase, Phase::Calls | Phase::Meets(_))
                    });
                    if let Some(victim) = victim {
                        self.slots[victim].is_interrupted = true;
                        self.slots[victim].interrupted = Some(self.now);
                        self.log(|| format!("{} is interrupted", self.name(victim)));
                    }
                }
                Event::Start(seat) => self.starting.push(seat),
                Event::Settled => {
                    self.check_settled();
                    self.is_over = true;
                }
            }
            if !self.starting.is_empty() {
                return;
            }
        }
        self.is_over = true;
    }

    fn any(&mut self, is_candidate: impl Fn(&Slot) -> bool) -> Option<usize> {
        let slots = 0..self.slots.len();
        let candidates: Vec<usize> =
            slots.filter(|&slot| is_candidate(&self.slots[slot])).collect();
        self.random.choice(candidates)
    }

    pub fn name(&self, process: usize) -> String {
        self.slots[process].process.describe()
    }

    /// Whether a process crashes here.
    pub fn crashes_now(&mut self) -> bool {
        let crashes = self.now < FAULTS
            && self.faults.crashes > 0
            && self.random.f64() < self.faults.crash_rate;
        self.faults.crashes -= crashes as usize;
        crashes
    }

    /// Ends a process. Its launcher says so, and may start another one.
    pub fn end(&mut self, process: usize) {
        if self.is_over || !self.slots[process].is_alive {
            return;
        }
        self.log(|| format!("{} ends", self.name(process)));
        // Its thread ends.
        self.wake_after(Duration::ZERO, process);
        self.slots[process].is_alive = false;
        let seat = self.slots[process].process.seat;
        if self.faults.launched {
            let most =
                if self.random.bool() { self.faults.notice } else { self.faults.notice / 20 };
            let delay = self.up_to(most);
            let write = Write { key: seat.exit_key(), value: b"ended".to_vec(), is_first: false };
            self.after(delay, Event::Write(write));
        }
        let host = &self.slots[process].process.host_id;
        let is_seen =
            self.living().iter().any(|slot| slot.has_state && slot.process.host_id == *host);
        // Nor does anybody know of one that has not said that it is there.
        let was_there = self.has_begun || self.values.contains_key(&info_key(PREFIX, seat.number));
        let is_found = was_there && (self.faults.hosts == 1 || is_seen);
        if !self.faults.launched && !is_found {
            self.faults.are_gentle = false;
        }
        if self.now < FAULTS && self.random.u8(..3) > 0 {
            let delay = Duration::from_millis(50) + self.up_to(Duration::from_secs(1));
            let replacement = seat.replacement + self.faults.launched as usize;
            self.after(delay, Event::Start(Seat { replacement, ..seat }));
        }
        self.stir();
        let is_anybody_left = self.slots[..self.faults.size].iter().any(|slot| slot.is_alive);
        // Then a launcher ends the job.
        self.is_over |= !self.has_begun && !is_anybody_left;
    }

    /// Returns a seat on which a process is to be started now.
    pub fn next_start(&mut self) -> Option<Seat> {
        while let Some(seat) = self.starting.pop() {
            let is_taken = self.living().iter().any(|slot| slot.process.seat == seat);
            let may_start = !(self.faults.launched && is_taken);
            if may_start && self.living().len() < MAX_PROCESSES && self.starts < MAX_STARTS {
                self.starts += 1;
                return Some(seat);
            }
        }
        None
    }

    /// Carries out a write; returns whether it was.
    pub fn write(&mut self, write: Write) -> bool {
        let Write { key, value, is_first } = write;
        if is_first && self.values.contains_key(&key) {
            return false;
        }
        self.log(|| format!("{key} = {}", String::from_utf8_lossy(&value)));
        self.check_write(&key, &value);
        self.values.insert(key, value);
        for process in 0..self.slots.len() {
            let keys = &self.slots[process].waits_for;
            if !keys.is_empty() && self.are_set(keys) {
                self.wake_after(Duration::ZERO, process);
            }
        }
        self.stir();
        true
    }

    /// Tells processes that train that something has changed, as they notice some time.
    pub fn stir(&mut self) {
        for process in 0..self.slots.len() {
            if self.is_disturbed(process) {
                let delay = self.up_to(Duration::from_millis(300));
                self.wake_after(delay, process);
            }
        }
    }

    /// Whether a process that trains has a reason to reconfigure.
    pub fn is_disturbed(&self, process: usize) -> bool {
        let Phase::Trains(members) = &self.slots[process].phase else { return false };
        let is_first = members.processes[0].is(&self.slots[process].process);
        is_first && self.has_newcomers(members)
            || members
                .processes
                .iter()
                .any(|member| !self.slot_of(member.pid).is_with(members.epoch))
    }

    fn has_newcomers(&self, members: &Members) -> bool {
        (members.newcomers..)
            .map_while(|number| self.values.get(&format!("{PREFIX}newcomer/{number}")))
            .any(|newcomer| newcomer != b"null")
    }

    pub fn set_phase(&mut self, process: usize, phase: Phase) {
        self.slots[process].phase = phase;
        self.stir();
    }

    /// Whether all these members have once been in the barrier at one time.
    pub fn note_meeting(&mut self, members: &Members) -> bool {
        let epoch = members.epoch;
        let are_there = members.processes.iter().all(|process| {
            let slot = self.slot_of(process.pid);
            slot.is_with(epoch) && slot.entered == Some(epoch)
        });
        if are_there {
            self.met.insert(epoch);
        }
        self.met.contains(&epoch)
    }

    pub fn are_set(&self, keys: &[String]) -> bool {
        keys.iter().all(|key| self.values.contains_key(key))
    }

    /// Whether the process is interrupted; this is said once.
    pub fn take_interrupt(&mut self, process: usize) -> bool {
        std::mem::take(&mut self.slots[process].is_interrupted)
    }

    /// Returns how long a message to or from the store is on its way.
    pub fn message_delay(&mut self, process: usize) -> Duration {
        let most = match self.random.u8(..32) {
            0 => self.faults.delay,
            1..8 => USUAL_DELAY,
            _ => Duration::from_millis(1),
        };
        self.up_to(most) * self.slots[process].slowness + Duration::from_micros(1)
    }

    pub fn slot_of(&self, pid: u32) -> &Slot {
        &self.slots[pid as usize - 100]
    }
}
