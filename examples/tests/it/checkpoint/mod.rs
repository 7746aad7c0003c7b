//! mnist with checkpoints, killed and started again through the real launcher.

mod folder;
mod job;
mod killed;
mod other_ranks;
mod other_training;
