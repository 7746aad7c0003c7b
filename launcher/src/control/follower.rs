//! The control plane of an agent that does not lead. One connection waits for commands; its long
//! polls are the heartbeat. Another sends events.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use flow_store::net::local_address_for;
use flow_store::{Address, Error, Store};

use crate::control::node::Node;
use crate::control::protocol::{AgentEvent, AgentId, Command, ControlMessage, command_key};
use crate::control::token::token;
use crate::job::Job;
use crate::net;
use crate::report::text::excerpt;
use crate::trace::folder as trace;

/// Interval of the heartbeat.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The time to wait before looking up a host name again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

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
    messages: Receiver<ControlMessage>,
    /// Holds one byte for each message.
    wake_pipe: PipeReader,
    /// Whether there is a connection; `sent` closes when it has sent all events.
    connected: Arc<AtomicBool>,
    sent: Receiver<()>,
}

impl Follower {
    /// Joins the job whose leader is at `host` and `port`, within `timeout`.
    pub fn join(
        job: &Job,
        node: Node,
        host: &str,
        port: u16,
        timeout: Duration,
    ) -> anyhow::Result<Follower> {
        let (sender, messages) = mpsc::channel();
        let (wake_pipe, wake_writer) = io::pipe()?;
        rustix::io::ioctl_fionbio(&wake_pipe, true)?;
        let (events, receiver) = mpsc::channel();
        let (sending, sent) = mpsc::channel();
        let connected = Arc::new(AtomicBool::new(false));
        let follower = FollowerThread {
            address: Address::Tcp(net::join(host, port)),
            token: token(job)?,
            timeout,
            heartbeat: job.nodes.timeouts.heartbeat,
            leader: host.to_string(),
            node,
            connected: Arc::clone(&connected),
        };
        let commands_out = CommandSender { messages: sender, wake_pipe: wake_writer };
        thread::Builder::new().name("flow-control".into()).spawn(move || {
            if let Err(reason) = follower.run(receiver, sending, &commands_out) {
                commands_out.send(ControlMessage::Disconnected(reason));
            }
        })?;
        Ok(Follower { events: Some(events), messages, wake_pipe, connected, sent })
    }

    /// Sends an event. It is lost if there is no connection, which [`Follower::poll`] reports.
    pub fn send(&self, event: AgentEvent) {
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
        let message = self.messages.try_recv().ok()?;
        let _ = self.wake_pipe.read(&mut [0]);
        Some(message)
    }

