//! The processes of a job from one membership to the next: who they are, and what memory they have.

use serde::{Deserialize, Serialize};

use crate::env::Membership;
use crate::liveness::has_ended;
use crate::peer_info::{PeerInfo, host_id};

/// A process as the launcher numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Seat {
    /// Its rank when it was started.
    pub number: usize,
    /// The number of processes that have had this rank before in the running job.
    pub replacement: usize,
}

impl Seat {
    /// Returns the seat of a process that was there from the beginning.
    pub fn first(number: usize) -> Self {
        Self { number, replacement: 0 }
    }

    /// Returns the key under which flow-launch says how the process has ended.
    pub fn exit_key(self) -> String {
        let Self { number, replacement } = self;
        if replacement == 0 {
            format!("exit/{number}")
        } else {
            format!("exit/{number}.{replacement}")
        }
    }
}

/// A process that is a member of the job, or wants to be.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Process {
    /// Members are in the order of their seats' numbers.
    pub seat: Seat,
    pub pid: u32,
    /// Identifies its host and process id namespace.
    pub host_id: String,
    /// Identifies its node.
    pub node: String,
    /// The name of its host, for messages.
    pub host: String,
    /// The shared memory that it has mapped; None of a newcomer.
    pub memory: Option<MemoryPlace>,
}

/// The shared memory of a node, as a process there has mapped it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryPlace {
    /// Tells the memory apart from other memory of the node.
    pub inode: u64,
    /// The process' file descriptor.
    pub fd: i32,
    pub regions: usize,
    pub region_bytes: usize,
    /// The region that the process allocates from.
    pub own_region: usize,
    /// The regions in which a newcomer would have room, if the processes that have them end.
    pub roomy: Vec<usize>,
}

/// The members of a job at one time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Members {
    /// The number of times that the membership has changed.
    pub epoch: u64,
    /// Them, in the order of their ranks.
    pub processes: Vec<Process>,
    /// The number of newcomers so far that were taken or refused.
    pub newcomers: usize,
    /// Newcomers that were refused since the epoch before, by their numbers, and why.
    pub refused: Vec<(usize, String)>,
}

/// How a process has joined its job, which it needs to join it again with other members.
#[derive(Clone)]
pub struct Lineage {
    pub membership: Membership,
    /// Whether flow-launch says how the processes end.
    pub launched: bool,
    /// Begins the keys of all epochs.
    pub prefix: String,
    pub members: Members,
}

impl Lineage {
    /// Returns a key of an epoch.
    pub fn epoch_key(&self, epoch: u64, what: &str) -> String {
        format!("{}epoch/{epoch}/{what}", self.prefix)
    }

    /// Returns the key that is there once a rank reconfigures the job.
    pub fn begun_key(&self) -> String {
        self.epoch_key(self.members.epoch + 1, "begun")
    }
}

impl Process {
    /// Returns the process that describes itself so.
    pub fn of(seat: Seat, info: PeerInfo, memory: Option<MemoryPlace>) -> Self {
        let PeerInfo { pid, host_id, node, host, .. } = info;
        Self { seat, pid, host_id, node, host, memory }
    }

    /// Whether it has ended, as far as this process can see: not on other hosts.
    pub fn has_ended(&self) -> bool {
        self.host_id == host_id() && has_ended(self.pid)
    }

    /// Whether both are the same process.
    pub fn is(&self, other: &Process) -> bool {
        self.seat == other.seat && self.pid == other.pid && self.host_id == other.host_id
    }

    /// Names it for messages.
    pub fn describe(&self) -> String {
        format!("process {} (pid {} on {})", self.seat.number, self.pid, self.host)
    }
}

/// The memory of a node's members in an epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NodeMemory {
    /// The first of them makes it; each has the region of its number among them.
    New,
    /// That of the members that were there before, which a newcomer maps at this place. The regions
    /// are those of the node's members, in their order.
    Kept { pid: u32, place: MemoryPlace, regions: Vec<usize> },
}

impl NodeMemory {
    /// Returns the memory of the members of one node. It is kept if those that have memory have the
    /// same, and newcomers have room in regions of processes that have ended.
    pub fn of(members: &[&Process]) -> Self {
        let mut old =
            members.iter().filter_map(|member| Some((member.pid, member.memory.as_ref()?)));
        let Some((pid, place)) = old.next() else { return NodeMemory::New };
        if !old.clone().all(|(_, other)| other.inode == place.inode) {
            return NodeMemory::New;
        }
        let taken: Vec<usize> =
            members.iter().filter_map(|member| Some(member.memory.as_ref()?.own_region)).collect();
        let mut free = place.roomy.iter().copied().filter(|region| !taken.contains(region));
        let mut regions = Vec::with_capacity(members.len());
        for member in members {
            let own = member.memory.as_ref().map(|memory| memory.own_region);
            match own.or_else(|| free.next()) {
                Some(region) => regions.push(region),
                None => return NodeMemory::New,
            }
        }
        NodeMemory::Kept { pid, place: place.clone(), regions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(seat: usize, memory: Option<(u64, usize)>) -> Process {
        Process {
            seat: Seat::first(seat),
            pid: 100 + seat as u32,
            host_id: "host".into(),
            node: "#0".into(),
            host: "host".into(),
            memory: memory.map(|(inode, own_region)| MemoryPlace {
                inode,
                fd: 3,
                regions: 4,
                region_bytes: 1 << 30,
                own_region,
                roomy: vec![0, 1, 3],
            }),
        }
    }

    fn regions(members: &[Process]) -> Option<Vec<usize>> {
        match NodeMemory::of(&members.iter().collect::<Vec<_>>()) {
            NodeMemory::Kept { regions, .. } => Some(regions),
            NodeMemory::New => None,
        }
    }

    #[test]
    fn newcomers_take_the_regions_of_those_that_have_ended() {
        let [zero, three] = [process(0, Some((7, 0))), process(3, Some((7, 3)))];
        assert_eq!(regions(&[zero.clone(), three.clone()]), Some(vec![0, 3]));
        let with_one = [zero.clone(), process(1, None), three.clone()];
        assert_eq!(regions(&with_one), Some(vec![0, 1, 3]));
        // Region 2 has no room.
        let with_two = [zero, process(1, None), process(2, None), three];
        assert_eq!(regions(&with_two), None);
    }

    #[test]
    fn members_with_different_memory_make_new_memory() {
        assert_eq!(regions(&[process(0, Some((7, 0))), process(1, Some((8, 0)))]), None);
        assert_eq!(regions(&[process(0, None), process(1, None)]), None);
    }
}
