//! The command that starts the agent on each host: pure functions.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::hosts::control_stream;
use crate::job::{HostEntry, Hosts, Job};
use crate::report::events;

/// The facts that all hosts have in common.
pub struct Place {
    /// The path of flow-launch.
    pub launcher: PathBuf,
    pub folder: PathBuf,
}

impl HostEntry {
    /// Returns the form that ssh takes.
    pub fn destination(&self) -> String {
        self.user.iter().map(|user| format!("{user}@")).collect::<String>() + &self.name
    }
}

/// The start of a node's agent.
pub struct Start {
    pub host: String,
    /// The program that runs the agent there, for messages.
    pub starter: String,
    /// The command that a user would type there.
    pub agent: Vec<OsString>,
    pub command: Vec<OsString>,
}

/// Says how to start the agent of a node. With `prefix`, it puts the rank before each line.
pub fn start(
    job: &Job,
    hosts: &Hosts,
    node: usize,
    is_local: bool,
    place: &Place,
    prefix: bool,
) -> Start {
    let host = hosts.list[node].destination();
    let arguments = agent(job, hosts, node, prefix);
    let launcher = OsString::from(&place.launcher);
    let mut with_control = vec![control_stream::HIDDEN_FLAG.into()];
    with_control.extend(arguments.iter().cloned());
    let mut command = vec![launcher.clone()];
    let starter = if is_local {
        command.extend(with_control);
        vec![place.launcher.display().to_string()]
    } else {
        command.push(control_stream::REMOTE_SHELL_FLAG.into());
        command.extend(hosts.remote_shell.iter().map(OsString::from));
        command.extend([host.clone().into(), script(place, &with_control)]);
        hosts.remote_shell.clone()
    };
    let starter: Vec<_> = starter.iter().map(|word| shown(word)).collect();
    let mut agent = vec![launcher];
    agent.extend(arguments);
    Start { host, starter: starter.join(" "), agent, command }
}

/// Returns a word of a command for the user, quoted if a shell needs that.
fn shown(word: &str) -> String {
    if word.contains(|c: char| c.is_whitespace() || "'\"\\".contains(c)) {
        lossy(OsStr::new(word))
    } else {
        word.into()
    }
}

/// Returns the arguments of a node's agent.
fn agent(job: &Job, hosts: &Hosts, node: usize, prefix: bool) -> Vec<OsString> {
    let place = [
        format!("--nnodes={}", hosts.list.len()),
        format!("--node-rank={node}"),
        format!("--master-addr={}", hosts.master_addr),
    ];
    let mut arguments = hosts.flags.clone();
    arguments.extend(place.map(OsString::from));
    arguments.extend(
        hosts.list[node].workers.map(|workers| format!("--nproc-per-node={workers}").into()),
    );
    arguments.extend(prefix.then(|| "--prefix".into()));
    arguments.push(job.program.name.clone());
    arguments.extend(job.program.arguments.iter().cloned());
    arguments
}

/// Returns the line that starts flow-launch on another host, such as an agent, for any login shell.
pub fn script(place: &Place, arguments: &[OsString]) -> OsString {
    let folder = place.folder.display();
    let launcher = place.launcher.display();
    let no_folder =
        format!("there is no folder {folder}; flow-launch starts in the same one on all hosts");
    let no_launcher = format!("there is no flow-launch: neither {launcher} nor on PATH");
    let arguments: Vec<_> = arguments.iter().map(|argument| quote(argument)).collect();
    let script = [
        b"cd ".as_slice(),
        &quote(place.folder.as_os_str()),
        b" 2>/dev/null || { echo ",
        &quote(OsStr::new(&no_folder)),
        b" >&2; exit 1; }; launcher=",
        &quote(place.launcher.as_os_str()),
        b"; [ -x \"$launcher\" ] || launcher=$(command -v flow-launch) || { echo ",
        &quote(OsStr::new(&no_launcher)),
        b" >&2; exit 127; }; exec \"$launcher\" ",
        &arguments.join(&b' '),
    ];
    let script = OsString::from_vec(script.concat());
    OsString::from_vec([b"exec sh -c ".as_slice(), &quote(&script)].concat())
}

/// Quotes a word for a shell. (No argument of a process contains the byte that cannot be quoted.)
fn quote(word: &OsStr) -> Vec<u8> {
    let quoted = shlex::bytes::Quoter::new().allow_nul(true).quote(word.as_bytes());
    quoted.map_or_else(|_| word.as_bytes().to_vec(), |word| word.into_owned())
}

fn lossy(word: &OsStr) -> String {
    String::from_utf8_lossy(&quote(word)).into_owned()
}

/// Variables with these prefixes are passed on to all hosts.
const PASSED_ON: [&str; 11] = [
    "FLOW_", "PET_", "NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "PYTHON",
    "RUST_",
];

/// Exceptions, which belong to one host or one job.
const KEPT: [&str; 6] = [
    "FLOW_LAUNCHER",
    events::VARIABLE,
    "FLOW_STORE",
    "FLOW_LOCAL_ADDR",
    "FLOW_RSH",
    "TORCHELASTIC_ERROR_FILE",
];

