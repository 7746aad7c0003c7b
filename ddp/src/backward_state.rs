//! The state of a backward: its buckets, and the gradients that have come.

use std::collections::{BTreeSet, HashSet};
use std::time::Instant;

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;
use flow_comm::trace::BucketTensors;
use tch::{Kind, Tensor};

use crate::bucket::assignment::{Caps, Item, assign};
use crate::bucket::pending::{Look, Pending, Reduced};
use crate::bucket::sparse::SparseBucket;
use crate::bucket::{Bucket, ReducePath};
use crate::error::Result;
use crate::join::joining::Joining;
use crate::options::{Delayed, Options};
use crate::parameter::{Parameter, by_training, numbered};
use crate::static_graph::StaticGraph;
use crate::stats::{BucketStats, BucketTimes, Stats};
use crate::tuning::Tuning;

/// The backwards of the same buckets in which the timeline has the times of all gradients.
const DESCRIBED: u32 = 10;

/// A bucket in its place in the order of launches.
pub(crate) struct ScheduledBucket {
    /// Parameters by index, in the order of their slots.
    pub members: Vec<usize>,
    pub memory: Box<dyn Bucket>,
    /// Gradients still to come in this backward.
    pub missing: usize,
    /// The slots whose parameters this rank has not used since the last reduction.
    pub unused: Vec<bool>,
    /// The reduction, once it is launched.
    pub pending: Option<Pending>,
    /// The reduced gradients, if a communication hook returned them in a tensor of its own.
    reduced: Option<Tensor>,
    /// Who looks at the reduced gradients once they are there.
    look: Option<Look>,
    /// Bytes of gradients that are reduced where they are.
    in_place_bytes: usize,
    /// When the last gradient of this backward came, and when the bucket was reduced.
    ready: Option<Instant>,
    done: Option<Instant>,
}

impl ScheduledBucket {
    fn new(memory: Box<dyn Bucket>, members: Vec<usize>) -> Self {
        Self {
            missing: members.len(),
            unused: vec![false; members.len()],
            members,
            memory,
            pending: None,
            reduced: None,
            look: None,
            in_place_bytes: 0,
            ready: None,
            done: None,
        }
    }

    /// Calls [`Bucket::mark_ready`].
    pub fn mark_ready(&mut self, slot: usize, gradient: &Tensor, exclusive: bool) -> Result<bool> {
        let in_place = self.memory.mark_ready(slot, gradient, exclusive)?;
        if in_place {
            self.in_place_bytes += gradient.numel() * gradient.kind().elt_size_in_bytes();
        }
        self.arrived();
        Ok(in_place)
    }

    /// Calls [`Bucket::mark_unused`].
    pub fn mark_unused(&mut self, slot: usize) -> Result<()> {
        self.memory.mark_unused(slot)?;
        self.arrived();
        Ok(())
    }

    fn arrived(&mut self) {
        self.missing -= 1;
        if self.missing == 0 {
            self.ready = Some(Instant::now());
        }
    }

