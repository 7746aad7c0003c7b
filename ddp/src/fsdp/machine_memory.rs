//! The memory of this machine: what is free, and what its ranks have already.

use std::fs;

use flow_comm::store::cgroup::{ControlGroup, groups};

/// Bytes of memory on a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MachineMemory {
    /// Bytes that processes can still get, before the kernel ends one of them.
    pub available: u64,
    /// Bytes that this process has. What several have in common is divided among them.
    pub own: u64,
}

impl MachineMemory {
    /// Reads it; None where the kernel does not tell.
    pub fn read() -> Option<Self> {
        let available = available()?;
        let own = fs::read_to_string("/proc/self/smaps_rollup").ok();
        let own = own.and_then(|rollup| kib(&rollup, "Pss:")).unwrap_or(0);
        Some(Self { available, own })
    }
}

/// Returns the bytes that processes can still get, before the kernel ends one of them; None where the kernel
/// does not tell.
pub(crate) fn available() -> Option<u64> {
    let information = fs::read_to_string("/proc/meminfo").ok()?;
    let free = kib(&information, "MemAvailable:")?;
    let swap = kib(&information, "SwapFree:").unwrap_or(0);
    let of_groups = room_in_groups(&groups("memory"));
    Some(free.min(of_groups.unwrap_or(u64::MAX)) + swap)
}

/// Formats bytes.
pub(crate) fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    if bytes < 1e9 { format!("{:.1} MB", bytes / 1e6) } else { format!("{:.1} GB", bytes / 1e9) }
}

/// Returns the bytes in the line of this name, which counts KiB.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns the bytes that fit into all of these control groups; None if they have no limit.
fn room_in_groups(groups: &[ControlGroup]) -> Option<u64> {
    let mut least: Option<u64> = None;
    for group in groups {
        let limit = group.number("memory.max", "memory.limit_in_bytes");
        let Some(limit) = limit else { continue };
        let used = group.number("memory.current", "memory.usage_in_bytes").unwrap_or(0);
        // The kernel drops what it has of files before it ends a process.
        let files = of_files(&group.read("memory.stat", "memory.stat").unwrap_or_default());
        let room = limit.saturating_sub(used.saturating_sub(files));
        least = Some(least.unwrap_or(u64::MAX).min(room));
    }
    least
}

/// Returns the bytes of files in a `memory.stat`.
fn of_files(stat: &str) -> u64 {
    let counts = stat.lines().filter_map(|line| line.split_once(' '));
    let of_files = counts.filter(|(name, _)| matches!(*name, "active_file" | "inactive_file"));
    of_files.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use flow_comm::store::cgroup::groups_in;

    use super::*;

    fn write(folder: &Path, file: &str, text: &str) {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn the_fullest_group_counts() {
        let mounted = tempfile::tempdir().unwrap();
        let top = mounted.path();
        let room = |groups: &str| room_in_groups(&groups_in(top, groups, "memory"));
        write(top, "job/memory.max", "5000\n");
        write(top, "job/memory.current", "1000\n");
        write(top, "job/step/memory.max", "max\n");
        assert_eq!(room("0::/job/step\n"), Some(4000));
        write(top, "job/step/memory.max", "4500\n");
        write(top, "job/step/memory.current", "1200\n");
        let stat = "anon 500\nactive_file 300\ninactive_file 100\nshmem 300\n";
        write(top, "job/step/memory.stat", stat);
        assert_eq!(room("0::/job/step\n"), Some(4500 - 800));
        write(top, "memory/docker/memory.limit_in_bytes", "300\n");
        write(top, "memory/docker/memory.usage_in_bytes", "400\n");
        assert_eq!(room("4:cpu,memory:/docker\n0::/job/step\n"), Some(0));
        assert_eq!(room("4:cpu:/docker\n0::/elsewhere\n"), None);
        assert_eq!(room("nonsense\n"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = MachineMemory::read().unwrap();
        assert!(memory.available > 0 && memory.own > 0, "{memory:?}");
    }
}
