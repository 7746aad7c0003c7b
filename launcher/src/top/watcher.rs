//! The connection of one who watches a job.

use std::time::{Duration, Instant};

use anyhow::bail;
use flow_store::{Address, Error, Store};

use crate::control::protocol::{AgentEvent, AgentId, status_key};
use crate::control::status::JobStatus;
use crate::report::text::excerpt;

/// The time between two looks at a job.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// The time to connect to the leader.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time to wait for an answer. The leader does not wait so long for its agents.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// One who watches a job: a client of its leader's store, but no agent.
pub struct Watcher {
    store: Store,
    id: AgentId,
    /// The number of the last question.
    number: u64,
}

impl Watcher {
    /// Connects to the leader of a job.
    pub fn connect(address: &Address, token: &str) -> anyhow::Result<Watcher> {
        let store = Store::connect(address, token, CONNECT_TIMEOUT)?;
        store.set_reply_timeout(ANSWER_TIMEOUT);
        let id = store.add("agents", 1)? as AgentId;
        Ok(Watcher { store, id, number: 0 })
    }

    /// Asks what the job does; None once it is over.
    ///
    /// # Errors
    /// The leader does not answer, or with something else.
    pub fn look(&mut self) -> anyhow::Result<Option<JobStatus>> {
        match self.ask() {
            Err(Error::Lost { .. }) => Ok(None),
            Err(error @ Error::Timeout { .. }) => {
                bail!("the leading node does not answer; does it run the same version? ({error})")
            }
            Err(error) => Err(error.into()),
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(status) => Ok(Some(status)),
                Err(error) => bail!(
                    "malformed answer of the leading node ({error}): got '{}'; is it of the same \
                     version?",
                    excerpt(&text)
                ),
            },
        }
    }

    fn ask(&mut self) -> Result<Vec<u8>, Error> {
        self.number += 1;
        let question = (self.id, AgentEvent::Watch { number: self.number });
        self.store.send(&serde_json::to_vec(&question).unwrap_or_default())?; // plain data
        let key = status_key(self.id);
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let text = self.store.get(&key, left)?;
            self.store.delete(&[&key])?;
            // The answer to an earlier question may have come late.
            let status = serde_json::from_slice::<JobStatus>(&text);
            if status.map_or(true, |status| status.number == self.number) {
                return Ok(text);
            }
        }
    }
}