    /// Waits for the reduction, if it is launched.
    pub fn wait(&mut self, path: &dyn ReducePath, group: &ProcessGroup) -> Result<(), BoxError> {
        let Some(mut pending) = self.pending.take() else { return Ok(()) };
        self.look = pending.take_look();
        match pending.wait()? {
            Reduced::InBucket(done) => self.done = done,
            Reduced::Flat(tensor) => self.reduced = Some(tensor),
            Reduced::NotYet => {
                path.flush()?;
                self.memory.complete(group)?;
            }
        }
        self.done.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Waits for the reduction, but for none that was launched later. Returns whether it is over;
    /// false if it is to be waited for at the end of backward. `may_wait`: otherwise false, too, if it
    /// is not over yet.
    pub fn finish_early(&mut self, may_wait: bool) -> flow_comm::Result<bool> {
        let Some(pending) = self.pending.take() else { return Ok(false) };
        match pending.wait_in_turn(may_wait)? {
            Ok(done) => self.done = Some(done),
            Err(pending) => self.pending = Some(pending),
        }
        Ok(self.pending.is_none())
    }

    /// Puts what a communication hook returned where reduced gradients are. The error is the length
    /// that it should have.
    pub fn scatter(&mut self, parameters: &[Parameter]) -> Result<(), usize> {
        let Some(flat) = self.reduced.take() else { return Ok(()) };
        let length = self.members.iter().map(|&member| parameters[member].elements()).sum();
        if flat.dim() != 1 || flat.numel() != length {
            return Err(length);
        }
        let mut start = 0;
        for (slot, &member) in self.members.iter().enumerate() {
            let parameter = &parameters[member];
            let end = start + parameter.elements() as i64;
            let part = flat.slice(0, start, end, 1).view(&parameter.shape[..]);
            let mut gradient = self.reduced_grad(slot, parameter);
            tch::no_grad(|| gradient.copy_(&part));
            start = end;
        }
        Ok(())
    }

    /// Has the communication hook look at the reduced gradients, if it wants to.
    pub fn show(&mut self, parameters: &[Parameter]) -> Result<(), BoxError> {
        let Some(look) = self.look.take() else { return Ok(()) };
        let mut gradients = Vec::with_capacity(self.members.len());
        for (slot, &member) in self.members.iter().enumerate() {
            gradients.push(self.reduced_grad(slot, &parameters[member]));
        }
        tch::no_grad(|| look(&gradients))
    }

    fn reduced_grad(&self, slot: usize, parameter: &Parameter) -> Tensor {
        let gradient = self.memory.reduced_grad(slot);
        gradient.map_or_else(|| parameter.grad(), Tensor::shallow_clone)
    }

    /// Makes it ready for the next backward: see [`Bucket::reset`].
    pub fn reset(&mut self, stream_joined: bool) {
        self.missing = self.members.len();
        self.pending = None;
        self.reduced = None;
        self.look = None;
        self.memory.reset(stream_joined);
    }

    fn begin(&mut self, step: u32) {
        self.memory.set_step(step);
        self.unused.fill(false);
        self.in_place_bytes = 0;
        self.ready = None;
        self.done = None;
    }
}

/// The parameters and buckets of a model, and the backward that runs.
pub(crate) struct BackwardState {
    pub parameters: Vec<Parameter>,
    /// Parameters that were not trained when the model was wrapped: they have no hooks.
    pub frozen: Vec<Parameter>,
    pub buckets: Vec<ScheduledBucket>,
    /// Bucket and slot of each parameter.
    pub slots: Vec<(usize, usize)>,
    /// The number of [`NoSync`](crate::NoSync)s.
    pub local: usize,
    /// Between the first hook and the end of a backward.
    pub in_backward: bool,
    /// Parameters whose final gradient has come in this backward.
    pub arrived: Vec<bool>,
    /// The time at which it came, if there is a timeline.
    pub came: Vec<Option<Instant>>,
    /// Backwards of the same buckets that the timeline describes.
    described: u32,
    /// Parameters whose gradients wait for that of `delayed_until`.
    pub delayed: Vec<bool>,
    pub delayed_until: Option<usize>,
    /// Delayed parameters whose gradients have come in this backward.
    pub waiting: BTreeSet<usize>,
    /// What is known of the graph, if it is the same in each backward.
    pub graph: Option<StaticGraph>,
    /// Parameters that got a gradient since the last reduction, under `no_sync` too.
    pub used: Vec<bool>,
    /// Parameters in the order of their gradients' coming.
    pub ready_order: Vec<usize>,
    /// The join that the model is in.
    pub join: Option<Joining>,
    /// The step of this backward.
    pub step: u32,
    /// The next bucket to launch.
    pub next: usize,
    /// How many buckets the optimizer has applied, the first ones, in this backward.
    pub applied: usize,
    pub rebuilt: bool,
    /// The order in which gradients come, once the buckets are rebuilt for it.
    pub order: Vec<usize>,
    /// The trial of sizes of buckets, while it lasts.
    pub tuning: Option<Tuning>,
    /// Another rank lacks gradients and has failed: backward runs to its end, where all ranks learn
    /// what each lacks.
    pub peer_misses_grads: bool,
    /// A backward has failed: the group is of no more use.
    pub unusable: bool,
    pub stats: Stats,
    /// The time at which the first gradient of this backward came.
    pub began: Instant,
}

impl BackwardState {
    /// Returns the state before the first backward, without buckets.
    pub fn new(mut parameters: Vec<Parameter>, frozen: Vec<Parameter>, options: &Options) -> Self {
        let count = parameters.len();
        for parameter in &mut parameters {
            parameter.is_sparse = options.sparse.contains(&parameter.name);
            parameter.as_dense = options.sparse_as_dense && !parameter.is_sparse;
        }
        let Delayed { names, until } = &options.delayed;
        let delayed = parameters.iter().map(|parameter| names.contains(&parameter.name)).collect();
        Self {
            delayed,
            delayed_until: parameters.iter().position(|parameter| parameter.name == *until),
            waiting: BTreeSet::new(),
            parameters,
            frozen,
            buckets: Vec::new(),
            slots: vec![(0, 0); count],
            local: 0,
            in_backward: false,
            arrived: vec![false; count],
            came: vec![None; count],
            described: 0,
            graph: options.static_graph.then(|| StaticGraph::new(count)),
            used: vec![false; count],
            ready_order: Vec::with_capacity(count),
            join: None,
            step: 0,
            next: 0,
            applied: 0,
            rebuilt: false,
            order: Vec::new(),
            tuning: None,
            peer_misses_grads: false,
            unusable: false,
            stats: Stats::default(),
            began: Instant::now(),
        }
    }

