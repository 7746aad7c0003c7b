//! What is done where an operation has no rule, and where its inputs are on different placements.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::error::{Error, Result};

static GATHERED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
static MOVES_INPUTS: LazyLock<AtomicBool> =
    LazyLock::new(|| AtomicBool::new(is_set("FLOW_GLOBAL_MOVE_INPUTS")));

/// Returns whether a variable of the environment is 1.
pub fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value == "1")
}

/// Notes that an operation without a rule gathers its inputs: a warning, once for each operation. An
/// error if `FLOW_GLOBAL_STRICT` is 1.
pub fn gathered(name: &str) -> Result<()> {
    if is_set("FLOW_GLOBAL_STRICT") {
        return Err(Error::Unsupported {
            operation: name.to_owned(),
            reason: "it has no rule, and FLOW_GLOBAL_STRICT=1 forbids to gather its inputs; box \
                     them by to_global, to B on each axis"
                .to_owned(),
        });
    }
    let mut known = GATHERED.lock().unwrap_or_else(PoisonError::into_inner);
    if known.insert(name.to_owned()) {
        log::warn!("{name} has no rule for global tensors: its inputs are gathered on all ranks");
    }
    Ok(())
}

/// Returns the operations without a rule that have run so far, by name.
pub fn gathered_operations() -> Vec<String> {
    GATHERED.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
}

/// Sets whether an operation whose inputs are on different placements moves them to one, or is an
/// error. By default it is an error; `FLOW_GLOBAL_MOVE_INPUTS=1` changes that. For all threads of
/// the process; all ranks say the same.
///
/// Inputs are moved to the placement of the tensor that the operation writes, if it writes one.
/// Else they are moved to that of the largest input, as this moves the fewest bytes; of equally
/// large ones, to that of the first. They keep their SBP where the placements have as many axes,
/// else they become B; partial values become B. Gradients come back to the inputs' own placements,
/// as those of [`to_global`](crate::GlobalTensor::to_global). [`explain`](crate::explain()) and
/// `FLOW_EXPLAIN=1` show each move.
pub fn move_inputs(moves: bool) {
    MOVES_INPUTS.store(moves, Ordering::Relaxed);
}

/// Returns what [`move_inputs`] has set.
pub fn moves_inputs() -> bool {
    MOVES_INPUTS.load(Ordering::Relaxed)
}
