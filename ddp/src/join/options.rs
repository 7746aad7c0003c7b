//! Options of a join.

/// Options of a join; all ranks choose the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinOptions {
    /// Whether gradients are divided by the number of all ranks also where some have ended (default:
    /// yes), so that each sample weighs the same. If not, they are divided by the number of ranks
    /// that have not.
    pub divide_by_initial_world_size: bool,
    /// Whether it is an error of all ranks, [`Error::EndedEarly`](crate::Error::EndedEarly), when
    /// some have ended and others have not (default: no).
    pub throw_on_early_termination: bool,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self { divide_by_initial_world_size: true, throw_on_early_termination: false }
    }
}
