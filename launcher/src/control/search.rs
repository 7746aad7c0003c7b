//! The search for the agent that leads a job.

use std::thread;
use std::time::{Duration, Instant};

use flow_store::{Address, Error, Store};

use crate::control::candidate::{LEADER_KEY, LeaderPlace};

/// The time to wait before looking up a host name again, and for an agent to say who leads.
pub const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Connects to the leader if the agent at this address, a host and a port, is it, or knows it. Returns the
/// leader's address as well.
pub fn leader_at(
    address: &str,
    token: &str,
    timeout: Duration,
) -> Result<Option<(Store, String)>, Error> {
    let (store, place) = ask(address, token, timeout)?;
    match place {
        LeaderPlace::Here => Ok(Some((store, address.to_string()))),
        LeaderPlace::At(leader) => {
            let (store, place) = ask(&leader, token, timeout)?;
            Ok((place == LeaderPlace::Here).then_some((store, leader)))
        }
        LeaderPlace::Unknown => Ok(None),
    }
}

/// Connects to an agent, which says where the leader is.
fn ask(address: &str, token: &str, timeout: Duration) -> Result<(Store, LeaderPlace), Error> {
    let store = open(address, token, timeout)?;
    store.set_reply_timeout(timeout.max(RETRY_INTERVAL));
    let place = store.get(LEADER_KEY, RETRY_INTERVAL)?;
    Ok((store, serde_json::from_slice(&place).unwrap_or(LeaderPlace::Unknown)))
}

/// Connects. Tries again on an unknown host name, which may be that of a host that is starting.
pub fn open(address: &str, token: &str, timeout: Duration) -> Result<Store, Error> {
    let begin = Instant::now();
    let address = Address::Tcp(address.into());
    loop {
        let left = timeout.saturating_sub(begin.elapsed());
        match Store::connect(&address, token, left) {
            Err(Error::Connect { .. }) if begin.elapsed() + RETRY_INTERVAL < timeout => {
                thread::sleep(RETRY_INTERVAL)
            }
            result => return result,
        }
    }
}