    /// Returns the descriptor that is readable when a message has come.
    pub fn watch(&self) -> BorrowedFd<'_> {
        self.wake_pipe.as_fd()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.events = None;
        if self.connected.load(Ordering::SeqCst) {
            let _ = self.sent.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

/// Hands messages to the event loop and wakes it.
struct CommandSender {
    messages: Sender<ControlMessage>,
    wake_pipe: PipeWriter,
}

impl CommandSender {
    fn try_clone(&self) -> io::Result<CommandSender> {
        Ok(CommandSender {
            messages: self.messages.clone(),
            wake_pipe: self.wake_pipe.try_clone()?,
        })
    }

    /// False if the event loop has gone.
    fn send(&self, message: ControlMessage) -> bool {
        self.messages.send(message).is_ok() && (&self.wake_pipe).write_all(b"!").is_ok()
    }
}

/// The thread that waits for commands.
struct FollowerThread {
    address: Address,
    token: String,
    timeout: Duration,
    heartbeat: Duration,
    leader: String,
    /// This node. If its address is empty, the one from which it reaches the leader is used.
    node: Node,
    connected: Arc<AtomicBool>,
}

impl FollowerThread {
    /// Joins and receives commands until the last one. The error says why the leader is lost.
    fn run(
        &self,
        events: Receiver<Outgoing>,
        sending: Sender<()>,
        commands_out: &CommandSender,
    ) -> Result<(), String> {
        let store = self.open_first(commands_out).map_err(lost)?;
        store.set_reply_timeout(self.heartbeat / 2);
        let events_out = self.open(self.timeout.min(FIRST_NOTICE)).map_err(lost)?;
        events_out.set_reply_timeout(self.heartbeat);
        let node = self.node()?;
        let agent = store.add("agents", 1).map_err(lost)? as AgentId;
        let will =
            AgentEvent::Gone { why: "its flow-launch was killed, or cannot be reached".into() };
        store.will(&message(agent, &will), self.heartbeat).map_err(lost)?;
        events_out.send(&message(agent, &AgentEvent::Joined { node })).map_err(lost)?;
        self.connected.store(true, Ordering::SeqCst);
        let errors_out = commands_out
            .try_clone()
            .map_err(|error| format!("cannot duplicate a pipe: {error}"))?;
        thread::Builder::new()
            .name("flow-events".into())
            .spawn(move || {
                let _closes_at_the_end = sending;
                if let Err(error) = send_events(events, agent, &events_out) {
                    errors_out.send(ControlMessage::Disconnected(lost(error)));
                }
            })
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        receive_commands(&store, agent, commands_out)
    }

    /// Connects, and says so if that takes long.
    fn open_first(&self, commands_out: &CommandSender) -> Result<Store, Error> {
        let begin = Instant::now();
        let soon = self.timeout.min(FIRST_NOTICE);
        match self.open(soon) {
            Err(Error::Connect { cause, .. }) if self.timeout > soon => {
                commands_out.send(ControlMessage::Notice(format!(
                    "no connection to the leading node at {} yet ({cause}); trying for {} s",
                    self.address,
                    self.timeout.as_secs()
                )));
                self.open(self.timeout.saturating_sub(begin.elapsed()))
            }
            result => result,
        }
    }

    /// Returns this node, with its address.
    fn node(&self) -> Result<Node, String> {
        let mut node = self.node.clone();
        if node.address.is_empty() {
            // Some port, as none is spoken to.
            let address = local_address_for((self.leader.as_str(), 1))
                .map_err(|error| format!("{}: {error}", self.leader))?;
            node.address = address.to_string();
        }
        Ok(node)
    }

    /// Connects. Tries again on an unknown host name, which may be that of a host that is starting.
    fn open(&self, timeout: Duration) -> Result<Store, Error> {
        let begin = Instant::now();
        loop {
            let left = timeout.saturating_sub(begin.elapsed());
            match Store::connect(&self.address, &self.token, left) {
                Err(Error::Connect { .. }) if begin.elapsed() + RETRY_INTERVAL < timeout => {
                    thread::sleep(RETRY_INTERVAL)
                }
                result => return result,
            }
        }
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

/// Hands on commands of the leader, to the last one. Each wait for one is a heartbeat.
fn receive_commands(
    store: &Store,
    agent: AgentId,
    commands_out: &CommandSender,
) -> Result<(), String> {
    for number in 0.. {
        let text = loop {
            match store.get(&command_key(agent, number), HEARTBEAT) {
                Err(Error::Timeout { .. }) => {}
                text => break text.map_err(lost)?,
            }
        };
        let command: Command = serde_json::from_slice(&text).map_err(|error| {
            format!(
                "malformed command of the leading node ({error}): got '{}'; do all nodes run the \
                 same version?",
                excerpt(&text)
            )
        })?;
        let is_last = matches!(command, Command::Finish(_));
        if !commands_out.send(ControlMessage::Command(command)) || is_last {
            break;
        }
    }
    Ok(())
}

/// Says why the leader is lost.
fn lost(error: Error) -> String {
    match error {
        Error::Denied { address, reason } => {
            let hint = "without FLOW_TOKEN, --rdzv-id must be the same";
            format!("the leading node at {address} refuses this one: {reason} ({hint})")
        }
        error => format!("the leading node cannot be reached: {error}"),
    }
}

fn message(agent: AgentId, event: &AgentEvent) -> Vec<u8> {
    serde_json::to_vec(&(agent, event)).unwrap_or_default() // plain data: it cannot fail
}