/// Returns the variables for the agents, and the names of those that do not exist here.
pub fn environment(
    own: impl Iterator<Item = (OsString, OsString)>,
    exports: &[(String, Option<String>)],
) -> (BTreeMap<String, String>, Vec<String>) {
    let own =
        own.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let own: BTreeMap<String, String> = own.collect();
    let mut environment = own.clone();
    environment.retain(|name, _| PASSED_ON.iter().any(|start| name.starts_with(start)));
    environment.retain(|name, _| !KEPT.contains(&name.as_str()));
    let mut missing = Vec::new();
    for (name, value) in exports {
        match value.as_ref().or(own.get(name)) {
            Some(value) => drop(environment.insert(name.clone(), value.clone())),
            None => missing.push(name.clone()),
        }
    }
    (environment, missing)
}

/// Returns the text of `--dry-run`: each agent's command, as for a shell, and the names of the
/// variables for all.
pub fn describe(starts: &[Start], environment: &BTreeMap<String, String>) -> String {
    let mut text = format!("nodes: {}\n", starts.len());
    for (node, Start { host, starter, agent, .. }) in starts.iter().enumerate() {
        let agent: Vec<_> = agent.iter().map(|word| lossy(word)).collect();
        let _ = writeln!(text, "\nnode {node}, host {host}, by {starter}\n  {}", agent.join(" "));
    }
    let names: Vec<_> = environment.keys().map(String::as_str).collect();
    let _ = writeln!(text, "\nvariables for all: {}", names.join(" "));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(line: &str) -> Job {
        Job::parse(line.split(' ').map(OsString::from), &|_| None).unwrap()
    }

    fn place(folder: &str, launcher: &str) -> Place {
        Place { launcher: launcher.into(), folder: folder.into() }
    }

    #[test]
    fn arguments_of_agents() {
        let job = job("f --hosts a:2,me@b --nproc 4 --tee 3 train --hosts x");
        let hosts = job.hosts.as_ref().unwrap();
        let of = |node, prefix| {
            agent(&job, hosts, node, prefix).join(OsStr::new(" ")).into_string().unwrap()
        };
        let common = "--nproc-per-node=4 --tee=3 --nnodes=2";
        let first = "--node-rank=0 --master-addr=a --nproc-per-node=2 train --hosts x";
        assert_eq!(of(0, false), format!("{common} {first}"));
        assert_eq!(
            of(1, true),
            format!("{common} --node-rank=1 --master-addr=a --prefix train --hosts x")
        );
        let start = |is_local| {
            start(&job, hosts, 1, is_local, &place("/folder", "/bin/flow-launch"), false)
        };
        let Start { host, agent, command, .. } = start(true);
        assert_eq!(
            (host.as_str(), &command[..2]),
            (
                "me@b",
                ["/bin/flow-launch", control_stream::HIDDEN_FLAG].map(OsString::from).as_slice()
            )
        );
        assert_eq!((&agent[0], &agent[1..]), (&command[0], &command[2..]));
        let Start { command, starter, .. } = start(false);
        assert_eq!((&command[2], &command[command.len() - 2]), (&"ssh".into(), &"me@b".into()));
        assert!(starter.starts_with("ssh -o BatchMode=yes"), "{starter}");
    }

    /// The shells themselves show whether the quotes are right.
    #[test]
    fn commands_for_other_shells() {
        let folder = tempfile::Builder::new().prefix("it's a \"$folder\"").tempdir().unwrap();
        let odd = ["a b", "'", "$HOME", "", "\\", "`", "!", "*"].map(OsString::from);
        let run = |place: &Place| {
            let mut shell = std::process::Command::new("sh");
            let output = shell
                .arg("-c")
                .arg(script(place, &odd))
                .env("PATH", "/bin:/usr/bin")
                .output()
                .unwrap();
            (
                output.status.code(),
                String::from_utf8(output.stdout).unwrap(),
                String::from_utf8(output.stderr).unwrap(),
            )
        };
        let folder = folder.path().to_str().unwrap();
        let launcher = format!("{folder}/launch er");
        flow_harness::executable(&launcher, "#!/bin/sh\npwd; printf '<%s>' \"$@\"\n");
        let expected = format!("{folder}\n<a b><'><$HOME><><\\><`><!><*>");
        assert_eq!(run(&place(folder, &launcher)), (Some(0), expected, String::new()));
        let (code, _, stderr) = run(&place("/no/where", &launcher));
        assert!(code == Some(1) && stderr.starts_with("there is no folder /no/where;"), "{stderr}");
        let (code, _, stderr) = run(&place(folder, "/no/flow-launch"));
        assert!(
            code == Some(127) && stderr.contains("neither /no/flow-launch nor on PATH"),
            "{stderr}"
        );
    }

    #[test]
    fn variables_that_are_passed_on() {
        let own = [
            ("FLOW_TIMEOUT", "9"),
            ("FLOW_STORE", "x"),
            ("PATH", "/bin"),
            ("PYTHONPATH", "/p"),
            ("MY", "1"),
        ];
        let own = own.into_iter().map(|(name, value)| (name.into(), value.into()));
        let exports =
            [("MY".into(), None), ("PATH".into(), Some("/x".into())), ("NONE".into(), None)];
        let (environment, missing) = environment(own, &exports);
        let found: Vec<_> =
            environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(
            found,
            [("FLOW_TIMEOUT", "9"), ("MY", "1"), ("PATH", "/x"), ("PYTHONPATH", "/p")]
        );
        assert_eq!(missing, ["NONE"]);
    }
}
