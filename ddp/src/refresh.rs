//! Parameters that are frozen, or trained again, between steps.

use crate::ddp::Ddp;
use crate::error::{Error, Result, job_rank};
use crate::model_check::{agree, check, describe, first_mismatch};

impl<M> Ddp<M> {
    /// Trains those of the model's parameters that require gradients now: call this after some were
    /// frozen or unfrozen (`set_requires_grad`), between two steps. All ranks call this, with the
    /// same parameters. Gradients stay as they are, also what backwards under
    /// [`Ddp::no_sync`] have added up.
    ///
    /// # Errors
    ///
    /// Ranks train different parameters, or none: then the `Ddp` goes on as before. A failure of the
    /// group.
    pub fn refresh(&mut self) -> Result<()> {
        let Some(reducer) = &self.reducer else { return Ok(()) };
        reducer.check_process("refresh")?;
        let rank = job_rank(&self.group);
        let named = reducer.named_parameters();
        let fit = check(&named, &[], reducer.options(), false).and_then(|()| {
            reducer.frozen_before_reduction().map_or(Ok(()), |name| {
                Err(format!(
                    "{name} was frozen with a gradient that is not reduced yet: freeze it after the \
                     backward that ends no_sync"
                ))
            })
        });
        let lines = match &fit {
            Ok(()) => describe(&named, &[]),
            Err(reason) => vec![format!("a model that cannot be trained: {reason}")],
        };
        if let Some(difference) = first_mismatch(reducer.group(), &lines)? {
            return Err(Error::Mismatch { rank, difference });
        }
        fit.map_err(|reason| Error::Model { rank, reason })?;
        // A hook that is dropped takes another one of its parameter with it.
        self.hooks.clear();
        self.hooks = agree(reducer.group(), reducer.train_anew())?;
        Ok(())
    }
}
