//! How the ranks of a job come together: who they are, the arena of each node, and the network
//! between nodes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags};
use rustix::thread::CpuSet;

use super::arena::Arena;
use super::control::{Control, Counter, Note, MAX_RANKS};
use super::fork::{ForkSafe, Process};
use super::joining::{has_ended, Joining, LOOK};
use super::world::{sleep_on, Peer, World, FIRST_WARNING, SLICE};
use crate::env::{hash, Membership, Rendezvous};
use crate::error::{Error, Result};
use crate::nodes::tcp::TcpNetwork;
use crate::nodes::Network;
use crate::store::{Address, Error as StoreError, Server, Store};
use crate::waits::Waits;

/// Where this rank can be reached by other nodes; else at the address from which it reaches the
/// store.
pub const LOCAL_ADDRESS: &str = "FLOW_LOCAL_ADDR";

/// At the beginning of the region of a node's first rank.
#[repr(C)]
struct Header {
    attached: Counter,
    /// Offset of the control block of the group of all ranks.
    root: AtomicU64,
    /// Why the ranks cannot come together, as the first of them found out.
    failure: Note,
    /// The processors that some rank may run on, a bit each.
    processors: [AtomicU64; CpuSet::MAX_CPU / 64],
}

/// What a rank tells the others of itself, under `rank/<rank>` in the store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Card {
    pub pid: u32,
    /// Tells machines apart, and the spaces in which process ids mean something.
    pub machine: String,
    /// Tells nodes apart.
    pub node: String,
    pub host: String,
    /// Where other nodes can reach it, if there are any.
    pub address: Option<SocketAddr>,
}

impl Card {
    fn own(membership: &Membership, address: Option<SocketAddr>) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let node = membership.node.map_or_else(|| host.clone(), |node| format!("#{node}"));
        Self { pid: std::process::id(), machine: machine(), node, host, address }
    }

    pub fn to_text(&self) -> String {
        let address = self.address.map(|address| address.to_string()).unwrap_or_default();
        [&self.pid.to_string(), &self.machine, &self.node, &self.host, &address]
            .map(String::as_str)
            .join("\t")
    }

    pub fn from_text(text: &str) -> Option<Self> {
        let mut fields = text.split('\t');
        let mut field = || fields.next();
        let (pid, machine, node, host) = (field()?.parse().ok()?, field()?, field()?, field()?);
        let address =
            Some(field()?).filter(|text| !text.is_empty()).map(str::parse).transpose().ok()?;
        Some(Self { pid, machine: machine.into(), node: node.into(), host: host.into(), address })
    }
}

/// The running system and the space of process ids.
pub fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), space.display())
}

