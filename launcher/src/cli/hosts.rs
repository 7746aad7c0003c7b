//! The flags about hosts on which flow-launch starts agents.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::Path;

use super::flag::Valued;
use super::flag_table as table;
use super::rendezvous::MASTER_PORT;
use super::settings::{Setting, Settings, host_and_number};
use super::usage::Usage;
use crate::job::{HostEntry, Hosts, Processes};

/// BatchMode: nobody could answer questions of all hosts. The other options end waits for hosts
/// that are down.
const SSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=10";

/// Flags that agents do not get, or not unchanged.
const OF_THE_HEAD: [&str; 7] = [
    table::HOSTS.0.name,
    table::HOSTFILE.0.name,
    table::EXPORT.0.name,
    table::RSH.0.name,
    table::MASTER_ADDR.0.name,
    table::DRY_RUN.0.name,
    table::TOP.0.name,
];

/// Flags that contradict a list of hosts.
const EXCLUDED: [Valued; 5] =
    [table::NNODES, table::NODE_RANK, table::RDZV_ENDPOINT, table::RDZV_BACKEND, table::LOCAL_ADDR];

const FORMATS: &str =
    "HOST, HOST:N or HOST slots=N, with N workers from 1 and an IPv6 address in brackets";

/// Returns the flags of this command line that all agents get.
fn flags_of_agents(settings: &Settings) -> Vec<OsString> {
    let flags = table::FLAGS.iter().filter(|flag| !OF_THE_HEAD.contains(&flag.name));
    flags.filter_map(|flag| flag.given(&settings.matches)).collect()
}

/// Reads the flags about hosts; None if there is no list of hosts. `processes` is the default
/// number of workers of a host.
pub fn hosts(settings: &Settings, processes: Processes) -> Result<Option<Hosts>, Usage> {
    let Some((source, list)) = list(settings, processes)? else {
        let export = settings.get_all(table::EXPORT).into_iter().next();
        let useless = export.or_else(|| settings.get(table::RSH));
        return useless.map_or(Ok(None), |setting| Err(setting.needs("--hosts or --hostfile")));
    };
    refuse_other_places(settings, &source)?;
    let first = &list[0];
    let master_addr = settings.get_host(table::MASTER_ADDR)?;
    if master_addr.is_none()
        && is_loopback(&first.name)
        && !list.iter().all(|host| is_loopback(&host.name))
    {
        let first = &first.name;
        return Err(Usage(format!(
            "{source} begins with {first}; it must be a name by which the others reach it"
        )));
    }
    let master_addr = master_addr.unwrap_or_else(|| first.name.clone());
    let exports = settings
        .get_all(table::EXPORT)
        .into_iter()
        .map(|setting| export(setting.literal()?, || setting.wrong(EXPORT)));
    let exports = exports.collect::<Result<_, _>>()?;
    Ok(Some(Hosts {
        list,
        master_addr,
        master_port: settings
            .get_number(table::MASTER_PORT, 1, "a port from 1 to 65535")?
            .unwrap_or(MASTER_PORT),
        remote_shell: remote_shell(settings)?,
        flags: flags_of_agents(settings),
        exports,
    }))
}

/// Reads the list of hosts, which has one at least, and returns the flag that it is from; None if
/// there is no such flag.
pub fn list(
    settings: &Settings,
    processes: Processes,
) -> Result<Option<(String, Vec<HostEntry>)>, Usage> {
    let hosts = settings.get(table::HOSTS);
    let hostfile = settings.get(table::HOSTFILE);
    let Some(setting) = hosts.as_ref().or(hostfile.as_ref()) else { return Ok(None) };
    let source = setting.source().to_string();
    if hosts.is_some() && hostfile.is_some() {
        return Err(Usage("--hosts and --hostfile exclude each other; give one".into()));
    }
    let list = match settings.get_path(table::HOSTFILE)? {
        Some(path) => read_file(&path, &source, processes)?,
        None => read_list(setting, processes)?,
    };
    if list.is_empty() {
        return Err(Usage(format!("{source} names no host; a line is {FORMATS}")));
    }
    Ok(Some((source, list)))
}

/// Refuses flags that say otherwise where nodes and their input are.
fn refuse_other_places(settings: &Settings, source: &str) -> Result<(), Usage> {
    let excluded = EXCLUDED.into_iter().find_map(|flag| settings.get(flag));
    let excluded = excluded.map(|setting| setting.source().to_string());
    let standalone = settings.is_on(table::STANDALONE)?.then(|| "--standalone".to_string());
    if let Some(other) = excluded.or(standalone) {
        return Err(Usage(format!(
            "{source} and {other} exclude each other: the nodes are those of the list"
        )));
    }
    let stdin = settings.get(table::STDIN);
    if let Some(stdin) = stdin.filter(|stdin| stdin.text().is_ok_and(|who| who != "none")) {
        let right = format!("none with {source}, where workers have no standard input");
        return Err(stdin.wrong(&right));
    }
    Ok(())
}

