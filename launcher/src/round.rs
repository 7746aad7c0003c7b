//! One start of a job's workers: the first, or after a failure or a change of nodes the next.

use serde::{Deserialize, Serialize};

/// A node's place in a round, as the coordinator has decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Placement {
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
    /// Where rank 0 runs, and a port that is free there, for workers that make a store of their own.
    pub master_addr: String,
    pub master_port: u16,
    /// Address and token of the launcher's store for this round.
    pub store: (String, String),
}
