//! The threads of a follower: one finds the leader and waits for its commands, another sends events.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use flow_store::net::local_address_for;
use flow_store::{Address, Error, Store};

use crate::control::job_record::{JobRecord, Member};
use crate::control::mailbox::MailSender;
use crate::control::node::Node;
use crate::control::protocol::{
    AgentEvent, AgentId, Command, ControlMessage, KeptWorkers, Loss, command_key,
};
use crate::control::search::{RETRY_INTERVAL, leader_at, open};
use crate::net;
use crate::report::text::excerpt;
use crate::trace::folder as trace;

/// Interval of the heartbeat.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The time between two searches for the leader.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);

/// The time to try to connect before the first notice.
const FIRST_NOTICE: Duration = Duration::from_secs(10);

/// A message for the thread that sends events.
pub enum Outgoing {
    Event(AgentEvent),
    /// The timeline of a rank.
    Trace {
        round: u32,
        rank: u32,
        path: PathBuf,
    },
}

/// What the thread that looks for the leader must know.
#[derive(Clone, Default)]
pub struct Search {
    /// Where the leader may be.
    pub addresses: Vec<String>,
    pub term: u64,
    pub record: JobRecord,
}

/// What the leader must know of an agent that may take its place.
pub struct Seat {
    pub id: u64,
    /// The address of the store that the agent serves, or else its port.
    pub address: Option<String>,
    pub port: u16,
}

/// The thread that waits for commands.
pub struct FollowerThread {
    pub search: Arc<Mutex<Search>>,
    pub token: String,
    pub timeout: Duration,
    pub heartbeat: Duration,
    /// This node. If its address is empty, the one from which it reaches the leader is used.
    pub node: Node,
    pub kept: Option<KeptWorkers>,
    pub seat: Option<Seat>,
    pub connected: Arc<AtomicBool>,
    pub is_over: Arc<AtomicBool>,
}

impl FollowerThread {
    /// Runs until there are no more commands, or the leader is lost, which is the last message.
    pub fn run(
        self,
        events: Receiver<Outgoing>,
        sending: Sender<()>,
        commands_out: &MailSender<ControlMessage>,
    ) {
        if let Err(loss) = self.follow(events, sending, commands_out) {
            commands_out.send(ControlMessage::Disconnected(loss));
        }
    }

    /// Joins and receives commands until the last one. The error says why the leader is lost.
    fn follow(
        &self,
        events: Receiver<Outgoing>,
        sending: Sender<()>,
        commands_out: &MailSender<ControlMessage>,
    ) -> Result<(), Loss> {
        let (store, address) = self.find(commands_out).map_err(lost)?;
        store.set_reply_timeout(self.heartbeat / 2);
        let events_out =
            open(&address, &self.token, self.timeout.min(FIRST_NOTICE)).map_err(lost)?;
        events_out.set_reply_timeout(self.heartbeat);
        let node = self.node(&address)?;
        let member = self.seat.as_ref().map(|seat| {
            let address = seat.address.clone();
            let address = address.unwrap_or_else(|| net::join(&node.address, seat.port));
            Member { id: seat.id, address }
        });
        let agent = store.add("agents", 1).map_err(lost)? as AgentId;
        let will =
            AgentEvent::Gone { why: "its flow-launch was killed, or cannot be reached".into() };
        store.will(&message(agent, &will), self.heartbeat).map_err(lost)?;
        if let Some(member) = member {
            let Search { term, record, .. } = self.search();
            let event = AgentEvent::Candidate { member, term, record };
            events_out.send(&message(agent, &event)).map_err(lost)?;
        }
        let kept = self.kept.clone();
        events_out.send(&message(agent, &AgentEvent::Joined { node, kept })).map_err(lost)?;
        self.connected.store(true, Ordering::SeqCst);
        let is_over = Arc::clone(&self.is_over);
        thread::Builder::new()
            .name("flow-events".into())
            .spawn(move || {
                let _closes_at_the_end = sending;
                if let Err(error) = send_events(events, agent, &events_out) {
                    log::debug!("{error}");
                    is_over.store(true, Ordering::SeqCst);
                }
            })
            .map_err(|error| told(format!("cannot start a thread: {error}")))?;
        self.receive_commands(&store, agent, commands_out)
            .map_err(|loss| Loss { was_found: true, ..loss })
    }

