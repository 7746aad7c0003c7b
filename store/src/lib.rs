//! The rendezvous store: a small key-value server and its client.
//!
//! Processes of one job find each other through it: they leave values under names, wait for those
//! of others and count. It carries addresses, names and counters, and is never in the path of a
//! collective.
//!
//! | | |
//! |---|---|
//! | [`Address`] | where it is: `tcp://host:port` or `unix://name` |
//! | [`Store`] | one client's connection: `set`, `get`, `wait`, `compare_and_set` and others |
//! | [`Server`] | serves a store until dropped; in `flow-launch`, or in rank 0 without it |
//! | [`Replica`] | keeps a store the same as one that another process serves, to take its place |
//! | [`TcpStoreServer`] | serves PyTorch's clients (`torch.distributed.TCPStore`) at the same address |
//! | [`Inbox`] | what clients have to say to the process that serves it |
//!
//! Beside it is what other crates share. That is processes that are forked ([`fork`]), this host in the
//! network ([`net`]), proofs of knowing a token ([`proof`]), this process's control groups
//! ([`cgroup`]), the time of records ([`clock`]), and the memory that has them ([`flight`]).
//!
//! Whoever connects must prove to know the store's token, which is not sent itself. On a unix
//! socket both sides must also belong to the same user. Keys and values live until they are
//! deleted, or as long as the store.
//!
//! One address can have several stores beside each other ([`Server::beside`]). The token decides in
//! which one a client is.
//!
//! What is not authenticated: clients of PyTorch's, where they are served
//! ([`Server::serve_tcp_store`]). They have nothing to prove themselves with, so whoever reaches
//! the port can read and change the values that they have there. These are apart from those of
//! Flow's stores, which they cannot reach.

mod address;
mod auth;
mod blocking_socket;
pub mod cgroup;
mod client;
pub mod clock;
mod connect;
mod connection;
mod event_loop;
pub mod flight;
pub mod fork;
mod inbox;
mod listener;
pub mod net;
mod patience;
pub mod proof;
mod protocol;
mod replica;
mod replication;
mod server;
mod service;
mod services;
mod session;
#[cfg(test)]
mod simulation;
mod store_service;
mod tcp_store;
mod values;

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

pub use address::Address;
pub use client::Store;
pub use inbox::Inbox;
pub use replica::{Replica, ReplicaMessages};
pub use server::{Server, TcpStoreServer};

/// An error of a store, with the address and the operation on which key.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A text is no [`Address`].
    #[error(
        "\"{text}\" is no store address: give tcp://HOST:PORT or unix://NAME, an IPv6 host in \
         brackets"
    )]
    Address {
        /// The text.
        text: String,
    },
    /// Nothing answered within the timeout.
    #[error(
        "store {address}: no connection within {timeout:?}: {cause}; is the process that serves it \
         (flow-launch, or rank 0) alive and reachable?"
    )]
    Connect {
        /// The store.
        address: Address,
        /// The time of the attempts.
        timeout: Duration,
        /// The last attempt's failure.
        cause: String,
    },
    /// The program wanted to stop waiting for the server. This client is of no more use.
    #[error("store {address}: {operation}: the program was interrupted while it waited")]
    Interrupted {
        /// The store.
        address: Address,
        /// The operation, and its key if it has one.
        operation: String,
    },
    /// The store, or the client, refused to go on after the first exchange.
    #[error("store {address}: {reason}")]
    Denied {
        /// The store.
        address: Address,
        /// Why, and what would be right.
        reason: String,
    },
    /// Keys were not set within the timeout.
    #[error(
        "store {address}: {operation} timed out after {timeout:?}; not set: {}; are the ranks that \
         set them alive?",
        list(missing)
    )]
    Timeout {
        /// The store.
        address: Address,
        /// The operation and its key.
        operation: String,
        /// The time of the wait.
        timeout: Duration,
        /// The keys that are still missing.
        missing: Vec<String>,
    },
    /// The connection failed, now or in an earlier call. This client is of no more use.
    #[error(
        "store {address}: {operation}: {cause}; is the process that serves it (flow-launch, or \
         rank 0) alive?"
    )]
    Lost {
        /// The store.
        address: Address,
        /// The operation and its key.
        operation: String,
        /// The cause.
        cause: String,
    },
    /// The request cannot be carried out. The connection stays usable.
    #[error("store {address}: {operation}: {reason}")]
    Rejected {
        /// The store.
        address: Address,
        /// The operation and its key.
        operation: String,
        /// Why, and what would be right.
        reason: String,
    },
}

/// A result whose error is the store's.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns the keys for a message: the first few by name, the rest as a number.
fn list(keys: &[impl std::fmt::Display]) -> String {
    const SHOWN: usize = 8;
    let mut text =
        keys.iter().take(SHOWN).map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(", ");
    if keys.len() > SHOWN {
        text.push_str(&format!(" and {} more", keys.len() - SHOWN));
    }
    text
}

/// Whether the process at the other end of a unix socket belongs to our user.
fn belongs_to_us(socket: &impl AsFd) -> io::Result<bool> {
    Ok(socket_peercred(socket)?.uid == geteuid())
}
