//! The connection of one who watches a job.

use std::io::{self, PipeReader, PipeWriter, Write};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use flow_store::{Error, Store};

use crate::control::protocol::{AgentEvent, AgentId, OVER_KEY, status_key};
use crate::control::search::{self, RETRY_INTERVAL};
use crate::control::status::JobStatus;
use crate::report::text::excerpt;
use crate::signal;

/// The time between two looks at a job.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// The time to wait for an answer, or for an agent that says who leads. The leader does not wait so long
/// for its agents.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The time in which a look must succeed: another node may have to be elected as the leader.
const LOOK_TIMEOUT: Duration = Duration::from_secs(90);

/// The time between two searches for the leader.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);

/// The leader forgets one who says nothing for so long. Who waits for the end asks again after this time.
const SILENCE: Duration = Duration::from_secs(60);

/// What a look at the job has brought: None once it is over.
pub type Look = anyhow::Result<Option<JobStatus>>;

/// Looks at a job again and again, on a thread of its own, as the leader may take long to answer. The pipe has a
/// byte for each look.
pub fn watch(mut watcher: Watcher) -> anyhow::Result<(Receiver<Look>, PipeReader)> {
    on_a_thread(move |looks| {
        looks.look_again(&mut watcher);
    })
}

/// Like [`watch`], at a job that may not have a leader yet. It goes on after an error.
pub fn watch_always(
    address: String,
    token: String,
) -> anyhow::Result<(Receiver<Look>, PipeReader)> {
    on_a_thread(move |looks| {
        let mut watcher = loop {
            match Watcher::connect(address.clone(), token.clone()) {
                Ok(watcher) => break watcher,
                Err(error) => {
                    if !looks.send(Err(error)) {
                        return;
                    }
                }
            }
            thread::sleep(INTERVAL);
        };
        // It knows who may lead the job, also after an error.
        while looks.look_again(&mut watcher) {
            thread::sleep(INTERVAL);
        }
    })
}

fn on_a_thread(
    look: impl FnOnce(Looks) + Send + 'static,
) -> anyhow::Result<(Receiver<Look>, PipeReader)> {
    let (sender, looks) = mpsc::channel();
    let (woken, wakes) = io::pipe()?;
    let thread = thread::Builder::new().name("flow-top".into());
    // Signals are for the main thread.
    signal::with_all_blocked(|| thread.spawn(move || look(Looks { sender, wakes })))??;
    Ok((looks, woken))
}

/// Where looks at a job are sent.
struct Looks {
    sender: Sender<Look>,
    wakes: PipeWriter,
}

impl Looks {
    /// Sends a look; false if nobody wants it.
    fn send(&self, look: Look) -> bool {
        self.sender.send(look).is_ok() && (&self.wakes).write_all(b"!").is_ok()
    }

    /// Looks until the job is over, or cannot be looked at; false if nobody wants to know.
    fn look_again(&self, watcher: &mut Watcher) -> bool {
        loop {
            let look = watcher.look();
            let is_last = !matches!(look, Ok(Some(_)));
            if !self.send(look) {
                return false;
            }
            if is_last {
                return true;
            }
            thread::sleep(INTERVAL);
        }
    }
}

/// One who watches a job: a client of its leader's store, but no agent.
pub struct Watcher {
    /// The address of an agent, by which the job was found.
    address: String,
    /// The addresses of others that say who leads.
    members: Vec<String>,
    token: String,
    connection: Connection,
}

impl Watcher {
    /// Connects to the leader of a job, which is at this address, or known there.
    pub fn connect(address: String, token: String) -> anyhow::Result<Watcher> {
        let connection = find(&[&address], &token)?;
        Ok(Watcher { address, members: Vec::new(), token, connection })
    }

