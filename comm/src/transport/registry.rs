//! The transports by name, and which one a rank uses.

use super::Transport;
use crate::env::{Membership, Rendezvous};
use crate::settings;

/// Opens a transport for a rank that joins its job.
type Open = fn(&Membership) -> Result<Box<dyn Transport>, String>;

/// The transports by name. Adding one takes a file and a line here.
const TRANSPORTS: &[(&str, Open)] = &[
    ("tcp", super::tcp::open),
    #[cfg(feature = "mpi")]
    ("mpi", super::mpi::open),
    #[cfg(test)]
    ("toy", super::toy::open),
];

/// Opens the transport that `FLOW_TRANSPORT` names; without it, MPI's where MPI gives the rendezvous,
/// else TCP.
///
/// # Errors
/// There is none of that name, or it cannot be used here.
pub fn open(membership: &Membership) -> Result<Box<dyn Transport>, String> {
    let default = if membership.rendezvous == Rendezvous::Mpi { "mpi" } else { "tcp" };
    let name = settings::transport().unwrap_or_else(|| default.into());
    let Some((_, open)) = TRANSPORTS.iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = TRANSPORTS.iter().map(|(name, _)| *name).collect();
        return Err(format!("there is no transport {name:?} here, only {}", known.join(", ")));
    };
    open(membership)
}
