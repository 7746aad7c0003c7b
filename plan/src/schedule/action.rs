//! What a rank does.

use std::fmt;

/// One thing that a rank does. `stage` counts all stages of the model, `micro_batch` those of a
/// step; both begin with 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// The stage's forward.
    Forward {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The stage's backward: the gradients of its inputs and of its weights at once.
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
    /// The stage.
    pub fn stage(self) -> usize {
        self.parts().1
    }

    /// The micro-batch.
    pub fn micro_batch(self) -> usize {
        self.parts().2
    }

    /// Whether this is a computation, and not a send or a receive.
    pub fn is_computation(self) -> bool {
        matches!(
            self,
            Forward { .. } | Backward { .. } | BackwardInput { .. } | BackwardWeight { .. }
        )
    }

    /// Of a send: what the other rank does to receive it.
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

    /// Of a receive: what the other rank does to send it.
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

    /// The same computation of another micro-batch; sends and receives are left as they are.
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
