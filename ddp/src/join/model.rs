//! A `Ddp` in a join.

use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;

use super::joining::{BUFFERS, FORWARD, root_of};
use super::{JoinContext, JoinHook, JoinOptions, Joinable, join};
use crate::buffers::Buffers;
use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};
use crate::reducer::Reducer;

impl<M> Ddp<M> {
    /// Runs a training loop in which ranks may take different numbers of steps, with the default
    /// options of [`Ddp::join_with`].
    ///
    /// ```no_run
    /// # use flow_ddp::{Ddp, Error, TryBackwardStep};
    /// # use tch::{Tensor, nn, nn::ModuleT};
    /// # fn train(
    /// #     model: &Ddp<nn::Linear>, optimizer: &mut nn::Optimizer, batches: &[(Tensor, Tensor)],
    /// # ) -> Result<(), Error> {
    /// model.join(|| {
    ///     for (x, y) in batches {
    ///         let loss = model.forward_t(x, true).cross_entropy_for_logits(y);
    ///         optimizer.try_backward_step(&loss)?;
    ///     }
    ///     Ok(())
    /// })
    /// # }
    /// ```
    pub fn join<T, E: From<Error> + Display>(
        &self,
        body: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.join_with(JoinOptions::default(), body)
    }

    /// Runs a training loop in which ranks may take different numbers of steps, even none: PyTorch's
    /// `DistributedDataParallel.join`. A rank whose `body` is over adds zeros to the gradients of the
    /// others, until all are. Then all ranks have the parameters and buffers of one that ended last.
    /// All ranks call this.
    ///
    /// In it each forward in training mode gives the ranks the buffers of the last rank that has not
    /// ended, as PyTorch does, rather than rank 0's. Ranks that have ended take no part in other
    /// collectives of `body`: for those, [`join`](join()) has [`Joinable`]s. An optimizer steps on
    /// the ranks that call it, so that what it keeps (momentum) stays behind on the others.
    ///
    /// # Errors
    ///
    /// What `body` returns: the model fails on all other ranks then, with its text. A model built
    /// with `static_graph(true)`. Batch norms of
    /// [`convert_sync_batchnorm`](crate::convert_sync_batchnorm) without
    /// [`throw_on_early_termination`](JoinOptions::throw_on_early_termination). Other options on
    /// other ranks. [`Error::EndedEarly`], after which the model can be trained on. A failure of the
    /// group.
    pub fn join_with<T, E: From<Error> + Display>(
        &self,
        options: JoinOptions,
        body: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        join(&[self], options, body)
    }
}

impl<M> Joinable for Ddp<M> {
    fn join_group(&self) -> &ProcessGroup {
        self.reducer.as_ref().map_or(&self.group, |reducer| reducer.group())
    }

    fn join_hook(&self, context: JoinContext) -> Result<Box<dyn JoinHook + '_>, BoxError> {
        let reducer = self.reducer.as_deref();
        if let Some(reducer) = reducer {
            reducer.check_process("join")?;
            let throws = context.options().throw_on_early_termination;
            let buffers = self.all_buffers.lock().unwrap_or_else(PoisonError::into_inner);
            if !throws && buffers.iter().any(flow_autograd::replaces_batch_norm) {
                let reason = "set throw_on_early_termination: ranks that have ended take no part in \
                              the collectives of convert_sync_batchnorm's layers";
                let rank = job_rank(&self.group);
                return Err(Error::Join { rank, reason: reason.to_owned() }.into());
            }
            reducer.begin_join(context)?;
        }
        Ok(Box::new(ModelHook { reducer, buffers: &self.buffers }))
    }
}

struct ModelHook<'a> {
    reducer: Option<&'a Reducer>,
    buffers: &'a Mutex<Buffers>,
}

impl JoinHook for ModelHook<'_> {
    fn main_hook(&mut self, code: i64, active: &[usize]) -> Result<(), BoxError> {
        let Some(reducer) = self.reducer else { return Ok(()) };
        match code {
            FORWARD => {}
            BUFFERS => {
                let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
                buffers.share(reducer.group(), root_of(active))?;
            }
            step => reducer.shadow_backward(step as u32, active)?,
        }
        Ok(())
    }

    fn post_hook(&mut self, last_joiners: &[usize]) -> Result<(), BoxError> {
        if let Some(reducer) = self.reducer {
            let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
            reducer.broadcast_model(last_joiners, &mut buffers.broadcast)?;
        }
        Ok(())
    }
}

impl Drop for ModelHook<'_> {
    fn drop(&mut self) {
        if let Some(reducer) = self.reducer {
            reducer.end_join();
        }
    }
}
