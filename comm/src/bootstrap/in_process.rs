//! A job whose ranks are threads of one process: no rank waits for another to join.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flow_store::net::{host_name, secret};
use flow_store::{Address, Server, Store};

use super::lineage::Seat;
use crate::error::{Error, Result};
use crate::shm::arena::{Arena, MAX_MAPPINGS};
use crate::shm::join_memory::JoinMemory;
use crate::shm::machine_buffer::RetiredBuffers;
use crate::shm::tenancy::Tenancy;
use crate::world::{Origin, Peer, World};

/// The time that a rank waits for the answer of the store, which is in this process.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);

impl World {
    /// Makes all ranks of a job of `size` threads.
    pub fn in_process(size: usize) -> Result<Vec<Self>> {
        worlds(size).map_err(|reason| Error::Join { rank: 0, reason })
    }

    /// Makes the ranks of a job of threads, which have these arenas and no store.
    pub(crate) fn of_threads(
        arenas: Vec<Arc<Arena>>,
        name: &str,
        host: &str,
        spin: bool,
    ) -> Result<Vec<Self>, String> {
        let size = arenas.len();
        let regions: Vec<usize> = (0..size).collect();
        let (memory, block) = JoinMemory::create(&arenas[0], size, size)?;
        let offset = memory.offset;
        let mut block = Some(block);
        for index in 0..size {
            let memory = JoinMemory::open(&arenas[0], offset, size, size)?;
            memory.local(index).pid.store(std::process::id(), Ordering::Release);
        }
        let mut worlds = Vec::with_capacity(size);
        for (rank, arena) in arenas.into_iter().enumerate() {
            let memory = JoinMemory::open(&arena, offset, size, size)?;
            let tenancy = Arc::new(Tenancy::new(memory, rank, &regions, block.take()));
            worlds.push(World {
                rank,
                size,
                seats: regions.iter().copied().map(Seat::first).collect(),
                lineage: None,
                locals: (0..size).collect(),
                retired_buffers: Arc::new(RetiredBuffers::new(&tenancy)),
                tenancy,
                arena,
                spin,
                peers: (0..size).map(|_| thread_of(host)).collect(),
                store: None,
                origin: Origin::Threads,
                prefix: format!("{name}/"),
                name: name.into(),
                launched: false,
                waits: None,
                transport: None,
                server: None,
                has_failed: AtomicBool::new(false),
                groups: Mutex::default(),
                retired_blocks: Mutex::default(),
            });
        }
        Ok(worlds)
    }
}

fn worlds(size: usize) -> Result<Vec<World>, String> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    if size == 0 || size > MAX_MAPPINGS {
        return Err(format!(
            "one process has 1 to {MAX_MAPPINGS} ranks, not {size}: start processes for more"
        ));
    }
    let name = format!("in-process/{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let arenas = map_arenas(size)?;
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
    let spin = size <= processors;
    let mut worlds = World::of_threads(arenas, &name, &host_name(), spin)?;

    let token = secret().map_err(|error| error.to_string())?;
    let address = Address::Unix(format!("flow-{}-{name}/", std::process::id()));
    let server = Server::start(&address, &token)
        .map_err(|error| format!("cannot serve a store: {error}"))?;
    let server = Arc::new(server);
    for world in &mut worlds {
        let store = Store::connect(&address, &token, STORE_TIMEOUT);
        world.store = Some(store.map_err(|error| error.to_string())?);
        world.server = Some(Arc::clone(&server));
    }
    Ok(worlds)
}

/// Maps the memory of the job once for each rank, so that an address is one rank's.
fn map_arenas(size: usize) -> Result<Vec<Arc<Arena>>, String> {
    let (file, region) = Arena::create_file(size, size)?;
    let file = Arc::new(file);
    let mut arenas = Vec::with_capacity(size);
    for rank in 0..size {
        arenas.push(Arc::new(Arena::map(&file, size, region, rank)?));
    }
    Ok(arenas)
}

/// Returns a rank that is a thread of this process.
fn thread_of(host: &str) -> Peer {
    Peer { pid: std::process::id(), host: host.into(), node: 0, pidfd: None, gone: false }
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