    /// Asks what the job does; None once it is over. Looks for another leader if this one is lost.
    ///
    /// # Errors
    /// Nobody leads the job, or the leader does not answer, or with something else.
    pub fn look(&mut self) -> anyhow::Result<Option<JobStatus>> {
        let begin = Instant::now();
        loop {
            if self.connection.is_over(Duration::ZERO) {
                return Ok(None);
            }
            let error = match self.connection.ask() {
                Ok(text) => {
                    let status = understand(&text)?;
                    self.members.clone_from(&status.members);
                    return Ok(Some(status));
                }
                Err(error) => error,
            };
            if self.connection.is_over(RETRY_INTERVAL) {
                return Ok(None);
            }
            if begin.elapsed() >= LOOK_TIMEOUT {
                bail!("the leading node does not answer; does it run the same version? ({error})");
            }
            log::debug!("{error}");
            let members = self.members.iter().map(String::as_str);
            let addresses: Vec<&str> = members.chain([&self.address[..]]).collect();
            self.connection = find(&addresses, &self.token).context("the leading node is lost")?;
        }
    }
}

fn understand(text: &[u8]) -> anyhow::Result<JobStatus> {
    serde_json::from_slice(text).map_err(|error| {
        anyhow::anyhow!(
            "malformed answer of the leading node ({error}): got '{}'; is it of the same version?",
            excerpt(text)
        )
    })
}

/// Finds the leader. Goes on as long as somebody answers, who will know it soon.
fn find(addresses: &[&str], token: &str) -> anyhow::Result<Connection> {
    let begin = Instant::now();
    let mut answered = begin;
    // A host that is off does not answer, while another one may.
    let patience = if addresses.len() > 1 { RETRY_INTERVAL } else { ANSWER_TIMEOUT };
    loop {
        let mut failure: Option<anyhow::Error> = None;
        for address in addresses {
            match search::leader_at(address, token, patience) {
                Ok(Some((store, leader))) => match Connection::open(store, &leader, token) {
                    Ok(connection) => return Ok(connection),
                    Err(error) => failure = Some(error),
                },
                Ok(None) => answered = Instant::now(),
                Err(error @ Error::Denied { .. }) if addresses.len() == 1 => {
                    return Err(error.into());
                }
                Err(error) => failure = Some(error.into()),
            }
        }
        if answered.elapsed() >= ANSWER_TIMEOUT || begin.elapsed() >= LOOK_TIMEOUT {
            match failure {
                Some(error) => return Err(error),
                None => bail!("nobody at {} leads the job", addresses.join(", ")),
            }
        }
        thread::sleep(SEARCH_INTERVAL);
    }
}

/// A connection to the leader.
struct Connection {
    store: Store,
    id: AgentId,
    /// The number of the last question.
    number: u64,
    /// True once the job is over. Closed when the leader is lost.
    over: Receiver<bool>,
}

impl Connection {
    fn open(store: Store, leader: &str, token: &str) -> anyhow::Result<Connection> {
        store.set_reply_timeout(ANSWER_TIMEOUT);
        let id = store.add("agents", 1)? as AgentId;
        let gone = AgentEvent::Gone { why: "it watches no more".into() };
        store.will(&message(id, gone), SILENCE)?;
        // It always waits, so that it hears of the end however soon the leader leaves.
        let waiting = search::open(leader, token, ANSWER_TIMEOUT)?;
        waiting.set_reply_timeout(ANSWER_TIMEOUT);
        let (sender, over) = mpsc::channel();
        // The screen's thread takes them, to leave the terminal as it was.
        let thread = thread::Builder::new().name("flow-top-end".into());
        signal::with_all_blocked(|| thread.spawn(move || wait_for_end(&waiting, &sender)))??;
        Ok(Connection { store, id, number: 0, over })
    }

    fn ask(&mut self) -> Result<Vec<u8>, Error> {
        self.number += 1;
        self.store.send(&message(self.id, AgentEvent::Watch { number: self.number }))?;
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

    /// Whether the leader has said that the job is over, or says so within this time.
    fn is_over(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.over.recv_timeout(left) {
                Ok(true) => return true,
                Ok(false) => {}
                Err(_) => return false,
            }
        }
    }
}

/// Says when the leader says that the job is over, until it is lost, or nobody wants to know.
fn wait_for_end(store: &Store, over: &Sender<bool>) {
    loop {
        match store.get(OVER_KEY, SILENCE) {
            Ok(_) => {
                let _ = over.send(true);
                return;
            }
            Err(Error::Timeout { .. }) if over.send(false).is_ok() => {}
            Err(_) => return,
        }
    }
}

fn message(watcher: AgentId, event: AgentEvent) -> Vec<u8> {
    serde_json::to_vec(&(watcher, event)).unwrap_or_default() // plain data: it cannot fail
}
