//! Parameters that an [`Fsdp`](crate::Fsdp) leaves to each rank.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use flow_autograd::identity;
use flow_comm::ProcessGroup;
use tch::Tensor;
use tch::nn::Variables;

use crate::buffers::broadcast_all;
use crate::error::Result;

/// The ignored parameters of a model.
#[derive(Default)]
pub(crate) struct Ignored {
    /// In alphabetical order of their names, of which a parameter may have several.
    pub parameters: Vec<(String, Tensor)>,
    /// Names that are no parameter's.
    unknown: Vec<String>,
}

impl Ignored {
    /// Returns the parameters of a store that have these names.
    pub fn of(names: &[String], store: &Mutex<Variables>) -> Self {
        let variables = store.lock().unwrap_or_else(PoisonError::into_inner);
        let trainable = variables.trainable_variables.iter();
        let trainable: HashSet<usize> = trainable.map(|one| identity(&one.tensor)).collect();
        let mut unknown = Vec::new();
        let mut ignored = HashSet::new();
        for name in names {
            let named = variables.named_variables.get(name).map(identity);
            match named.filter(|identity| trainable.contains(identity)) {
                Some(identity) => drop(ignored.insert(identity)),
                None => unknown.push(name.clone()),
            }
        }
        let mut parameters = Vec::new();
        for (name, tensor) in &variables.named_variables {
            if ignored.contains(&identity(tensor)) {
                parameters.push((name.clone(), tensor.shallow_clone()));
            }
        }
        parameters.sort_by(|(name, _), (other, _)| name.cmp(other));
        Self { parameters, unknown }
    }

    /// Checks that all names are parameters'. The error has those that are not.
    pub fn check(&self) -> Result<(), String> {
        if self.unknown.is_empty() {
            return Ok(());
        }
        Err(format!(
            "ignored_parameters names {}, which the VarStore has not among its trainable variables",
            self.unknown.join(", ")
        ))
    }

    /// Returns the identities of the parameters.
    pub fn identities(&self) -> HashSet<usize> {
        self.parameters.iter().map(|(_, tensor)| identity(tensor)).collect()
    }

    /// Describes what must be the same on all ranks, in a line.
    pub fn describe(&self) -> String {
        let parameters = self.parameters.iter();
        let parameters: Vec<String> = parameters
            .map(|(name, tensor)| format!("{name} {:?} {:?}", tensor.size(), tensor.kind()))
            .collect();
        format!("the ignored parameters {parameters:?}")
    }

    /// Returns how often each parameter has been changed.
    pub fn versions(&self) -> Vec<i64> {
        self.parameters.iter().map(|(_, tensor)| tensor.internal_version()).collect()
    }

    /// Gives all ranks those parameters that rank 0 has changed since they had these versions. All ranks
    /// call this.
    pub fn share_changed(&self, group: &ProcessGroup, before: &[i64]) -> Result<()> {
        let versions = self.versions();
        let changes = versions.iter().zip(before).map(|(now, before)| u8::from(now != before));
        let mut is_changed: Vec<u8> = changes.collect();
        if is_changed.is_empty() {
            return Ok(());
        }
        group.broadcast(&mut is_changed, 0)?;
        let mut changed = Vec::new();
        for ((name, tensor), is_changed) in self.parameters.iter().zip(is_changed) {
            if is_changed != 0 {
                changed.push((name.clone(), tensor.shallow_clone()));
            }
        }
        broadcast_all(group, &changed)
    }
}
