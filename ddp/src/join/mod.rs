//! Uneven inputs: ranks that have fewer batches than others end their training loop, and take part
//! in what the others still do.
//!
//! Whoever is about to communicate says so first, in a [`notice`](notices): a rank that has ended
//! says that instead. So the ranks that have ended know what comes next, and the others who takes
//! part.

mod joinable;
pub(crate) mod joining;
mod model;
mod notices;
mod options;

use std::cell::Cell;
use std::fmt::Display;
use std::sync::Arc;

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;

pub use self::joinable::{JoinHook, Joinable};
pub use self::notices::JoinContext;
use self::notices::Notices;
pub use self::options::JoinOptions;
use crate::error::{Error, Result, job_rank};
use crate::model_check::{first_mismatch, gather_texts};

thread_local! {
    /// A join of this thread is under way.
    static UNDER_WAY: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`, in which ranks may take different numbers of steps: PyTorch's `Join`. A rank whose
/// `body` is over takes part in the collectives of the joinables until those of all are. All ranks
/// call this, with the same joinables in the same order. [`Ddp::join`](crate::Ddp::join) is for one
/// model.
///
/// # Errors
///
/// What `body` returns: the joinables fail on all other ranks then, with its text. Those of
/// [`Join::new`] and [`Join::finish`].
pub fn join<T, E: From<Error> + Display>(
    joinables: &[&dyn Joinable],
    options: JoinOptions,
    body: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let join = Join::new(joinables, options)?;
    match body() {
        Ok(value) => {
            join.finish()?;
            Ok(value)
        }
        Err(error) => {
            join.fail(&format!("{error:#}"));
            Err(error)
        }
    }
}

/// A join that has begun, for code that is no closure: see [`join`]. If it is dropped rather than
/// [finished](Join::finish), the joinables fail on all ranks.
#[must_use = "the other ranks wait until it is finished"]
pub struct Join<'a> {
    group: &'a ProcessGroup,
    hooks: Hooks<'a>,
    notices: Arc<Notices>,
    is_over: bool,
}

impl<'a> Join<'a> {
    /// Begins a join. All ranks call this.
    ///
    /// # Errors
    ///
    /// There is no joinable, or one cannot be joined, or their groups have different ranks; ranks
    /// have other options or another number of joinables; another join of this thread is under way;
    /// a failure of the group.
    pub fn new(joinables: &[&'a dyn Joinable], options: JoinOptions) -> Result<Self> {
        let Some(first) = joinables.first() else {
            let reason = "there is nothing to join: give it a Ddp, or another Joinable".to_owned();
            return Err(Error::Join { rank: 0, reason });
        };
        let group = first.join_group();
        let failed = |reason| Error::Join { rank: job_rank(group), reason };
        // Nothing is asked of the other ranks: some may have ended, and wait in the other join.
        if UNDER_WAY.get() {
            let reason = "another join is under way, in which ranks that have ended know of its own \
                          joinables only: give it all of them, as in join(&[&model, &other], ..)";
            return Err(failed(reason.to_owned()));
        }
        let text = format!("{options:?} for {} joinables", joinables.len());
        if let Some(difference) = first_mismatch(group, &[text])? {
            return Err(failed(difference));
        }
        let begun = begin(joinables, options).map_err(|error| Error::in_join(group, error));
        let error = begun.as_ref().err().map(|error| one_line(&error.to_string()));
        let errors = gather_texts(group, &error.unwrap_or_default());
        let (notices, hooks) = begun?;
        if let Some(error) = errors?.into_iter().find(|error| !error.is_empty()) {
            return Err(failed(format!("another rank cannot begin it: {error}")));
        }
        UNDER_WAY.set(true);
        Ok(Self { group, hooks, notices, is_over: false })
    }

    /// Ends this rank's part: takes part in what the others still do, until all have ended. Then all
    /// ranks have what those that ended last have made.
    ///
    /// # Errors
    ///
    /// A failure of this rank or another, a rank that does not come in time;
    /// [`Error::EndedEarly`].
    pub fn finish(mut self) -> Result<()> {
        let ended = self.shadow();
        match &ended {
            Ok(()) => self.is_over = true,
            Err(error) => self.end(&error.to_string()),
        }
        ended
    }

    fn shadow(&mut self) -> Result<()> {
        let group = self.group;
        while let Some(step) = self.notices.ended()? {
            self.hooks[step.joinable]
                .main_hook(step.code, &step.active)
                .map_err(|error| Error::in_join(group, error))?;
        }
        let last_joiners = self.notices.last_active();
        for hook in &mut self.hooks {
            hook.post_hook(&last_joiners).map_err(|error| Error::in_join(group, error))?;
        }
        Ok(())
    }

    /// Fails the joinables on all ranks, with this cause.
    pub fn fail(mut self, cause: &str) {
        self.end(cause);
    }

    fn end(&mut self, cause: &str) {
        self.is_over = true;
        // All ranks know that one has ended early, and may go on after the join.
        if self.notices.check().is_ok() {
            self.notices.abort(&format!("its part of a join failed: {}", one_line(cause)));
        }
    }
}

impl Drop for Join<'_> {
    fn drop(&mut self) {
        UNDER_WAY.set(false);
        if !self.is_over {
            let panics = std::thread::panicking();
            self.end(if panics { "it panicked" } else { "it was dropped without finish()" });
        }
    }
}

type Hooks<'a> = Vec<Box<dyn JoinHook + 'a>>;

fn one_line(text: &str) -> String {
    text.lines().collect::<Vec<_>>().join(" ")
}

/// Begins a join of each joinable.
fn begin<'a>(
    joinables: &[&'a dyn Joinable],
    options: JoinOptions,
) -> Result<(Arc<Notices>, Hooks<'a>), BoxError> {
    let first = joinables[0].join_group();
    let groups = joinables.iter().map(|joinable| joinable.join_group().clone()).collect();
    let notices = Arc::new(Notices::new(groups, options)?);
    let mut hooks = Vec::with_capacity(joinables.len());
    for (number, joinable) in joinables.iter().enumerate() {
        let ranks = joinable.join_group().ranks();
        if ranks != first.ranks() {
            return Err(format!(
                "joinable {number} has the ranks {ranks:?} and the first one {:?}: join each set of \
                 ranks by itself",
                first.ranks()
            )
            .into());
        }
        hooks.push(joinable.join_hook(JoinContext::new(&notices, number))?);
    }
    Ok((notices, hooks))
}
