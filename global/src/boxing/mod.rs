//! Boxing: a tensor gets another placement or SBP.
//!
//! | file | subject |
//! |---|---|
//! | `plan` | what is to be reduced and copied, with as few bytes as that needs (pure) |
//! | `phases` | what a rank does for it |
//! | `execute` | carries out a plan on tensors, by reading other ranks' memory |
//! | `packed` | the same by collectives, where that cannot be read |
//! | `memory` | regions of tensors as memory |

pub mod execute;
pub(crate) mod memory;
mod packed;
mod phases;
pub mod plan;
