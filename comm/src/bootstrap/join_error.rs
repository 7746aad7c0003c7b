//! Why a join fails.

/// Why ranks do not come together.
#[derive(Debug)]
pub enum JoinError {
    /// The program wanted to stop waiting.
    Interrupted,
    /// What happened, and what to do.
    Failed(String),
}

impl From<String> for JoinError {
    fn from(reason: String) -> Self {
        Self::Failed(reason)
    }
}
