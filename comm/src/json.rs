//! Small texts that ranks leave for each other in the store.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes a value for `from_json`.
pub fn to_json(value: &impl Serialize) -> Vec<u8> {
    // The types in use have no maps with keys that are not texts, which is all that can fail.
    serde_json::to_vec(value).unwrap_or_default()
}

/// Reads a value, or says that `what` is malformed.
pub fn from_json<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|error| {
        format!("malformed {what}: got {:?}: {error}", String::from_utf8_lossy(bytes))
    })
}
