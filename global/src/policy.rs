//! What is done where an operation has no rule.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

static GATHERED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Notes that an operation without a rule gathers its inputs: a warning, once for each operation. An
/// error if `FLOW_GLOBAL_STRICT` is 1.
pub fn gathered(name: &str) -> Result<()> {
    if std::env::var("FLOW_GLOBAL_STRICT").is_ok_and(|value| value == "1") {
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

/// The operations without a rule that have run so far, by name.
pub fn gathered_operations() -> Vec<String> {
    GATHERED.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
}
