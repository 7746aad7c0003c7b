//! Parameters that are frozen, or trained again, between steps.

use flow_tensor::CoalescedBroadcast;

use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};
use crate::model_check::{agree, check, check_hooks, describe, first_mismatch};

impl<M> Ddp<M> {
    /// Trains those of the model's parameters that require gradients now: call this after some were
    /// frozen or unfrozen (`set_requires_grad`), between two steps. All ranks call this, with the
    /// same parameters. Parameters that were frozen become rank 0's. Gradients stay as they are, also
    /// what backwards under [`Ddp::no_sync`] have added up.
    ///
    /// # Errors
    ///
    /// Ranks train different parameters, or none, or one that another `Ddp` trains, or there is no
    /// memory: then the `Ddp` goes on as before. A failure of the group.
    pub fn refresh(&mut self) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        reducer.check_process("refresh")?;
        let rank = job_rank(&self.group);
        let group = reducer.group();
        let named = reducer.named_parameters();
        let unfrozen = reducer.unfrozen();
        let fit = check(&named, &[], reducer.options(), false)
            .and_then(|()| check_hooks(&unfrozen))
            .and_then(|()| reducer.check_reduced());
        let lines = match &fit {
            Ok(()) => describe(&named, &[]),
            Err(reason) => vec![format!("a model that cannot be trained: {reason}")],
        };
        if let Some(difference) = first_mismatch(group, &lines)? {
            return Err(Error::Mismatch { rank, difference });
        }
        fit.map_err(|reason| Error::Model { rank, reason })?;
        let state = agree(group, reducer.trained_anew())?;
        // Ranks of an Fsdp have rank 0's already.
        let to_broadcast = if reducer.kept().is_some() { Vec::new() } else { unfrozen };
        let broadcast = CoalescedBroadcast::new(group, to_broadcast).map_err(Error::from);
        let mut broadcast = agree(group, broadcast)?;
        if !broadcast.is_empty() {
            agree(group, broadcast.run(group, 0).map_err(Error::from))?;
        }
        // A hook that is dropped takes another one of its parameter with it.
        self.hooks.clear();
        self.hooks = agree(group, reducer.go_on(state))?;
        Ok(())
    }
}
