//! The command line of `flow-launch doctor`.

use std::ffi::OsString;
use std::time::Duration;

use super::flag_table as table;
use super::flags;
use super::hosts;
use super::settings::{Environment, Setting, Settings};
use super::usage::Usage;
use crate::job::{HostEntry, Processes};

/// What is asked of the doctor.
#[derive(Debug)]
pub struct Request {
    pub hosts: Vec<HostEntry>,
    pub remote_shell: Vec<String>,
    /// For each command that a probe runs.
    pub timeout: Duration,
    pub json: bool,
}

/// Reads the arguments after `doctor`. Answers `--help` here and ends the process.
pub fn request(arguments: &[OsString]) -> Result<Request, Usage> {
    read(arguments, &|name| std::env::var_os(name))
}

fn read(arguments: &[OsString], environment: Environment<'_>) -> Result<Request, Usage> {
    let matches = flags::parse(flags::doctor_command(), arguments)?;
    let json = matches.get_flag(flags::JSON);
    let timeout: &OsString = matches.get_one(flags::TIMEOUT).expect("it has a default");
    let timeout = Setting::preset("--timeout", &timeout.to_string_lossy());
    let timeout = timeout.seconds()?;
    let settings = Settings::new(matches, environment);
    let list = hosts::list(&settings, Processes::Count(1))?;
    if list.is_none()
        && let Some(setting) = settings.get(table::RSH)
    {
        return Err(setting.needs("--hosts or --hostfile"));
    }
    Ok(Request {
        hosts: list.map_or(Vec::new(), |(_, list)| list),
        remote_shell: hosts::remote_shell(&settings)?,
        timeout,
        json,
    })
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
        let plain = request("").unwrap();
        assert!(plain.hosts.is_empty() && !plain.json);
        assert_eq!(plain.timeout, Duration::from_secs(30));
        let hosts = request("--host a,me@b:2 --rsh rsh --timeout=0.5 --json").unwrap();
        let names: Vec<_> = hosts.hosts.iter().map(HostEntry::destination).collect();
        assert_eq!(
            (names, hosts.remote_shell),
            (vec!["a".into(), "me@b".into()], vec!["rsh".into()])
        );
        assert!(hosts.json && hosts.timeout == Duration::from_millis(500));
        let wrong = |line: &str| request(line).unwrap_err();
        assert!(wrong("--timeout soon").contains("--timeout is 'soon'"));
        assert!(wrong("--rsh ssh").contains("needs --hosts"));
        assert!(wrong("--hosts a,").contains("--hosts is 'a,'"));
        assert!(wrong("--nproc 2").contains("--nproc"), "{}", wrong("--nproc 2"));
        assert!(wrong("me").contains("'me'"), "{}", wrong("me"));
    }
}
