//! The set of actions that are over.

use super::action::Action::{self, *};

/// A set of actions. A whole backward counts as both its halves.
pub(super) struct Done {
    micro_batches: usize,
    /// A bit for each kind of action, by stage and micro-batch.
    kinds: Vec<u8>,
}

impl Done {
    /// Returns a set without actions.
    pub fn new(stages: usize, micro_batches: usize) -> Self {
        Self { micro_batches, kinds: vec![0; stages * micro_batches] }
    }

    /// Adds an action, and returns whether it is new. Actions of other stages or micro-batches are not
    /// kept, and always new.
    pub fn insert(&mut self, action: Action) -> bool {
        let bits = bits(action);
        let Some(kinds) = self.place(action).and_then(|place| self.kinds.get_mut(place)) else {
            return true;
        };
        let is_new = *kinds & bits == 0;
        *kinds |= bits;
        is_new
    }

    /// Returns whether an action was added.
    pub fn contains(&self, action: Action) -> bool {
        let kinds = self.place(action).and_then(|place| self.kinds.get(place));
        kinds.is_some_and(|kinds| kinds & bits(action) == bits(action))
    }

    fn place(&self, action: Action) -> Option<usize> {
        let micro_batch = action.micro_batch();
        (micro_batch < self.micro_batches)
            .then(|| action.stage() * self.micro_batches + micro_batch)
    }
}

fn bits(action: Action) -> u8 {
    match action {
        Forward { .. } => 1,
        BackwardInput { .. } => 2,
        BackwardWeight { .. } => 4,
        Backward { .. } => 2 | 4,
        SendActivation { .. } => 8,
        RecvActivation { .. } => 16,
        SendGradient { .. } => 32,
        RecvGradient { .. } => 64,
    }
}
