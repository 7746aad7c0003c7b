//! How the ranks of a group make their communicator.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flow_kernels::cuda::Device;
use flow_store::Error as StoreError;

use super::communicator::{Communicator, CommunicatorError};
use super::error::{system_error, EnqueueError};
use super::library::Library;
use super::result::UniqueId;
use crate::error::{Error, Result};
use crate::failure::Failure;

/// How often the peers are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The operation in messages about a group that is being made.
pub const JOINING: &str = "joining over NCCL";

/// Makes the communicator: the first rank's unique id reaches the others through the store.
pub fn init_communicator(
    failure: &Failure,
    device: &Arc<Device>,
    prefix: &str,
) -> Result<Communicator> {
    // The others wait for this rank.
    let system = |reason: String| failure.fail(system_error(failure, JOINING, reason));
    let mut cancelled = join_check(failure, prefix)?;
    let (store, key) = (failure.core.world.store(), format!("{prefix}id"));
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
    let (begin, timeout) = (Instant::now(), failure.core.timeout());
    let store = failure.core.world.store();
    let joined = move |rank: usize| format!("{prefix}joined/{rank}");
    if let Some(store) = store {
        let fail =
            |error: StoreError| failure.fail(system_error(failure, JOINING, error.to_string()));
        store.set(&joined(failure.core.rank), b"").map_err(fail)?;
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
        let absent =
            |&r: &usize| store.is_some_and(|s| !matches!(s.try_get(&joined(r)), Ok(Some(_))));
        let missing: Vec<usize> =
            (0..failure.core.size()).filter(absent).map(|r| failure.core.ranks[r]).collect();
        let missing = match missing.is_empty() {
            true => "NCCL to connect the ranks, which are all there".into(),
            false => missing
                .into_iter()
                .map(|r| failure.core.world.describe(r))
                .collect::<Vec<_>>()
                .join("; "),
        };
        let (rank, operation) = (failure.core.world.rank, JOINING.into());
        Err(failure.fail(Error::Timeout { rank, operation, timeout, missing }))
    })
}

pub fn not_joined(failure: &Failure, error: CommunicatorError) -> Error {
    match error {
        CommunicatorError::Cancelled(error) => error,
        other => failure.fail(system_error(failure, JOINING, EnqueueError::from(other).0)),
    }
}

/// A tag for a new group's keys in the store: all ranks take that of the first.
pub(crate) fn unique_tag() -> [i64; 2] {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    [i64::from(std::process::id()), NUMBER.fetch_add(1, Ordering::Relaxed) as i64]
}
