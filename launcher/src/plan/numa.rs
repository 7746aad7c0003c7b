//! `--numa-binding`: the CPUs on which each worker runs. Memory follows: Linux allocates it on the
//! node that first uses it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cli::usage::Usage;
use crate::job::NumaBinding;

/// A CPU (a hardware thread) that this job may use.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cpu {
    id: usize,
    node: usize,
    socket: usize,
    /// The first CPU of the same physical core.
    core: usize,
    /// The first CPU that shares its largest cache.
    cache: usize,
}

/// CPUs and GPUs, and which are near each other.
#[derive(Debug, PartialEq)]
pub struct Topology {
    cpus: Vec<Cpu>,
    /// The NUMA node of each GPU, in CUDA's order.
    gpu_nodes: Vec<usize>,
}

impl Topology {
    /// Reads this host's; `visible` is CUDA_VISIBLE_DEVICES.
    pub fn this(visible: Option<&str>) -> anyhow::Result<Topology> {
        let allowed = allowed().context("cannot learn which CPUs may be used")?;
        Topology::read(Path::new("/"), &allowed, visible)
            .context("cannot read the host's topology below /sys")
    }

    /// Reads `sys` and `proc` below `root`.
    fn read(root: &Path, allowed: &[usize], visible: Option<&str>) -> io::Result<Topology> {
        let nodes = nodes(root)?;
        let mut cpus = Vec::with_capacity(allowed.len());
        for &id in allowed {
            let folder = root.join(format!("sys/devices/system/cpu/cpu{id}"));
            let socket =
                fs::read_to_string(folder.join("topology/physical_package_id")).unwrap_or_default();
            cpus.push(Cpu {
                id,
                node: nodes.get(&id).copied().unwrap_or(0),
                // Some virtual machines and ARM boards have -1, or nothing.
                socket: socket.trim().parse().unwrap_or(0),
                core: first(&fs::read_to_string(folder.join("topology/thread_siblings_list"))?)
                    .unwrap_or(id),
                cache: largest_cache(&folder.join("cache")).unwrap_or(id),
            });
        }
        Ok(Topology { cpus, gpu_nodes: gpu_nodes(root, visible) })
    }

    /// Returns NUMA nodes with CPUs; those of a socket are adjacent.
    fn nodes(&self) -> Vec<usize> {
        let mut nodes: Vec<_> = self.cpus.iter().map(|cpu| (cpu.socket, cpu.node)).collect();
        nodes.sort_unstable();
        nodes.dedup_by_key(|(_, node)| *node);
        nodes.into_iter().map(|(_, node)| node).collect()
    }

    /// Returns the CPUs of a node, grouped by what they share, such as a core.
    fn groups(&self, node: usize, shared: impl Fn(&Cpu) -> usize) -> Vec<Vec<usize>> {
        let mut groups = BTreeMap::<usize, Vec<usize>>::new();
        for cpu in self.cpus.iter().filter(|cpu| cpu.node == node) {
            groups.entry(shared(cpu)).or_default().push(cpu.id);
        }
        groups.into_values().collect()
    }
}

/// Chooses the CPUs of each worker, by local rank. A worker is bound near its GPU. With fewer GPUs
/// than workers, the workers are spread over the nodes, adjacent ranks together.
pub fn bind(
    binding: NumaBinding,
    workers: usize,
    topology: &Topology,
) -> Result<Vec<Vec<usize>>, Usage> {
    let nodes = topology.nodes();
    let worker_nodes: Vec<usize> = match topology.gpu_nodes.get(..workers) {
        Some(gpu_nodes) => gpu_nodes.to_vec(),
        None => (0..workers).map(|worker| nodes[worker * nodes.len() / workers]).collect(),
    };
    if let Some(gpu) = worker_nodes.iter().position(|node| !nodes.contains(node)) {
        return Err(Usage(format!(
            "--numa-binding: GPU {gpu} is on NUMA node {}, whose CPUs this job may not use; allow \
             some, or leave it out",
            worker_nodes[gpu]
        )));
    }
    let mut bound = Vec::with_capacity(workers);
    for (worker, &node) in worker_nodes.iter().enumerate() {
        let on_node = worker_nodes.iter().filter(|other| **other == node).count();
        let index = worker_nodes[..worker].iter().filter(|other| **other == node).count();
        let mut cpus = topology.share(binding, node, index, on_node)?;
        cpus.sort_unstable();
        bound.push(cpus);
    }
    Ok(bound)
}

