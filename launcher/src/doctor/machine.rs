//! Probes of the machine: cores, memory, names and ports.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::path::Path;

use flow_store::cgroup;
use rustix::fs::MemfdFlags;
use rustix::process::{Resource, getrlimit};

use crate::cli::rendezvous::{ENDPOINT_PORT, MASTER_PORT};
use crate::doctor::fact::Fact;
use crate::net;
use crate::plan::host::LocalHost;
use crate::plan::numa;

const MIB: u64 = 1 << 20;

/// The least memory that PyTorch and one small model take.
const LITTLE_MEMORY: u64 = 1 << 30;

/// Containers have 64 MiB unless told otherwise.
const LITTLE_SHM: u64 = 256 * MIB;

/// The least shared memory of a rank, of which `flow-comm` reserves far more.
const LEAST_REGION: u64 = 64 * MIB;

/// The fewest ports to choose from that are enough for jobs of many ranks.
const FEW_PORTS: u32 = 4096;

/// Returns the cores that this process may use.
pub fn cores() -> Vec<Fact> {
    let usable = LocalHost::this().cores as usize;
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let online = numa::parse(&online).map_or(0, |cpus| cpus.len()).max(usable);
    let allowed = numa::allowed().unwrap_or_default();
    let mut value = format!("{usable} of {online}");
    if allowed.len() < online && !allowed.is_empty() {
        value += &format!(", affinity {}", numa::list(&allowed));
    }
    if usable < allowed.len() {
        value += &format!(", the control group's quota allows {usable}");
    }
    let fact = Fact::ok("cores", value);
    if usable > 1 || online == 1 {
        return vec![fact];
    }
    vec![fact.advise(
        "all ranks share one core: allow more (taskset, Slurm's --cpus-per-task, the container's \
         cpus)",
    )]
}

/// Returns the NUMA nodes with their cores.
pub fn numa_nodes() -> Vec<Fact> {
    let mut nodes = BTreeMap::<usize, Vec<usize>>::new();
    for (cpu, node) in numa::nodes(Path::new("/")).unwrap_or_default() {
        nodes.entry(node).or_default().push(cpu);
    }
    let value = match nodes.len() {
        0 => "the kernel names none".into(),
        1 => "1 node".into(),
        count => {
            let cpus = nodes.values().map(|cpus| numa::list(cpus)).collect::<Vec<_>>();
            format!("{count} nodes: {} (--numa-binding binds workers)", cpus.join("; "))
        }
    };
    vec![Fact::ok("NUMA", value)]
}

