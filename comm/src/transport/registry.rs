//! The transports by name, and which one a rank uses.

use super::Transport;
use crate::env::{Membership, Rendezvous};
use crate::settings;

/// Opens a transport for a rank that joins its job.
type OpenTransport = fn(&Membership) -> Result<Box<dyn Transport>, String>;

/// The transports by name. Adding one takes a file and a line here.
const TRANSPORTS: &[(&str, OpenTransport)] = &[
    ("tcp", super::tcp::open),
    #[cfg(feature = "mpi")]
    ("mpi", super::mpi::open),
];

/// Opens the transport that `FLOW_TRANSPORT` names; without it, MPI's where MPI gives the
/// rendezvous, else TCP.
///
/// # Errors
/// There is none of that name, or it cannot be used here.
pub fn open(membership: &Membership) -> Result<Box<dyn Transport>, String> {
    let default = if membership.rendezvous == Rendezvous::Mpi { "mpi" } else { "tcp" };
    let name = settings::transport().unwrap_or_else(|| default.into());
    find(&name)?(membership)
}

fn find(name: &str) -> Result<OpenTransport, String> {
    let found = TRANSPORTS.iter().find(|(known, _)| *known == name);
    found.map(|(_, open)| *open).ok_or_else(|| {
        let known: Vec<&str> = TRANSPORTS.iter().map(|(name, _)| *name).collect();
        format!("there is no transport {name:?} here, only {}", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_store::Address;

    #[test]
    fn a_transport_is_found_by_its_name() {
        let address = Address::Unix("registry".into());
        let membership = Membership {
            rank: 0,
            world_size: 2,
            local_rank: 0,
            local_world_size: 1,
            node: None,
            rendezvous: Rendezvous::RankZero { address, token: "token".into() },
        };
        let transport = find("tcp").unwrap()(&membership).unwrap();
        assert_eq!(transport.name(), "tcp");
        let error = find("token-ring").unwrap_err();
        assert!(
            error.starts_with("there is no transport \"token-ring\" here, only tcp"),
            "{error}"
        );
    }
}
