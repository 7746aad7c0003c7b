//! Addresses and ports of this host.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

use flow_store::net::local_address_for;

/// Returns where programs of this host reach a listener, which may listen at all addresses: at that on the
/// way to `peer`, a host and port. By it others reach them.
pub fn own_place(listens_at: SocketAddr, peer: &str) -> io::Result<SocketAddr> {
    let mut place = listens_at;
    if place.ip().is_unspecified() {
        place.set_ip(local_address_for(peer)?);
    }
    Ok(place)
}

/// Finds a TCP port that is free on all addresses of this host.
pub fn free_port() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    Ok(listener.local_addr()?.port())
}

/// Returns the address that stands for all of this host, IPv6 and IPv4 where there is IPv6.
pub fn any() -> IpAddr {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)) {
        Ok(_) => Ipv6Addr::UNSPECIFIED.into(),
        Err(_) => Ipv4Addr::UNSPECIFIED.into(),
    }
}

/// Returns the address to listen at, for others that know this host by these names. It is the one
/// address that the names resolve to, if there is one, and otherwise all. A name that resolves to
/// the loopback address here (127.0.1.1, in Debian's /etc/hosts) resolves to another address
/// elsewhere, so it counts as all. Only localhost is the loopback address everywhere; its IPv4
/// address is preferred.
pub fn interface(names: &[&str]) -> IpAddr {
    let mut found = BTreeSet::new();
    for name in names {
        if is_localhost(name) {
            found.extend(own(name));
        } else {
            found.extend(resolve(name));
        }
    }
    let is_same = names.iter().all(|name| name.parse::<IpAddr>().is_ok() || is_localhost(name));
    match found.first() {
        Some(address)
            if found.len() == 1 && is_own(*address) && (is_same || !address.is_loopback()) =>
        {
            *address
        }
        _ => any(),
    }
}

fn is_localhost(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost")
}

/// Returns the address of this host that `name` resolves to, IPv4 if there are several.
pub fn own(name: &str) -> Option<IpAddr> {
    resolve(name).into_iter().filter(|address| is_own(*address)).min()
}

fn resolve(name: &str) -> Vec<IpAddr> {
    (name, 0)
        .to_socket_addrs()
        .map(|addresses| addresses.map(|address| address.ip()).collect())
        .unwrap_or_default()
}

fn is_own(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// Joins `host:port`, with an IPv6 host in brackets.
pub fn join(host: &str, port: u16) -> String {
    match host.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{port}"),
        Err(_) => format!("{host}:{port}"),
    }
}

/// Whether `host` is this host.
pub fn is_local(host: &str) -> bool {
    own(host).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports() {
        assert_eq!(join("node0", 1), "node0:1");
        assert_eq!(join("fd00::1", 1), "[fd00::1]:1");
        assert!(is_local("127.0.0.1") && is_local("localhost"));
        assert!(!is_local("192.0.2.1") && !is_local("no such host"));
    }

    #[test]
    fn programs_of_this_host_learn_the_way_to_others() {
        let at =
            |place: &str| own_place(place.parse().unwrap(), "127.0.0.1:9").unwrap().to_string();
        assert_eq!(at("192.0.2.1:7"), "192.0.2.1:7");
        assert_eq!((at("0.0.0.0:7"), at("[::]:7")), ("127.0.0.1:7".into(), "127.0.0.1:7".into()));
    }

    #[test]
    fn where_to_listen() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!((own("127.0.0.1"), own("192.0.2.1")), (Some(ip("127.0.0.1")), None));
        assert!(own("localhost").is_some_and(|address| address.is_loopback()));
        assert_eq!(interface(&["127.0.0.1", "127.0.0.1"]), ip("127.0.0.1"));
        for names in [&["localhost"][..], &["localhost", "Localhost"]] {
            assert_eq!(Some(interface(names)), own("localhost"), "{names:?}");
        }
        // Two addresses, another host's address, and an unknown name.
        for names in [
            &["127.0.0.1", "127.0.0.2"][..],
            &["localhost", "127.0.0.2"],
            &["192.0.2.1"],
            &["no such host"],
        ] {
            assert!(interface(names).is_unspecified(), "{names:?}");
        }
    }
}
