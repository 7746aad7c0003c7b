//! `--trace FILE` and `flow-launch trace FILE`: one timeline for all ranks.
//!
//! With FLOW_TRACE, each worker writes `rank<R>.json` into its node's folder when it leaves the
//! job. Followers send these files to the leader in pieces, and the leader merges all of them.
//!
//! | file | subject |
//! |---|---|
//! | `arrivals.rs` | who was the last to arrive in each collective (pure) |
//! | `buckets/` | the buckets that backward waited for, and what would have hidden them (pure) |
//! | `folder.rs` | the files of the ranks, reading and writing them in pieces, merging them |
//! | `format.rs` | the JSON of a timeline |
//! | `intervals.rs` | stretches of time (pure) |
//! | `summary.rs` | what `flow-launch trace` prints (pure) |

mod arrivals;
mod buckets;
pub mod folder;
mod format;
pub mod intervals;
mod summary;

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, Write, stdout};

use anyhow::Context;

use crate::cli::flags;
use crate::plan::program;

/// Prints the summary of a timeline. Says how to start a program of this name, if there is one.
pub fn main(arguments: &[OsString]) -> anyhow::Result<()> {
    program::note_namesake(flags::TRACE);
    let path = flags::timeline(arguments)?;
    let opened = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    let timeline = serde_json::from_reader(BufReader::new(opened));
    let timeline = timeline.with_context(|| format!("{} is no timeline", path.display()))?;
    stdout().write_all(summary::describe(&timeline).as_bytes())?;
    Ok(())
}