    /// Begins the backward of a step.
    pub fn begin(&mut self, step: u32) {
        self.step = step;
        self.in_backward = true;
        self.began = Instant::now();
        self.peer_misses_grads = false;
        self.arrived.fill(false);
        self.came.fill(None);
        self.waiting.clear();
        self.ready_order.clear();
        if let Some(graph) = &mut self.graph {
            graph.begin();
        }
        self.next = 0;
        self.applied = 0;
        for bucket in &mut self.buckets {
            bucket.begin(step);
        }
    }

    /// Describes parameters for bucketing.
    fn items(&self, options: &Options) -> Vec<Item> {
        let mut classes: Vec<(Kind, bool, bool)> = Vec::new();
        let mut items = Vec::with_capacity(self.parameters.len());
        for (parameter, &is_delayed) in self.parameters.iter().zip(&self.delayed) {
            let own = (parameter.kind, is_delayed, parameter.is_sparse);
            let class = classes.iter().position(|&class| class == own).unwrap_or(classes.len());
            if class == classes.len() {
                classes.push(own);
            }
            // A sparse one fills a bucket.
            let bytes = bytes_sent(parameter, options).unwrap_or(usize::MAX);
            items.push(Item { bytes, class: class as u8 });
        }
        items
    }

    /// Returns whether the timeline describes this backward: the first ones of the same buckets.
    pub fn is_described(&mut self) -> bool {
        self.described += 1;
        self.described <= DESCRIBED
    }

    /// Describes the buckets of this backward, whose gradients were all there at `computed`.
    pub fn bucket_tensors(&self, options: &Options, computed: Instant) -> Vec<BucketTensors> {
        let items = self.items(options);
        let mut buckets = Vec::with_capacity(self.buckets.len());
        for ScheduledBucket { members, .. } in &self.buckets {
            let class = items[members[0]].class;
            let mut bucket = BucketTensors { class, tensors: Vec::new(), ready: Vec::new() };
            for &member in members {
                let bytes = bytes_sent(&self.parameters[member], options).unwrap_or(0);
                let came = self.came[member].unwrap_or(computed);
                bucket.tensors.push(bytes as u64);
                bucket.ready.push((came - self.began).as_micros() as u64);
            }
            buckets.push(bucket);
        }
        buckets
    }

