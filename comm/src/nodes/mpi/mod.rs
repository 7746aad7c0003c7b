//! Links over MPI: how a message goes from rank to rank is MPI's affair.
//!
//! | file | subject |
//! |---|---|
//! | `session` | this process' use of MPI: the calls, and when it begins and ends |
//! | `wire` | links |

mod session;
mod wire;

use std::io::Read;
use std::time::{Duration, Instant};

use session::{with, NAP};
pub use wire::MpiNetwork;

use crate::env::Membership;
use crate::shm::LOCAL_ADDRESS;
use crate::store::{Address, Server};

/// The longest text of [`meet`].
const MAX_PLACE: usize = 512;

/// Serves the store of a join in rank 0, and tells all ranks where. Returns the server, the
/// address, and the token.
pub fn meet(
    membership: &Membership,
    timeout: Duration,
) -> Result<(Option<Server>, Address, String), String> {
    let (rank, size) = (membership.rank, membership.world_size);
    let begin = Instant::now();
    let mut buffer = vec![0; MAX_PLACE];
    with(|session| {
        match (session.rank, session.size) {
        place if place == (rank, size) => Ok(()),
        (own, of) => Err(format!(
            "this is rank {rank} of {size}, but rank {own} of {of} to MPI: start the job with the mpirun of the MPI that \
             the program is built with, or with a srun that knows it (srun --mpi=list), or set FLOW_BACKEND=tcp"
        )),
    }
    })?;
    let server = (rank == 0)
        .then(|| serve(&mut buffer))
        .transpose()
        .map_err(|e| format!("no rendezvous: {e}"))?;
    let mut message = with(|session| session.broadcast(buffer))?;
    while with(|session| session.test(&mut message))?.is_none() {
        if begin.elapsed() >= timeout {
            return Err(format!("rank 0 has not joined within {timeout:?}"));
        }
        std::thread::sleep(NAP);
    }
    let text = String::from_utf8_lossy(&message.buffer);
    let (token, place) =
        text.trim_end_matches('\0').split_once(' ').ok_or("rank 0 has told nonsense of itself")?;
    Ok((server, Address::Tcp(place.into()), token.into()))
}

/// Starts the store, and writes down its token and its place.
fn serve(buffer: &mut [u8]) -> std::io::Result<Server> {
    let mut random = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    let token = format!("{:032x}", u128::from_ne_bytes(random));
    let local = std::env::var(LOCAL_ADDRESS).ok();
    let server = Server::start(
        &Address::Tcp(format!("{}:0", local.as_deref().unwrap_or("0.0.0.0"))),
        &token,
    )?;
    let Address::Tcp(at) = server.address() else {
        return Err(std::io::ErrorKind::Unsupported.into());
    };
    let (_, port) = at.rsplit_once(':').unwrap_or_default();
    let host =
        local.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let text = format!("{token} {host}:{port}");
    let too_long = || std::io::Error::other(format!("{host:?} is too long for the name of a host"));
    buffer.get_mut(..text.len()).ok_or_else(too_long)?.copy_from_slice(text.as_bytes());
    Ok(server)
}
