//! What ranks tell each other in a join: those that go on, what they do next; the others, that they
//! have ended.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_comm::ProcessGroup;

use super::JoinOptions;
use crate::error::{Error, Result, job_rank};

/// The first number of a rank's notice is this if the rank has ended, or else one more than the
/// joinable's number. The second is the joinable's code.
const ENDED: i64 = 0;

/// A joinable's part of a join.
#[derive(Debug, Clone)]
pub struct JoinContext {
    notices: Arc<Notices>,
    joinable: usize,
}

impl JoinContext {
    pub(super) fn new(notices: &Arc<Notices>, joinable: usize) -> Self {
        Self { notices: Arc::clone(notices), joinable }
    }

    /// Returns the options of the join.
    pub fn options(&self) -> JoinOptions {
        self.notices.options
    }

    /// Tells the ranks that have ended that the joinable is about to call collectives, which `code`
    /// stands for: they take part in [`JoinHook::main_hook`](super::JoinHook::main_hook). All ranks
    /// that have not ended call this together. Returns these ranks, by their numbers in the group.
    ///
    /// # Errors
    ///
    /// [`Error::EndedEarly`]; a failure of the group.
    pub fn notify(&self, code: i64) -> Result<Vec<usize>> {
        let step = self.notices.exchange([self.joinable as i64 + 1, code])?;
        Ok(step.map(|step| step.active).unwrap_or_default())
    }
}

/// What the ranks that have not ended do next.
pub(super) struct Step {
    pub joinable: usize,
    pub code: i64,
    pub active: Vec<usize>,
}

/// The notices of a join.
#[derive(Debug)]
pub(super) struct Notices {
    group: ProcessGroup,
    options: JoinOptions,
    /// The ranks that had not ended when the last step began.
    active: Mutex<Vec<usize>>,
}

impl Notices {
    pub fn new(group: &ProcessGroup, options: JoinOptions) -> Self {
        let active = Mutex::new((0..group.world_size()).collect());
        Self { group: group.clone(), options, active }
    }

    /// Tells the others that this rank has ended. Returns what they do next; None if all have ended.
    pub fn ended(&self) -> Result<Option<Step>> {
        self.exchange([ENDED, 0])
    }

    /// Returns the ranks that had not ended when the last step began.
    pub fn last_active(&self) -> Vec<usize> {
        self.active().clone()
    }

    /// Fails if a rank has ended early, and that is to be an error.
    pub fn check(&self) -> Result<()> {
        let active = self.active();
        let ranks = self.group.ranks();
        if !self.options.throw_on_early_termination || active.len() == ranks.len() {
            return Ok(());
        }
        let (active, ended) = (0..ranks.len()).partition(|rank| active.contains(rank));
        let named = |those: Vec<usize>| those.into_iter().map(|rank| ranks[rank]).collect();
        Err(Error::EndedEarly {
            rank: job_rank(&self.group),
            ended: named(ended),
            active: named(active),
        })
    }

    /// Gives all ranks this rank's notice, and returns what the ranks that go on do next.
    fn exchange(&self, own: [i64; 2]) -> Result<Option<Step>> {
        self.check()?;
        let mut all = vec![0; own.len() * self.group.world_size()];
        self.group.all_gather(&own, &mut all)?;
        let notices: Vec<&[i64]> = all.chunks_exact(own.len()).collect();
        let active: Vec<usize> =
            (0..notices.len()).filter(|&rank| notices[rank][0] != ENDED).collect();
        let Some(&last) = active.last() else { return Ok(None) };
        self.active().clone_from(&active);
        self.check()?;
        let joinable = notices[last][0] as usize - 1;
        Ok(Some(Step { joinable, code: notices[last][1], active }))
    }

    fn active(&self) -> MutexGuard<'_, Vec<usize>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
