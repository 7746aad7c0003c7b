//! The end of a backward waits for the buckets and gives the reduced gradients to the parameters.
//! After the first backward it builds the buckets anew.

use std::time::Instant;

use flow_comm::{ReduceOp, trace};

use super::backward::Backward;
use crate::bucket::BackwardEvent;
use crate::bucket::assignment::Caps;
use crate::error::{Error, Result, job_rank};
use crate::join::joining::Joining;
use crate::parameter::names_of;

impl Backward<'_> {
    /// Waits for all buckets and gives the reduced gradients to the parameters. Returns the
    /// parameters without a gradient.
    pub fn finish_buckets(&mut self) -> Result<Vec<usize>> {
        let backward_end = Instant::now();
        self.reducer.path.record(BackwardEvent::EndOfBackward)?;
        self.defer_missing_grads(|backward| {
            backward.state.join.as_mut().map_or(Ok(()), Joining::end_backward)
        })?;
        let learns = self.state.graph.as_ref().is_some_and(|graph| !graph.is_learnt());
        if learns {
            self.take_all()?;
        }
        self.take_waiting()?;
        let missing = match self.state.graph.as_ref().filter(|graph| graph.is_learnt()) {
            Some(graph) => graph.lacking(),
            None => (0..self.state.arrived.len()).filter(|&i| !self.state.arrived[i]).collect(),
        };
        let finds_unused =
            learns || (self.reducer.options.find_unused && self.state.graph.is_none());
        if finds_unused {
            self.fill_in(&missing)?;
        } else if !missing.is_empty() {
            self.state.peer_misses_grads = true;
        }
        let mut used = Vec::with_capacity(self.state.parameters.len());
        for (index, &arrived) in self.state.arrived.iter().enumerate() {
            used.push(u8::from(arrived || self.state.is_used(index)));
        }
        self.reduce(&missing, finds_unused.then_some(&mut used))?;
        self.scatter()?;
        let mut used: Vec<bool> = used.into_iter().map(|used| used != 0).collect();
        if let Some(graph) = &mut self.state.graph {
            used = graph.learn(used).to_vec();
        }
        self.hand_back_all(&used)?;
        self.state.used.fill(false);
        if let Some(optimizer) = &self.reducer.optimizer {
            self.defer_missing_grads(|_| optimizer.finish())?;
            // On a GPU, a rank may learn only here that another has failed in this backward.
            self.check_gradients(&missing)?;
        }
        self.reducer.path.record(BackwardEvent::EndOfReduction)?;
        self.state.record(backward_end);
        if trace::is_on() && self.state.is_described() {
            let buckets = self.state.bucket_tensors(&self.reducer.options, backward_end);
            self.reducer.group.trace_buckets(self.state.step.into(), buckets);
        }
        Ok(missing)
    }

    /// Launches the remaining buckets, and waits until all are reduced. `used`: which parameters this
    /// rank uses, and then some rank. `missing`: parameters whose gradients this rank lacks.
    pub fn reduce(&mut self, missing: &[usize], used: Option<&mut Vec<u8>>) -> Result<()> {
        self.defer_missing_grads(|backward| {
            backward.launch()?;
            backward.wait()?;
            if let Some(used) = used {
                let _wait = trace::wait(backward.state.step.into(), None);
                backward.reducer.group.all_reduce(used, ReduceOp::Max)?;
            }
            Ok(())
        })?;
        self.check_gradients(missing)?;
        self.reducer.path.join()
    }

    /// Waits until all launched buckets are reduced.
    fn wait(&mut self) -> Result<()> {
        let Self { reducer, state } = self;
        for (index, bucket) in state.buckets.iter_mut().enumerate() {
            let _wait = trace::wait(state.step.into(), index as u32);
            let waited = bucket.wait(&**reducer.path, &reducer.group);
            waited.map_err(|error| Error::of_hook(&reducer.group, index, error))?;
        }
        Ok(())
    }

    /// Puts what the communication hook has made of buckets where reduced gradients are, and has it look
    /// at them.
    fn scatter(&mut self) -> Result<()> {
        for (bucket, scheduled) in self.state.buckets.iter_mut().enumerate() {
            scheduled.scatter(&self.state.parameters).map_err(|expected| Error::CommHook {
                rank: job_rank(&self.reducer.group),
                bucket,
                reason: format!(
                    "it must return a tensor of one dimension and {expected} elements, as \
                     buffer() does"
                ),
            })?;
            let shown = scheduled.show(&self.state.parameters);
            shown.map_err(|error| Error::of_hook(&self.reducer.group, bucket, error))?;
        }
        Ok(())
    }

    /// Gives the reduced gradients to the parameters that are `used`, but for those that the optimizer
    /// has applied.
    fn hand_back_all(&self, used: &[bool]) -> Result<()> {
        let scale = self.state.join.as_ref().and_then(Joining::scale);
        for (index, &used) in used.iter().enumerate() {
            if used && !self.state.is_applied(index) {
                self.hand_back(index)?;
                if let Some(scale) = scale {
                    let mut gradient = self.state.parameters[index].grad();
                    let _ = tch::no_grad(|| gradient.g_mul_scalar_(scale));
                }
            }
        }
        Ok(())
    }

    /// Fails on all ranks if one of them misses gradients: this one misses those of `missing`.
    pub fn check_gradients(&self, missing: &[usize]) -> Result<()> {
        if !self.state.peer_misses_grads {
            return Ok(());
        }
        let group = &self.reducer.group;
        let of_this_rank = names_of(&self.state.parameters, missing);
        let operation = "parameters got no gradient";
        group.await_error_details(operation, &of_this_rank);
        // Only now, so that whoever waits there finds out why. On another machine it may not know yet.
        self.reducer.fail_other_groups(&format!("{operation}: {of_this_rank}"));
        let of_ranks = group.collect_error_details();
        let lines: Vec<String> =
            of_ranks.iter().map(|(rank, names)| format!("rank {rank}: {names}")).collect();
        let advice = if self.state.graph.is_some() {
            "the graph is not that of the first backward: build without static_graph(true), or call \
             refresh where parameters were frozen"
        } else {
            "use every parameter in computing the loss, or freeze those parameters before wrapping \
             or call refresh after, or build with find_unused_parameters(true)"
        };
        Err(Error::MissingGradients { rank: job_rank(group), missing: lines.join("; "), advice })
    }

    /// Makes the buckets anew, in the order in which rank 0's gradients came, or in a join those of a
    /// rank that has not ended; unused parameters are last.
    pub fn rebuild(&mut self, missing: Vec<usize>) -> Result<()> {
        let mut order: Vec<i32> = Vec::with_capacity(self.state.parameters.len());
        for &index in self.state.ready_order.iter().chain(&missing) {
            if !self.state.graph.as_ref().is_some_and(|graph| graph.is_left_out(index)) {
                order.push(index as i32);
            }
        }
        self.defer_missing_grads(|backward| {
            let Self { reducer, state } = backward;
            let _wait = trace::wait(state.step.into(), None);
            let root = state.join.as_ref().map_or(0, Joining::root);
            reducer.group.broadcast(&mut order, root)?;
            // A rank that went on and failed would else take from slower ones what this backward
            // has done.
            Ok(reducer.group.barrier()?)
        })?;
        // On a GPU, a rank learns only here that another has failed in this backward.
        self.check_gradients(&missing)?;
        self.state.order = order.into_iter().map(|i| i as usize).collect();
        self.build(&self.reducer.options.caps)
    }

    /// Makes the buckets anew, with these caps.
    pub fn build(&mut self, caps: &Caps) -> Result<()> {
        let Self { reducer, state } = self;
        if reducer.path.grads_are_views() {
            state.keep_grads_apart().map_err(|error| reducer.torch_error(error))?;
        }
        let order = std::mem::take(&mut state.order);
        let built = state.build(&**reducer.path, &reducer.options, &order, caps);
        state.order = order;
        built
    }
}
