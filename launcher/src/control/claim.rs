//! An elected leader's claim of the endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use flow_store::{Address, Store};

use crate::control::candidate::PeerMessage;
use crate::control::job_record::JobRecord;

/// The interval at which an elected leader looks whether another agent leads at the endpoint.
const CLAIM_INTERVAL: Duration = Duration::from_secs(1);

/// Tells whoever leads at the endpoint, where new agents come to, that another agent leads: its host
/// may have come back. Ends when it is dropped.
pub struct Claim {
    is_over: Arc<AtomicBool>,
}

impl Claim {
    /// Starts the thread.
    pub fn start(token: String, endpoint: String, record: JobRecord) -> anyhow::Result<Claim> {
        let is_over = Arc::new(AtomicBool::new(false));
        let claim = Claim { is_over: Arc::clone(&is_over) };
        thread::Builder::new().name("flow-claim".into()).spawn(move || {
            let address = Address::Tcp(endpoint);
            let message = serde_json::to_vec(&PeerMessage::Led { record }).unwrap_or_default();
            while !is_over.load(Ordering::SeqCst) {
                // Nobody is there, as a rule.
                if let Ok(store) = Store::connect(&address, &token, CLAIM_INTERVAL) {
                    store.set_reply_timeout(CLAIM_INTERVAL);
                    let _ = store.send(&message);
                }
                thread::sleep(CLAIM_INTERVAL);
            }
        })?;
        Ok(claim)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}
