//! How the ranks of a group find each other over NCCL.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flow_kernels::cuda::Device;

use super::communicator::{Communicator, Failure};
use super::group::{failed, Fault};
use super::library::Library;
use super::result::UniqueId;
use crate::error::{Error, Result};
use crate::shm::engine::Engine;
use crate::store::Error as StoreError;

/// Between two looks at the peers.
const LOOK: Duration = Duration::from_millis(100);
/// The operation in messages about a group that is being made.
pub const JOINING: &str = "joining over NCCL";

/// Makes the communicator: the first rank's unique id reaches the others through the store.
pub fn meet(engine: &Engine, device: &Arc<Device>, prefix: &str) -> Result<Communicator> {
    // The others wait for this rank.
    let system = |reason: String| engine.fail(failed(engine, JOINING, reason));
    let mut patience = patience(engine, prefix)?;
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
            match store.get(&key, LOOK) {
                Ok(bytes) => {
                    let bytes = bytes
                        .try_into()
                        .map_err(|_| system(format!("{key} in the store is no id of NCCL's")))?;
                    break UniqueId::from_bytes(bytes);
                }
                Err(StoreError::Timeout { .. }) => patience()?,
                Err(error) => return Err(system(error.to_string())),
            }
        }
    };
    let met = Communicator::new(device, &id, engine.rank, engine.size(), &mut patience);
    met.map_err(|failure| not_joined(engine, failure))
}

/// Announces that this rank waits for all ranks of `engine` to join over NCCL, and says whether to
/// go on waiting.
pub fn patience<'a>(
    engine: &'a Engine,
    prefix: &'a str,
) -> Result<impl FnMut() -> Result<()> + 'a> {
    let (begin, timeout) = (Instant::now(), engine.timeout());
    let store = engine.world.store();
    let joined = move |rank: usize| format!("{prefix}joined/{rank}");
    if let Some(store) = store {
        let fail = |error: StoreError| engine.fail(failed(engine, JOINING, error.to_string()));
        store.set(&joined(engine.rank), b"").map_err(fail)?;
    }
    let mut next_look = begin + LOOK;
    Ok(move || {
        if Instant::now() < next_look {
            return Ok(());
        }
        next_look = Instant::now() + LOOK;
        engine.check_failure(&JOINING, true)?;
        if let Some(&peer) = engine.gone().first() {
            return Err(engine.lose(peer, &JOINING));
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

pub fn not_joined(engine: &Engine, failure: Failure) -> Error {
    match failure {
        Failure::Stopped(error) => error,
        other => engine.fail(failed(engine, JOINING, Fault::from(other).0)),
    }
}

/// A tag for a new group's keys in the store: all ranks take that of the first.
pub(crate) fn own_tag() -> [i64; 2] {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    [i64::from(std::process::id()), NUMBER.fetch_add(1, Ordering::Relaxed) as i64]
}
