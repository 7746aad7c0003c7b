//! How the ranks of a group make their communicator.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flow_kernels::cuda::Device;

use super::communicator::{Communicator, CommunicatorError};
use super::error::{system_error, EnqueueError};
use super::library::Library;
use super::result::UniqueId;
use crate::error::{Error, Result};
use crate::shm::engine::Engine;
use crate::store::Error as StoreError;

/// How often the peers are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The operation in messages about a group that is being made.
pub const JOINING: &str = "joining over NCCL";

/// Makes the communicator: the first rank's unique id reaches the others through the store.
pub fn init_communicator(
    engine: &Engine,
    device: &Arc<Device>,
    prefix: &str,
) -> Result<Communicator> {
    // The others wait for this rank.
    let system = |reason: String| engine.fail(system_error(engine, JOINING, reason));
    let mut cancelled = join_check(engine, prefix)?;
    let (store, key) = (engine.world.store(), format!("{prefix}id"));
    let id = if engine.rank == 0 {
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
    let joined = Communicator::new(device, &id, engine.rank, engine.size(), &mut cancelled);
    joined.map_err(|failure| not_joined(engine, failure))
}

/// Announces that this rank waits for all ranks of `engine` to join over NCCL. Returns the check to
/// call during the wait: its error ends the wait.
pub fn join_check<'a>(
    engine: &'a Engine,
    prefix: &'a str,
) -> Result<impl FnMut() -> Result<()> + 'a> {
    let (begin, timeout) = (Instant::now(), engine.timeout());
    let store = engine.world.store();
    let joined = move |rank: usize| format!("{prefix}joined/{rank}");
    if let Some(store) = store {
        let fail =
            |error: StoreError| engine.fail(system_error(engine, JOINING, error.to_string()));
        store.set(&joined(engine.rank), b"").map_err(fail)?;
    }
    let mut next_poll = begin + POLL_INTERVAL;
    Ok(move || {
        if Instant::now() < next_poll {
            return Ok(());
        }
        next_poll = Instant::now() + POLL_INTERVAL;
        engine.check_failure(&JOINING, true)?;
        if let Some(&peer) = engine.departed_peers().first() {
            return Err(engine.fail_peer_lost(peer, &JOINING));
        }
        if begin.elapsed() < timeout {
            return Ok(());
        }
        let absent =
            |&r: &usize| store.is_some_and(|s| !matches!(s.try_get(&joined(r)), Ok(Some(_))));
        let missing: Vec<usize> =
            (0..engine.size()).filter(absent).map(|r| engine.ranks[r]).collect();
        let missing = match missing.is_empty() {
            true => "NCCL to connect the ranks, which are all there".into(),
            false => {
                missing.into_iter().map(|r| engine.world.describe(r)).collect::<Vec<_>>().join("; ")
            }
        };
        let (rank, operation) = (engine.world.rank, JOINING.into());
        Err(engine.fail(Error::Timeout { rank, operation, timeout, missing }))
    })
}

pub fn not_joined(engine: &Engine, failure: CommunicatorError) -> Error {
    match failure {
        CommunicatorError::Cancelled(error) => error,
        other => engine.fail(system_error(engine, JOINING, EnqueueError::from(other).0)),
    }
}

/// A tag for a new group's keys in the store: all ranks take that of the first.
pub(crate) fn unique_tag() -> [i64; 2] {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    [i64::from(std::process::id()), NUMBER.fetch_add(1, Ordering::Relaxed) as i64]
}
