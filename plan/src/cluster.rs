//! The machines: how fast a rank computes, and how ranks are connected.

use serde::Deserialize;

use crate::error::{Error, Result, not_negative, positive, share};

/// The machines that a job runs on. The first `ranks_per_node` ranks are on the first node, and so
/// on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Ranks (GPUs) of a node.
    pub ranks_per_node: usize,
    /// Bytes that a rank may use.
    pub memory: f64,
    /// Floating point operations a second of a rank, at best.
    pub flops: f64,
    /// The share of `flops` that matrix products reach.
    pub matmul: Efficiency,
    /// Bytes a second between a rank and its memory.
    pub memory_bandwidth: f64,
    /// The connection between ranks of a node.
    pub intra_node: Link,
    /// The connection between nodes. The bandwidth is that of each rank when all ranks of a node
    /// send.
    pub inter_node: Link,
    /// Ranks of a node that compute at once. By default all of them do; fewer if ranks share cores.
    pub concurrent_ranks: Option<usize>,
    /// Whether ranks of a node can have memory in common, as processes on CPUs can.
    #[serde(default)]
    pub shared_memory: bool,
    /// Seconds that a layer's forward takes to start its operations.
    #[serde(default)]
    pub layer_overhead: f64,
}

/// The share of the peak that a matrix product reaches: `peak_share * size / (size + half_size)`,
/// where `size` is the smallest of its three dimensions on a rank.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// The share that very large products reach, above 0 and at most 1.
    pub peak_share: f64,
    /// The size that reaches half of `peak_share`. With 0 all sizes reach the same share.
    pub half_size: f64,
}

impl Efficiency {
    /// Returns the share of the peak for a product whose smallest dimension is `size`.
    pub fn of(&self, size: f64) -> f64 {
        self.peak_share * size / (size + self.half_size)
    }
}

/// A connection.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes a second that a rank sends, while it receives as many.
    pub bandwidth: f64,
    /// Seconds that a message of a few bytes takes.
    pub latency: f64,
}

impl Cluster {
    pub(crate) fn check(&self) -> Result<()> {
        if self.ranks_per_node == 0 {
            let need = "a node has at least 1 rank";
            return Err(Error::field("cluster.ranks_per_node", 0, need));
        }
        if let Some(value @ 0) = self.concurrent_ranks {
            let need = "at least 1 rank of a node computes";
            return Err(Error::field("cluster.concurrent_ranks", value, need));
        }
        positive("cluster.memory", self.memory)?;
        positive("cluster.flops", self.flops)?;
        positive("cluster.matmul.peak_share", self.matmul.peak_share)?;
        share("cluster.matmul.peak_share", self.matmul.peak_share)?;
        not_negative("cluster.matmul.half_size", self.matmul.half_size)?;
        positive("cluster.memory_bandwidth", self.memory_bandwidth)?;
        positive("cluster.intra_node.bandwidth", self.intra_node.bandwidth)?;
        not_negative("cluster.intra_node.latency", self.intra_node.latency)?;
        positive("cluster.inter_node.bandwidth", self.inter_node.bandwidth)?;
        not_negative("cluster.inter_node.latency", self.inter_node.latency)?;
        not_negative("cluster.layer_overhead", self.layer_overhead)
    }

    /// Returns the group of each `stride`-th of `ranks` ranks, `size` in all, as on an axis of a
    /// mesh. If such groups lie differently on nodes, this is the one that crosses nodes most.
    pub(crate) fn group(&self, size: usize, stride: usize, ranks: usize) -> Group {
        let node = self.ranks_per_node;
        let on_a_node = if ranks <= node {
            size
        } else if node.is_multiple_of(stride) {
            greatest_common_divisor(node / stride, size)
        } else {
            1
        };
        let link = if size > on_a_node { self.ring_between(on_a_node) } else { self.intra_node };
        Group { size, on_a_node, link, latency_on_a_node: self.intra_node.latency }
    }

    /// Returns the link of a ring with `on_a_node` ranks on each node. The ring enters and leaves a
    /// node once, over the connections of all its ranks there.
    fn ring_between(&self, on_a_node: usize) -> Link {
        let shared = self.inter_node.bandwidth * on_a_node as f64;
        let is_only_between = on_a_node == 1;
        let bandwidth =
            if is_only_between { shared } else { shared.min(self.intra_node.bandwidth) };
        Link { bandwidth, latency: self.inter_node.latency }
    }

    /// Returns a [`Cluster::group`] of ranks that send to their neighbours, each over its own
    /// connection.
    pub(crate) fn neighbours(&self, size: usize, stride: usize, ranks: usize) -> Group {
        let group = self.group(size, stride, ranks);
        let link = if group.crosses_nodes() { self.inter_node } else { self.intra_node };
        // Of the borders between neighbours, the slowest counts.
        let on_a_node = if group.crosses_nodes() { 1 } else { size };
        Group { link, on_a_node, ..group }
    }

