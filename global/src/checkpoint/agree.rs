//! What ranks tell each other around a checkpoint.

use flow_tensor::ProcessGroup;
use serde::de::DeserializeOwned;
use serde::Serialize;

use super::error::CheckpointError;

type Result<T> = std::result::Result<T, CheckpointError>;

/// This rank's result if no rank has failed; else its own error, or that of the first rank that has
/// one. All ranks call this.
pub fn agree<T>(group: &ProcessGroup, own: Result<T>) -> Result<T> {
    let mut have_failed = vec![0i64; group.world_size()];
    group.all_gather(&[i64::from(own.is_err())], &mut have_failed)?;
    let Some(rank) = have_failed.iter().position(|&has_failed| has_failed == 1) else { return own };
    let error = own.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let reason = broadcast(group, rank, error.into_bytes())?;
    let reason = String::from_utf8_lossy(&reason).into_owned();
    own.and(Err(CheckpointError::OtherRank { rank, reason }))
}

/// What rank 0 has come to, on all ranks. `own` is rank 0's.
pub fn from_rank_0<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    own: Option<Result<T>>,
) -> Result<T> {
    let own = agree(group, own.transpose())?;
    let bytes = own.as_ref().map(|own| serde_json::to_vec(own).unwrap_or_default());
    let bytes = broadcast(group, 0, bytes.unwrap_or_default())?;
    let parsed = || {
        serde_json::from_slice(&bytes).map_err(|error| CheckpointError::OtherRank {
            rank: 0,
            reason: format!("its answer cannot be read: {error}"),
        })
    };
    own.map_or_else(parsed, Ok)
}

/// One number of each rank, on all ranks.
pub fn gather(group: &ProcessGroup, own: u64) -> Result<Vec<u64>> {
    let mut all = vec![0i64; group.world_size()];
    group.all_gather(&[own as i64], &mut all)?;
    Ok(all.into_iter().map(|number| number as u64).collect())
}

/// Rank `root`'s bytes to all.
fn broadcast(group: &ProcessGroup, root: usize, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    let mut length = [bytes.len() as i64];
    group.broadcast(&mut length, root)?;
    bytes.resize(length[0] as usize, 0);
    if !bytes.is_empty() {
        group.broadcast(&mut bytes, root)?;
    }
    Ok(bytes)
}
