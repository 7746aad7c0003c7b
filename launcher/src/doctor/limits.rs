//! Probes of the limits on this process (`ulimit`) and on its control group.

use std::path::Path;

use flow_store::cgroup;
use rustix::process::{Resource, getrlimit};

use crate::agent::process;
use crate::doctor::fact::Fact;

/// Fewer processes and threads than this are soon used up: each rank has some for each core.
const FEW_PROCESSES: u64 = 1024;

/// Returns the limit on open files. flow-launch raises the first number itself, up to the second.
pub fn open_files() -> Vec<Fact> {
    let limit = getrlimit(Resource::Nofile);
    let value = format!("{}, at most {}", shown(limit.current), shown(limit.maximum));
    let fact = Fact::ok("open files", value);
    let maximum = limit.maximum.unwrap_or(u64::MAX);
    if maximum >= process::needed_descriptors(1) {
        return vec![fact];
    }
    let advice = format!(
        "a job of one rank may need {}: ulimit -Hn 65536, or LimitNOFILE of the service, or \
         nofile of the container",
        process::needed_descriptors(1)
    );
    vec![fact.advise(advice)]
}

/// Returns the limit on locked memory, which RDMA needs.
pub fn locked_memory() -> Vec<Fact> {
    let limit = getrlimit(Resource::Memlock).current;
    let value = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes / 1024));
    let fact = Fact::ok("locked memory", value);
    let has_rdma =
        Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut all| all.next().is_some());
    if !has_rdma || limit.is_none() {
        return vec![fact];
    }
    vec![fact.advise(
        "NCCL and MPI lock memory for the InfiniBand adapters here: ulimit -l unlimited, or \
         docker run --ulimit memlock=-1",
    )]
}

/// Returns the limits on processes and threads.
pub fn processes() -> Vec<Fact> {
    let of_user = getrlimit(Resource::Nproc).current;
    let of_group = cgroup::least_limit(&cgroup::groups("pids"), "pids.max", "pids.max");
    let mut value = shown(of_user);
    if let Some(limit) = of_group {
        value += &format!(", the control group's limit is {limit}");
    }
    let fact = Fact::ok("processes", value);
    if of_user.into_iter().chain(of_group).all(|limit| limit >= FEW_PROCESSES) {
        return vec![fact];
    }
    vec![fact.advise("threads count too: ulimit -u, or docker run --pids-limit, should be higher")]
}

fn shown(limit: Option<u64>) -> String {
    limit.map_or("unlimited".into(), |limit| limit.to_string())
}
