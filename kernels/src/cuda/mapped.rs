//! The files that are mapped into this process: the libraries that it has loaded.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;

/// A file that is mapped into this process.
pub struct MappedFile {
    /// Where it is mapped.
    pub addresses: Range<usize>,
    /// Its path.
    pub path: PathBuf,
}

/// Returns the files that are mapped into this process.
pub fn mapped_files() -> Vec<MappedFile> {
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    String::from_utf8_lossy(&maps).lines().filter_map(mapped_file).collect()
}

/// Returns where PyTorch's wheels have NVIDIA's libraries, if this process has loaded the libtorch of
/// such a wheel: the folder `nvidia` beside `torch`.
pub fn nvidia_wheels() -> Option<PathBuf> {
    beside_libtorch(&mapped_files())
}

/// Reads a line of `/proc/self/maps`; None if no file is mapped there.
fn mapped_file(line: &str) -> Option<MappedFile> {
    let (begin, end) = line.split_once(' ')?.0.split_once('-')?;
    let begin = usize::from_str_radix(begin, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    Some(MappedFile { addresses: begin..end, path: line[line.find('/')?..].into() })
}

fn beside_libtorch(files: &[MappedFile]) -> Option<PathBuf> {
    for MappedFile { path, .. } in files {
        if path.ends_with("torch/lib/libtorch_cpu.so") || path.ends_with("torch/lib/libc10.so") {
            return Some(path.ancestors().nth(3)?.join("nvidia"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beside(maps: &str) -> Option<PathBuf> {
        let files: Vec<MappedFile> = maps.lines().filter_map(mapped_file).collect();
        beside_libtorch(&files)
    }

    #[test]
    fn wheels_of_nvidia_are_looked_for_beside_a_libtorch_of_a_wheel() {
        let maps = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42    /usr/lib/libc.so.6\n\
                    7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n\
                    7f0000004000-7f0000005000 r--p 00000000 08:01 43    /opt/my \
                    wheels/torch/lib/libc10.so\n";
        assert_eq!(beside(maps), Some("/opt/my wheels/nvidia".into()));
        assert_eq!(beside(&maps.replace("torch/lib", "libtorch/lib")), None);
        let without = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /usr/lib/libc.so.6\n";
        assert_eq!(beside(without), None);
    }

    #[test]
    fn this_program_is_mapped_where_its_functions_are() {
        let address = mapped_files as *const () as usize;
        let file = mapped_files().into_iter().find(|file| file.addresses.contains(&address));
        let path = std::env::current_exe().expect("a program knows its own path");
        assert_eq!(file.map(|file| file.path), Some(path));
    }
}
