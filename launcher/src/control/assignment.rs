//! One start of a job's workers: the first, or after a failure or a change of nodes the next.

use serde::{Deserialize, Serialize};

/// A node's place in a round, as the coordinator has decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankAssignment {
    /// Rounds before this one that ended with a failure.
    pub restart_count: u32,
    /// This node among the nodes, from 0.
    pub group_rank: u32,
    pub group_world_size: u32,
    /// The rank of this node's first worker; the others follow.
    pub first_rank: u32,
    pub local_world_size: u32,
    pub world_size: u32,
    /// As `first_rank` and `world_size`, among the workers of the same `--role`.
    pub first_role_rank: u32,
    pub role_world_size: u32,
    pub stores: RendezvousStoreInfo,
}

/// How the workers of a round find each other; the leader knows it, not the coordinator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RendezvousStoreInfo {
    /// Where the leading node's agent, beside rank 0, serves PyTorch's store.
    pub master_addr: String,
    pub master_port: u16,
    /// Whether it does; else the port is free there, for rank 0 to serve one.
    pub has_agent_store: bool,
    /// Address and token of Flow's store for this round.
    pub store: String,
    pub token: String,
}
