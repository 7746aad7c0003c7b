//! `--trace` in an agent: the folder for its workers' timelines, and the merged file at the end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::agent::reaper::Reaper;
use crate::control::ControlPlane;
use crate::output::sink::Sinks;
use crate::report::text;
use crate::trace::folder::{Piece, TraceFolder, VARIABLE};

/// The parts of the timeline that workers write, and the file they are merged into.
pub struct Tracing {
    folder: TraceFolder,
    /// The merged file, which the leader writes.
    to: PathBuf,
    world_size: u32,
}

impl Tracing {
    /// Prepares a timeline that is merged into `to`.
    pub fn start(to: &Path, control: &ControlPlane, reaper: &Reaper) -> anyhow::Result<Tracing> {
        let to = std::path::absolute(to).context("cannot read the current folder")?;
        let parent = to.parent().filter(|parent| parent.is_dir());
        if parent.is_none() && matches!(control, ControlPlane::Leader(_)) {
            bail!("cannot write the timeline {}: there is no such folder", to.display());
        }
        let folder = reaper.temporary_folder().and_then(|folder| TraceFolder::create(&folder));
        let folder = folder.context("cannot make a folder for the timelines of --trace")?;
        Ok(Tracing { folder, to, world_size: 0 })
    }

    /// Prepares a round.
    pub fn start_round(&mut self, world_size: u32) {
        self.world_size = world_size;
        if let Err(error) = self.folder.clear() {
            log::warn!("cannot remove the timelines of the last round: {error}");
        }
    }

    /// Returns the variable that asks a worker for its timeline.
    pub fn variable(&self) -> (&'static str, OsString) {
        (VARIABLE, self.folder.path().into())
    }

    /// Sends the timelines of these ranks, whose workers have ended, to the leader.
    pub fn end_round(&self, round: u32, ranks: impl Iterator<Item = u32>, control: &ControlPlane) {
        for rank in ranks {
            control.send_trace(round, rank, self.folder.file(rank));
        }
    }

    /// Takes a piece of another node's timeline.
    pub fn take(&self, piece: &Piece) {
        if let Err(error) = self.folder.append(piece) {
            log::warn!("cannot keep the timeline of rank {}: {error}", piece.rank);
        }
    }

    /// Merges the timelines of all ranks, if this agent is the leader's.
    pub fn finish(&self, control: &ControlPlane, sinks: &mut Sinks) {
        if !matches!(control, ControlPlane::Leader(_)) || self.world_size == 0 {
            return;
        }
        match self.folder.merge(self.world_size, &self.to) {
            Ok(missing) if missing.is_empty() => {}
            Ok(missing) => sinks.note(&format!(
                "{} lacks {}: they were killed, joined no process group of Flow, or their node \
                 has no --trace",
                self.to.display(),
                text::ranks(&missing)
            )),
            Err(error) => sinks.say(&format!("{error:#}")),
        }
    }
}
