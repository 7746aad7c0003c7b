//! Who leads the job when the leading agent is lost (pure).
//!
//! These are Raft's elections, and its changes of one member at a time (Ongaro, "Consensus: Bridging
//! Theory and Practice", chapters 3 and 4). Two things are simpler here. The log is one small
//! [`JobRecord`]: a newer one replaces an older. And nothing is kept on disk: an agent that is
//! started again is another member.
//!
//! A leader acts only while a majority of the members is connected to it. A member is connected to
//! one leader at most, and votes for another one only when it has lost this one. So there are never
//! two leaders that act.

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::control::job_record::{JobRecord, Member, MemberId, Progress};

/// The time between the candidacies of two members, so that one is elected before the next stands.
const STAGGER: Duration = Duration::from_millis(300);

/// The member that has a copy of the store stands so long before the others.
const HEAD_START: Duration = Duration::from_secs(2);

/// A candidate's request for a vote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VoteRequest {
    /// It only asks whether it would get the vote, so that a member that cannot win does not disturb
    /// a leader by a later term.
    pub is_trial: bool,
    pub term: u64,
    pub candidate: MemberId,
    /// The candidate's record: members with a newer one refuse, others take it.
    pub record: JobRecord,
}

/// The answer to a [`VoteRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vote {
    pub is_trial: bool,
    pub term: u64,
    pub voter: MemberId,
    pub granted: bool,
    /// The voter's record, if it is newer than the candidate's.
    pub record: Option<JobRecord>,
}

/// What follows from a vote.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    Open,
    /// All other members must be asked this.
    Ask(VoteRequest),
    /// This agent leads from now on.
    Elected,
}

/// An agent's part in the choice of a leader.
pub struct Election {
    me: MemberId,
    /// The time after which a leader takes a member that is silent for lost.
    lease: Duration,
    /// The time that voters may need to stop their workers before they follow whom they elect.
    grace: Duration,
    record: JobRecord,
    /// The latest term that this agent has voted in or heard of.
    term: u64,
    /// The candidate that has this agent's vote in `term`.
    voted: Option<MemberId>,
    role: Role,
}

enum Role {
    Following,
    /// It has no leader, and is or may become a candidate.
    Searching {
        /// Before this it may still count as the lost leader's member.
        free_at: Instant,
        /// When to stand for election; None until it may.
        stand_at: Option<Instant>,
        is_trial: bool,
        votes: BTreeSet<MemberId>,
    },
    Leading(Leadership),
}

/// The leader's knowledge of the others.
struct Leadership {
    /// Those that are connected, in the order in which they came, and the age of the record that they have.
    present: Vec<(Member, (u64, u64))>,
    /// The first record of this term.
    first: (u64, u64),
    /// A majority has had a record of this term: this agent acts as the leader.
    is_established: bool,
    /// A leader that is not established by then gives up.
    give_up_at: Instant,
    /// All that were alive when it was sent have had time to answer the present record.
    is_fresh: bool,
}

impl Election {
    pub fn new(me: MemberId, lease: Duration, grace: Duration, now: Instant) -> Election {
        Election {
            me,
            lease,
            grace,
            record: JobRecord::default(),
            term: 0,
            voted: None,
            role: searching(now),
        }
    }

    /// Begins a job, as its leader and only member.
    pub fn found(&mut self, address: String, now: Instant) {
        let me = Member { id: self.me, address };
        self.term = 1;
        self.voted = Some(self.me);
        let members = vec![me.clone()];
        self.record = JobRecord { job: self.me, term: 1, members, ..JobRecord::default() };
        self.lead(me, now);
    }

    fn lead(&mut self, me: Member, now: Instant) {
        self.record.version += 1;
        let age = self.record.age();
        self.role = Role::Leading(Leadership {
            present: vec![(me, age)],
            first: age,
            is_established: false,
            give_up_at: now + self.lease + self.grace,
            is_fresh: true,
        });
        self.establish();
    }

    pub fn record(&self) -> &JobRecord {
        &self.record
    }

    pub fn id(&self) -> MemberId {
        self.me
    }

    /// Returns this agent's address, if it is a member.
    pub fn address(&self) -> Option<&str> {
        let own = self.record.members.iter().find(|member| member.id == self.me);
        own.map(|member| member.address.as_str())
    }

    /// Whether this agent leads, and may act as the leader.
    pub fn acts(&self) -> bool {
        matches!(&self.role, Role::Leading(leadership) if leadership.is_established)
    }

