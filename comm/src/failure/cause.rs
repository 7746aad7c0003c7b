//! The cause of a group's failure, and the form in which other nodes read it.

use serde::{Deserialize, Serialize};

/// The kind of a group's failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Cause {
    /// An error of one rank, which its text says.
    Error,
    /// Ranks have more to say: see [`Failure::await_error_details`](super::Failure::await_error_details).
    ErrorDetails,
    /// Ranks called different operations.
    Mismatch,
    /// The loss of this rank of the group.
    Lost(u32),
}

/// The code of the loss of the group's first rank; that of the next is one more, and so on.
const LOST: u32 = 3;

impl Cause {
    /// Returns the number that stands for it in a note in shared memory.
    pub fn code(self) -> u32 {
        match self {
            Cause::Error => 0,
            Cause::ErrorDetails => 1,
            Cause::Mismatch => 2,
            Cause::Lost(rank) => LOST + rank,
        }
    }

    /// Returns the member of a group of `size` ranks whose loss it is.
    pub fn lost_member(self, size: usize) -> Option<usize> {
        match self {
            Cause::Lost(rank) => Some(rank as usize).filter(|&rank| rank < size),
            _ => None,
        }
    }

    /// Returns the cause with this code.
    pub fn from_code(code: u32) -> Self {
        match code {
            0 => Cause::Error,
            1 => Cause::ErrorDetails,
            2 => Cause::Mismatch,
            lost => Cause::Lost(lost - LOST),
        }
    }
}

/// A group's failure, as other nodes read it in the store and at the end of connections.
#[derive(PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PublishedFailure {
    pub cause: Cause,
    /// The lost rank has left the group.
    pub has_left: bool,
    /// The error, as the rank that saw it first describes it.
    pub text: String,
}

impl PublishedFailure {
    /// Writes the failure as a text.
    pub fn encode(&self) -> String {
        // A struct of a number, a bool and a text cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads a failure; None if the text is none.
    pub fn decode(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_read_as_they_were_written() {
        for cause in [Cause::Error, Cause::ErrorDetails, Cause::Mismatch, Cause::Lost(0)] {
            assert_eq!(Cause::from_code(cause.code()), cause);
            let text = "rank 1: all_reduce #3 \"failed\"\nat once".to_string();
            let failure = PublishedFailure { cause, has_left: cause == Cause::Lost(0), text };
            assert_eq!(PublishedFailure::decode(&failure.encode()), Some(failure));
        }
        assert_eq!(Cause::from_code(Cause::Lost(70).code()), Cause::Lost(70));
        assert_eq!(PublishedFailure::decode("1 0 text"), None);
    }
}