impl World {
    /// Meets the other ranks that join under this name. All of them do so equally often; what else
    /// they have joined does not matter.
    pub fn join(membership: &Membership, name: &str, timeout: Duration) -> Result<Self> {
        let prefix = next_prefix(name);
        let (rank, size) = (membership.rank, membership.world_size);
        let begin = Instant::now();
        let fail = |reason: String| Error::Join { rank, reason };
        if size > MAX_RANKS {
            return Err(fail(format!("a job can have at most {MAX_RANKS} ranks, not {size}")));
        }
        let (server, store) = rendezvous(membership, &prefix, timeout).map_err(fail)?;
        let several_nodes = membership.local_world_size < size;
        let mut network = match several_nodes && membership.rendezvous != Rendezvous::Mpi {
            true => Some(network(membership).map_err(fail)?),
            false => None,
        };
        let address = network.as_ref().map(TcpNetwork::address);
        let launched = matches!(membership.rendezvous, Rendezvous::Server { .. })
            && is_known_to_launcher(membership);
        let waits = Waits::from_env(rank).filter(|_| launched);
        let mut joining = store.as_ref().map(|store| Joining {
            rank,
            size,
            store,
            prefix: &prefix,
            launched,
            begin,
            timeout,
            next_look: begin + LOOK,
            next_warning: begin + FIRST_WARNING,
            long: waits.as_ref().map(|waits| waits.begin(store)),
        });
        let own = Card::own(membership, address);
        if let Some(joining) = &joining {
            joining.announce(&own).map_err(fail)?;
        }
        let cards = match &mut joining {
            Some(joining) if several_nodes => {
                let cards = joining.all_cards().map_err(fail)?;
                check_node(&cards, &own, membership).map_err(fail)?;
                if let Some(network) = &mut network {
                    network.set_addresses(reachable(&cards, &own).map_err(fail)?);
                }
                cards
            }
            // On one node what else there is to know is in the arena.
            _ => vec![own.clone(); size],
        };
        let locals: Vec<usize> = (0..size).filter(|&r| cards[r].node == own.node).collect();

        let arena = share_arena(rank, size, &locals, joining.as_mut())?;
        drop(joining);
        let watch = |r: usize| {
            let node = cards.iter().position(|card| card.node == cards[r].node).unwrap_or(r);
            let host = cards[r].host.clone();
            let Some(index) = locals.iter().position(|&local| local == r) else {
                return Ok(Peer { pid: cards[r].pid, host, node, pidfd: None, gone: false });
            };
            let pid = pid(&arena, index).load(Ordering::Acquire);
            let others = Pid::from_raw(pid as i32).filter(|_| r != rank);
            match others.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty())).transpose() {
                Ok(pidfd) => Ok(Peer { pid, host, node, pidfd, gone: false }),
                Err(rustix::io::Errno::SRCH) => Ok(Peer { pid, host, node, pidfd: None, gone: true }),
                Err(error) => Err(fail(format!(
                    "cannot watch rank {r} (pid {pid}): {error}; that takes Linux 5.3, and a file descriptor for each \
                     rank (ulimit -n)"
                ))),
            }
        };
        let peers = (0..size).map(watch).collect::<Result<_>>()?;
        let root = header(&arena).root.load(Ordering::Acquire) as usize;
        let neighbours = cards.iter().filter(|card| card.machine == own.machine).count();
        Ok(Self {
            rank,
            size,
            locals,
            spin: neighbours <= processors(&arena),
            arena,
            root,
            peers,
            launched,
            waits,
            store,
            prefix,
            network: match network {
                Some(network) => Some(Box::new(network)),
                None => several_nodes.then(by_mpi).flatten(),
            },
            server,
            graveyard: Mutex::default(),
        })
    }
}

#[cfg(feature = "mpi")]
fn by_mpi() -> Option<Box<dyn Network>> {
    Some(Box::new(crate::nodes::mpi::MpiNetwork))
}

/// Nor is there such a rendezvous.
#[cfg(not(feature = "mpi"))]
fn by_mpi() -> Option<Box<dyn Network>> {
    None
}

/// Begins the keys of a join: tells its name, how often this process has joined under that before,
/// and how many forks lie behind it, so that forked processes do not meet those that they are
/// forked from.
fn next_prefix(name: &str) -> String {
    static JOINS: Mutex<BTreeMap<(u32, String), usize>> = Mutex::new(BTreeMap::new());
    let mut joins = JOINS.lock().unwrap_or_else(PoisonError::into_inner);
    let forks = Process::current().forks();
    let count = joins.entry((forks, name.into())).or_default();
    let number = std::mem::replace(count, *count + 1);
    let forks = if forks == 0 { String::new() } else { format!("fork {forks}/") };
    match name {
        "" => format!("world/{forks}{number}/"),
        // In quotes, so that no part of the one can be taken for a part of the other.
        name => format!("world/{name:?}/{forks}{number}/"),
    }
}