    pub fn is_leading(&self) -> bool {
        matches!(self.role, Role::Leading(_))
    }

    /// Whether this agent leads others that may be members.
    pub fn has_followers(&self) -> bool {
        matches!(&self.role, Role::Leading(leadership) if leadership.present.len() > 1)
    }

    /// Follows the leader that has sent this record. Returns false if its term is over.
    pub fn follow(&mut self, record: JobRecord, now: Instant) -> bool {
        if record.term < self.term {
            return false;
        }
        self.heard_of(record.term, now);
        self.record = record;
        self.role = Role::Following;
        true
    }

    /// Takes the record of a job that others have taken part in before this agent founded one. They
    /// elect their leader. Returns whether this agent led until now.
    pub fn give_way(&mut self, record: JobRecord, now: Instant) -> bool {
        let is_new = self.record.progress.round == 0 || record.age() > self.record.age();
        // Fewer could elect nobody.
        let can_elect = record.members.len() > 2;
        if record.job == self.record.job || !is_new || !can_elect || !self.is_leading() {
            return false;
        }
        self.term = self.term.max(record.term);
        self.record = record;
        self.search(now);
        true
    }

    /// Takes a record of a leader, or of a voter. A leader that hears of a later term leads no more.
    pub fn learn(&mut self, record: JobRecord, now: Instant) {
        if record.age() <= self.record.age() {
            return;
        }
        self.heard_of(record.term, now);
        self.record = record;
    }

    /// Notes that the leader is lost. If it is only silent, it may still count this agent as one that
    /// is connected.
    pub fn lost(&mut self, is_silent: bool, now: Instant) {
        let free_at = if is_silent { now + self.lease } else { now };
        match self.role {
            Role::Searching { free_at: known, .. } => self.search(known.max(free_at)),
            _ => self.search(free_at),
        }
    }

    fn search(&mut self, free_at: Instant) {
        self.role = searching(free_at);
    }

    /// Notes that this agent could lead now.
    pub fn may_stand(&mut self, now: Instant) {
        let turn = self.turn();
        let replica = self.record.progress.replica;
        let is_last = replica.is_some_and(|replica| replica != self.me);
        let head_start = if is_last { HEAD_START } else { Duration::ZERO };
        if let Role::Following = self.role {
            self.search(now);
        }
        if let Role::Searching { free_at, stand_at, .. } = &mut self.role {
            *stand_at = turn.map(|turn| now.max(*free_at) + turn * STAGGER + head_start);
        }
    }

    /// Returns the number of members that stand before this one: the last leader stands last.
    fn turn(&self) -> Option<u32> {
        let place = self.record.members.iter().position(|member| member.id == self.me)?;
        Some(place.checked_sub(1).unwrap_or(self.record.members.len() - 1) as u32)
    }

    /// Returns when to call [`Election::elapsed`].
    pub fn deadline(&self) -> Option<Instant> {
        match &self.role {
            Role::Following => None,
            Role::Searching { stand_at, .. } => *stand_at,
            Role::Leading(leadership) => {
                (!leadership.is_established).then_some(leadership.give_up_at)
            }
        }
    }

    /// Stands for election if it is time. Returns the request for all other members.
    pub fn elapsed(&mut self, now: Instant) -> Option<VoteRequest> {
        match &mut self.role {
            Role::Leading(leadership)
                if !leadership.is_established && leadership.give_up_at <= now =>
            {
                self.search(now);
                None
            }
            Role::Searching { stand_at: Some(at), .. } if *at <= now => {
                let turn = self.turn();
                // Not all may have noticed the loss yet.
                if let Role::Searching { stand_at, .. } = &mut self.role {
                    *stand_at = turn.map(|turn| now + (turn + 1) * STAGGER);
                }
                turn.map(|_| self.stand(true))
            }
            _ => None,
        }
    }

    fn stand(&mut self, trial: bool) -> VoteRequest {
        if let Role::Searching { is_trial, votes, .. } = &mut self.role {
            // A trial that is repeated keeps the answers to the one before.
            if !trial || !*is_trial {
                votes.clear();
            }
            *is_trial = trial;
            votes.insert(self.me);
        }
        if !trial {
            self.term += 1;
            self.voted = Some(self.me);
        }
        let term = if trial { self.term + 1 } else { self.term };
        VoteRequest { is_trial: trial, term, candidate: self.me, record: self.record.clone() }
    }

