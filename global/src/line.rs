//! The line of the program that has called into libraries: for errors.

use std::backtrace::Backtrace;
use std::path::{Path, PathBuf};

/// Crates that programs call, by function where the file is not known.
const LIBRARIES: [&str; 12] = [
    "flow",
    "flow_autograd",
    "flow_comm",
    "flow_ddp",
    "flow_global",
    "flow_kernels",
    "flow_tensor",
    "tch",
    "torch_sys",
    "alloc",
    "core",
    "std",
];
/// Their folders beside this crate's.
const FOLDERS: [&str; 7] = ["autograd", "comm", "ddp", "flow", "global", "kernels", "tensor"];

/// Returns where the program is, as `src/main.rs:42`; without debug information the function. None
/// if the thread is not the program's.
pub fn line() -> Option<String> {
    let here = std::env::current_dir().unwrap_or_default();
    of_program(&Backtrace::force_capture().to_string(), &here)
}

/// Returns the first frame of a backtrace that is not a library's. The format of [`Backtrace`] is a
/// line `N: function`, and a line `at file:line:column` if that is known.
fn of_program(backtrace: &str, here: &Path) -> Option<String> {
    let mut lines = backtrace.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some((number, function)) = line.split_once(": ") else { continue };
        if number.parse::<usize>().is_err() {
            continue;
        }
        match lines.peek().and_then(|line| line.strip_prefix("at ")) {
            Some(place) => {
                // Without the column.
                let place = place.rsplit_once(':').map_or(place, |(place, _)| place);
                let place = place.trim_start_matches("./");
                let is_rust = place.rsplit_once(':').is_some_and(|(file, _)| file.ends_with(".rs"));
                if is_rust && !is_file_of_library(&here.join(place)) {
                    return Some(place.to_owned());
                }
            }
            None if is_of_program(function) => return Some(function.to_owned()),
            None => {}
        }
    }
    None
}

fn is_file_of_library(file: &Path) -> bool {
    let parts: Vec<_> = file.iter().filter_map(|part| part.to_str()).collect();
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(file).into();
    let beside = file.strip_prefix(root).ok().map(|path| path.iter().collect::<Vec<_>>());
    let is_ours = beside.is_some_and(|parts| match parts[..] {
        [folder, src, ..] => {
            let folder = folder.to_str().unwrap_or_default();
            src == "src" && (FOLDERS.contains(&folder) || folder.starts_with("flow-"))
        }
        _ => false,
    });
    let is_of_tch = parts.windows(2).any(|pair| {
        let is_crate = pair[0].starts_with("tch-0") || pair[0].starts_with("torch-sys-0");
        is_crate && pair[1] == "src"
    });
    is_ours || is_of_tch || parts.contains(&"rustc")
}

/// Returns whether a function is one of Rust's that no library has.
fn is_of_program(function: &str) -> bool {
    let path = function.trim_start_matches(['<', '&', '*']).trim_start_matches("mut ");
    let (first, rest) = path.split_once("::").unwrap_or((path, ""));
    let is_name = first.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    !rest.is_empty() && is_name && !LIBRARIES.contains(&first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_frame_of_the_program() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let backtrace = "   0: <std::backtrace::Backtrace>::create
             at /rustc/library/std/src/backtrace.rs:331:13
   1: run
             at ./global/src/dispatch/mod.rs:12:3
   2: _ZN2at4_ops3add4callE
             at /libtorch/include/ATen/ops/add.h:38:12
   3: {impl#1}
             at /registry/src/tch-0.24.0/src/wrappers/tensor.rs:239:34
   4: {closure#0}
             at ./global/tests/train.rs:42:17
   5: train::main
             at ./global/tests/train.rs:50:5";
        assert_eq!(of_program(backtrace, root).as_deref(), Some("global/tests/train.rs:42"));
        let without: Vec<&str> =
            backtrace.lines().filter(|line| !line.trim().starts_with("at ")).collect();
        assert_eq!(of_program(&without.join("\n"), root).as_deref(), Some("train::main"));
        let elsewhere = "   0: train\n             at /clones/tch-0.26/train/src/main.rs:7:1";
        assert_eq!(
            of_program(elsewhere, root).as_deref(),
            Some("/clones/tch-0.26/train/src/main.rs:7")
        );
        assert_eq!(of_program("   0: std::rt::lang_start\n   1: main", root), None);
    }
}
