//! The rendezvous store of a join: who serves it, and the connection to it.

use std::net::ToSocketAddrs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use flow_kernels::digest;
use flow_store::fork::PerProcess;
use flow_store::{Address, Server, Store};

use crate::env::{Membership, Rendezvous};
use crate::interrupt::ends_call;

/// Connects to the store; returns it, and its server if that is this rank's to run.
pub fn connect_store(
    membership: &Membership,
    prefix: &str,
    timeout: Duration,
) -> Result<(Option<Arc<Server>>, Option<Store>), String> {
    match &membership.rendezvous {
        Rendezvous::None => Ok((None, None)),
        Rendezvous::Server { address, token } => {
            Ok((None, Some(connect(address, token, timeout)?)))
        }
        #[cfg(feature = "mpi")]
        Rendezvous::Mpi => {
            let (server, address, token) =
                crate::transport::mpi::exchange_store_address(membership, timeout)?;
            let store = connect(&address, &token, timeout).map_err(|reason| {
                format!(
                    "{reason}; if the name of rank 0's host leads nowhere, set {} there to its \
                     address",
                    crate::settings::LOCAL_ADDRESS
                )
            })?;
            Ok((server.map(Arc::new), Some(store)))
        }
        #[cfg(not(feature = "mpi"))]
        Rendezvous::Mpi => {
            let reason = "this program is built without MPI: build it with --features mpi";
            Err(reason.into())
        }
        Rendezvous::RankZero { address, token } => {
            // A server for each join: that of the one before may be there still, or gone already.
            let address = &match address {
                Address::Unix(name) => Address::Unix(format!("{name}-{:016x}", digest(prefix))),
                address => address.clone(),
            };
            let mut server = None;
            if membership.rank == 0 {
                let several_nodes = membership.local_world_size < membership.world_size;
                let served = match address {
                    Address::Tcp(at) if several_nodes => &Address::Tcp(on_all_interfaces(at)),
                    address => address,
                };
                server = Some(serve(served, token).map_err(|error| {
                    format!(
                        "cannot serve the rendezvous at {address}: {error}; if another job of \
                         yours runs here, give each its own MASTER_PORT"
                    )
                })?);
            }
            Ok((server, Some(connect(address, token, timeout)?)))
        }
    }
}

fn connect(address: &Address, token: &str, timeout: Duration) -> Result<Store, String> {
    Store::connect_unless(ends_call, address, token, timeout).map_err(|error| error.to_string())
}

/// Returns the address at which to serve other nodes: to this one, the name of its own host may be
/// that of the loopback interface.
fn on_all_interfaces(host_and_port: &str) -> String {
    let is_ipv6 = host_and_port
        .to_socket_addrs()
        .is_ok_and(|mut addresses| addresses.all(|address| address.is_ipv6()));
    let host = if is_ipv6 { "[::]" } else { "0.0.0.0" };
    let port = host_and_port.rsplit_once(':').map_or("", |(_, port)| port);
    format!("{host}:{port}")
}

/// Starts a server. There is only one port: what is served there lives as long as the process, for
/// all its joins.
fn serve(address: &Address, token: &str) -> std::io::Result<Arc<Server>> {
    type Kept = Option<(Address, Arc<Server>)>;
    static KEPT: PerProcess<Mutex<Kept>> = PerProcess::empty();
    let Address::Tcp(_) = address else { return Server::start(address, token).map(Arc::new) };
    let mut kept = KEPT.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, server)) = kept.as_ref().filter(|(at, _)| at == address) {
        return Ok(Arc::clone(server));
    }
    let server = Arc::new(Server::start(address, token)?);
    *kept = Some((address.clone(), Arc::clone(&server)));
    Ok(server)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::World;

    #[test]
    fn a_rendezvous_of_several_nodes_is_served_on_all_interfaces() {
        for (host, address) in
            [("127.0.1.1", "127.0.0.1"), ("localhost", "127.0.1.1"), ("[::1]", "[::1]")]
        {
            let bind = |host| std::net::TcpListener::bind(format!("{host}:0"));
            let Ok(port) = bind(host).map(|free| free.local_addr().unwrap().port()) else {
                println!("SKIPPED: a rendezvous at {host}: there is no such address here");
                continue;
            };
            let at = |host: &str| Address::Tcp(format!("{host}:{port}"));
            let rendezvous = Rendezvous::RankZero { address: at(host), token: "token".into() };
            let membership = Membership {
                rank: 0,
                world_size: 2,
                local_rank: 0,
                local_world_size: 1,
                node: None,
                rendezvous,
            };
            let joining = std::thread::spawn(move || {
                World::join(&membership, "", Duration::from_secs(3)).map(drop)
            });
            let store = Store::connect(&at(address), "token", Duration::from_secs(2)).map(drop);
            assert!(store.is_ok(), "{host}: {store:?}");
            assert!(joining.join().unwrap().is_err(), "rank 1 does not come");
        }
    }
}
