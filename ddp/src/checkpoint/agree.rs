//! Ranks tell each other the outcome of saving or loading a checkpoint.

use flow_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{CheckpointError, Result};
use crate::model_check::{broadcast_bytes, gather_texts};

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

/// Returns this rank's result and what each rank tells of its own, if no rank has failed; else this rank's error, or
/// that of the first rank that has one. All ranks call this.
pub fn exchange<T, U: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    own: Result<T>,
    tell: impl FnOnce(&T) -> U,
) -> Result<(T, Vec<U>)> {
    let told = own.as_ref().map(tell).map_err(ToString::to_string);
    let texts = gather_texts(group, &serde_json::to_string(&told).unwrap_or_default())?;
    let own = own?;
    let mut all = Vec::with_capacity(texts.len());
    for (rank, text) in texts.iter().enumerate() {
        all.push(
            read(text.as_bytes()).map_err(|reason| CheckpointError::OtherRank { rank, reason })?,
        );
    }
    Ok((own, all))
}

/// Reads the result of another rank.
fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    serde_json::from_slice(text)
        .unwrap_or_else(|error| Err(format!("its answer cannot be read: {error}")))
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
        read(&bytes).map_err(|reason| CheckpointError::OtherRank { rank: 0, reason })
    })
}
