//! Ranks in a join send each other notices. Those that go on say what they do next, the others that
//! they have ended.
//!
//! A notice is a bucket of its own. So a rank that begins a backward need not wait for the others'.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_autograd::tensor_from_memory;
use flow_comm::{DType, JOIN_NOTICE, ProcessGroup, ReduceOp, Segments};
use tch::{Kind, Tensor};

use super::options::JoinOptions;
use crate::bucket::grad_bytes::GradBytes;
use crate::error::{Error, Result, job_rank};

/// The first number of a rank's notice is this if the rank has ended, or else one more than the
/// joinable's number. The second is the joinable's code.
const ENDED: i64 = 0;
/// The numbers of a notice.
const LENGTH: usize = 2;

/// A joinable's part of a join.
#[derive(Clone)]
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
    /// that have not ended call this together, with the same code. Returns these ranks, by their
    /// numbers in the group.
    ///
    /// # Errors
    ///
    /// [`Error::EndedEarly`]; a backward of a joined model is under way; ranks are about to do
    /// different things; a failure of the group.
    pub fn notify(&self, code: i64) -> Result<Vec<usize>> {
        self.send(code)?;
        self.complete()
    }

    /// Returns the group of the notices.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.notices.group
    }

    /// Tells what [`JoinContext::notify`] tells, of a backward, without waiting for other ranks.
    pub(crate) fn begin_backward(&self, code: i64) -> Result<()> {
        self.send(code)?;
        self.notices.state().backwards += 1;
        Ok(())
    }

    /// Waits for the other ranks' notices. Returns what [`JoinContext::notify`] returns.
    pub(crate) fn complete(&self) -> Result<Vec<usize>> {
        let step = self.notices.receive()?;
        Ok(step.map(|step| step.active).unwrap_or_default())
    }

    /// Notes the end of a backward.
    pub(crate) fn end_backward(&self) {
        self.notices.state().backwards -= 1;
    }

    fn send(&self, code: i64) -> Result<()> {
        let backwards = self.notices.state().backwards;
        if backwards > 0 && !self.options().throw_on_early_termination {
            let reason = "a joined model is in backward, in which ranks that have ended are until its \
                          end: let other joinables communicate before or after it, and wrap models \
                          that one backward goes through as one, or run some of them under no_sync";
            // A backward that has failed has not come to its end.
            self.notices.groups.iter().try_for_each(|group| group.check("join"))?;
            self.notices.abort(reason);
            return Err(failed(&self.notices.group, reason.to_owned()));
        }
        self.notices.send([self.joinable as i64 + 1, code])
    }
}

impl fmt::Debug for JoinContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = self.options();
        f.debug_struct("JoinContext").field("options", &options).finish_non_exhaustive()
    }
}

/// What the ranks that have not ended do next.
pub(super) struct Step {
    pub joinable: usize,
    pub code: i64,
    pub active: Vec<usize>,
}

/// The notices of a join.
pub(super) struct Notices {
    group: ProcessGroup,
    /// The groups of the joinables.
    groups: Vec<ProcessGroup>,
    options: JoinOptions,
    segments: Arc<Segments>,
    state: Mutex<State>,
}

struct State {
    /// A notice of each rank; those of the others are 0 until all are added up.
    all: Tensor,
    /// The backwards under way.
    backwards: usize,
    /// The ranks that had not ended when the last step began.
    active: Vec<usize>,
}

impl Notices {
    /// Returns the notices of joinables that have these groups, at least one.
    pub fn new(groups: Vec<ProcessGroup>, options: JoinOptions) -> Result<Self> {
        // Notices of several joinables may come between the collectives of one.
        let group = if groups.len() == 1 { groups[0].clone() } else { groups[0].duplicate()? };
        let ranks = group.world_size();
        let length = LENGTH * ranks;
        let memory = group.alloc_shared::<u8>(length * DType::I64.size())?;
        let all = tensor_from_memory(memory, &[length as i64], Kind::Int64)
            .map_err(|error| failed(&group, error.to_string()))?;
        let state = State { all, backwards: 0, active: (0..ranks).collect() };
        Ok(Self {
            segments: Arc::new(group.segments(JOIN_NOTICE, DType::I64, vec![length])?),
            group,
            groups,
            options,
            state: Mutex::new(state),
        })
    }

    /// Tells the others that this rank has ended. Returns what they do next; None if all have ended.
    pub fn ended(&self) -> Result<Option<Step>> {
        self.send([ENDED, 0])?;
        self.receive()
    }

    /// Fails the joinables on all ranks, with this cause. A rank that is alone fails nobody.
    pub fn abort(&self, cause: &str) {
        if self.group.world_size() == 1 {
            return;
        }
        self.groups.iter().chain([&self.group]).for_each(|group| group.abort(cause));
    }

    /// Returns the ranks that had not ended when the last step began.
    pub fn last_active(&self) -> Vec<usize> {
        self.state().active.clone()
    }

    /// Fails if a rank has ended early, and that is to be an error.
    pub fn check(&self) -> Result<()> {
        self.check_active(&self.state().active)
    }

    fn check_active(&self, active: &[usize]) -> Result<()> {
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

    /// Tells the others what this rank does next, without waiting for their notices.
    fn send(&self, own: [i64; LENGTH]) -> Result<()> {
        self.check()?;
        let state = self.state();
        let place = LENGTH * self.group.rank();
        let _ = state.all.shallow_clone().zero_();
        state.all.narrow(0, place as i64, LENGTH as i64).copy_(&Tensor::from_slice(&own));
        // Refused only after a failure of the group: then launching fails.
        self.segments.set_piece(0, GradBytes(state.all.shallow_clone()));
        while !self.group.launch_bucket(&self.segments, ReduceOp::Sum)? {
            self.group.finish_buckets()?;
        }
        Ok(())
    }

    /// Waits for the notices of all ranks, and returns what the ranks that go on do next.
    fn receive(&self) -> Result<Option<Step>> {
        self.segments.wait(&self.group)?;
        let mut state = self.state();
        let all = Vec::<i64>::try_from(&state.all)
            .map_err(|error| failed(&self.group, error.to_string()))?;
        let notices: Vec<&[i64]> = all.chunks_exact(LENGTH).collect();
        let active: Vec<usize> =
            (0..notices.len()).filter(|&rank| notices[rank][0] != ENDED).collect();
        let Some(&last) = active.last() else { return Ok(None) };
        state.active.clone_from(&active);
        self.check_active(&active)?;
        if let Some(&other) = active.iter().find(|&&rank| notices[rank] != notices[last]) {
            let does = |rank: usize| {
                let notice = &notices[rank];
                let rank = self.group.ranks()[rank];
                format!("rank {rank} (joinable {}, code {})", notice[0] - 1, notice[1])
            };
            let reason = format!(
                "ranks are about to do different things: {} and {}; those that have not ended go \
                 through the same joined models, forward and backward, in the same order, and notify \
                 with the same codes",
                does(other),
                does(last)
            );
            // Those that do not wait for notices wait for gradients.
            self.abort(&reason);
            return Err(failed(&self.group, reason));
        }
        let notice = &notices[last];
        Ok(Some(Step { joinable: notice[0] as usize - 1, code: notice[1], active }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(group: &ProcessGroup, reason: String) -> Error {
    Error::Join { rank: job_rank(group), reason }
}
