//! An agent as one that leads, or may: the store that it serves, and its part in elections.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use flow_store::{Address, Server, Store};
use serde::{Deserialize, Serialize};

use crate::control::assignment::RendezvousStoreInfo;
use crate::control::election::{Election, Outcome, Vote, VoteRequest};
use crate::control::job_record::JobRecord;
use crate::control::local_store::LocalStore;
use crate::control::mailbox::{MailSender, Mailbox, mailbox};
use crate::control::protocol::{AgentEvent, AgentId};
use crate::net;

/// The time that another member has for its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest time that a replica may be silent: the replies to workers wait for it.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// The key under which every agent that serves a store says who leads.
pub const LEADER_KEY: &str = "leader";

/// Where the leader is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LeaderPlace {
    Unknown,
    /// It serves this store.
    Here,
    At(String),
}

/// A message that comes through an agent's store.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub enum PeerMessage {
    Event(AgentId, AgentEvent),
    /// A request for a vote; the answer goes to a key of this store.
    Request {
        request: VoteRequest,
        answer: String,
    },
    /// Another agent leads the job.
    Led {
        record: JobRecord,
    },
}

/// The store that an agent serves, and its part in elections.
pub struct Candidate {
    pub server: Server,
    pub election: Election,
    /// The address of the store, if it was known from the start.
    pub address: Option<String>,
    /// The store for the workers of this node, if they may outlive the leader.
    pub local: Option<LocalStore>,
    /// The time after which a replica counts as lost.
    silence: Duration,
    token: Arc<str>,
    /// The number of requests that this agent has sent.
    asked: u64,
    votes: Mailbox<Vote>,
    votes_out: MailSender<Vote>,
}

impl Candidate {
    /// Makes the candidate that serves this store to those that know `token`. The others take it for
    /// lost when it is silent as long as `lease`. Its workers may take `grace` to stop.
    pub fn new(
        server: Server,
        token: &str,
        lease: Duration,
        grace: Duration,
    ) -> anyhow::Result<Candidate> {
        let (votes_out, votes) = mailbox()?;
        let mut id = [0; 8];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
        let candidate = Candidate {
            server,
            election: Election::new(u64::from_ne_bytes(id), lease, grace, Instant::now()),
            address: None,
            local: None,
            silence: (lease / 2).min(MAX_SILENCE),
            token: token.into(),
            asked: 0,
            votes,
            votes_out,
        };
        candidate.announce(&LeaderPlace::Unknown);
        Ok(candidate)
    }

    /// Tells those that ask this store who leads.
    pub fn announce(&self, leader: &LeaderPlace) {
        // Plain data: it cannot fail.
        let text = serde_json::to_vec(leader).unwrap_or_default();
        self.server.set(LEADER_KEY, &text);
    }

    /// Opens the store for this node's workers of a round, for which the leader has these stores. Puts its
    /// address in place of the leader's.
    pub fn open_local(
        &mut self,
        round: u32,
        stores: &mut RendezvousStoreInfo,
    ) -> anyhow::Result<()> {
        let local = self.local.as_mut();
        match local.filter(|local| local.round == round && local.is_for(stores)) {
            Some(local) => local.follow(stores)?,
            None => {
                self.local = None;
                self.local = Some(LocalStore::open(&self.server, round, stores)?);
            }
        }
        let leader = stores.store.trim_start_matches("tcp://");
        let place = net::own_place(self.bound().parse()?, leader)?;
        stores.store = Address::Tcp(place.to_string()).to_string();
        Ok(())
    }

    /// Makes the store for the workers of a round a replica of the leader's.
    pub fn replicate(&mut self, round: u32, number: u64) -> anyhow::Result<()> {
        match self.local.as_mut().filter(|local| local.round == round) {
            Some(local) => {
                log::info!("this node keeps a copy of the workers' store");
                local.replicate(number, self.silence)
            }
            None => Ok(()),
        }
    }

    /// Takes the store for the workers of the present round, if it has all of the last leader's. It
    /// serves them from now on.
    pub fn take_replica(&mut self) -> anyhow::Result<Option<LocalStore>> {
        let progress = &self.election.record().progress;
        let has_all = progress.replica == Some(self.election.id()) && progress.result.is_none();
        let round = progress.round;
        let Some(local) = self.local.take_if(|local| has_all && local.round == round) else {
            return Ok(None);
        };
        local.server.serve()?;
        Ok(Some(local))
    }

    /// Returns where the store is, and the token that it asks for.
    pub fn store(&self) -> (&str, &str) {
        (self.bound(), &self.token)
    }

    /// Returns the host and the port at which the store is served.
    fn bound(&self) -> &str {
        match self.server.address() {
            Address::Tcp(address) => address,
            Address::Unix(name) => name,
        }
    }

    /// Returns the port of the store.
    pub fn port(&self) -> Option<u16> {
        self.bound().rsplit_once(':')?.1.parse().ok()
    }

    /// Answers a candidate.
    pub fn vote(&mut self, request: &VoteRequest, answer: &str) {
        let vote = self.election.vote(request, Instant::now());
        log::debug!("{request:?}: {vote:?}");
        self.server.set(answer, &serde_json::to_vec(&vote).unwrap_or_default());
    }

    /// Counts votes, and stands for election if it is time. Returns whether this agent is elected.
    pub fn poll(&mut self) -> bool {
        while let Some(vote) = self.votes.poll() {
            log::debug!("answer: {vote:?}");
            match self.election.count(vote, Instant::now()) {
                Outcome::Open => {}
                Outcome::Ask(request) => self.ask(&request),
                Outcome::Elected => return true,
            }
        }
        if let Some(request) = self.election.elapsed(Instant::now()) {
            self.ask(&request);
        }
        false
    }

    /// Asks all other members for their votes.
    fn ask(&mut self, request: &VoteRequest) {
        self.asked += 1;
        let answer = format!("vote/{}/{}", request.candidate, self.asked);
        for member in &request.record.members {
            if member.id == request.candidate {
                continue;
            }
            let Ok(votes_out) = self.votes_out.try_clone() else { continue };
            let address = Address::Tcp(member.address.clone());
            let token = Arc::clone(&self.token);
            let request = request.clone();
            let answer = answer.clone();
            let asked = thread::Builder::new().name("flow-election".into()).spawn(move || {
                // Whoever does not answer does not vote.
                if let Some(vote) = answer_of(&address, &token, request, answer) {
                    votes_out.send(vote);
                }
            });
            if let Err(error) = asked {
                log::warn!("cannot ask {} for its vote: {error}", member.address);
            }
        }
    }

    /// Returns the descriptors that are readable when something has come.
    pub fn watch(&self) -> [BorrowedFd<'_>; 2] {
        [self.server.inbox().as_fd(), self.votes.watch()]
    }
}

/// Asks one member, which puts its vote under the key `answer` of its own store.
fn answer_of(address: &Address, token: &str, request: VoteRequest, answer: String) -> Option<Vote> {
    let store = Store::connect(address, token, ANSWER_TIMEOUT).ok()?;
    store.set_reply_timeout(ANSWER_TIMEOUT);
    let message = PeerMessage::Request { request, answer: answer.clone() };
    store.send(&serde_json::to_vec(&message).ok()?).ok()?;
    let vote = store.get(&answer, ANSWER_TIMEOUT);
    // Nobody reads it again.
    let _ = store.delete(&[answer]);
    serde_json::from_slice(&vote.ok()?).ok()
}
