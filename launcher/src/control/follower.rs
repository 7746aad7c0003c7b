//! The control plane of an agent that does not lead. One connection waits for commands; its long
//! polls are the heartbeat. Another sends events.

mod connection;

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::control::candidate::{Candidate, LeaderPlace, PeerMessage};
use crate::control::election::Election;
use crate::control::local_store::LocalStore;
use crate::control::mailbox::{Mailbox, mailbox};
use crate::control::node::Node;
use crate::control::protocol::{AgentEvent, Command, ControlMessage, KeptWorkers, command_key};
use crate::control::token::token;
use crate::job::Job;
use crate::net;
use crate::report::text::excerpt;

use connection::{FollowerThread, Outgoing, Search, Seat};

/// The time that the end of this agent waits until its last events are sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// The control plane of an agent that does not lead: two threads that talk to the leader.
pub struct Follower {
    events: Option<Sender<Outgoing>>,
    messages: Mailbox<ControlMessage>,
    /// Whether there is a connection; `sent` closes when it has sent all events.
    connected: Arc<AtomicBool>,
    sent: Receiver<()>,
    /// What the thread that looks for the leader must know.
    search: Arc<Mutex<Search>>,
    /// The endpoint, at which every leader may be.
    endpoint: String,
    token: String,
    /// Ends the thread that looks for the leader, or waits for its commands.
    is_over: Arc<AtomicBool>,
    /// If the job may go on under another leader.
    pub candidate: Option<Candidate>,
    /// The workers that this agent has kept when it lost the last leader.
    kept: Option<KeptWorkers>,
    /// What it has sent since then, until it follows a leader.
    unsent: Vec<AgentEvent>,
    follows: bool,
    is_in_place: bool,
}

/// What an agent takes along that is elected as the leader.
pub struct Elected {
    pub candidate: Candidate,
    /// The workers that it has kept, and what has become of them since then.
    pub kept: Option<KeptWorkers>,
    pub events: Vec<AgentEvent>,
}

impl Follower {
    /// Joins the job whose leader is at `host` and `port`, or at an address that the candidate knows,
    /// within `timeout`. `kept`: the workers that the agent has from another leader.
    pub fn join(
        job: &Job,
        node: Node,
        host: &str,
        port: u16,
        timeout: Duration,
        candidate: Option<Candidate>,
        kept: Option<KeptWorkers>,
    ) -> anyhow::Result<Follower> {
        let (sender, messages) = mailbox()?;
        let (events, receiver) = mpsc::channel();
        let (sending, sent) = mpsc::channel();
        let connected = Arc::new(AtomicBool::new(false));
        let is_over = Arc::new(AtomicBool::new(false));
        let search = Arc::new(Mutex::new(Search::default()));
        let seat = candidate.as_ref().map(|candidate| Seat {
            id: candidate.election.id(),
            address: candidate.address.clone(),
            port: candidate.port().unwrap_or_default(),
        });
        let token = token(&job.nodes.id)?;
        let thread = FollowerThread {
            search: Arc::clone(&search),
            token: token.clone(),
            timeout,
            heartbeat: job.nodes.timeouts.heartbeat,
            node,
            kept: kept.clone(),
            seat,
            connected: Arc::clone(&connected),
            is_over: Arc::clone(&is_over),
        };
        let follower = Follower {
            events: Some(events),
            messages,
            connected,
            sent,
            search,
            endpoint: net::join(host, port),
            token,
            is_over,
            candidate,
            kept,
            unsent: Vec::new(),
            follows: false,
            is_in_place: job.is_in_place,
        };
        follower.refresh_search();
        thread::Builder::new()
            .name("flow-control".into())
            .spawn(move || thread.run(receiver, sending, &sender))?;
        Ok(follower)
    }

    /// Returns a store that says who leads the job, and the token that it asks for.
    pub fn store(&self) -> (&str, &str) {
        self.candidate.as_ref().map_or((&self.endpoint, &self.token), Candidate::store)
    }

    /// Sends an event. It is lost if there is no connection, which [`Follower::poll`] reports.
    pub fn send(&mut self, event: AgentEvent) {
        if self.candidate.is_some() && !self.follows {
            self.unsent.push(event.clone());
        }
        if let Some(events) = &self.events {
            // Without a connection it is lost; `poll` reports that.
            let _ = events.send(Outgoing::Event(event));
        }
    }

    /// Sends the timeline of a rank, before all later events.
    pub fn send_trace(&self, round: u32, rank: u32, path: PathBuf) {
        if let Some(events) = &self.events {
            let _ = events.send(Outgoing::Trace { round, rank, path });
        }
    }

