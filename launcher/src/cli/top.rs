//! The command line of `flow-launch top`.

use std::ffi::OsString;

use super::flag_table as table;
use super::flags;
use super::rendezvous::{ENDPOINT_PORT, host_and_port};
use super::settings::{Environment, Settings};
use super::usage::Usage;
use crate::job::NO_ID;

/// What is to be shown, and how.
#[derive(Debug, PartialEq)]
pub struct Request {
    pub which: Which,
    /// A line of JSON a second.
    pub json: bool,
    /// One line.
    pub once: bool,
}

/// Which job is shown.
#[derive(Debug, PartialEq)]
pub enum Which {
    /// The one with this id, or whose flow-launch has this process number. None: the only one.
    OfThisMachine(Option<String>),
    /// The one with this id whose leading agent is there.
    OfEndpoint { host: String, port: u16, id: String },
}

/// Reads the arguments after `top`. Answers `--help` here and ends the process.
pub fn request(arguments: &[OsString]) -> Result<Request, Usage> {
    read(arguments, &|name| std::env::var_os(name))
}

fn read(arguments: &[OsString], environment: Environment<'_>) -> Result<Request, Usage> {
    let mut matches = flags::parse(flags::top_command(), arguments)?;
    let name: Option<String> = matches.remove_one(flags::JOB);
    let json = matches.get_flag(flags::JSON);
    let once = matches.get_flag(flags::ONCE);
    if once && !json {
        return Err(Usage("--once needs --json: a screen is shown until q is typed".into()));
    }
    let settings = Settings::new(matches, environment);
    let id = settings.get(table::RDZV_ID);
    let which = match settings.get(table::RDZV_ENDPOINT) {
        None => match (name, id) {
            (None, Some(id)) => return Err(id.needs("--rdzv-endpoint; or give the id as JOB")),
            (name, _) => Which::OfThisMachine(name),
        },
        Some(endpoint) if name.is_some() => {
            return Err(endpoint.needs("--rdzv-id ID in place of JOB"));
        }
        Some(endpoint) => {
            let (host, port) = host_and_port(&endpoint)?;
            let id = id.map_or(Ok(NO_ID.into()), |id| id.text().map(String::from))?;
            Which::OfEndpoint { host, port: port.unwrap_or(ENDPOINT_PORT), id }
        }
    };
    Ok(Request { which, json, once })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(line: &str) -> Result<Request, String> {
        let arguments: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        read(&arguments, &|_| None).map_err(|usage| usage.0)
    }

    #[test]
    fn command_lines() {
        let of_this = |name: Option<&str>| Which::OfThisMachine(name.map(String::from));
        let screen = |which| Request { which, json: false, once: false };
        assert_eq!(request(""), Ok(screen(of_this(None))));
        assert_eq!(request("run7"), Ok(screen(of_this(Some("run7")))));
        let once = Request { which: of_this(Some("12")), json: true, once: true };
        assert_eq!(request("--json --once 12"), Ok(once));
        let there =
            |port, id: &str| screen(Which::OfEndpoint { host: "h".into(), port, id: id.into() });
        assert_eq!(request("--rdzv-endpoint h:7 --rdzv-id run7"), Ok(there(7, "run7")));
        assert_eq!(request("--rdzv_endpoint h"), Ok(there(ENDPOINT_PORT, NO_ID)));
        let wrong = |line: &str| request(line).unwrap_err();
        assert!(wrong("--once").contains("--once needs --json"));
        assert!(wrong("--rdzv-id run7").contains("--rdzv-endpoint"));
        assert!(wrong("--rdzv-endpoint h run7").contains("--rdzv-id ID in place of JOB"));
        assert!(wrong("--rdzv-endpoint h:x").contains("--rdzv-endpoint is 'h:x'"));
        assert!(wrong("a b").contains("'b'"), "{}", wrong("a b"));
        assert!(wrong("--nproc 2").contains("--nproc"), "{}", wrong("--nproc 2"));
    }
}
