//! The parameters whose gradients are not the same on all ranks, as a [`CommHook`](crate::CommHook) says.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};

use tch::Tensor;

/// How many [`Apart`]s have each parameter, by its identity.
static APART: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Parameters whose gradients are each rank's own, as long as this lives.
pub(crate) struct Apart(HashSet<usize>);

impl Apart {
    /// Keeps gradients of these parameters out of averages.
    pub fn new<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> Self {
        let own: HashSet<usize> = parameters.into_iter().map(flow_autograd::identity).collect();
        let mut apart = APART.lock().unwrap_or_else(PoisonError::into_inner);
        for &identity in &own {
            *apart.entry(identity).or_default() += 1;
        }
        Self(own)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let mut apart = APART.lock().unwrap_or_else(PoisonError::into_inner);
        apart.retain(|identity, count| {
            *count -= usize::from(self.0.contains(identity));
            *count > 0
        });
    }
}

/// Returns whether the gradients of one of these parameters are each rank's own.
pub(crate) fn are_apart<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> bool {
    let apart = APART.lock().unwrap_or_else(PoisonError::into_inner);
    !apart.is_empty()
        && parameters.into_iter().any(|tensor| apart.contains_key(&flow_autograd::identity(tensor)))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn a_parameter_is_apart_until_the_last_model_with_it_ends() {
        let parameters = [0, 1].map(|_| Tensor::zeros(2, (Kind::Float, Device::Cpu)));
        let first = Apart::new(&parameters);
        let second = Apart::new(&parameters[..1]);
        drop(first);
        assert!(are_apart(&parameters) && !are_apart(&parameters[1..]));
        drop(second);
        assert!(!are_apart(&parameters));
    }
}
