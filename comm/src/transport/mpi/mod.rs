//! Links over MPI: how a message goes from rank to rank is MPI's affair.
//!
//! | file | subject |
//! |---|---|
//! | `session` | this process' use of MPI: the calls, and when it begins and ends |
//! | `connections` | connections |

mod connections;
mod session;

use std::time::{Duration, Instant};

pub use connections::open;
use flow_store::net::{host_name, secret};
use flow_store::{Address, Server};
use session::{MAX_BACKOFF, with_session};

use crate::env::Membership;
use crate::settings;

/// The longest text of [`exchange_store_address`].
const MAX_PLACE: usize = 512;

/// Serves the store of a join in rank 0, and tells all ranks where. Returns the server, the
/// address, and the token.
pub fn exchange_store_address(
    membership: &Membership,
    timeout: Duration,
) -> Result<(Option<Server>, Address, String), String> {
    let rank = membership.rank;
    let begin = Instant::now();
    let mut buffer = vec![0; MAX_PLACE];
    check_place(membership)?;
    let server = (rank == 0)
        .then(|| serve(&mut buffer))
        .transpose()
        .map_err(|e| format!("no rendezvous: {e}"))?;
    let mut message = with_session(|session| session.broadcast(buffer))?;
    while with_session(|session| session.test(&mut message))?.is_none() {
        if begin.elapsed() >= timeout {
            return Err(format!("rank 0 has not joined within {timeout:?}"));
        }
        std::thread::sleep(MAX_BACKOFF);
    }
    let text = message.buffer.split(|&byte| byte == 0).next().unwrap_or_default();
    let (token, place): (String, String) = serde_json::from_slice(text).map_err(|error| {
        format!(
            "malformed store address of rank 0: got {:?}: {error}",
            String::from_utf8_lossy(text)
        )
    })?;
    Ok((server, Address::Tcp(place), token))
}

/// Whether MPI gives this process the place that it has in the job.
fn check_place(membership: &Membership) -> Result<(), String> {
    let Membership { rank, world_size: size, .. } = *membership;
    with_session(|session| {
        if session.rank == rank && session.size == size {
            return Ok(());
        }
        Err(format!(
            "this is rank {rank} of {size}, but rank {} of {} to MPI: start the job with the \
             mpirun of the MPI that the program is built with, or with a srun that knows it (srun \
             --mpi=list), or set FLOW_TRANSPORT=tcp",
            session.rank, session.size
        ))
    })
}

/// Starts the store, and writes down its token and its place.
fn serve(buffer: &mut [u8]) -> std::io::Result<Server> {
    let token = secret()?;
    let local = settings::local_address();
    let server = Server::start(
        &Address::Tcp(format!("{}:0", local.as_deref().unwrap_or("0.0.0.0"))),
        &token,
    )?;
    let Address::Tcp(at) = server.address() else {
        return Err(std::io::ErrorKind::Unsupported.into());
    };
    let (_, port) = at.rsplit_once(':').unwrap_or_default();
    let host = local.unwrap_or_else(host_name);
    let text = serde_json::json!([token, format!("{host}:{port}")]).to_string();
    let place = buffer.get_mut(..text.len()).ok_or_else(|| {
        std::io::Error::other(format!("{host:?} is too long for the name of a host"))
    })?;
    place.copy_from_slice(text.as_bytes());
    Ok(server)
}
