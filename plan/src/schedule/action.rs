//! The actions of a rank.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One action of a rank. `stage` counts all stages of the model, and `micro_batch` all micro-batches of
/// a step. Both begin with 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Action {
    /// The stage's forward.
    Forward {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The stage's whole backward: the gradients of its inputs and of its weights.
    Backward {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The first half of a backward in zero bubble schedules: the gradients of the inputs only.
    BackwardInput {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The other half, later: the gradients of the weights.
    BackwardWeight {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Sends the output of `stage` to the rank of stage + 1, and does not wait for that rank.
    SendActivation {
        /// The stage that computed what is sent.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Receives the input of `stage` from the rank of stage - 1, and waits for it.
    RecvActivation {
        /// The stage that needs what is received.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Sends the gradient of the input of `stage` to the rank of stage - 1, and does not wait for
    /// that rank.
    SendGradient {
        /// The stage that computed what is sent.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Receives the gradient of the output of `stage` from the rank of stage + 1, and waits for it.
    RecvGradient {
        /// The stage that needs what is received.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
}

use Action::*;

impl Action {
    /// Returns the stage.
    pub fn stage(self) -> usize {
        self.parts().1
    }

    /// Returns the micro-batch.
    pub fn micro_batch(self) -> usize {
        self.parts().2
    }

    /// Returns whether the action is a computation, and not a send or a receive.
    pub fn is_computation(self) -> bool {
        matches!(
            self,
            Forward { .. } | Backward { .. } | BackwardInput { .. } | BackwardWeight { .. }
        )
    }

    /// Returns the receive on the other rank that belongs to this send, or None if this is no send.
    pub fn receive(self) -> Option<Self> {
        match self {
            SendActivation { stage, micro_batch } => {
                Some(RecvActivation { stage: stage + 1, micro_batch })
            }
            SendGradient { stage, micro_batch } => {
                Some(RecvGradient { stage: stage.checked_sub(1)?, micro_batch })
            }
            _ => None,
        }
    }

    /// Returns the send on the other rank that belongs to this receive, or None if this is no receive.
    pub fn send(self) -> Option<Self> {
        match self {
            RecvActivation { stage, micro_batch } => {
                Some(SendActivation { stage: stage.checked_sub(1)?, micro_batch })
            }
            RecvGradient { stage, micro_batch } => {
                Some(SendGradient { stage: stage + 1, micro_batch })
            }
            _ => None,
        }
    }

    /// Returns the same computation of another micro-batch. Sends and receives stay the same.
    pub(super) fn of_micro_batch(self, micro_batch: usize) -> Self {
        match self {
            Forward { stage, .. } => Forward { stage, micro_batch },
            Backward { stage, .. } => Backward { stage, micro_batch },
            BackwardInput { stage, .. } => BackwardInput { stage, micro_batch },
            BackwardWeight { stage, .. } => BackwardWeight { stage, micro_batch },
            other => other,
        }
    }

    fn parts(self) -> (&'static str, usize, usize) {
        match self {
            Forward { stage, micro_batch } => ("forward", stage, micro_batch),
            Backward { stage, micro_batch } => ("backward", stage, micro_batch),
            BackwardInput { stage, micro_batch } => ("backward of inputs", stage, micro_batch),
            BackwardWeight { stage, micro_batch } => ("backward of weights", stage, micro_batch),
            SendActivation { stage, micro_batch } => ("send of the output", stage, micro_batch),
            RecvActivation { stage, micro_batch } => ("receive of the input", stage, micro_batch),
            SendGradient { stage, micro_batch } => {
                ("send of the input's gradient", stage, micro_batch)
            }
            RecvGradient { stage, micro_batch } => {
                ("receive of the output's gradient", stage, micro_batch)
            }
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (what, stage, micro_batch) = self.parts();
        write!(f, "{what} of stage {stage}, micro-batch {micro_batch}")
    }
}
