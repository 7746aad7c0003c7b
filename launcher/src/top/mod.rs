//! `flow-launch top` and `--top`: shows what a job does, on a screen or as JSON.
//!
//! | file | subject |
//! |---|---|
//! | `local_jobs.rs` | the jobs of this machine |
//! | `watcher.rs` | the connection to the leader |
//! | `view.rs` | what is shown: who waits for whom, what a change has cost (pure) |
//! | `table.rs` | the screen's lines (pure) |
//! | `screen.rs` | the terminal |
//! | `panel.rs` | `--top`: the foot of the terminal on which the job was started |
//! | `http.rs`, `page.html` | the page over HTTP |

mod http;
pub mod local_jobs;
pub mod panel;
mod screen;
mod table;
mod view;
mod watcher;

use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal, Write, stdin, stdout};
use std::thread;

use crate::cli::top::{self, Output, Request, Which};
use crate::cli::usage::Usage;
use crate::control::token::token;
use crate::net;
use crate::top::local_jobs::LocalJob;
use crate::top::view::View;
use crate::top::watcher::{INTERVAL, Watcher};

/// Shows a job until it is over, or the user has seen enough; returns the exit code.
pub fn main(arguments: &[OsString]) -> anyhow::Result<u8> {
    let request = top::request(arguments)?;
    let has_terminal = stdin().is_terminal() && stdout().is_terminal();
    if request.output == Output::Screen && !has_terminal {
        let text = "top needs a terminal for its screen; --json prints a line of JSON a second, and --http serves a \
                    page";
        return Err(Usage(text.into()).into());
    }
    let watcher = connect(&request)?;
    match request.output {
        Output::Screen => screen::show(watcher),
        Output::Json { once } => print_json(watcher, once),
        Output::Page { host, port } => http::serve(watcher, &host, port),
    }
}

fn connect(request: &Request) -> anyhow::Result<Watcher> {
    let (address, token) = match &request.which {
        Which::OfEndpoint { host, port, id } => (net::join(host, *port), token(id)?),
        Which::OfThisMachine(name) => {
            let LocalJob { address, token, .. } = local_jobs::find(name.as_deref())?;
            (address, token)
        }
    };
    Watcher::connect(address, token)
}

/// Prints a line a second until the job is over, or one.
fn print_json(mut watcher: Watcher, once: bool) -> anyhow::Result<u8> {
    while let Some(status) = watcher.look()? {
        let mut line = serde_json::to_vec(&View::of(&status))?;
        line.push(b'\n');
        match stdout().write_all(&line) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            written => written?,
        }
        if once {
            break;
        }
        thread::sleep(INTERVAL);
    }
    Ok(0)
}
