//! Ranks: which workers of a job run on which node in a round.

use serde::{Deserialize, Serialize};

use crate::control::node::Node;

/// The ranks of one node in a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankAssignment {
    /// Earlier rounds that failed.
    pub restart_count: u32,
    /// Index of this node among the nodes.
    pub group_rank: u32,
    pub group_world_size: u32,
    /// The rank of this node's first worker; the others follow.
    pub first_rank: u32,
    pub local_world_size: u32,
    pub world_size: u32,
    /// By local rank: the number of workers that had the rank before in the round.
    pub replacements: Vec<u32>,
    /// Like `first_rank` and `world_size`, among the workers of the same `--role`.
    pub first_role_rank: u32,
    pub role_world_size: u32,
    pub stores: RendezvousStoreInfo,
}

/// The place at which the workers of a round find each other. The leader fills it in; the
/// coordinator does not know it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RendezvousStoreInfo {
    /// The leading node, where rank 0 runs and PyTorch's store is served.
    pub master_addr: String,
    pub master_port: u16,
    /// The leading agent serves PyTorch's store; otherwise the port is free for rank 0 to serve it.
    pub has_agent_store: bool,
    /// Address of Flow's store for this round, and the token that it asks for.
    pub store: String,
    pub token: String,
}

/// Gives the workers of `nodes`, in this order, consecutive ranks.
pub fn assign(nodes: &[&Node], restart_count: u32) -> Vec<RankAssignment> {
    let mut assignments = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        assignments.push(RankAssignment {
            restart_count,
            group_rank: index as u32,
            group_world_size: nodes.len() as u32,
            first_rank: count(&nodes[..index]),
            local_world_size: node.local_world_size,
            world_size: count(nodes),
            replacements: vec![0; node.local_world_size as usize],
            first_role_rank: count_of_role(&nodes[..index], &node.role),
            role_world_size: count_of_role(nodes, &node.role),
            stores: RendezvousStoreInfo::default(),
        });
    }
    assignments
}

/// Returns the number of workers of `nodes`.
fn count(nodes: &[&Node]) -> u32 {
    nodes.iter().map(|node| node.local_world_size).sum()
}

/// Returns the number of those that have this role.
fn count_of_role(nodes: &[&Node], role: &str) -> u32 {
    let same = nodes.iter().filter(|node| node.role == role);
    same.map(|node| node.local_world_size).sum()
}