/// Returns memory and what of it is available.
pub fn memory() -> Vec<Fact> {
    let information = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let read = |name: &str| {
        let line = information.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let (Some(total), Some(available)) = (read("MemTotal"), read("MemAvailable")) else {
        return vec![Fact::ok("memory", "/proc/meminfo does not tell")];
    };
    let groups = cgroup::groups("memory");
    let limit = cgroup::least_limit(&groups, "memory.max", "memory.limit_in_bytes");
    let limit = limit.filter(|limit| *limit < total);
    let mut value = format!("{} available of {}", size(available), size(total));
    if let Some(limit) = limit {
        value += &format!(", the control group's limit is {}", size(limit));
    }
    let fact = Fact::ok("memory", value);
    if available.min(limit.unwrap_or(u64::MAX)) >= LITTLE_MEMORY {
        return vec![fact];
    }
    vec![fact.advise("the kernel kills ranks (SIGKILL) when memory runs out: allow more")]
}

/// Returns whether ranks can share memory as `flow-comm` does it: by a file without a name, which
/// `/dev/shm` does not limit, and by `/proc`.
pub fn shared_memory() -> Vec<Fact> {
    let fact = |value: &str| Fact::ok("shared memory", value);
    vec![match share() {
        Ok(()) => fact("memfd, without a limit of /dev/shm"),
        Err((what, advice)) => fact(&what).broken(advice),
    }]
}

/// Makes a file like that of `flow-comm`; an error says what fails, and what to do.
fn share() -> Result<(), (String, &'static str)> {
    let limits = "raise the limits on file size and address space (ulimit -f, ulimit -v)";
    // Beyond a limit the kernel sends SIGXFSZ, which would end the doctor.
    for (resource, what) in [(Resource::Fsize, "a file"), (Resource::As, "a process's memory")] {
        let limit = getrlimit(resource).current.unwrap_or(u64::MAX);
        if limit < 2 * LEAST_REGION {
            return Err((format!("{what} may have {} only", size(limit)), limits));
        }
    }
    let file = rustix::fs::memfd_create(c"flow-doctor", MemfdFlags::CLOEXEC).map_err(|error| {
        (format!("memfd_create: {error}"), "the container's seccomp profile must allow it")
    })?;
    rustix::fs::ftruncate(&file, LEAST_REGION)
        .map_err(|error| (format!("ftruncate: {error}"), limits))?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = File::options().read(true).write(true).open(&path);
    opened.map_err(|error| (format!("{path}: {error}"), "/proc must be mounted"))?;
    Ok(())
}

/// Returns the size of `/dev/shm`.
pub fn dev_shm() -> Vec<Fact> {
    let advice = "NCCL and PyTorch's DataLoader workers need it: docker run --shm-size 1g, or \
                  mount -t tmpfs tmpfs /dev/shm (Flow itself does not use it)";
    let fact = |value: String| Fact::ok("/dev/shm", value);
    vec![match rustix::fs::statvfs("/dev/shm") {
        Err(error) => fact(error.to_string()).advise(advice),
        Ok(found) => {
            let free = found.f_bavail * found.f_frsize;
            let total = found.f_blocks * found.f_frsize;
            let fact = fact(format!("{} free of {}", size(free), size(total)));
            if free < LITTLE_SHM { fact.advise(advice) } else { fact }
        }
    }]
}

/// Returns this host's name, and whether it resolves to one of its addresses.
pub fn host_name() -> Vec<Fact> {
    let name = host();
    vec![match net::own(&name) {
        Some(address) => Fact::ok("host name", format!("{name} is {address}")),
        None => Fact::ok("host name", format!("{name} is no address of this host")).advise(
            "for jobs on several machines correct /etc/hosts or DNS, or name this one by \
             --local-addr",
        ),
    }]
}

/// Returns this host's name.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns whether the default ports are free, and the range of others.
pub fn ports() -> Vec<Fact> {
    let is_taken = |port: &u16| TcpListener::bind((net::any(), *port)).is_err();
    let taken: Vec<String> = [ENDPOINT_PORT, MASTER_PORT]
        .into_iter()
        .filter(is_taken)
        .map(|port| port.to_string())
        .collect();
    let defaults = Fact::ok("ports", format!("{ENDPOINT_PORT} and {MASTER_PORT} are free"));
    let defaults = if taken.is_empty() {
        defaults
    } else {
        Fact::ok("ports", format!("{} cannot be had", taken.join(" and "))).advise(
            "another job may have it: for jobs on several machines give another by \
             --rdzv-endpoint HOST:PORT or --master-port",
        )
    };
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut range = text.split_whitespace().filter_map(|port| port.parse::<u32>().ok());
    let (Some(first), Some(last)) = (range.next(), range.next()) else { return vec![defaults] };
    let others = Fact::ok("other ports", format!("{first} to {last}"));
    if last.saturating_sub(first) < FEW_PORTS {
        let advice = "ranks between nodes take some each: sysctl net.ipv4.ip_local_port_range='32768 \
                      60999'";
        return vec![defaults, others.advise(advice)];
    }
    vec![defaults, others]
}

/// Writes a number of bytes for people.
fn size(bytes: u64) -> String {
    match bytes {
        0..MIB => format!("{} KiB", bytes / 1024),
        MIB..1_073_741_824 => format!("{} MiB", bytes / MIB),
        _ => format!("{:.1} GiB", bytes as f64 / (1024 * MIB) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_for_people() {
        assert_eq!(size(64 << 10), "64 KiB");
        assert_eq!(size(64 << 20), "64 MiB");
        assert_eq!(size((3 << 30) / 2), "1.5 GiB");
    }
}
