//! Another node's side of the link: a connection that listens for orders, whose long polls are the
//! heartbeat, and one that posts events.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use flow_comm::store::{Address, Error, Store};

use crate::address;
use crate::coordinator::{AgentId, Event, Node, Order};
use crate::job::Job;
use crate::leader::order_key;
use crate::link::{self, Heard};

/// How often the leader hears from this node.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long to wait before a name is looked up again.
const PAUSE: Duration = Duration::from_millis(500);

/// When to say that there is no connection yet.
const FIRST_NOTICE: Duration = Duration::from_secs(10);

/// How long the end of this agent waits for its last events to be posted.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// See the head of this file.
pub struct Member {
    events: Option<Sender<Event>>,
    heard: Receiver<Heard>,
    /// Readable when something was heard: a byte for each.
    bell: PipeReader,
    /// Whether there is a connection, and what closes when it has posted all events.
    connected: Arc<AtomicBool>,
    posted: Receiver<()>,
}

impl Member {
    /// Joins the job whose leader is at `host` and `port`, within `patience`.
    pub fn join(
        job: &Job,
        node: Node,
        host: &str,
        port: u16,
        patience: Duration,
    ) -> anyhow::Result<Member> {
        let (sender, heard) = mpsc::channel();
        let (bell, ring) = io::pipe()?;
        rustix::io::ioctl_fionbio(&bell, true)?;
        let (events, receiver) = mpsc::channel();
        let (posting, posted) = mpsc::channel();
        let connected = Arc::new(AtomicBool::new(false));
        let joining = Joining {
            address: Address::Tcp(address::join(host, port)),
            token: link::token(job)?,
            patience,
            heartbeat: job.nodes.patience.heartbeat,
            leader: host.to_string(),
            node,
            connected: Arc::clone(&connected),
        };
        let ear = Ear { heard: sender, bell: ring };
        thread::Builder::new().name("flow-link".into()).spawn(move || {
            if let Err(reason) = joining.run(receiver, posting, &ear) {
                ear.tell(Heard::Lost(reason));
            }
        })?;
        Ok(Member { events: Some(events), heard, bell, connected, posted })
    }

    pub fn tell(&self, event: Event) {
        if let Some(events) = &self.events {
            // Without a connection there is nobody to tell; that is heard.
            let _ = events.send(event);
        }
    }

    pub fn hear(&mut self) -> Option<Heard> {
        let heard = self.heard.try_recv().ok()?;
        let _ = self.bell.read(&mut [0]);
        Some(heard)
    }

    pub fn watch(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.events = None;
        if self.connected.load(Ordering::SeqCst) {
            let _ = self.posted.recv_timeout(LAST_WORDS);
        }
    }
}

/// Passes on what is heard.
struct Ear {
    heard: Sender<Heard>,
    bell: PipeWriter,
}

impl Ear {
    fn try_clone(&self) -> io::Result<Ear> {
        Ok(Ear { heard: self.heard.clone(), bell: self.bell.try_clone()? })
    }

    /// False if nobody listens any more.
    fn tell(&self, heard: Heard) -> bool {
        self.heard.send(heard).is_ok() && (&self.bell).write_all(b"!").is_ok()
    }
}

/// What the thread of the connection that listens needs.
struct Joining {
    address: Address,
    token: String,
    patience: Duration,
    heartbeat: Duration,
    leader: String,
    /// This one; without an address it is the one on the way to the leader.
    node: Node,
    connected: Arc<AtomicBool>,
}

impl Joining {
    /// Joins and listens until there is nothing more to hear. The error says why the leader is
    /// lost.
    fn run(&self, events: Receiver<Event>, posting: Sender<()>, ear: &Ear) -> Result<(), String> {
        let lost = |error: Error| match error {
            Error::Denied { address, reason } => {
                let hint = "without FLOW_TOKEN, --rdzv-id must be the same";
                format!("the leading node at {address} refuses this one: {reason} ({hint})")
            }
            error => format!("the leading node cannot be reached: {error}"),
        };
        let begin = Instant::now();
        let soon = self.patience.min(FIRST_NOTICE);
        let store = match self.open(soon) {
            Err(Error::Connect { cause, .. }) if self.patience > soon => {
                let (address, patience) = (&self.address, self.patience.as_secs());
                let wait =
                    format!("no connection to the leading node at {address} yet ({cause}); trying for {patience} s");
                ear.tell(Heard::Wait(wait));
                self.open(self.patience.saturating_sub(begin.elapsed()))
            }
            result => result,
        };
        let store = store.map_err(lost)?;
        store.set_patience(self.heartbeat / 2);
        let posts = self.open(soon).map_err(lost)?;
        posts.set_patience(self.heartbeat);
        let mut node = self.node.clone();
        if node.address.is_empty() {
            node.address = address::towards(&self.leader)
                .map_err(|error| format!("{}: {error}", self.leader))?;
        }
        let agent = store.add("agents", 1).map_err(lost)? as AgentId;
        let will = Event::Gone { why: "its flow-launch was killed, or cannot be reached".into() };
        store.will(&message(agent, &will), self.heartbeat).map_err(lost)?;
        posts.post(&message(agent, &Event::Joined { node })).map_err(lost)?;
        self.connected.store(true, Ordering::SeqCst);
        let own_ear =
            ear.try_clone().map_err(|error| format!("cannot duplicate a pipe: {error}"))?;
        let post = move || {
            let _closes_at_the_end = posting;
            for event in events {
                if let Err(error) = posts.post(&message(agent, &event)) {
                    own_ear
                        .tell(Heard::Lost(format!("the leading node cannot be reached: {error}")));
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
                match store.get(&order_key(agent, number), HEARTBEAT) {
                    Err(Error::Timeout { .. }) => {}
                    text => break text.map_err(lost)?,
                }
            };
            let order: Order = serde_json::from_slice(&text).map_err(|error| {
                format!("the leading node's order makes no sense ({error}): is its flow-launch of the same version?")
            })?;
            let is_last = matches!(order, Order::End(_));
            if !ear.tell(Heard::Order(order)) || is_last {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Connects. A name that is not known may become known: that of a machine which is starting.
    fn open(&self, patience: Duration) -> Result<Store, Error> {
        let begin = Instant::now();
        loop {
            let left = patience.saturating_sub(begin.elapsed());
            match Store::connect(&self.address, &self.token, left) {
                Err(Error::Connect { .. }) if begin.elapsed() + PAUSE < patience => {
                    thread::sleep(PAUSE)
                }
                result => return result,
            }
        }
    }
}

fn message(agent: AgentId, event: &Event) -> Vec<u8> {
    serde_json::to_vec(&(agent, event)).unwrap_or_default() // plain data: it cannot fail
}