/// Reads the hosts of `--hosts`.
fn read_list(setting: &Setting, processes: Processes) -> Result<Vec<HostEntry>, Usage> {
    let mut list = Vec::new();
    for text in setting.text()?.split(',').map(str::trim) {
        let host =
            entry(text).ok_or_else(|| setting.wrong("HOST or HOST:N, separated by commas"))?;
        add(&mut list, host, processes)
            .map_err(|why| Usage(format!("{}: {why}", setting.source())))?;
    }
    Ok(list)
}

/// Reads the hosts of `--hostfile`.
fn read_file(path: &Path, source: &str, processes: Processes) -> Result<Vec<HostEntry>, Usage> {
    let path_shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Usage(format!("{source}: cannot read {path_shown}: {error}")))?;
    // Windows editors may begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let mut list = Vec::new();
    for (index, text) in text.lines().enumerate() {
        let at = format!("{source}: {path_shown}, line {}", index + 1);
        let text = text.split('#').next().unwrap_or_default().trim();
        if text.is_empty() {
            continue;
        }
        let host =
            line(text).ok_or_else(|| Usage(format!("{at} is '{text}'; it must be {FORMATS}")))?;
        add(&mut list, host, processes).map_err(|why| Usage(format!("{at}: {why}")))?;
    }
    Ok(list)
}

const EXPORT: &str = "NAME or NAME=VALUE";

fn export(text: &str, wrong: impl Fn() -> Usage) -> Result<(String, Option<String>), Usage> {
    let (name, value) =
        text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value.to_string())));
    if name.is_empty() {
        return Err(wrong());
    }
    Ok((name.into(), value))
}

/// Returns the command that runs a command on another host.
pub fn remote_shell(settings: &Settings) -> Result<Vec<String>, Usage> {
    let Some(setting) = settings.get(table::RSH).or_else(|| settings.variable("FLOW_RSH")) else {
        return Ok(SSH.split(' ').map(String::from).collect());
    };
    let words = shlex::split(setting.text()?).filter(|words| !words.is_empty());
    words.ok_or_else(|| {
        setting.wrong("a command with its options, quoted as for a shell: 'ssh -p 2222'")
    })
}

/// Reads `user@host:8`.
fn entry(text: &str) -> Option<HostEntry> {
    let (user, rest) = text.split_once('@').map_or((None, text), |(user, rest)| (Some(user), rest));
    if let Some(user) = user {
        let is_name = user.chars().all(|c| c.is_alphanumeric() || "._-".contains(c));
        if !is_name || user.is_empty() || user.starts_with('-') {
            return None;
        }
    }
    let (name, workers) = host_and_number(rest)?;
    Some(HostEntry { user: user.map(String::from), name, workers })
        .filter(|host| host.workers != Some(0))
}

/// Reads a line of a file without its comment: `host`, `host:8` or `host slots=8`, which may have
/// `max_slots=16` too.
fn line(text: &str) -> Option<HostEntry> {
    let mut words = text.split_whitespace();
    let mut host = entry(words.next()?)?;
    for word in words {
        match word.split_once('=')? {
            ("slots", number) if host.workers.is_none() => {
                host.workers = Some(number.parse().ok().filter(|number| *number > 0)?);
            }
            ("max_slots" | "max-slots", number) => drop(number.parse::<u32>().ok()?),
            _ => return None,
        }
    }
    Some(host)
}

/// Adds a host; one that is listed again gets more workers, as with mpirun.
fn add(list: &mut Vec<HostEntry>, host: HostEntry, processes: Processes) -> Result<(), String> {
    let Some(known) = list.iter_mut().find(|known| known.name == host.name) else {
        list.push(host);
        return Ok(());
    };
    if known.user != host.user {
        return Err(format!("{} is there twice, for different users", host.name));
    }
    let default = match processes {
        Processes::Count(count) => Some(count),
        Processes::Auto | Processes::Cpu | Processes::Gpu => None,
    };
    let counts = known.workers.or(default).zip(host.workers.or(default));
    let Some(sum) = counts.and_then(|(one, other)| one.checked_add(other)) else {
        return Err(format!("{} is there twice; give it once, with a number", host.name));
    };
    known.workers = Some(sum);
    Ok(())
}