    /// Makes the buckets anew, for gradients that come in `order`, with these caps.
    pub fn build(
        &mut self,
        path: &dyn ReducePath,
        options: &Options,
        order: &[usize],
        caps: &Caps,
    ) -> Result<()> {
        self.stats.bucket_cap_mb = caps.in_mib();
        let assigned = assign(&self.items(options), order, caps);
        if assigned.iter().eq(self.buckets.iter().map(|b| &b.members)) {
            return Ok(());
        }
        self.described = 0;
        // The old buckets' memory first: the new ones take as much.
        self.buckets.clear();
        for (number, members) in assigned.into_iter().enumerate() {
            for (slot, &member) in members.iter().enumerate() {
                self.slots[member] = (number, slot);
            }
            let parameters: Vec<&Parameter> =
                members.iter().map(|&member| &self.parameters[member]).collect();
            let memory = if parameters[0].is_sparse {
                Box::new(SparseBucket::new(parameters[0], options.op))
            } else {
                let sent = options.communication.unwrap_or(parameters[0].kind);
                path.bucket(number as u32, &parameters, sent)?
            };
            self.buckets.push(ScheduledBucket::new(memory, members));
        }
        Ok(())
    }

    /// Returns the sizes of buckets to try. Those that make the same buckets as one before are left
    /// out.
    pub fn sizes_to_try(&self, options: &Options) -> Vec<Caps> {
        let items = self.items(options);
        let mut seen = HashSet::new();
        let candidates = Tuning::candidates(&options.caps).into_iter();
        candidates.filter(|caps| seen.insert(assign(&items, &self.order, caps))).collect()
    }

    /// Returns all parameters, trained and frozen, in the order of the model.
    pub fn named(&self) -> Vec<(String, Tensor)> {
        let mut parameters: Vec<&Parameter> = self.parameters.iter().chain(&self.frozen).collect();
        parameters.sort_by_key(|parameter| parameter.position);
        let named = parameters.into_iter();
        named.map(|parameter| (parameter.name.clone(), parameter.tensor.shallow_clone())).collect()
    }

    /// Returns the parameters that have got a gradient since the last reduction, and still have it.
    pub fn used(&self) -> impl Iterator<Item = &Parameter> {
        let indices = 0..self.parameters.len();
        indices.filter(|&index| self.is_used(index)).map(|index| &self.parameters[index])
    }

    /// Returns whether a parameter has got a gradient since the last reduction, and still has it.
    pub fn is_used(&self, index: usize) -> bool {
        self.used[index] && self.parameters[index].tensor.grad().defined()
    }

    /// Returns whether the optimizer has applied a parameter's gradient in this backward.
    pub fn is_applied(&self, index: usize) -> bool {
        self.slots[index].0 < self.applied
    }

    /// Returns the state that trains the parameters that require gradients now. This one stays as it
    /// is.
    pub fn trained_anew(&self, path: &dyn ReducePath, options: &Options) -> Result<Self> {
        let used: HashSet<usize> = self.used().map(|parameter| parameter.position).collect();
        let (trained, frozen) = by_training(numbered(self.named()));
        let mut fresh = Self::new(trained, frozen, options);
        for (index, parameter) in fresh.parameters.iter().enumerate() {
            fresh.used[index] = used.contains(&parameter.position);
        }
        fresh.local = self.local;
        fresh.step = self.step;
        fresh.stats.backwards = self.stats.backwards;
        let order: Vec<usize> = (0..fresh.parameters.len()).rev().collect();
        fresh.build(path, options, &order, &options.caps)?;
        Ok(fresh)
    }