    /// Returns the number of ranks that take turns on the cores that one rank needs.
    pub(crate) fn ranks_per_core(&self, ranks: usize) -> f64 {
        let on_a_node = self.ranks_per_node.min(ranks);
        on_a_node as f64 / self.concurrent_ranks.unwrap_or(on_a_node).min(on_a_node) as f64
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}

/// Ranks that communicate, and the slowest link between them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub size: usize,
    /// The number of its ranks on one node.
    pub on_a_node: usize,
    pub link: Link,
    latency_on_a_node: f64,
}

impl Group {
    /// Returns whether the group has ranks on several nodes.
    pub fn crosses_nodes(&self) -> bool {
        self.size > self.on_a_node
    }

    /// Returns bytes that a rank sends in a reduce-scatter or an all-gather of `bytes` in all: one
    /// half of an all-reduce (Thakur et al. 2005, "Optimization of Collective Communication
    /// Operations in MPICH").
    pub fn reduce_scatter_bytes(&self, bytes: f64) -> f64 {
        bytes * (self.size - 1) as f64 / self.size as f64
    }

    /// Seconds of a reduce-scatter or an all-gather of `bytes` in all: a ring.
    pub fn reduce_scatter(&self, bytes: f64) -> f64 {
        if self.size == 1 || bytes == 0.0 {
            return 0.0;
        }
        self.reduce_scatter_bytes(bytes) / self.link.bandwidth + self.ring_latency()
    }

    /// Seconds of a reduce-scatter or an all-gather of a few bytes. What a rank sends passes all other
    /// ranks, one after the other.
    pub fn ring_latency(&self) -> f64 {
        let nodes = self.size.div_ceil(self.on_a_node);
        let between = (nodes - 1) as f64 * self.link.latency;
        between + (self.size - nodes) as f64 * self.latency_on_a_node
    }

    /// Seconds of an all-reduce of `bytes`. Its latency is that of a tree.
    pub fn all_reduce(&self, bytes: f64) -> f64 {
        if self.size == 1 || bytes == 0.0 {
            return 0.0;
        }
        let levels = usize::BITS - (self.size - 1).leading_zeros();
        let way = self.reduce_scatter_bytes(bytes) / self.link.bandwidth
            + f64::from(levels) * self.link.latency;
        2.0 * way
    }

    /// Seconds until the next rank has `bytes`.
    pub fn send(&self, bytes: f64) -> f64 {
        bytes / self.link.bandwidth + self.link.latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dgx() -> Cluster {
        let text = include_str!("../models/dgx-a100.json");
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_group_uses_the_slowest_link_on_its_way() {
        let cluster = dgx();
        let within = cluster.group(8, 1, 64);
        assert!(!within.crosses_nodes());
        assert_eq!(within.link.bandwidth, cluster.intra_node.bandwidth);
        let across = cluster.group(6, 8, 48);
        assert!(across.crosses_nodes());
        assert_eq!(across.link.bandwidth, cluster.inter_node.bandwidth);
        // Four ranks of each node are in the group: the two groups share the node's connections.
        assert_eq!(cluster.group(32, 2, 64).link.bandwidth, 4.0 * cluster.inter_node.bandwidth);
        // Six do not divide a node's eight: one group is ranks 6 and 7, and four of the next node.
        assert!(cluster.group(6, 1, 24).crosses_nodes());
        assert!(!cluster.group(6, 1, 6).crosses_nodes());
        assert_eq!(cluster.group(1, 1, 8).all_reduce(1e9), 0.0);
        // A ring of two ranks on each node has both their connections; a send has one.
        assert_eq!(cluster.group(4, 4, 16).link.bandwidth, 2.0 * cluster.inter_node.bandwidth);
        assert_eq!(cluster.neighbours(4, 4, 16).link.bandwidth, cluster.inter_node.bandwidth);
        assert_eq!(cluster.neighbours(2, 4, 8).link.bandwidth, cluster.intra_node.bandwidth);
    }

    #[test]
    fn a_ring_passes_each_rank() {
        let cluster = dgx();
        let within = cluster.intra_node.latency;
        let between = cluster.inter_node.latency;
        let close = |seconds: f64, expected: f64| assert!((seconds / expected - 1.0).abs() < 1e-9);
        close(cluster.group(8, 1, 64).ring_latency(), 7.0 * within);
        close(cluster.group(64, 1, 64).ring_latency(), 56.0 * within + 7.0 * between);
        close(cluster.group(8, 8, 64).ring_latency(), 7.0 * between);
        // Not so the trees of an all-reduce.
        close(cluster.group(64, 1, 64).all_reduce(1e-9), 2.0 * 6.0 * between);
    }

    #[test]
    fn ranks_that_share_cores_take_turns() {
        let mut cluster = dgx();
        assert_eq!(cluster.ranks_per_core(3072), 1.0);
        cluster.concurrent_ranks = Some(2);
        assert_eq!(cluster.ranks_per_core(3072), 4.0);
        assert_eq!(cluster.ranks_per_core(1), 1.0);
    }
}