/// Whether what flow-launch tells of a rank, and is told, is of the process that has this rank
/// here: not where a program gives its ranks numbers of its own, nor in forked processes.
fn is_known_to_launcher(membership: &Membership) -> bool {
    let is =
        |name, number: usize| std::env::var(name).is_ok_and(|value| value.parse() == Ok(number));
    Process::current().forks() == 0
        && is("RANK", membership.rank)
        && is("WORLD_SIZE", membership.world_size)
}

/// The store, and its server if that is this rank's to run.
fn rendezvous(
    membership: &Membership,
    prefix: &str,
    timeout: Duration,
) -> Result<(Option<Arc<Server>>, Option<Store>), String> {
    let connect = |address: &Address, token: &str| {
        Store::connect(address, token, timeout).map(Some).map_err(|e| e.to_string())
    };
    match &membership.rendezvous {
        Rendezvous::None => Ok((None, None)),
        Rendezvous::Server { address, token } => Ok((None, connect(address, token)?)),
        #[cfg(feature = "mpi")]
        Rendezvous::Mpi => {
            let (server, address, token) = crate::nodes::mpi::meet(membership, timeout)?;
            let store = connect(&address, &token).map_err(|error| {
                format!("{error}; if the name of rank 0's host leads nowhere, set {LOCAL_ADDRESS} there to its address")
            })?;
            Ok((server.map(Arc::new), store))
        }
        #[cfg(not(feature = "mpi"))]
        Rendezvous::Mpi => {
            Err("this program is built without MPI: build it with --features mpi".into())
        }
        Rendezvous::RankZero { address, token } => {
            // A server for each join: that of the one before may be there still, or gone already.
            let address = &match address {
                Address::Unix(name) => Address::Unix(format!("{name}-{:016x}", hash(prefix))),
                address => address.clone(),
            };
            let serve = || match address {
                Address::Tcp(at) if membership.local_world_size < membership.world_size => {
                    serve(&Address::Tcp(on_all_interfaces(at)), token)
                }
                address => serve(address, token),
            };
            let server = (membership.rank == 0).then(serve).transpose().map_err(|e| {
                format!(
                    "cannot serve the rendezvous at {address}: {e}; if another job of yours runs here, give each its own MASTER_PORT"
                )
            })?;
            Ok((server, connect(address, token)?))
        }
    }
}

/// Where to serve other nodes: to this one, the name of its own host may be that of the loopback
/// interface.
fn on_all_interfaces(host_and_port: &str) -> String {
    let is_ipv6 =
        |mut addresses: std::vec::IntoIter<SocketAddr>| addresses.all(|address| address.is_ipv6());
    let host = if host_and_port.to_socket_addrs().is_ok_and(is_ipv6) { "[::]" } else { "0.0.0.0" };
    let port = host_and_port.rsplit_once(':').map_or("", |(_, port)| port);
    format!("{host}:{port}")
}

/// Starts a server. There is only one port: what is served there lives as long as the process, for
/// all its joins.
fn serve(address: &Address, token: &str) -> std::io::Result<Arc<Server>> {
    static KEPT: Mutex<Option<(Address, ForkSafe<Arc<Server>>)>> = Mutex::new(None);
    let Address::Tcp(_) = address else { return Server::start(address, token).map(Arc::new) };
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, server)) =
        kept.as_ref().filter(|(at, server)| at == address && server.is_ours())
    {
        return Ok(Arc::clone(server));
    }
    let server = Arc::new(Server::start(address, token)?);
    *kept = Some((address.clone(), ForkSafe::new(Arc::clone(&server))));
    Ok(server)
}

