//! The description of a rank, which it publishes when it joins.

use flow_store::net::host_name;
use serde::{Deserialize, Serialize};

use crate::env::Membership;

/// A rank, as it describes itself under `rank/<rank>` in the store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PeerInfo {
    /// Its process.
    pub pid: u32,
    /// Identifies a host and its process id namespace.
    pub host_id: String,
    /// Identifies a node.
    pub node: String,
    /// The name of its host, for messages.
    pub host: String,
    /// The address at which ranks on other nodes reach this one, in a form that only the transport
    /// knows; empty on a single node.
    pub address: Vec<u8>,
}

impl PeerInfo {
    /// Describes this process.
    pub fn own(membership: &Membership, address: Vec<u8>) -> Self {
        let host = host_name();
        let node = membership.node.map_or_else(|| host.clone(), |node| format!("#{node}"));
        Self { pid: std::process::id(), host_id: host_id(), node, host, address }
    }
}

/// Returns the running system and the space of process ids.
pub fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), space.display())
}
