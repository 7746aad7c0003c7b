//! The command line of `flow-launch top`.

use std::ffi::OsString;

use super::flag_table as table;
use super::flags;
use super::rendezvous::{ENDPOINT_PORT, host_and_port};
use super::settings::{Environment, Settings};
use super::usage::Usage;
use crate::job::NO_ID;
use crate::report::text::printable;

/// What is to be shown, and how.
#[derive(Debug, PartialEq)]
pub struct Request {
    pub which: Which,
    pub output: Output,
}

/// How it is shown.
#[derive(Debug, PartialEq)]
pub enum Output {
    Screen,
    /// A line of JSON a second, or one.
    Json {
        once: bool,
    },
    /// A page over HTTP, served there.
    Page {
        host: String,
        port: u16,
    },
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
    let output = match matches.remove_one::<String>(flags::HTTP) {
        Some(_) if json => {
            return Err(Usage("--http serves JSON as well: leave --json out".into()));
        }
        Some(address) => page(&address)?,
        None if json => Output::Json { once },
        None => Output::Screen,
    };
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
    Ok(Request { which, output })
}

/// Reads PORT, or HOST:PORT. Without a host only this machine can ask.
fn page(address: &str) -> Result<Output, Usage> {
    let (host, port) = address.rsplit_once(':').unwrap_or(("127.0.0.1", address));
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = bare.is_some() || !host.is_empty() && !host.contains(':');
    let port = port.parse().ok().filter(|_| is_host);
    let host = bare.unwrap_or(host).to_string();
    let wrong = || Usage(format!("--http is '{}': give PORT or HOST:PORT", printable(address)));
    Ok(Output::Page { host, port: port.ok_or_else(wrong)? })
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
        let screen = |which| Request { which, output: Output::Screen };
        assert_eq!(request(""), Ok(screen(of_this(None))));
        assert_eq!(request("run7"), Ok(screen(of_this(Some("run7")))));
        let output = Output::Json { once: true };
        let once = Request { which: of_this(Some("12")), output };
        assert_eq!(request("--json --once 12"), Ok(once));
        let there =
            |port, id: &str| screen(Which::OfEndpoint { host: "h".into(), port, id: id.into() });
        assert_eq!(request("--rdzv-endpoint h:7 --rdzv-id run7"), Ok(there(7, "run7")));
        assert_eq!(request("--rdzv_endpoint h"), Ok(there(ENDPOINT_PORT, NO_ID)));
        let page = |host: &str, port| {
            let output = Output::Page { host: host.into(), port };
            Ok(Request { which: of_this(None), output })
        };
        assert_eq!(request("--http 80"), page("127.0.0.1", 80));
        assert_eq!(request("--http [::]:0"), page("::", 0));
        let wrong = |line: &str| request(line).unwrap_err();
        assert!(wrong("--http h").contains("--http is 'h': give PORT or HOST:PORT"));
        assert!(wrong("--http ::1").contains("PORT or HOST:PORT"));
        assert!(wrong("--http :80").contains("PORT or HOST:PORT"));
        assert!(wrong("--http 80 --json").contains("leave --json out"));
        assert!(wrong("--once").contains("--once needs --json"));
        assert!(wrong("--rdzv-id run7").contains("--rdzv-endpoint"));
        assert!(wrong("--rdzv-endpoint h run7").contains("--rdzv-id ID in place of JOB"));
        assert!(wrong("--rdzv-endpoint h:x").contains("--rdzv-endpoint is 'h:x'"));
        assert!(wrong("a b").contains("'b'"), "{}", wrong("a b"));
        assert!(wrong("--nproc 2").contains("--nproc"), "{}", wrong("--nproc 2"));
    }
}
