//! The places of the pieces of a bucket on the members on this node.

use crate::descriptor::{Location, OpDescriptor};
use crate::error::{Error, Result};
use crate::shm::rounds::Rounds;
use crate::shm::segments::Segments;

/// Returns each piece's address on each member on this node, once these have arrived in the round.
/// An empty piece has none.
pub fn pieces_of_locals(
    segments: &Segments,
    rounds: &Rounds,
    round: u64,
    operation: &OpDescriptor,
) -> Result<Vec<Vec<*mut u8>>> {
    let core = &rounds.core;
    let tables = rounds.local_locations(round, operation, &|_| segments.lengths.len() * 8)?;
    let element = segments.dtype.size();
    let mut pieces = Vec::with_capacity(segments.lengths.len());
    for (index, &length) in segments.lengths.iter().enumerate() {
        let mut places = Vec::with_capacity(core.locals.len());
        for (&rank, &table) in core.locals.iter().zip(&tables) {
            if length == 0 {
                places.push(std::ptr::null_mut());
                continue;
            }
            let offset = match table {
                Location::Shared(table) if table.is_multiple_of(64) => {
                    // SAFETY: the table was checked to hold an offset for each piece, and its rank
                    // has arrived.
                    unsafe { segments.offset_of_piece(table, index) }
                }
                _ => 0,
            };
            let bytes = length * element;
            if !offset.is_multiple_of(element) || !core.is_reachable(rank, offset, bytes) {
                return Err(invalid_piece_error(rounds, rank, operation));
            }
            places.push(core.world.arena.at(offset));
        }
        pieces.push(places);
    }
    Ok(pieces)
}

/// Returns the error where a rank that has launched a bucket no longer has its pieces.
fn invalid_piece_error(rounds: &Rounds, rank: usize, operation: &OpDescriptor) -> Error {
    let core = &rounds.core;
    let failure = &rounds.failure;
    if let Err(error) = failure.check_failure(operation, true) {
        return error;
    }
    if failure.has_left(rank) {
        return failure.fail_peer_lost(rank, operation);
    }
    let detail = format!("rank {} placed a gradient outside the shared memory", core.ranks[rank]);
    failure.fail(Error::Mismatch { rank: core.world.rank, detail })
}