    fn search(&self) -> Search {
        self.search.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Finds the leader, and says so if that takes long. Returns the connection and the address.
    fn find(&self, commands_out: &MailSender<ControlMessage>) -> Result<(Store, String), Error> {
        let begin = Instant::now();
        let mut notice_at = Some(begin + FIRST_NOTICE.min(self.timeout));
        loop {
            let Search { addresses, record, .. } = self.search();
            // A host that is off does not answer, while another one may.
            let patience = if addresses.len() > 1 { RETRY_INTERVAL } else { FIRST_NOTICE };
            let mut failure = None;
            for address in &addresses {
                let left = self.timeout.saturating_sub(begin.elapsed());
                match leader_at(address, &self.token, left.min(patience)) {
                    // This agent may have become the leader itself.
                    Ok(Some(_)) if self.is_over.load(Ordering::SeqCst) => {}
                    Ok(Some(leader)) => return Ok(leader),
                    Ok(None) => {}
                    // Another job may have come to the address of a member that is lost.
                    Err(error @ Error::Denied { .. }) if record.members.is_empty() => {
                        return Err(error);
                    }
                    Err(error) => failure = Some(error),
                }
            }
            let failure = failure.unwrap_or_else(|| Error::Connect {
                address: Address::Tcp(addresses.join(", ")),
                timeout: self.timeout,
                cause: "nobody there leads the job".into(),
            });
            if begin.elapsed() >= self.timeout || self.is_over.load(Ordering::SeqCst) {
                return Err(match failure {
                    Error::Connect { address, cause, .. } => {
                        Error::Connect { address, timeout: self.timeout, cause }
                    }
                    other => other,
                });
            }
            if notice_at.take_if(|at| *at <= Instant::now()).is_some()
                && let Error::Connect { cause, .. } = failure
            {
                commands_out.send(ControlMessage::Notice(format!(
                    "no connection to the leading node at {} yet ({cause}); trying for {} s",
                    addresses.join(", "),
                    self.timeout.as_secs()
                )));
            }
            thread::sleep(SEARCH_INTERVAL.min(self.timeout.saturating_sub(begin.elapsed())));
        }
    }

    /// Returns this node, with its address.
    fn node(&self, leader: &str) -> Result<Node, Loss> {
        let mut node = self.node.clone();
        if node.address.is_empty() {
            let address =
                local_address_for(leader).map_err(|error| told(format!("{leader}: {error}")))?;
            node.address = address.to_string();
        }
        Ok(node)
    }

    /// Hands on commands of the leader, to the last one. Each wait for one is a heartbeat.
    fn receive_commands(
        &self,
        store: &Store,
        agent: AgentId,
        commands_out: &MailSender<ControlMessage>,
    ) -> Result<(), Loss> {
        let mut heard = Instant::now();
        for number in 0.. {
            let text = loop {
                match store.get(&command_key(agent, number), HEARTBEAT) {
                    Err(Error::Timeout { .. }) if self.is_over.load(Ordering::SeqCst) => {
                        return Err(told(
                            "the leading node takes no events, or leads the job no more".into(),
                        ));
                    }
                    Err(Error::Timeout { .. }) => heard = Instant::now(),
                    Err(error) => {
                        let is_silent = heard.elapsed() >= self.heartbeat / 2;
                        return Err(Loss { is_silent, ..lost(error) });
                    }
                    Ok(text) => break text,
                }
            };
            let command: Command = serde_json::from_slice(&text).map_err(|error| {
                told(format!(
                    "malformed command of the leading node ({error}): got '{}'; do all nodes run \
                     the same version?",
                    excerpt(&text)
                ))
            })?;
            if command == Command::Rejoin {
                return Err(told("the leading node leads the job no more".into()));
            }
            let is_last = matches!(command, Command::Finish(_));
            if !commands_out.send(ControlMessage::Command(command)) || is_last {
                break;
            }
            // Without a connection, the next wait says so.
            let _ = store.delete(&[command_key(agent, number)]);
        }
        Ok(())
    }
}

/// Sends events until there are no more.
fn send_events(events: Receiver<Outgoing>, agent: AgentId, store: &Store) -> Result<(), Error> {
    for event in events {
        match event {
            Outgoing::Event(event) => store.send(&message(agent, &event))?,
            Outgoing::Trace { round, rank, path } => trace::send_pieces(rank, &path, |piece| {
                store.send(&message(agent, &AgentEvent::Trace { round, piece }))
            })?,
        }
    }
    Ok(())
}

/// Says why the leader is lost.
fn lost(error: Error) -> Loss {
    told(match error {
        Error::Denied { address, reason } => {
            let hint = "without FLOW_TOKEN, --rdzv-id must be the same";
            format!("the leading node at {address} refuses this one: {reason} ({hint})")
        }
        error => format!("the leading node cannot be reached: {error}"),
    })
}

fn told(why: String) -> Loss {
    Loss { why, is_silent: false, was_found: false }
}

fn message(agent: AgentId, event: &AgentEvent) -> Vec<u8> {
    serde_json::to_vec(&(agent, event)).unwrap_or_default() // plain data: it cannot fail
}