impl Topology {
    /// Returns the CPUs of one of `on_node` workers whose GPU is on a node; `index` is its number
    /// there.
    fn share(
        &self,
        binding: NumaBinding,
        node: usize,
        index: usize,
        on_node: usize,
    ) -> Result<Vec<usize>, Usage> {
        match binding {
            NumaBinding::Node => Ok(self.groups(node, |cpu| cpu.node).concat()),
            NumaBinding::Socket => {
                let on_this = self.cpus.iter().filter(|cpu| cpu.node == node);
                let sockets: Vec<_> = on_this.map(|cpu| cpu.socket).collect();
                let near = self.cpus.iter().filter(|cpu| sockets.contains(&cpu.socket));
                Ok(near.map(|cpu| cpu.id).collect())
            }
            NumaBinding::Exclusive => {
                let cores = self.groups(node, |cpu| cpu.core);
                if cores.len() < on_node {
                    return Err(Usage(format!(
                        "--numa-binding is 'exclusive', but of NUMA node {node} this job may use \
                         {} cores for {on_node} workers; start fewer, or use node",
                        cores.len()
                    )));
                }
                // The first ones get the remainder.
                let share = cores.len() / on_node;
                let more = cores.len() % on_node;
                let start = index * share + index.min(more);
                let end = start + share + usize::from(index < more);
                Ok(cores[start..end].concat())
            }
            NumaBinding::CoreComplex => {
                let mut complexes = self.groups(node, |cpu| cpu.cache);
                complexes.sort_by_key(|cpus| std::cmp::Reverse(cpus.len()));
                Ok(complexes[index % complexes.len()].clone())
            }
        }
    }
}

/// Returns the CPUs that this process may use.
pub fn allowed() -> io::Result<Vec<usize>> {
    let mask = rustix::thread::sched_getaffinity(None)?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| mask.is_set(*cpu)).collect())
}

/// Returns the node of each CPU below `root`; empty if the kernel knows of no nodes.
pub fn nodes(root: &Path) -> io::Result<BTreeMap<usize, usize>> {
    let mut nodes = BTreeMap::new();
    let Ok(entries) = fs::read_dir(root.join("sys/devices/system/node")) else { return Ok(nodes) };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let Some(node) = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok())
        else {
            continue;
        };
        let cpus = fs::read_to_string(entry.path().join("cpulist"))?;
        nodes.extend(parse(&cpus).unwrap_or_default().into_iter().map(|cpu| (cpu, node)));
    }
    Ok(nodes)
}

/// Returns the first CPU that shares the largest cache described in a folder.
fn largest_cache(folder: &Path) -> Option<usize> {
    let caches =
        fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).filter_map(|path| {
            let kind = fs::read_to_string(path.join("type")).ok()?;
            let level = fs::read_to_string(path.join("level")).ok()?;
            let level: u32 = level.trim().parse().ok()?;
            matches!(kind.trim(), "Unified" | "Data").then_some((level, path))
        });
    let (_, path) = caches.max()?;
    first(&fs::read_to_string(path.join("shared_cpu_list")).ok()?)
}

/// Returns the node of each GPU that CUDA would see. NVIDIA's driver lists GPUs by PCI address,
/// which is CUDA's order if they are alike.
fn gpu_nodes(root: &Path, visible: Option<&str>) -> Vec<usize> {
    let Ok(entries) = fs::read_dir(root.join("proc/driver/nvidia/gpus")) else { return Vec::new() };
    let mut gpus: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    gpus.sort_unstable();
    let Some(visible) = visible else {
        return gpus.iter().map(|gpu| gpu_node(root, gpu)).collect();
    };
    let chosen = visible.split(',').map_while(|id| find_gpu(&gpus, id.trim()));
    chosen.map(|gpu| gpu_node(root, gpu)).collect()
}

fn gpu_node(root: &Path, gpu: &Path) -> usize {
    let address = root.join("sys/bus/pci/devices").join(gpu.file_name().unwrap_or_default());
    let node = fs::read_to_string(address.join("numa_node")).unwrap_or_default();
    // -1 if there is only one node.
    node.trim().parse().unwrap_or(0)
}

/// Finds a GPU by number, or by the start of its UUID.
fn find_gpu<'a>(gpus: &'a [PathBuf], id: &str) -> Option<&'a PathBuf> {
    if !id.starts_with("GPU-") {
        return gpus.get(id.parse::<usize>().ok()?);
    }
    gpus.iter().find(|gpu| {
        let information = fs::read_to_string(gpu.join("information")).unwrap_or_default();
        information.lines().any(|line| {
            line.strip_prefix("GPU UUID:").is_some_and(|uuid| uuid.trim().starts_with(id))
        })
    })
}

fn first(list: &str) -> Option<usize> {
    parse(list)?.into_iter().min()
}