    /// Answers a candidate.
    pub fn vote(&mut self, request: &VoteRequest, now: Instant) -> Vote {
        let is_free = matches!(self.role, Role::Searching { free_at, .. } if free_at <= now);
        let is_older = request.record.age() < self.record.age();
        if is_free {
            self.learn(request.record.clone(), now);
        }
        let has_voted = request.term < self.term
            || (request.term == self.term && self.voted.is_some_and(|id| id != request.candidate));
        let granted = is_free && !is_older && !has_voted;
        if granted && !request.is_trial {
            self.term = request.term;
            self.voted = Some(request.candidate);
            // It gets the time to be found before this one stands itself.
            if let Role::Searching { stand_at: Some(at), .. } = &mut self.role {
                *at = (*at).max(now + self.lease);
            }
        }
        Vote {
            is_trial: request.is_trial,
            term: if granted { request.term } else { self.term },
            voter: self.me,
            granted,
            record: is_older.then(|| self.record.clone()),
        }
    }

    /// Takes an answer.
    pub fn count(&mut self, vote: Vote, now: Instant) -> Outcome {
        if let Some(record) = vote.record {
            self.learn(record, now);
        }
        if !vote.granted {
            self.heard_of(vote.term, now);
            return Outcome::Open;
        }
        let Role::Searching { is_trial, votes, .. } = &mut self.role else { return Outcome::Open };
        let term = if *is_trial { self.term + 1 } else { self.term };
        if vote.is_trial != *is_trial || vote.term != term || votes.is_empty() {
            return Outcome::Open;
        }
        votes.insert(vote.voter);
        if !self.record.has_majority(|id| votes.contains(&id)) {
            return Outcome::Open;
        }
        if *is_trial {
            let request = self.stand(false);
            let pause = self.turn().unwrap_or_default() + self.record.members.len() as u32 + 1;
            if let Role::Searching { stand_at, .. } = &mut self.role {
                *stand_at = stand_at.map(|_| now + pause * STAGGER);
            }
            return Outcome::Ask(request);
        }
        let Some(place) = self.record.members.iter().position(|member| member.id == self.me) else {
            return Outcome::Open;
        };
        let me = self.record.members.remove(place);
        self.record.members.insert(0, me.clone());
        self.record.term = self.term;
        self.record.version = 0;
        self.lead(me, now);
        Outcome::Elected
    }

    /// Notes that there is, or was, an election with this term. Returns whether this agent led until
    /// now.
    pub fn heard_of(&mut self, term: u64, now: Instant) -> bool {
        if term <= self.term {
            return false;
        }
        self.term = term;
        self.voted = None;
        if let Role::Searching { votes, .. } = &mut self.role {
            votes.clear();
        }
        let was_leading = self.is_leading();
        if was_leading {
            self.search(now);
        }
        was_leading
    }

    /// Returns the latest term that this agent knows. It follows no leader of an earlier one.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Notes that an agent is connected to this leader. It counts once it has answered: until then it
    /// may follow another one.
    pub fn joined(&mut self, member: Member) {
        if let Role::Leading(leadership) = &mut self.role {
            leadership.present.retain(|(other, _)| other.id != member.id);
            leadership.present.push((member, (0, 0)));
        }
    }

    /// Notes that an agent has the record of this age.
    pub fn acknowledged(&mut self, id: MemberId, age: (u64, u64)) {
        if let Role::Leading(leadership) = &mut self.role
            && let Some((_, known)) =
                leadership.present.iter_mut().find(|(member, _)| member.id == id)
        {
            *known = age.max(*known);
        }
        self.establish();
    }

    /// Notes that this agent did nothing for so long that the others may have elected another leader.
    /// It acts again once a majority has the record, which must be sent to all.
    pub fn doubt(&mut self, now: Instant) {
        let Role::Leading(leadership) = &mut self.role else { return };
        self.record.version += 1;
        let age = self.record.age();
        leadership.first = age;
        leadership.is_established = false;
        leadership.give_up_at = now + self.lease + self.grace;
        self.note_own();
        self.establish();
    }

    /// Notes that this leader has its own record.
    fn note_own(&mut self) {
        let age = self.record.age();
        if let Role::Leading(leadership) = &mut self.role
            && let Some((_, known)) =
                leadership.present.iter_mut().find(|(member, _)| member.id == self.me)
        {
            *known = age;
        }
    }

    fn establish(&mut self) {
        let Role::Leading(leadership) = &mut self.role else { return };
        if self.record.has_majority(|id| leadership.has(id, leadership.first)) {
            leadership.is_established = true;
        }
    }

