//! A virtual rank's part of a step.

use std::fmt::Display;
use std::ops::Range;

use flow_autograd::with_seed;
use flow_comm::digest;

use super::own::OwnVirtualRanks;
use crate::ddp::{Ddp, NoSync};
use crate::error::{Error, Result};
use crate::reducer::Reducer;

impl<M> Ddp<M> {
    /// Returns the virtual ranks of this rank, in the order in which it runs them: see
    /// [`DdpBuilder::virtual_ranks`](crate::DdpBuilder::virtual_ranks). Without that, the rank itself.
    pub fn virtual_ranks(&self) -> Range<usize> {
        let own = self.reducer.as_ref().and_then(|reducer| reducer.virtual_ranks());
        let rank = self.group.rank();
        own.map_or(rank..rank + 1, |own| own.own.clone())
    }

    /// Runs the part of virtual rank `part` in a step: forward and backward. A rank runs each of
    /// [`Ddp::virtual_ranks`] once in a step, in order. The backward of its last one averages the gradients of
    /// all virtual ranks; `.grad` has them after this.
    ///
    /// `run` begins without gradients, so that no `zero_grad` is needed, and with the buffers of virtual rank
    /// 0 after the last step. The random numbers that libtorch draws in it are those of `part` and `step`,
    /// whichever process this is; those outside go on as before. `step` is the program's own number of the
    /// step, which it goes on with after a restart.
    ///
    /// # Errors
    ///
    /// What `run` returns; virtual ranks that come in another order; a backward that leaves a parameter out,
    /// or none. The `Ddp` then fails on all ranks. A failure of another rank.
    pub fn in_virtual_rank<T, E: From<Error> + Display>(
        &self,
        part: usize,
        step: u64,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let running = Running::begin(self, part)?;
        let seed = digest(&(step, part as u64)) as i64;
        let seeded = with_seed(seed, run);
        let result = seeded.map_err(|error| Error::torch(&self.group, "in_virtual_rank", error));
        match result.map_err(E::from).and_then(|result| result) {
            Ok(value) => {
                running.end()?;
                Ok(value)
            }
            Err(error) => {
                running.fail(&format!("{error:#}"));
                Err(error)
            }
        }
    }
}

/// A virtual rank that runs. If it is dropped rather than ended, in a panic, the `Ddp` fails on all ranks.
struct Running<'a, M> {
    model: &'a Ddp<M>,
    reducer: &'a Reducer,
    virtual_ranks: &'a OwnVirtualRanks,
    part: usize,
    /// Keeps the gradients of all but the last one here.
    _local: Option<NoSync>,
    is_over: bool,
}

impl<'a, M> Running<'a, M> {
    fn begin(model: &'a Ddp<M>, part: usize) -> Result<Self> {
        let reducer = model.reducer.as_deref();
        let found = reducer.and_then(|reducer| Some((reducer, reducer.virtual_ranks()?)));
        let Some((reducer, virtual_ranks)) = found else {
            let reason = "in_virtual_rank: build with virtual_ranks(number)".to_owned();
            return Err(Error::model(&model.group, reason));
        };
        reducer.group().check("in_virtual_rank")?;
        let OwnVirtualRanks { own, .. } = virtual_ranks;
        let mut progress = virtual_ranks.progress();
        if progress.is_running || part != progress.next {
            let expected =
                if progress.is_running { "one runs already" } else { "it is not its turn" };
            let reason = format!(
                "in_virtual_rank({part}): {expected}: this rank runs {own:?} once in each step, in this order, \
                 and comes to {}",
                progress.next
            );
            drop(progress);
            reducer.abort(&reason);
            return Err(Error::model(&model.group, reason));
        }
        let is_last = part + 1 == own.end;
        progress.is_running = true;
        progress.reduces = false;
        if part == own.start {
            progress.waiting.clear();
            progress.buffers = model.copies_of_buffers();
        } else {
            model.set_buffers(&progress.buffers);
        }
        drop(progress);
        let _local = (!is_last).then(|| model.no_sync());
        let running = Self { model, reducer, virtual_ranks, part, _local, is_over: false };
        reducer.drop_grads()?;
        Ok(running)
    }

    fn end(mut self) -> Result<()> {
        let OwnVirtualRanks { own, .. } = self.virtual_ranks;
        let is_last = self.part + 1 == own.end;
        let checked = if is_last {
            let is_reduced = self.virtual_ranks.progress().reduces;
            is_reduced.then_some(()).ok_or_else(|| {
                "it has run no backward, or under no_sync only: its last one reduces gradients"
                    .into()
            })
        } else {
            self.reducer.with_parameters(|all| self.virtual_ranks.take_gradients(self.part, all))
        };
        if let Err(reason) = checked {
            let reason = format!("virtual rank {}: {reason}", self.part);
            self.abort(&reason);
            return Err(Error::model(&self.model.group, reason));
        }
        let mut progress = self.virtual_ranks.progress();
        progress.is_running = false;
        if self.part == 0 && !is_last {
            progress.first_buffers = self.model.copies_of_buffers();
        }
        progress.next = if is_last { own.start } else { self.part + 1 };
        if is_last {
            if own.contains(&0) && own.len() > 1 {
                self.model.set_buffers(&progress.first_buffers);
            }
            drop(progress);
            self.is_over = true;
            let synced = self.model.sync_buffers();
            if synced.is_err() {
                self.model.set_buffers(&self.virtual_ranks.progress().buffers);
            }
            return synced;
        }
        self.is_over = true;
        Ok(())
    }

    fn fail(mut self, cause: &str) {
        self.abort(&format!("virtual rank {} failed: {cause}", self.part));
    }

    fn abort(&mut self, cause: &str) {
        self.is_over = true;
        // The step may be repeated, by other processes.
        self.model.set_buffers(&self.virtual_ranks.progress().buffers);
        self.reducer.abort(cause);
    }
}

impl<M> Drop for Running<'_, M> {
    fn drop(&mut self) {
        if !self.is_over {
            self.abort(&format!("virtual rank {} has panicked", self.part));
        }
    }
}
