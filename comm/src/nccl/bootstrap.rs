//! The ranks of a group make their communicator.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use flow_kernels::cuda::Device;
use flow_store::{Error as StoreError, Store};

use super::communicator::{Communicator, CommunicatorError};
use super::error::{EnqueueError, system_error};
use super::library::Library;
use super::result::UniqueId;
use crate::error::{Error, Result};
use crate::failure::Failure;

/// The interval at which the peers are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The operation in messages about a group that is being made.
pub const JOINING: &str = "joining over NCCL";

/// Makes the communicator: the first rank's unique id reaches the others through the store.
pub fn init_communicator(
    failure: &Failure,
    device: &Arc<Device>,
    prefix: &str,
) -> Result<Arc<Communicator>> {
    // The others wait for this rank.
    let system = |reason: String| failure.fail(system_error(failure, JOINING, reason));
    let mut cancelled = join_check(failure, prefix)?;
    let store = failure.core.world.store();
    let key = format!("{prefix}id");
    let id = if failure.core.rank == 0 {
        let library = Library::get().map_err(|e| system(e.to_string()))?;
        let id = library.unique_id().map_err(|e| system(e.to_string()))?;
        if let Some(store) = store {
            store.set(&key, &id.to_bytes()).map_err(|e| system(e.to_string()))?;
        }
        id
    } else {
        let store = store.ok_or_else(|| system("there is no rendezvous store".into()))?;
        loop {
            match store.get(&key, POLL_INTERVAL) {
                Ok(bytes) => {
                    let bytes = bytes
                        .try_into()
                        .map_err(|_| system(format!("{key} in the store is no id of NCCL's")))?;
                    break UniqueId::from_bytes(bytes);
                }
                Err(StoreError::Timeout { .. }) => cancelled()?,
                Err(error) => return Err(system(error.to_string())),
            }
        }
    };
    let joined =
        Communicator::new(device, &id, failure.core.rank, failure.core.size(), &mut cancelled);
    joined.map_err(|error| not_joined(failure, error))
}

/// Announces that this rank waits for all ranks of `failure` to join over NCCL. Returns the check
/// to call during the wait: its error ends the wait.
pub fn join_check<'a>(
    failure: &'a Failure,
    prefix: &'a str,
) -> Result<impl FnMut() -> Result<()> + 'a> {
    let begin = Instant::now();
    let timeout = failure.core.timeout();
    let store = failure.core.world.store();
    if let Some(store) = store {
        store
            .set(&joined_key(prefix, failure.core.rank), b"")
            .map_err(|error| failure.fail(system_error(failure, JOINING, error.to_string())))?;
    }
    let mut next_poll = begin + POLL_INTERVAL;
    Ok(move || {
        if Instant::now() < next_poll {
            return Ok(());
        }
        next_poll = Instant::now() + POLL_INTERVAL;
        failure.check_failure(&JOINING, true)?;
        if let Some(&peer) = failure.departed_peers().first() {
            return Err(failure.fail_peer_lost(peer, &JOINING));
        }
        if begin.elapsed() < timeout {
            return Ok(());
        }
        let missing = store.map_or(Vec::new(), |store| absent(failure, store, prefix));
        Err(failure.fail(Error::Timeout {
            rank: failure.core.world.rank,
            operation: JOINING.into(),
            timeout,
            missing: if missing.is_empty() {
                "NCCL to connect the ranks, which are all there".into()
            } else {
                missing.join("; ")
            },
        }))
    })
}

/// Returns the key that a rank sets when it waits for the others.
fn joined_key(prefix: &str, rank: usize) -> String {
    format!("{prefix}joined/{rank}")
}

/// Returns the ranks that have not come, for messages.
fn absent(failure: &Failure, store: &Store, prefix: &str) -> Vec<String> {
    let core = &failure.core;
    let absent =
        core.ranks_where(|rank| !matches!(store.try_get(&joined_key(prefix, rank)), Ok(Some(_))));
    absent.into_iter().map(|rank| core.world.describe(core.ranks[rank])).collect()
}

/// Returns the error of a communicator that was not made.
pub fn not_joined(failure: &Failure, error: CommunicatorError) -> Error {
    match error {
        CommunicatorError::Cancelled(error) => error,
        other => failure.fail(system_error(failure, JOINING, EnqueueError::from(other).reason)),
    }
}

/// Returns a tag for a new group's keys in the store, which no other group of this rank has: all
/// ranks take that of the first.
pub(crate) fn unique_tag() -> [i64; 2] {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    [i64::from(std::process::id()), NUMBER.fetch_add(1, Ordering::Relaxed) as i64]
}
