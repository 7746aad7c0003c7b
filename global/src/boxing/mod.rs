//! Boxing: a tensor gets another placement or SBP.
//!
//! | file | subject |
//! |---|---|
//! | `plan` | what is to be reduced and copied, with as few bytes as that needs (pure) |
//! | `execute` | carries out a plan on tensors |

pub mod execute;
pub mod plan;

use crate::error::Result;
use crate::placement::Placement;

/// Bytes that boxing has moved between the ranks of the placement's job so far: what all ranks
/// together receive, counted on each rank that takes part.
///
/// # Errors
/// The placement has no process group.
pub fn moved_bytes(placement: &Placement) -> Result<u64> {
    Ok(placement.runtime()?.groups.moved())
}