    /// Returns the next message, if one has come.
    pub fn poll(&mut self) -> Option<ControlMessage> {
        self.answer_peers();
        while let Some(message) = self.messages.poll() {
            match (message, &mut self.candidate) {
                (ControlMessage::Command(Command::Record(record)), Some(candidate)) => {
                    let leader = record.members.first().map(|member| member.address.clone());
                    let age = record.age();
                    let copy = match record.progress.replica {
                        Some(_) => ", and one has a copy of the workers' store",
                        None => "",
                    };
                    log::info!("{} nodes elect the next leader{copy}", record.members.len());
                    if candidate.election.follow(record, Instant::now()) {
                        self.follows = true;
                        self.unsent.clear();
                        candidate.announce(&leader.map_or(LeaderPlace::Unknown, LeaderPlace::At));
                        self.send(AgentEvent::Has { age });
                    } else {
                        // The thread says so.
                        self.is_over.store(true, Ordering::SeqCst);
                    }
                }
                (ControlMessage::Command(command), Some(candidate)) if self.is_in_place => {
                    let command = adapt(command, candidate);
                    return Some(ControlMessage::Command(command));
                }
                (ControlMessage::Disconnected(loss), Some(candidate)) => {
                    candidate.announce(&LeaderPlace::Unknown);
                    candidate.local.iter_mut().for_each(LocalStore::lose_leader);
                    candidate.election.lost(loss.is_silent, Instant::now());
                    return Some(ControlMessage::Disconnected(loss));
                }
                (message, _) => return Some(message),
            }
        }
        None
    }

    /// Returns the candidate if it is elected as the leader. It follows nobody from then on.
    pub fn take_elected(&mut self) -> Option<Elected> {
        let candidate = self.candidate.take_if(Candidate::poll)?;
        self.is_over.store(true, Ordering::SeqCst);
        let kept = self.kept.take();
        let events = std::mem::take(&mut self.unsent);
        Some(Elected { candidate, kept, events })
    }

    /// Handles what other agents have sent to this one's store.
    fn answer_peers(&mut self) {
        let Some(candidate) = &mut self.candidate else { return };
        let mut has_learnt = false;
        while let Some(message) = candidate.server.inbox().try_next() {
            match serde_json::from_slice(&message) {
                Ok(PeerMessage::Request { request, answer }) => {
                    candidate.vote(&request, &answer);
                    has_learnt = true;
                }
                Ok(PeerMessage::Led { record }) => {
                    candidate.election.learn(record, Instant::now());
                    has_learnt = true;
                }
                Ok(PeerMessage::Event(
                    agent,
                    AgentEvent::Joined { .. } | AgentEvent::Candidate { .. },
                )) => {
                    let command = serde_json::to_vec(&Command::Rejoin).unwrap_or_default();
                    candidate.server.set(&command_key(agent, 0), &command);
                }
                Ok(PeerMessage::Event(..)) => {}
                Err(error) => log::warn!(
                    "malformed message of another agent ({error}): got '{}'",
                    excerpt(&message)
                ),
            }
        }
        if has_learnt {
            self.refresh_search();
        }
    }

    fn refresh_search(&self) {
        let election = self.candidate.as_ref().map(|candidate| &candidate.election);
        let record = election.map(|election| election.record().clone()).unwrap_or_default();
        let members = record.members.iter().map(|member| &member.address);
        let addresses = members.chain([&self.endpoint]).cloned().collect();
        let term = election.map(Election::term).unwrap_or_default();
        *self.search.lock().unwrap_or_else(PoisonError::into_inner) =
            Search { addresses, term, record };
    }

    /// Returns the descriptors that are readable when a message has come.
    pub fn watch(&self) -> Vec<BorrowedFd<'_>> {
        let candidate = self.candidate.iter().flat_map(Candidate::watch);
        candidate.chain([self.messages.watch()]).collect()
    }

    /// Returns when to call [`Follower::take_elected`].
    pub fn deadline(&self) -> Option<Instant> {
        self.candidate.as_ref()?.election.deadline()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.events = None;
        self.is_over.store(true, Ordering::SeqCst);
        if self.connected.load(Ordering::SeqCst) {
            let _ = self.sent.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

/// Does what a command says about the store of this node's workers. Returns the command with the
/// address of that store in it.
fn adapt(mut command: Command, candidate: &mut Candidate) -> Command {
    let done = match &mut command {
        Command::Start { round, assignment } => {
            candidate.open_local(*round, &mut assignment.stores)
        }
        Command::Keep { round, stores } => candidate.open_local(*round, stores),
        Command::Replicate { round, number } => candidate.replicate(*round, *number),
        _ => Ok(()),
    };
    if let Err(error) = done {
        log::warn!("the workers of this node cannot outlive the leader: {error:#}");
    }
    command
}