/// Begins to listen for ranks on other nodes.
fn network(membership: &Membership) -> Result<TcpNetwork, String> {
    let (Rendezvous::Server { address, token } | Rendezvous::RankZero { address, token }) =
        &membership.rendezvous
    else {
        return Err("there is no rendezvous store".into());
    };
    let own: IpAddr = match (std::env::var(LOCAL_ADDRESS), address) {
        (Ok(name), _) => (name.trim_matches(['[', ']']), 0_u16)
            .to_socket_addrs()
            .ok()
            .and_then(|mut addresses| Some(addresses.next()?.ip()))
            .ok_or_else(|| {
                format!("{LOCAL_ADDRESS}={name:?}: must be an address, or a name, of this host")
            })?,
        (Err(_), Address::Unix(_)) => Ipv4Addr::LOCALHOST.into(),
        (Err(_), Address::Tcp(store)) => {
            towards(store).map_err(|e| format!("no way to the store at {store}: {e}"))?
        }
    };
    TcpNetwork::listen(membership.rank, own, token).map_err(|e| {
        format!("cannot listen at {own} for other nodes: {e}; set {LOCAL_ADDRESS} to an address of this host")
    })
}

/// The address that this host has on the way to another: a datagram socket knows it without sending
/// anything.
fn towards(host_and_port: &str) -> std::io::Result<IpAddr> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the host has no address");
    for address in host_and_port.to_socket_addrs()? {
        let any: IpAddr = if address.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        };
        let way = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(address)?;
            Ok(socket.local_addr()?.ip())
        });
        match way {
            Ok(way) => return Ok(way),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether the ranks on this node are as many as they should be.
fn check_node(cards: &[Card], own: &Card, membership: &Membership) -> Result<(), String> {
    let nodemates = cards.iter().filter(|card| card.node == own.node).count();
    if nodemates != membership.local_world_size {
        return Err(format!(
            "{} ranks should be on this node ({}), and {nodemates} are: give all ranks of a node, and no others, the same \
             GROUP_RANK",
            membership.local_world_size, own.host
        ));
    }
    Ok(())
}

/// All ranks' addresses, if they make sense.
fn reachable(cards: &[Card], own: &Card) -> Result<Vec<SocketAddr>, String> {
    let address = |(rank, card): (usize, &Card)| {
        match card.address {
        Some(address) if address.ip().is_loopback() && card.machine != own.machine => Err(format!(
            "rank {rank} on {} says that it is at {address}, where only its own host can reach it: set {LOCAL_ADDRESS} \
             there to the address of its network",
            card.host
        )),
        Some(address) => Ok(address),
        None => {
            Err(format!("rank {rank} on {} takes its node for the only one: check its LOCAL_WORLD_SIZE", card.host))
        }
    }
    };
    cards.iter().enumerate().map(address).collect()
}

/// The arena of this node, once all its ranks have mapped it.
fn share_arena(
    rank: usize,
    size: usize,
    locals: &[usize],
    mut joining: Option<&mut Joining>,
) -> Result<Arc<Arena>> {
    let fail = |reason: String| Error::Join { rank, reason };
    let (first, count) = (locals[0], locals.len());
    let key = joining
        .as_ref()
        .map(|joining| format!("{}arena/{first}", joining.prefix))
        .unwrap_or_default();
    let reserved = std::mem::size_of::<Header>() + count * std::mem::size_of::<AtomicU32>();
    let (arena, file) = if rank == first {
        let (file, region) = Arena::create_file(count).map_err(fail)?;
        let arena = Arc::new(Arena::map(&file, count, region, 0, reserved).map_err(fail)?);
        let block = arena.allocate_zeroed(Control::bytes(size, count)).ok_or_else(|| {
            fail(format!("no shared memory for the control block of {size} ranks"))
        })?;
        let root = Control::attach(Arc::clone(&arena), block.offset(), size, count);
        root.header().attached.store(count as u32, Ordering::SeqCst);
        header(&arena).root.store(block.offset() as u64, Ordering::Release);
        // Nobody can know when every rank has left the job: this block goes with the arena.
        block.abandon();
        if let Some(joining) = &joining {
            let place = format!("{} {} {region}", std::process::id(), file.as_raw_fd());
            joining.store.set(&key, place.as_bytes()).map_err(|e| fail(e.to_string()))?;
        }
        (arena, Some(file))
    } else {
        let Some(joining) = &mut joining else {
            return Err(fail("there is no rendezvous store".into()));
        };
        let place = loop {
            match joining.store.get(&key, joining.left(LOOK)) {
                Ok(place) => break place,
                Err(StoreError::Timeout { .. }) => {
                    joining.look(&|| vec![first], &|_| 0).map_err(fail)?
                }
                Err(error) => return Err(fail(format!("rank {first} has not joined: {error}"))),
            }
        };
        let place = String::from_utf8_lossy(&place).into_owned();
        let fields: Vec<usize> = place.split(' ').filter_map(|f| f.parse().ok()).collect();
        let [pid, fd, region] = fields[..] else {
            return Err(fail(format!(
                "rank {first} announced its shared memory as {place:?}, which is not understood"
            )));
        };
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = std::fs::File::options().read(true).write(true).open(&path).map_err(|e| {
            fail(match joining.given_up() {
                Some(reason) => reason,
                None if has_ended(pid as u32) => format!("rank {first} (pid {pid}) died before all ranks had joined"),
                None => format!(
                    "cannot open rank {first}'s shared memory at {path}: {e}; all ranks of a node must run on one machine \
                     as one user"
                ),
            })
        })?;
        let index = locals.iter().position(|&local| local == rank).unwrap_or_default();
        (Arc::new(Arena::map(&file, count, region, index, 0).map_err(fail)?), None)
    };

    let own = std::process::id();
    announce_processors(&arena);
    let index = |rank: usize| locals.iter().position(|&local| local == rank);
    let pid_of =
        |rank: usize| index(rank).map_or(0, |index| pid(&arena, index).load(Ordering::Acquire));
    pid(&arena, index(rank).unwrap_or_default()).store(own, Ordering::Release);
    let attached = &header(&arena).attached;
    attached.raise(count as u32);
    let missing = || -> Vec<usize> { locals.iter().copied().filter(|&r| pid_of(r) == 0).collect() };
    let failure = &header(&arena).failure;
    while let (Some(joining), false, None) = (&mut joining, missing().is_empty(), failure.read()) {
        sleep_on(attached, count as u32, joining.left(SLICE));
        if let Err(reason) = joining.look(&missing, &pid_of) {
            // Only if it is the first: what this rank found out may be a consequence of that.
            failure.write(0, &reason);
            let reason = failure.read().map_or(reason, |(_, first)| first);
            joining.give_up(&reason);
            return Err(fail(reason));
        }
    }
    if let Some((_, reason)) = failure.read() {
        return Err(fail(reason));
    }
    // All have it mapped: from here on it lives only as long as they do.
    drop(file);
    Ok(arena)
}

fn header(arena: &Arena) -> &Header {
    // SAFETY: the mapping begins with the header, page aligned and zero at first; it consists of
    // atomics.
    unsafe { &*arena.at(0).cast::<Header>() }
}

fn announce_processors(arena: &Arena) {
    let Ok(own) = rustix::thread::sched_getaffinity(None) else { return };
    for processor in (0..CpuSet::MAX_CPU).filter(|&p| own.is_set(p)) {
        header(arena).processors[processor / 64].fetch_or(1 << (processor % 64), Ordering::Relaxed);
    }
}

/// How many processors all ranks have together: each may be bound to its own, or to less than its
/// share by a quota.
fn processors(arena: &Arena) -> usize {
    let all: u32 =
        header(arena).processors.iter().map(|p| p.load(Ordering::Relaxed).count_ones()).sum();
    let bound = rustix::thread::sched_getaffinity(None).map_or(0, |own| own.count() as usize);
    let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
    if usable < bound {
        usable
    } else {
        all as usize
    }
}

fn pid(arena: &Arena, index: usize) -> &AtomicU32 {
    let pids = arena.at(std::mem::size_of::<Header>()).cast::<AtomicU32>();
    // SAFETY: the header is followed by one word per rank, reserved when the arena was mapped.
    unsafe { &*pids.add(index) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
