//! The memory of this machine: what is free, and what its ranks have already.

use std::fs;
use std::path::Path;

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
        let information = fs::read_to_string("/proc/meminfo").ok()?;
        let free = kib(&information, "MemAvailable:")?;
        let swap = kib(&information, "SwapFree:").unwrap_or(0);
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of_groups = room_in_groups(Path::new("/sys/fs/cgroup"), &groups);
        let available = free.min(of_groups.unwrap_or(u64::MAX)) + swap;
        let own = fs::read_to_string("/proc/self/smaps_rollup").ok();
        let own = own.and_then(|rollup| kib(&rollup, "Pss:")).unwrap_or(0);
        Some(Self { available, own })
    }
}

/// Returns the bytes in the line of this name, which counts KiB.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns the bytes that fit into the control group of this process, and those around it; None if they
/// have no limit. `groups` is the text of `/proc/self/cgroup`.
fn room_in_groups(mounted: &Path, groups: &str) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (top, names) = if controllers.is_empty() {
            (mounted.to_path_buf(), ["memory.max", "memory.current"])
        } else if controllers.split(',').any(|name| name == "memory") {
            (mounted.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes"])
        } else {
            continue;
        };
        // A container may see its own group at the top, and the name that it has outside.
        let group = top.join(group.trim_start_matches('/'));
        for folder in group.ancestors().take_while(|folder| folder.starts_with(&top)) {
            let [limit, used] = names.map(|name| number(&folder.join(name)));
            let Some(limit) = limit else { continue }; // or it is "max"
            // The kernel drops what it has of files before it ends a process.
            let files = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let used = used.unwrap_or(0).saturating_sub(of_files(&files));
            let room = limit.saturating_sub(used);
            least = Some(least.unwrap_or(u64::MAX).min(room));
        }
    }
    least
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the bytes of files in a `memory.stat`.
fn of_files(stat: &str) -> u64 {
    let counts = stat.lines().filter_map(|line| line.split_once(' '));
    let of_files = counts.filter(|(name, _)| matches!(*name, "active_file" | "inactive_file"));
    of_files.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
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
        write(top, "job/memory.max", "5000\n");
        write(top, "job/memory.current", "1000\n");
        write(top, "job/step/memory.max", "max\n");
        assert_eq!(room_in_groups(top, "0::/job/step\n"), Some(4000));
        write(top, "job/step/memory.max", "4500\n");
        write(top, "job/step/memory.current", "1200\n");
        let stat = "anon 500\nactive_file 300\ninactive_file 100\nshmem 300\n";
        write(top, "job/step/memory.stat", stat);
        assert_eq!(room_in_groups(top, "0::/job/step\n"), Some(4500 - 800));
        write(top, "memory/docker/memory.limit_in_bytes", "300\n");
        write(top, "memory/docker/memory.usage_in_bytes", "400\n");
        assert_eq!(room_in_groups(top, "4:cpu,memory:/docker\n0::/job/step\n"), Some(0));
        assert_eq!(room_in_groups(top, "4:cpu:/docker\n0::/elsewhere\n"), None);
        assert_eq!(room_in_groups(top, "nonsense\n"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = MachineMemory::read().unwrap();
        assert!(memory.available > 0 && memory.own > 0, "{memory:?}");
    }
}
