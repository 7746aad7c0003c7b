//! Ranks tell each other the outcome of saving or loading a checkpoint.

use flow_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{CheckpointError, Result};
use crate::model_check::broadcast_bytes;

/// Returns this rank's result if no rank has failed; else its own error, or that of the first rank
/// that has one. All ranks call this.
pub fn agree<T>(group: &ProcessGroup, own: Result<T>) -> Result<T> {
    let mut have_failed = vec![0i64; group.world_size()];
    group.all_gather(&[i64::from(own.is_err())], &mut have_failed)?;
    let Some(rank) = have_failed.iter().position(|&has_failed| has_failed == 1) else { return own };
    let mut error =
        own.as_ref().err().map(|error| error.to_string().into_bytes()).unwrap_or_default();
    broadcast_bytes(group, rank, &mut error)?;
    let reason = String::from_utf8_lossy(&error).into_owned();
    own.and(Err(CheckpointError::OtherRank { rank, reason }))
}

/// Returns rank 0's result, on all ranks. `own` is rank 0's.
pub fn from_rank_0<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    own: Option<Result<T>>,
) -> Result<T> {
    let text = own.as_ref().map(|own| own.as_ref().map_err(ToString::to_string));
    let mut bytes =
        text.map(|text| serde_json::to_vec(&text).unwrap_or_default()).unwrap_or_default();
    broadcast_bytes(group, 0, &mut bytes)?;
    own.unwrap_or_else(|| {
        let result: Result<T, String> = serde_json::from_slice(&bytes)
            .unwrap_or_else(|error| Err(format!("its answer cannot be read: {error}")));
        result.map_err(|reason| CheckpointError::OtherRank { rank: 0, reason })
    })
}
