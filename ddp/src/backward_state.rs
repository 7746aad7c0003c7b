//! What a reducer knows of its parameters and of the backward that runs.

use std::collections::HashMap;
use std::time::Instant;

use flow_comm::nccl::Event;
use flow_comm::ProcessGroup;
use tch::Kind;

use crate::bucket::assignment::{assign, Item};
use crate::bucket::progress::ReducePath;
use crate::bucket::Bucket;
use crate::error::Result;
use crate::options::Options;
use crate::parameter::Parameter;
use crate::stats::{times, BucketStats, Stats};

/// The moments of a backward that are recorded in libtorch's stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Phase {
    FirstGradient,
    EndOfBackward,
    EndOfReduction,
}

/// What changes from backward to backward.
pub(crate) struct BackwardState {
    pub parameters: Vec<Parameter>,
    /// Those that were not trained when the model was wrapped: they have no hooks.
    pub frozen: Vec<Parameter>,
    pub buckets: Vec<Bucket>,
    /// Bucket and slot of each parameter.
    pub slots: Vec<(usize, usize)>,
    /// How many [`NoSync`](crate::NoSync)s there are.
    pub local: usize,
    /// Between the first hook and the end of a backward.
    pub in_backward: bool,
    pub arrived: Vec<bool>,
    /// Parameters that got a gradient since the last reduction, under `no_sync` too.
    pub used: Vec<bool>,
    /// Parameters in the order of their gradients' coming.
    pub ready_order: Vec<usize>,
    /// The next bucket to launch.
    pub next: usize,
    pub in_place_bytes: Vec<usize>,
    pub rebuilt: bool,
    /// Another rank has failed for want of gradients: backward runs on to the end, where all ranks
    /// meet.
    pub peer_misses_grads: bool,
    /// A backward has failed: the group is of no more use.
    pub unusable: bool,
    pub stats: Stats,
    /// When the first gradient of this backward came.
    pub began: Instant,
    /// On a GPU, and in libtorch's stream: the first gradient, the end of backward, and that of its
    /// reductions.
    pub events: Option<[Event; 3]>,
}

impl BackwardState {
    pub fn new(parameters: Vec<Parameter>, frozen: Vec<Parameter>) -> Self {
        let count = parameters.len();
        Self {
            parameters,
            frozen,
            buckets: Vec::new(),
            slots: vec![(0, 0); count],
            local: 0,
            in_backward: false,
            arrived: vec![false; count],
            used: vec![false; count],
            ready_order: Vec::with_capacity(count),
            next: 0,
            in_place_bytes: Vec::new(),
            rebuilt: false,
            peer_misses_grads: false,
            unusable: false,
            stats: Stats::default(),
            began: Instant::now(),
            events: None,
        }
    }

    pub fn begin(&mut self) {
        self.in_backward = true;
        self.began = Instant::now();
        self.peer_misses_grads = false;
        self.arrived.fill(false);
        self.ready_order.clear();
        self.next = 0;
        self.in_place_bytes.fill(0);
    }

    pub fn build(
        &mut self,
        group: &ProcessGroup,
        path: &ReducePath,
        options: Options,
        order: &[usize],
    ) -> Result<()> {
        let mut kinds: Vec<Kind> = Vec::new();
        let items: Vec<Item> = self
            .parameters
            .iter()
            .map(|p| {
                let class = kinds.iter().position(|&k| k == p.kind).unwrap_or_else(|| {
                    kinds.push(p.kind);
                    kinds.len() - 1
                });
                let kind = options.communication.unwrap_or(p.kind);
                Item { bytes: p.elements() * kind.elt_size_in_bytes(), class: class as u8 }
            })
            .collect();
        let assigned = assign(&items, order, options.caps);
        if assigned.iter().eq(self.buckets.iter().map(|b| &b.members)) {
            return Ok(());
        }
        // The old buckets' memory first: the new ones take as much.
        self.buckets.clear();
        for (number, members) in assigned.into_iter().enumerate() {
            for (slot, &member) in members.iter().enumerate() {
                self.slots[member] = (number, slot);
            }
            self.buckets.push(Bucket::new(
                group,
                path,
                number,
                members,
                &self.parameters,
                options.communication,
            )?);
        }
        self.in_place_bytes = vec![0; self.buckets.len()];
        Ok(())
    }

    pub fn record(&mut self, finished: &[(u32, Instant)], backward_end: Instant) {
        let done: HashMap<u32, Instant> = finished.iter().copied().collect();
        let end = Instant::now();
        let bucket = |(number, bucket): (usize, &Bucket)| {
            let done = done.get(&(number as u32)).copied().unwrap_or(end);
            let (ready_to_done, behind_backward) =
                times(bucket.ready.unwrap_or(done), done, backward_end);
            BucketStats {
                bytes: bucket.bytes(),
                parameters: bucket
                    .members
                    .iter()
                    .map(|&m| self.parameters[m].name.clone())
                    .collect(),
                in_place: self.in_place_bytes[number],
                ready_at: bucket.ready.unwrap_or(done).saturating_duration_since(self.began),
                ready_to_done,
                behind_backward,
            }
        };
        self.stats.backward = backward_end - self.began;
        self.stats.buckets = self.buckets.iter().enumerate().map(bucket).collect();
        self.stats.backwards += 1;
        self.stats.exposed = end - backward_end;
    }

    /// What is known of the last backward. On a GPU, times are the device's: asking for them waits
    /// for it.
    pub fn timed_stats(&self) -> Stats {
        let mut stats = self.stats.clone();
        let Some([begin, end, after]) = self.events.as_ref().filter(|_| stats.backwards > 0) else {
            return stats;
        };
        if after.synchronize().is_err() {
            return stats;
        }
        for (told, bucket) in stats.buckets.iter_mut().zip(&self.buckets) {
            if let Some(times) = bucket.times(begin, end) {
                [told.ready_at, told.ready_to_done, told.behind_backward] = times;
            }
        }
        stats.backward = end.since(begin).unwrap_or_default();
        stats.exposed = after.since(end).unwrap_or_default();
        stats
    }
}
