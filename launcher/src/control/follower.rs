//! Another node's side of the link: a connection that listens for commands, whose long polls are the
//! heartbeat, and one that posts events.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use flow_comm::store::{Address, Error, Store};

use crate::control::protocol::{command_key, AgentEvent, AgentId, Command, ControlMessage, Node};
use crate::control::token::token;
use crate::job::Job;
use crate::net;

/// How often the leader hears from this node.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long to wait before a name is looked up again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// When to say that there is no connection yet.
const FIRST_NOTICE: Duration = Duration::from_secs(10);

/// How long the end of this agent waits for its last events to be posted.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// See the head of this file.
pub struct Follower {
    events: Option<Sender<AgentEvent>>,
    messages: Receiver<ControlMessage>,
    /// Holds one byte for each message.
    wake_pipe: PipeReader,
    /// Whether there is a connection, and what closes when it has posted all events.
    connected: Arc<AtomicBool>,
    posted: Receiver<()>,
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
        let (posting, posted) = mpsc::channel();
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
        thread::Builder::new().name("flow-link".into()).spawn(move || {
            if let Err(reason) = follower.run(receiver, posting, &commands_out) {
                commands_out.send(ControlMessage::Disconnected(reason));
            }
        })?;
        Ok(Follower { events: Some(events), messages, wake_pipe, connected, posted })
    }

    pub fn send(&self, event: AgentEvent) {
        if let Some(events) = &self.events {
            // Without a connection there is nobody to tell; `poll` reports that.
            let _ = events.send(event);
        }
    }

    pub fn poll(&mut self) -> Option<ControlMessage> {
        let messages = self.messages.try_recv().ok()?;
        let _ = self.wake_pipe.read(&mut [0]);
        Some(messages)
    }

    pub fn watch(&self) -> BorrowedFd<'_> {
        self.wake_pipe.as_fd()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.events = None;
        if self.connected.load(Ordering::SeqCst) {
            let _ = self.posted.recv_timeout(FLUSH_TIMEOUT);
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

    /// False if nobody listens any more.
    fn send(&self, messages: ControlMessage) -> bool {
        self.messages.send(messages).is_ok() && (&self.wake_pipe).write_all(b"!").is_ok()
    }
}

/// What the thread of the connection that listens needs.
struct FollowerThread {
    address: Address,
    token: String,
    timeout: Duration,
    heartbeat: Duration,
    leader: String,
    /// This one; without an address it is the one on the way to the leader.
    node: Node,
    connected: Arc<AtomicBool>,
}

impl FollowerThread {
    /// Joins and listens until there is nothing more to hear. The error says why the leader is
    /// lost.
    fn run(
        &self,
        events: Receiver<AgentEvent>,
        posting: Sender<()>,
        commands_out: &CommandSender,
    ) -> Result<(), String> {
        let lost = |error: Error| match error {
            Error::Denied { address, reason } => {
                let hint = "without FLOW_TOKEN, --rdzv-id must be the same";
                format!("the leading node at {address} refuses this one: {reason} ({hint})")
            }
            error => format!("the leading node cannot be reached: {error}"),
        };
        let begin = Instant::now();
        let soon = self.timeout.min(FIRST_NOTICE);
        let store = match self.open(soon) {
            Err(Error::Connect { cause, .. }) if self.timeout > soon => {
                let (address, timeout) = (&self.address, self.timeout.as_secs());
                let wait =
                    format!("no connection to the leading node at {address} yet ({cause}); trying for {timeout} s");
                commands_out.send(ControlMessage::Notice(wait));
                self.open(self.timeout.saturating_sub(begin.elapsed()))
            }
            result => result,
        };
        let store = store.map_err(lost)?;
        store.set_reply_timeout(self.heartbeat / 2);
        let posts = self.open(soon).map_err(lost)?;
        posts.set_reply_timeout(self.heartbeat);
        let mut node = self.node.clone();
        if node.address.is_empty() {
            node.address =
                net::towards(&self.leader).map_err(|error| format!("{}: {error}", self.leader))?;
        }
        let agent = store.add("agents", 1).map_err(lost)? as AgentId;
        let will =
            AgentEvent::Gone { why: "its flow-launch was killed, or cannot be reached".into() };
        store.will(&message(agent, &will), self.heartbeat).map_err(lost)?;
        posts.post(&message(agent, &AgentEvent::Joined { node })).map_err(lost)?;
        self.connected.store(true, Ordering::SeqCst);
        let post_errors = commands_out
            .try_clone()
            .map_err(|error| format!("cannot duplicate a pipe: {error}"))?;
        let post = move || {
            let _closes_at_the_end = posting;
            for event in events {
                if let Err(error) = posts.post(&message(agent, &event)) {
                    post_errors.send(ControlMessage::Disconnected(format!(
                        "the leading node cannot be reached: {error}"
                    )));
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("flow-posts".into())
            .spawn(post)
            .map_err(|e| format!("cannot start a thread: {e}"))?;
        for number in 0.. {
            let text = loop {
                match store.get(&command_key(agent, number), HEARTBEAT) {
                    Err(Error::Timeout { .. }) => {}
                    text => break text.map_err(lost)?,
                }
            };
            let command: Command = serde_json::from_slice(&text).map_err(|error| {
                format!("the leading node's command makes no sense ({error}): is its flow-launch of the same version?")
            })?;
            let is_last = matches!(command, Command::Finish(_));
            if !commands_out.send(ControlMessage::Command(command)) || is_last {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Connects. A name that is not known may become known: that of a machine which is starting.
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

fn message(agent: AgentId, event: &AgentEvent) -> Vec<u8> {
    serde_json::to_vec(&(agent, event)).unwrap_or_default() // plain data: it cannot fail
}
