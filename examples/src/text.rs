//! Text to learn, as bytes.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::read::MultiGzDecoder;

use crate::fashion::cache_folder;

/// Reads a file, gzipped if its name ends so; without one the Jargon File of Debian's package
/// jargon-text, as `scripts/setup --data` leaves it.
///
/// # Errors
/// When the file cannot be read.
pub fn read(path: Option<&Path>) -> Result<Vec<u8>> {
    let path = match path {
        Some(path) => path.to_owned(),
        None => cache_folder().map(|folder| folder.join("jargon.txt.gz")).unwrap_or_default(),
    };
    let name = path.display();
    let mut bytes = Vec::new();
    read_into(&mut bytes, &path).with_context(|| {
        format!("cannot read {name}; get a text by `scripts/setup --data`, or name one by --text")
    })?;
    Ok(bytes)
}

fn read_into(bytes: &mut Vec<u8>, path: &Path) -> std::io::Result<usize> {
    let mut file = File::open(path)?;
    if path.extension().is_some_and(|extension| extension == "gz") {
        MultiGzDecoder::new(file).read_to_end(bytes)
    } else {
        file.read_to_end(bytes)
    }
}
