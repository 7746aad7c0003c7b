//! The limits of this process's control groups, versions 1 and 2.

use std::fs;
use std::path::Path;

/// Returns the least limit of this process's group and of those around it; None if there is none.
/// `file` is the limit's name in version 2, `file_v1` in the hierarchy of `controller` of version 1.
pub fn limit(file: &str, controller: &str, file_v1: &str) -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    least(Path::new("/sys/fs/cgroup"), &groups, file, controller, file_v1)
}

fn least(mounted: &Path, groups: &str, file: &str, controller: &str, file_v1: &str) -> Option<u64> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (top, file) = if controllers.is_empty() {
            (mounted.to_path_buf(), file)
        } else if controllers.split(',').any(|name| name == controller) {
            (mounted.join(controller), file_v1)
        } else {
            continue;
        };
        // A container may see its own group at the top, and the name that it has outside.
        let group = top.join(group.trim_start_matches('/'));
        let around = group.ancestors().take_while(|folder| folder.starts_with(&top));
        let texts = around.filter_map(|folder| fs::read_to_string(folder.join(file)).ok());
        limits.extend(texts.filter_map(|text| text.trim().parse::<u64>().ok())); // or it is "max"
    }
    limits.into_iter().min()
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
        least(mounted, groups, "memory.max", "memory", "memory.limit_in_bytes")
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
