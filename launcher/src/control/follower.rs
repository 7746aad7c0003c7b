//! The control plane of an agent that does not lead. One connection waits for commands; its long
//! polls are the heartbeat. Another sends events.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use flow_store::net::local_address_for;
use flow_store::{Address, Error, Store};

use crate::control::candidate::{Candidate, LeaderPlace, PeerMessage};
use crate::control::election::Election;
use crate::control::job_record::{JobRecord, Member};
use crate::control::local_store::LocalStore;
use crate::control::mailbox::{MailSender, Mailbox, mailbox};
use crate::control::node::Node;
use crate::control::protocol::{
    AgentEvent, AgentId, Command, ControlMessage, KeptWorkers, Loss, command_key,
};
use crate::control::search::{RETRY_INTERVAL, leader_at, open};
use crate::control::token::token;
use crate::job::Job;
use crate::net;
use crate::report::text::excerpt;
use crate::trace::folder as trace;

/// Interval of the heartbeat.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The time between two searches for the leader.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);

/// The time to try to connect before the first notice.
const FIRST_NOTICE: Duration = Duration::from_secs(10);

/// The time that the end of this agent waits until its last events are sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// A message for the thread that sends events.
enum Outgoing {
    Event(AgentEvent),
    /// The timeline of a rank.
    Trace {
        round: u32,
        rank: u32,
        path: PathBuf,
    },
}

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

/// What the thread that looks for the leader must know.
#[derive(Clone, Default)]
struct Search {
    /// Where the leader may be.
    addresses: Vec<String>,
    term: u64,
    record: JobRecord,
}

/// What the leader must know of an agent that may take its place.
struct Seat {
    id: u64,
    /// The address of the store that the agent serves, or else its port.
    address: Option<String>,
    port: u16,
}

/// The thread that waits for commands.
struct FollowerThread {
    search: Arc<Mutex<Search>>,
    token: String,
    timeout: Duration,
    heartbeat: Duration,
    /// This node. If its address is empty, the one from which it reaches the leader is used.
    node: Node,
    kept: Option<KeptWorkers>,
    seat: Option<Seat>,
    connected: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
}

impl FollowerThread {
    fn run(
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
            let own = || net::join(&node.address, seat.port);
            Member { id: seat.id, address: seat.address.clone().unwrap_or_else(own) }
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
