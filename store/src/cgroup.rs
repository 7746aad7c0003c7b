//! The control groups of this process, versions 1 and 2.

use std::fs;
use std::path::{Path, PathBuf};

/// A control group.
pub struct ControlGroup {
    folder: PathBuf,
    is_v2: bool,
}

impl ControlGroup {
    /// Returns the text of a file of the group, which has another name in version 1.
    pub fn read(&self, file: &str, file_v1: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(if self.is_v2 { file } else { file_v1 })).ok()
    }

    /// Returns the number in a file of the group; None if there is none, or it is "max".
    pub fn number(&self, file: &str, file_v1: &str) -> Option<u64> {
        self.read(file, file_v1)?.trim().parse().ok()
    }
}

/// Returns this process's groups, and those around them, whose controller this is.
pub fn groups(controller: &str) -> Vec<ControlGroup> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    groups_in(Path::new("/sys/fs/cgroup"), &groups, controller)
}

/// Returns the groups of a process whose `/proc/self/cgroup` has this text, where the file systems of
/// groups are mounted at `mounted`.
pub fn groups_in(mounted: &Path, groups: &str, controller: &str) -> Vec<ControlGroup> {
    let mut all = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let is_v2 = controllers.is_empty();
        if !is_v2 && !controllers.split(',').any(|name| name == controller) {
            continue;
        }
        let top = if is_v2 { mounted.to_path_buf() } else { mounted.join(controller) };
        // A container may see its own group at the top, and the name that it has outside.
        let group = top.join(group.trim_start_matches('/'));
        let around = group.ancestors().take_while(|folder| folder.starts_with(&top));
        all.extend(around.map(|folder| ControlGroup { folder: folder.to_path_buf(), is_v2 }));
    }
    all
}

/// Returns the least limit of groups; None if there is none. `file_v1` is the limit's name in version 1.
pub fn least_limit(groups: &[ControlGroup], file: &str, file_v1: &str) -> Option<u64> {
    groups.iter().filter_map(|group| group.number(file, file_v1)).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, file: &str, text: &str) {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn memory(mounted: &Path, groups: &str) -> Option<u64> {
        let groups = groups_in(mounted, groups, "memory");
        least_limit(&groups, "memory.max", "memory.limit_in_bytes")
    }

    #[test]
    fn the_least_limit_counts() {
        let mounted = tempfile::tempdir().unwrap();
        let top = mounted.path();
        write(top, "job/memory.max", "500\n");
        write(top, "job/step/memory.max", "max\n");
        write(top, "memory/docker/memory.limit_in_bytes", "300\n");
        assert_eq!(memory(top, "0::/job/step\n"), Some(500));
        assert_eq!(memory(top, "4:cpu,memory:/docker\n0::/job/step\n"), Some(300));
        assert_eq!(memory(top, "4:cpu:/docker\n0::/elsewhere\n"), None);
        assert_eq!(memory(top, "nonsense\n"), None);
    }

    #[test]
    fn inside_a_container_the_top_is_the_group() {
        let mounted = tempfile::tempdir().unwrap();
        write(mounted.path(), "memory/memory.limit_in_bytes", "300\n");
        assert_eq!(memory(mounted.path(), "4:memory:/docker/abc\n"), Some(300));
    }
}
