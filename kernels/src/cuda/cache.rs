//! Compiled kernels in the user's cache folder.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::digest;

/// Returns the folder of compiled kernels, where the environment names one.
pub(super) fn folder() -> Option<PathBuf> {
    let flow = folder_in("FLOW_CACHE")
        .or_else(|| folder_in("XDG_CACHE_HOME").map(|cache| cache.join("flow")))
        .or_else(|| folder_in("HOME").map(|home| home.join(".cache/flow")))?;
    Some(flow.join("kernels"))
}

/// Returns the folder that a variable names.
fn folder_in(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Reads the compiled code in `file`, if it is there and whole.
pub(super) fn read(file: &Path) -> Option<Vec<u8>> {
    let content = fs::read(file).ok()?;
    let (image, expected) = content.split_last_chunk()?;
    (digest(image).to_le_bytes() == *expected).then(|| image.to_vec())
}

/// Writes the compiled code and its digest. Other processes may write the same file at the same
/// time, so it appears at once, as a whole.
pub(super) fn write(file: &Path, image: &[u8]) -> io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let unfinished = file.with_extension(format!(
        "{}-{}",
        process::id(),
        COUNTER.fetch_add(1, Ordering::Relaxed)
    ));
    fs::write(&unfinished, [image, &digest(image).to_le_bytes()].concat())
        .and_then(|()| fs::rename(&unfinished, file))
        .inspect_err(|_| drop(fs::remove_file(&unfinished)))
}
