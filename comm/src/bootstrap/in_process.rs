//! A job whose ranks are threads of one process: no rank waits for another to join.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flow_store::net::{host_name, secret};
use flow_store::{Address, Server, Store};

use crate::error::{Error, Result};
use crate::shm::arena::{Arena, MAX_MAPPINGS};
use crate::shm::arena_header::ArenaHeader;
use crate::shm::control::Control;
use crate::world::{Peer, World, IN_PROCESS};

/// How long a rank waits for the answer of the store, which is in this process.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);

impl World {
    /// All ranks of a job of `size` threads.
    pub fn in_process(size: usize) -> Result<Vec<Self>> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let fail = |reason: String| Error::Join { rank: 0, reason };
        if size == 0 || size > MAX_MAPPINGS {
            return Err(fail(format!(
                "one process has 1 to {MAX_MAPPINGS} ranks, not {size}: start processes for more"
            )));
        }
        let prefix = format!("{IN_PROCESS}{}/", NUMBER.fetch_add(1, Ordering::Relaxed));
        // Each rank maps the memory for itself, so that an address is one rank's.
        let (file, region) = Arena::create_file(size, size).map_err(fail)?;
        let map = |rank: usize| {
            let reserved = if rank == 0 { ArenaHeader::bytes(size) } else { 0 };
            Arena::map(&file, size, region, rank, reserved).map(Arc::new).map_err(fail)
        };
        let arenas = (0..size).map(map).collect::<Result<Vec<_>>>()?;
        let header = ArenaHeader::of(&arenas[0]);
        header.publish_processors();
        let block = arenas[0].allocate_zeroed(Control::bytes(size, size)).ok_or_else(|| {
            fail(format!("no shared memory for the control block of {size} ranks"))
        })?;
        let root = block.offset();
        let control = Control::attach(Arc::clone(&arenas[0]), root, size, size);
        control.header().attached.store(size as u32, Ordering::SeqCst);
        // It goes with the memory.
        block.leak();

        let token = secret().map_err(|error| fail(error.to_string()))?;
        let address = Address::Unix(format!("flow-{}-{prefix}", std::process::id()));
        let server = Server::start(&address, &token);
        let server =
            Arc::new(server.map_err(|error| fail(format!("cannot serve a store: {error}")))?);
        let (host, processors) = (host_name(), header.processors());
        let world = |(rank, arena)| {
            let store = Store::connect(&address, &token, STORE_TIMEOUT);
            let pid = std::process::id();
            let peer = || Peer { pid, host: host.clone(), node: 0, pidfd: None, gone: false };
            Ok(Self {
                rank,
                size,
                locals: (0..size).collect(),
                arena,
                spin: size <= processors,
                root,
                peers: (0..size).map(|_| peer()).collect(),
                store: Some(store.map_err(|error| fail(error.to_string()))?),
                prefix: prefix.clone(),
                launched: false,
                waits: None,
                transport: None,
                server: Some(Arc::clone(&server)),
                retired_blocks: Mutex::default(),
            })
        };
        arenas.into_iter().enumerate().map(world).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_memory_for_as_many_ranks_as_are_allowed() {
        assert!(Arena::create_file(MAX_MAPPINGS, MAX_MAPPINGS).is_ok());
        assert!(Arena::create_file(MAX_MAPPINGS + 1, MAX_MAPPINGS + 1).is_err());
        let error = World::in_process(MAX_MAPPINGS + 1).err().expect("one too many");
        assert!(error.to_string().contains("one process has 1 to 724 ranks, not 725"), "{error}");
    }
}
