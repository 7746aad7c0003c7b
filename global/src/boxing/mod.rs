//! Boxing: a tensor gets another placement or SBP.
//!
//! | file | subject |
//! |---|---|
//! | `plan` | what is to be reduced and copied, with as few bytes as that needs (pure) |
//! | `execute` | carries out a plan on tensors |

pub mod execute;
pub mod plan;
