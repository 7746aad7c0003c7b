//! What makes it necessary to reconfigure.

use std::sync::atomic::Ordering;
use std::time::Duration;

use flow_store::{Error as StoreError, Store};

use super::agreement::{newcomer_key, store_failed};
use crate::bootstrap::lineage::{Lineage, Process};
use crate::error::Result;
use crate::json::to_json;
use crate::world::World;

/// Returns how many newcomers wait.
pub fn count_newcomers(world: &World, lineage: &Lineage) -> Result<usize> {
    let Some(store) = world.store() else { return Ok(0) };
    let mut number = lineage.members.newcomers;
    let mut waiting = 0;
    while let Some(newcomer) = get(world, store, &newcomer_key(lineage, number))? {
        waiting += (newcomer != to_json(&None::<Process>)) as usize;
        number += 1;
    }
    Ok(waiting)
}

/// Tells the other ranks that this one reconfigures.
pub fn begin(world: &World, lineage: &Lineage) -> Result<()> {
    let Some(store) = world.store() else { return Ok(()) };
    store.set(&lineage.begun_key(), b"").map_err(|error| store_failed(world.seat(), error))
}

/// Whether another rank reconfigures already, or one has ended, as far as this rank can tell.
pub fn have_begun(world: &World, lineage: &Lineage) -> Result<bool> {
    let Some(store) = world.store() else { return Ok(false) };
    let members = &lineage.members;
    if world.has_failed.load(Ordering::Relaxed) {
        return Ok(true);
    }
    if get(world, store, &lineage.begun_key())?.is_some() {
        return Ok(true);
    }
    let Some(own) = members.processes.get(world.rank) else { return Ok(false) };
    let (near, far): (Vec<_>, Vec<_>) =
        members.processes.iter().partition(|process| process.host_id == own.host_id);
    if near.iter().any(|process| process.has_ended()) {
        return Ok(true);
    }
    if far.is_empty() || !lineage.launched {
        return Ok(false);
    }
    let ends: Vec<String> = far.iter().map(|process| process.seat.exit_key()).collect();
    match store.wait(&ends, Duration::ZERO) {
        Ok(()) => Ok(true),
        Err(StoreError::Timeout { missing, .. }) => Ok(missing.len() < ends.len()),
        Err(error) => Err(store_failed(world.seat(), error)),
    }
}

fn get(world: &World, store: &Store, key: &str) -> Result<Option<Vec<u8>>> {
    store.try_get(key).map_err(|error| store_failed(world.seat(), error))
}