/// Parses CPUs as Linux lists them: `0-3,8`.
pub fn parse(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (start, end) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(start.parse::<usize>().ok()?..=end.parse().ok()?);
    }
    Some(cpus)
}

/// Writes the list that [`parse`] reads; the CPUs are in order.
pub fn list(cpus: &[usize]) -> String {
    let ranges = cpus.chunk_by(|cpu, next| cpu + 1 == *next).map(|range| match range {
        [cpu] => cpu.to_string(),
        range => format!("{}-{}", range[0], range[range.len() - 1]),
    });
    ranges.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tempfile::TempDir;

    /// A host with `per_core` threads a core, numbered as Linux does: the first threads of all
    /// cores come first.
    struct Shape {
        sockets: usize,
        nodes_per_socket: usize,
        cores_per_node: usize,
        caches_per_node: usize,
        threads_per_core: usize,
    }

    fn write(path: PathBuf, text: impl AsRef<[u8]>) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    impl Shape {
        fn cores(&self) -> usize {
            self.sockets * self.nodes_per_socket * self.cores_per_node
        }

        fn tree(&self) -> TempDir {
            let root = tempfile::tempdir().unwrap();
            let system = root.path().join("sys/devices/system");
            let threads = |cores: std::ops::Range<usize>| {
                let all = (0..self.threads_per_core)
                    .flat_map(|thread| cores.clone().map(move |c| c + thread * self.cores()));
                list(&all.collect::<Vec<_>>())
            };
            for node in 0..self.sockets * self.nodes_per_socket {
                let start = node * self.cores_per_node;
                write(
                    system.join(format!("node/node{node}/cpulist")),
                    threads(start..start + self.cores_per_node),
                );
                for core in start..start + self.cores_per_node {
                    let size = self.cores_per_node / self.caches_per_node;
                    let cache = core - (core - start) % size;
                    for thread in 0..self.threads_per_core {
                        let cpu = system.join(format!("cpu/cpu{}", core + thread * self.cores()));
                        write(
                            cpu.join("topology/physical_package_id"),
                            format!("{}\n", node / self.nodes_per_socket),
                        );
                        write(cpu.join("topology/thread_siblings_list"), threads(core..core + 1));
                        for (index, level, kind, shared) in [
                            (0, 1, "Data", threads(core..core + 1)),
                            (1, 4, "Instruction", threads(0..self.cores())),
                            (2, 3, "Unified", threads(cache..cache + size)),
                        ] {
                            let folder = cpu.join(format!("cache/index{index}"));
                            write(folder.join("level"), format!("{level}\n"));
                            write(folder.join("type"), format!("{kind}\n"));
                            write(folder.join("shared_cpu_list"), shared);
                        }
                    }
                }
            }
            root
        }

        fn topology(&self) -> Topology {
            let all: Vec<_> = (0..self.cores() * self.threads_per_core).collect();
            Topology::read(self.tree().path(), &all, None).unwrap()
        }
    }

    const LARGE: Shape = Shape {
        sockets: 2,
        nodes_per_socket: 2,
        cores_per_node: 4,
        caches_per_node: 2,
        threads_per_core: 2,
    };
    const SMALL: Shape = Shape {
        sockets: 1,
        nodes_per_socket: 1,
        cores_per_node: 4,
        caches_per_node: 2,
        threads_per_core: 1,
    };

    fn bound(binding: NumaBinding, workers: usize, topology: &Topology) -> Vec<String> {
        bind(binding, workers, topology).unwrap().iter().map(|cpus| list(cpus)).collect()
    }

    #[test]
    fn workers_without_gpus_are_spread() {
        let large = LARGE.topology();
        assert_eq!(bound(NumaBinding::Node, 2, &large), ["0-3,16-19", "8-11,24-27"]);
        assert_eq!(bound(NumaBinding::Socket, 2, &large), ["0-7,16-23", "8-15,24-31"]);
        assert_eq!(
            bound(NumaBinding::Exclusive, 6, &large),
            ["0-1,16-17", "2-3,18-19", "4-7,20-23", "8-9,24-25", "10-11,26-27", "12-15,28-31"]
        );
        assert_eq!(
            bound(NumaBinding::CoreComplex, 4, &large),
            ["0-1,16-17", "4-5,20-21", "8-9,24-25", "12-13,28-29"]
        );
        assert_eq!(bound(NumaBinding::CoreComplex, 5, &large)[..2], ["0-1,16-17", "2-3,18-19"]);
    }

    #[test]
    fn one_node_is_shared_or_divided() {
        let small = SMALL.topology();
        assert_eq!(bound(NumaBinding::Node, 2, &small), ["0-3", "0-3"]);
        assert_eq!(bound(NumaBinding::Socket, 2, &small), ["0-3", "0-3"]);
        assert_eq!(bound(NumaBinding::Exclusive, 3, &small), ["0-1", "2", "3"]);
        assert_eq!(bound(NumaBinding::CoreComplex, 3, &small), ["0-1", "2-3", "0-1"]);
        assert!(
            bind(NumaBinding::Exclusive, 5, &small)
                .unwrap_err()
                .0
                .contains("4 cores for 5 workers")
        );
    }

    #[test]
    fn only_allowed_cpus_are_used() {
        let root = LARGE.tree();
        let topology = Topology::read(root.path(), &[1, 4, 5, 17], None).unwrap();
        assert_eq!(bound(NumaBinding::Node, 2, &topology), ["1,17", "4-5"]);
        assert_eq!(bound(NumaBinding::Socket, 1, &topology), ["1,4-5,17"]);
        assert!(
            bind(NumaBinding::Exclusive, 4, &topology)
                .unwrap_err()
                .0
                .contains("1 cores for 2 workers")
        );
        let uneven = Topology::read(root.path(), &[0, 2, 3], None).unwrap();
        assert_eq!(bound(NumaBinding::CoreComplex, 2, &uneven), ["2-3", "0"]);
    }

    #[test]
    fn workers_go_where_their_gpu_is() {
        let root = LARGE.tree();
        for (address, node, uuid) in [
            ("0000:1b:00.0", 3, "GPU-aa"),
            ("0000:0a:00.0", 1, "GPU-bb"),
            ("0000:dc:00.0", -1, "GPU-cc"),
        ] {
            write(
                root.path().join(format!("sys/bus/pci/devices/{address}/numa_node")),
                format!("{node}\n"),
            );
            let information = format!("Model: \t\t X\nGPU UUID: \t {uuid}-1\n");
            write(
                root.path().join(format!("proc/driver/nvidia/gpus/{address}/information")),
                information,
            );
        }
        let all: Vec<_> = (0..32).collect();
        let nodes = |visible| Topology::read(root.path(), &all, visible).unwrap().gpu_nodes;
        assert_eq!(nodes(None), [1, 3, 0]);
        assert_eq!(nodes(Some("2,GPU-aa")), [0, 3]);
        assert_eq!(nodes(Some("1,-1,0")), [3]);
        assert!(nodes(Some("")).is_empty());
        let topology = Topology::read(root.path(), &all, None).unwrap();
        assert_eq!(bound(NumaBinding::Node, 2, &topology), ["4-7,20-23", "12-15,28-31"]);
        // More workers than GPUs: bind without regard to GPUs.
        assert_eq!(bound(NumaBinding::Node, 4, &topology)[3], "12-15,28-31");
        let topology = Topology::read(root.path(), &[0, 1], None).unwrap();
        assert!(
            bind(NumaBinding::Node, 2, &topology)
                .unwrap_err()
                .0
                .contains("GPU 0 is on NUMA node 1")
        );
    }

    #[test]
    fn this_machine_is_understood() {
        let topology = Topology::this(None).unwrap();
        assert!(!topology.cpus.is_empty());
        for binding in [
            NumaBinding::Node,
            NumaBinding::Socket,
            NumaBinding::Exclusive,
            NumaBinding::CoreComplex,
        ] {
            assert!(!bind(binding, 1, &topology).unwrap()[0].is_empty());
        }
    }

    proptest! {
        #[test]
        fn exclusive_cpus_belong_to_one_worker(
            nodes in 1usize..4,
            cores in 3usize..16,
            workers in 1usize..12,
        ) {
            let node = |id: usize| id % cores % nodes;
            let cpu = |id| Cpu { id, node: node(id), socket: 0, core: id % cores, cache: 0 };
            let topology = Topology { cpus: (0..2 * cores).map(cpu).collect(), gpu_nodes: vec![] };
            if let Ok(bound) = bind(NumaBinding::Exclusive, workers, &topology) {
                let mut all = bound.concat();
                let count = all.len();
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len(), count);
                prop_assert!(bound.iter().all(|cpus| !cpus.is_empty()));
                prop_assert!(workers < nodes || count == 2 * cores);
            }
        }

        #[test]
        fn lists_are_read_as_they_are_written(
            cpus in prop::collection::btree_set(0usize..200, 0..40),
        ) {
            let cpus: Vec<_> = cpus.into_iter().collect();
            prop_assert_eq!(parse(&list(&cpus)), Some(cpus));
        }
    }
}