    /// Notes that an agent is no longer connected to this leader. Returns whether it leads no more,
    /// as too few members are left.
    pub fn left(&mut self, id: MemberId, now: Instant) -> bool {
        let Role::Leading(leadership) = &mut self.role else { return false };
        leadership.present.retain(|(member, _)| member.id != id);
        // One that has not answered may follow another leader by now.
        let is_kept = self.record.has_majority(|id| leadership.has(id, leadership.first));
        if !leadership.is_established || is_kept {
            return false;
        }
        self.search(now);
        true
    }

    /// Whether the others that follow this leader can elect another one.
    pub fn can_leave(&self) -> bool {
        let Role::Leading(leadership) = &self.role else { return false };
        self.record.has_majority(|id| id != self.me && leadership.has(id, leadership.first))
    }

    /// Whether this agent leads, and a majority has the record as it is.
    pub fn is_known(&self) -> bool {
        let Role::Leading(leadership) = &self.role else { return false };
        let age = self.record.age();
        self.record.has_majority(|id| leadership.has(id, age))
    }

    /// Brings the record up to date. Returns whether it has changed and must be sent to all.
    pub fn update(&mut self, progress: Progress) -> bool {
        if !self.acts() {
            return false;
        }
        let has_progress = self.record.progress != progress;
        self.record.progress = progress;
        let has_changed = self.change_members() || has_progress;
        if has_changed {
            self.record.version += 1;
            if let Role::Leading(leadership) = &mut self.role {
                leadership.is_fresh = true;
            }
            self.note_own();
        }
        has_changed
    }

    /// Makes the next change of the members, if there is one to make. Returns whether the record must
    /// be sent.
    fn change_members(&mut self) -> bool {
        let Role::Leading(leadership) = &mut self.role else { return false };
        let record = &mut self.record;
        let age = record.age();
        let has_record = |id| id == self.me || leadership.has(id, age);
        // One change at a time, each known to a majority before the next.
        if !record.has_majority(has_record) {
            return false;
        }
        let wanted = wanted(record, &leadership.present);
        // Those that are gone come first: else those that are left could have no majority.
        let absent = record.members.iter().position(|member| !leadership.has(member.id, (0, 0)));
        let surplus = record.members.iter().position(|member| !wanted.contains(&member.id));
        if let Some(surplus) = absent.or(surplus) {
            record.members.remove(surplus);
            return true;
        }
        let missing: Vec<&Member> = leadership
            .present
            .iter()
            .map(|(member, _)| member)
            .filter(|member| wanted.contains(&member.id) && !record.has(member.id))
            .collect();
        if missing.is_empty() {
            leadership.is_fresh = false;
            return false;
        }
        if !leadership.is_fresh {
            // Only who answers now is known to be alive.
            return true;
        }
        let ready = missing.iter().filter(|member| has_record(member.id));
        let added: Vec<Member> = if record.members.len() > 1 {
            ready.take(1).map(|member| (*member).clone()).collect()
        } else if ready.count() == missing.len() {
            // Nobody else could have been elected so far. So all may become members at once: with one
            // alone, the loss of either would end the job.
            missing.into_iter().cloned().collect()
        } else {
            Vec::new()
        };
        let has_changed = !added.is_empty();
        record.members.extend(added);
        has_changed
    }
}

impl Leadership {
    /// Whether this agent is connected, and has a record of this age or a later one.
    fn has(&self, id: MemberId, age: (u64, u64)) -> bool {
        self.present.iter().any(|(member, known)| member.id == id && *known >= age)
    }
}

fn searching(free_at: Instant) -> Role {
    Role::Searching { free_at, stand_at: None, is_trial: true, votes: BTreeSet::new() }
}

/// Returns those that should be members: one, three or five, those that are it already first. Two
/// could lose none, as one could not.
fn wanted(record: &JobRecord, present: &[(Member, (u64, u64))]) -> BTreeSet<MemberId> {
    let size = match present.len() {
        0..=2 => 1,
        3..=4 => 3,
        _ => 5,
    };
    let present_ids: BTreeSet<MemberId> = present.iter().map(|(member, _)| member.id).collect();
    let members = record.members.iter().map(|member| member.id);
    let members = members.filter(|id| present_ids.contains(id));
    let others = present.iter().map(|(member, _)| member.id).filter(|id| !record.has(*id));
    members.chain(others).take(size).collect()
}
