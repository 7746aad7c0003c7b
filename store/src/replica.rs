//! A copy of a store that another process serves.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::protocol::ALL_CHANGES;
use super::{Address, Error, Result, Server, Store};

/// The messages by which a replica tells the process that serves the store about itself, through
/// its inbox.
#[derive(Clone, Debug)]
pub struct ReplicaMessages {
    /// It has all that is acknowledged to any client.
    pub complete: Vec<u8>,
    /// It is lost.
    pub lost: Vec<u8>,
}

/// Keeps a store the same as another one, until dropped, or until either is lost.
#[derive(Debug)]
pub struct Replica {
    is_over: Arc<AtomicBool>,
}

impl Replica {
    /// Makes `server`, which sends its clients elsewhere, a replica of the store at `address`, where the
    /// replica with this number is admitted ([`Server::admit_replica`]). Each
    /// counts as lost for the other if nothing is heard of it for `silence`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        server: &Arc<Server>,
        address: Address,
        token: &str,
        number: u64,
        messages: ReplicaMessages,
        silence: Duration,
    ) -> io::Result<Replica> {
        let is_over = Arc::new(AtomicBool::new(false));
        let replica = Replica { is_over: Arc::clone(&is_over) };
        let server = Arc::downgrade(server);
        let token = token.to_string();
        thread::Builder::new().name("flow-replica".into()).spawn(move || {
            let end = follow(&server, &address, &token, number, &messages, silence, &is_over);
            if let Err(error) = end {
                log::info!("the replica ends: {error}");
            }
        })?;
        Ok(replica)
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// Takes over all changes.
fn follow(
    server: &Weak<Server>,
    address: &Address,
    token: &str,
    replica: u64,
    messages: &ReplicaMessages,
    silence: Duration,
    is_over: &Arc<AtomicBool>,
) -> Result<()> {
    let store = Store::connect(address, token, silence)?;
    store.set_reply_timeout(silence);
    store.will(&messages.lost, silence)?;
    let mut number = ALL_CHANGES;
    let mut is_complete = false;
    while !is_over.load(Ordering::SeqCst) {
        // Each request acknowledges what came before it.
        let changes = store.changes(replica, number, silence / 4)?;
        let Some(server) = server.upgrade() else { break };
        let taken = server.take_changes(number == ALL_CHANGES, changes.changes, is_over);
        let taken = taken.map_err(|error| Error::Lost {
            address: server.address().clone(),
            operation: "keep a replica".into(),
            cause: error.to_string(),
        })?;
        if !taken {
            break;
        }
        number = changes.number;
        if !changes.more && !is_complete {
            is_complete = true;
            store.send(&messages.complete)?;
        }
    }
    Ok(())
}
