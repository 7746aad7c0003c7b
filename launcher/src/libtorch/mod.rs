//! libtorch, which Rust programs are built with.

pub mod setup;

use std::fs;
use std::path::{Path, PathBuf};

/// The versions of `tch`, and the libtorch that each is for.
pub const VERSIONS: [(&str, &str); 2] = [("0.24", "2.11.0"), ("0.26", "2.13.0")];

/// A folder with libtorch.
pub struct Libtorch {
    pub version: String,
    pub has_cuda: bool,
}

impl Libtorch {
    /// Looks at a folder; an error says what it lacks.
    pub fn at(folder: &Path) -> Result<Libtorch, String> {
        if !folder.is_absolute() {
            return Err("it must be an absolute path".into());
        }
        if !folder.join("lib/libtorch_cpu.so").exists() {
            return Err("it has no lib/libtorch_cpu.so".into());
        }
        let version = version(folder).ok_or("it has no include/torch/headeronly/version.h")?;
        Ok(Libtorch { version, has_cuda: folder.join("lib/libtorch_cuda.so").exists() })
    }
}

/// Returns the folder that LIBTORCH names.
pub fn named() -> Option<PathBuf> {
    std::env::var_os("LIBTORCH").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

fn version(folder: &Path) -> Option<String> {
    let header = folder.join("include/torch/headeronly/version.h");
    let text = fs::read_to_string(header).ok()?;
    let (_, rest) = text.split_once("#define TORCH_VERSION ")?;
    rest.split('"').nth(1).map(String::from)
}
