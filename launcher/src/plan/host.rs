//! The CPUs, GPUs and environment of this host.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};

/// The facts about this host that planning depends on.
#[derive(Clone, Debug, Default)]
pub struct LocalHost {
    /// Cores this process may use (affinity mask and cgroup quota).
    pub cores: u32,
    pub gpus: u32,
    /// The launcher's environment, which workers inherit.
    pub environment: HashMap<OsString, OsString>,
    /// The CPUs of each worker, by local rank; empty if workers are not bound.
    pub binding: Vec<Vec<usize>>,
}

impl LocalHost {
    /// Looks at this host.
    pub fn this() -> LocalHost {
        let environment: HashMap<_, _> = std::env::vars_os().collect();
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let mut host = LocalHost { cores, gpus: 0, environment, binding: Vec::new() };
        host.gpus = visible_gpus(nvidia_devices(), host.visible_devices());
        host
    }

    /// Returns CUDA_VISIBLE_DEVICES.
    pub fn visible_devices(&self) -> Option<&str> {
        self.environment.get(OsStr::new(VISIBLE))?.to_str()
    }

    /// Whether the environment has this variable.
    pub fn has_variable(&self, name: &str) -> bool {
        self.environment.contains_key(OsStr::new(name))
    }
}

const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

fn nvidia_devices() -> u32 {
    let Ok(entries) = std::fs::read_dir("/dev") else { return 0 };
    let gpus = entries.flatten().filter(|entry| {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    });
    gpus.count() as u32
}

/// Returns the number of GPUs that a CUDA program would see. CUDA_VISIBLE_DEVICES is a list that
/// ends at its first empty or negative entry.
fn visible_gpus(devices: u32, visible: Option<&str>) -> u32 {
    let Some(list) = visible else { return devices };
    let ids = list.split(',').map(str::trim);
    let listed = ids.take_while(|id| !id.is_empty() && !id.starts_with('-')).count();
    devices.min(listed as u32)
}

#[cfg(test)]
mod tests {
    use super::visible_gpus;

    #[test]
    fn cuda_visible_devices_is_honoured() {
        assert_eq!(visible_gpus(8, None), 8);
        assert_eq!(visible_gpus(8, Some("")), 0);
        assert_eq!(visible_gpus(8, Some("-1")), 0);
        assert_eq!(visible_gpus(8, Some("3, 5")), 2);
        assert_eq!(visible_gpus(8, Some("0,-1,2")), 1);
        assert_eq!(visible_gpus(8, Some("GPU-a1b2,GPU-c3d4")), 2);
        assert_eq!(visible_gpus(0, Some("0,1")), 0);
    }
}
