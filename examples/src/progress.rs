//! Progress in an epoch.

use indicatif::{ProgressBar, ProgressStyle};

/// Rank 0's progress in an epoch: a bar on a terminal, else a line now and then.
pub struct Progress {
    bar: ProgressBar,
    /// Whether to print lines.
    lines: bool,
    epoch: usize,
}

impl Progress {
    /// Shows `epoch`, which has `steps`, if this is the `first` rank.
    pub fn new(first: bool, epoch: usize, steps: usize) -> Self {
        let bar = if first { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg} {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(format!("epoch {epoch}"));
        Self { lines: first && bar.is_hidden(), bar, epoch }
    }

    /// Shows that `step` steps are done, the last of them with this loss.
    pub fn step(&self, step: usize, loss: f64) {
        self.bar.set_position(step as u64);
        self.bar.set_message(format!("loss {loss:.4}"));
        if self.lines && step.is_multiple_of(100) {
            let steps = self.bar.length().unwrap_or_default();
            println!("epoch {}, step {step}/{steps}: loss {loss:.4}", self.epoch);
        }
    }

    /// Ends the epoch.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