fn is_loopback(name: &str) -> bool {
    name == "localhost" || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{parse, refusal};
    use super::*;

    fn hosts_of(line: &str) -> Hosts {
        parse(&format!("{line} train")).unwrap().hosts.unwrap()
    }

    fn of(list: &[HostEntry]) -> Vec<(String, Option<u32>)> {
        list.iter().map(|host| (host.destination(), host.workers)).collect()
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        file
    }

    fn flag(file: &Path) -> String {
        format!("--hostfile {}", file.display())
    }

    #[test]
    fn lists() {
        let hosts = hosts_of("--hosts a:8,me@b.lan,[fd00::1]:2,10.0.0.1:1,[::1]");
        let expected = [
            ("a", Some(8)),
            ("me@b.lan", None),
            ("fd00::1", Some(2)),
            ("10.0.0.1", Some(1)),
            ("::1", None),
        ];
        assert_eq!(of(&hosts.list), expected.map(|(name, workers)| (name.to_string(), workers)));
        assert_eq!(hosts.master_addr, "a");
        assert_eq!(hosts_of("--host me@a,b").master_addr, "a");
        assert_eq!(hosts_of("--hosts a,b --master-addr 10.0.0.9").master_addr, "10.0.0.9");
        assert_eq!(hosts_of("--hosts a,b").remote_shell[..3], ["ssh", "-o", "BatchMode=yes"]);
        assert_eq!(hosts_of("--hosts a,b --rsh rsh").remote_shell, ["rsh"]);
        for wrong in
            ["", "a,", "a:0", "a:x", "a:-1", "::1", "-a", "@a", "-x@a", "a/b", "a:99999999999"]
        {
            assert!(refusal(&format!("--hosts={wrong} train")).contains("--hosts"), "{wrong}");
        }
        assert_eq!(parse("--nnodes 2 --master-addr a train").unwrap().hosts, None);
    }

    #[test]
    fn files() {
        let formats = "\u{feff}# nodes\n\na slots=8\n  b:4  # fast\nc\nme@d slots=2 \
                       max_slots=4\n[fd00::1] slots=1\n";
        let expected =
            [("a", Some(8)), ("b", Some(4)), ("c", None), ("me@d", Some(2)), ("fd00::1", Some(1))];
        let list = hosts_of(&flag(file(formats).path())).list;
        assert_eq!(of(&list), expected.map(|(name, workers)| (name.to_string(), workers)));
        for wrong in [
            "a slots=0",
            "a slots",
            "a slots=8 gpus=8",
            "a b",
            "a:8 slots=8",
            "a:",
            "fd00::1",
            "a slots=x",
        ] {
            let file = file(&format!("x\n\n{wrong}\n"));
            let line = refusal(&format!("{} train", flag(file.path())));
            assert!(
                line.contains(&format!("line 3 is '{wrong}'")) && line.contains("HOST slots=N"),
                "{line}"
            );
        }
        let empty = file("# none\n");
        assert!(refusal(&format!("{} train", flag(empty.path()))).contains("names no host"));
        assert!(refusal("--hostfile /nowhere/hosts train").contains("cannot read /nowhere/hosts"));
    }

    #[test]
    fn a_host_that_is_there_twice_adds_up() {
        let file = file("b\na\nb\na slots=3\nb\n");
        let count = |more: &str| of(&hosts_of(&format!("{} {more}", flag(file.path()))).list);
        assert_eq!(count(""), [("b".into(), Some(3)), ("a".into(), Some(4))]);
        assert_eq!(count("--nproc-per-node 2"), [("b".into(), Some(6)), ("a".into(), Some(5))]);
        let line = refusal(&format!("--nproc-per-node gpu {} train", flag(file.path())));
        assert!(line.contains("line 3: b is there twice"), "{line}");
        assert!(refusal("--hosts me@a,you@a train").contains("different users"));
    }

    #[test]
    fn what_the_hosts_decide_is_not_to_be_given() {
        for other in [
            "--nnodes 2",
            "--node-rank 0",
            "--rdzv-endpoint a",
            "--rdzv-backend c10d",
            "--standalone",
        ] {
            let line = refusal(&format!("--hosts a,b {other} train"));
            assert!(line.contains("--hosts and --") && line.contains("exclude"), "{line}");
        }
        assert!(refusal("--hosts a --hostfile f train").contains("exclude each other"));
        assert!(refusal("--hosts localhost,b train").contains("by which the others reach it"));
        assert!(parse("--hosts localhost:2,127.0.0.1:1 train").is_ok());
        assert!(refusal("--hosts a --stdin all train").contains("must be none with --hosts"));
        assert!(parse("--hosts a --stdin none train").is_ok());
        assert!(refusal("-x A=3 train").contains("needs --hosts"));
        assert!(refusal("--rsh ssh train").contains("needs --hosts"));
        assert!(refusal("--hosts a --rsh ' train").contains("--rsh"));
        assert!(refusal("--hosts a -x =3 train").contains("NAME=VALUE"));
    }

    #[test]
    fn the_other_flags_are_for_the_agents() {
        let line = "--hosts a --nproc 3 --master_port=7 --tee 1 --tee 3 -x A=b=c --prefix -x D \
                    --max-restarts 0 --dry-run";
        let hosts = hosts_of(line);
        let flags =
            ["--nproc-per-node=3", "--max-restarts=0", "--master-port=7", "--prefix", "--tee=3"];
        assert_eq!(hosts.flags, flags);
        assert_eq!(hosts.exports, [("A".into(), Some("b=c".into())), ("D".into(), None)]);
    }
}
