//! A node of the job.

use serde::{Deserialize, Serialize};

/// A node, as its agent describes it when it joins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub host: String,
    /// The address at which other nodes reach it.
    pub address: String,
    /// `--node-rank`, where the rendezvous is static.
    pub node_rank: Option<u32>,
    pub local_world_size: u32,
    pub role: String,
    /// `--nnodes` (min, max), which must be the same on all nodes.
    pub nodes: (u32, u32),
    /// `--elastic in-place`, which must be the same on all nodes.
    pub is_in_place: bool,
    /// It knows [`Command::Report`](crate::control::protocol::Command::Report).
    #[serde(default)]
    pub can_report: bool,
}

/// Returns a number of nodes as `--nnodes` has it.
pub fn range((min, max): (u32, u32)) -> String {
    if min == max { max.to_string() } else { format!("{min}:{max}") }
}