    /// Makes `.grad` of a parameter its place in the bucket, if the type is the same.
    pub fn alias_grad_to_bucket(&self, index: usize) -> Result<(), flow_autograd::Error> {
        let (bucket, slot) = self.slots[index];
        let parameter = &self.parameters[index];
        let place = self.buckets[bucket].memory.reduced_grad(slot);
        let Some(place) = place.filter(|place| place.kind() == parameter.kind) else {
            return Ok(());
        };
        parameter.set_grad(place)
    }

    /// Makes `.grad` the reduced gradient, unless it was reduced where it is. `bucket_view`: a new
    /// `.grad` is a view of the bucket.
    pub fn write_back(
        &self,
        index: usize,
        path: &dyn ReducePath,
        bucket_view: bool,
    ) -> Result<(), flow_autograd::Error> {
        let (bucket, slot) = self.slots[index];
        let Some(place) = self.buckets[bucket].memory.reduced_grad(slot) else { return Ok(()) };
        let parameter = &self.parameters[index];
        if parameter.is_sparse {
            return parameter.set_grad(place);
        }
        let mut gradient = parameter.grad();
        if path.grads_are_views() {
            // A tensor without elements has no address, as one that is not defined.
            if gradient.defined()
                && flow_autograd::data_ptr(&gradient) == flow_autograd::data_ptr(place)
            {
                return Ok(());
            }
            return parameter.set_grad(place);
        }
        if !gradient.defined() {
            let fresh = if bucket_view && place.kind() == parameter.kind {
                place.shallow_clone()
            } else {
                place.to_kind(parameter.kind).copy()
            };
            return parameter.set_grad(&fresh);
        }
        if flow_autograd::data_ptr(&gradient) != flow_autograd::data_ptr(place) {
            tch::no_grad(|| gradient.copy_(place));
        }
        Ok(())
    }

    /// Gives gradients memory of their own. Views of buckets would keep the buckets' memory; sparse
    /// gradients are none.
    pub fn keep_grads_apart(&self) -> Result<(), flow_autograd::Error> {
        for Parameter { tensor, .. } in &self.parameters {
            let gradient = tensor.grad();
            if gradient.defined() && !gradient.is_sparse() {
                flow_autograd::set_grad(tensor, Some(&gradient.copy()))?;
            }
        }
        Ok(())
    }

    /// Keeps the times of a backward whose buckets are reduced.
    pub fn record(&mut self, backward_end: Instant) {
        let end = Instant::now();
        self.stats.buckets.clear();
        for bucket in &self.buckets {
            let done = bucket.done.unwrap_or(end);
            let ready = bucket.ready.unwrap_or(done);
            self.stats.buckets.push(BucketStats {
                bytes: bucket.memory.bytes(),
                parameters: bucket
                    .members
                    .iter()
                    .map(|&member| self.parameters[member].name.clone())
                    .collect(),
                in_place: bucket.in_place_bytes,
                times: BucketTimes::new(self.began, ready, done, backward_end),
            });
        }
        self.stats.backward = backward_end - self.began;
        self.stats.backwards += 1;
        self.stats.exposed = end - backward_end;
    }

    /// Returns the figures of the last backward. Times are the device's if it has a clock of its own:
    /// asking for them waits for it.
    pub fn timed_stats(&self, path: &dyn ReducePath) -> Stats {
        let mut stats = self.stats.clone();
        stats.is_tuning = self.tuning.is_some();
        if stats.backwards == 0 {
            return stats;
        }
        let Some(phases) = path.phase_times() else { return stats };
        stats.backward = phases.backward;
        stats.exposed = phases.exposed;
        for (recorded, bucket) in stats.buckets.iter_mut().zip(&self.buckets) {
            if let Some(times) = bucket.memory.times() {
                recorded.times = times;
            }
        }
        stats
    }
}

/// Returns how many bytes are sent of a parameter's gradient; None of a sparse one.
fn bytes_sent(parameter: &Parameter, options: &Options) -> Option<usize> {
    let sent = options.communication.unwrap_or(parameter.kind);
    (!parameter.is_sparse).then(|| parameter.elements() * sent.elt_size_in_bytes())
}
