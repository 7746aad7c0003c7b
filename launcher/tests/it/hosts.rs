//! `--hosts` and `--hostfile`: one flow-launch starts the agents of all machines. ssh is a script
//! that enters the tests' machines; the last test has the real one.

mod in_place;

use flow_harness::Finished;
use flow_harness::cli::{Running, children, is_alive, launcher, run, script, until, until_gone};
use flow_harness::net::{Agent, Gate, Net, ipv4};

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const IDLE: &str = "echo ready $RANK; exec sleep 1000";

/// Two machines and a way to them.
struct Site {
    net: Net,
    ssh: String,
    _folder: TempDir,
}

impl Site {
    fn new() -> Option<Site> {
        let net = Net::new(2)?;
        let (_folder, ssh) = net.remote_shell();
        Some(Site { net, ssh, _folder })
    }

    /// A job with two workers on the first machine and one on the second.
    fn job(&self, flags: &str, text: &str) -> Command {
        script(&format!("--rsh {} --hosts node0:2,node1:1 {flags}", self.ssh), text)
    }

    /// One whose workers wait to be stopped.
    fn idle(&self, flags: &str) -> Running {
        self.ready(&mut self.job(flags, IDLE))
    }

    fn ready(&self, command: &mut Command) -> Running {
        let mut running = Running::start(command);
        let mut lines: Vec<_> = (0..3).map(|_| running.line()).collect();
        lines.sort_unstable();
        assert_eq!(lines, ["ready 0", "ready 1", "ready 2"]);
        running
    }
}

fn lines<'a>(finished: &'a Finished, text: &str) -> Vec<&'a str> {
    finished.stderr.lines().filter(|line| line.contains(text)).collect()
}

#[test]
fn ranks_go_by_the_list() {
    let Some(site) = Site::new() else { return };
    let text = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK on $(hostname), node $GROUP_RANK, \
                $MASTER_ADDR $MASTER_PORT $A $B $NCCL_DEBUG $(cat)";
    let mut command = site.job("-x A=1 -x B --master_port 29600", text);
    let finished =
        run(command.env("B", "two words").env("NCCL_DEBUG", "INFO").env_remove("FLOW_TOKEN"));
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""), "{finished:?}");
    let expected =
        ["0 of 3, 0 on node0, node 0", "1 of 3, 1 on node0, node 0", "2 of 3, 0 on node1, node 1"];
    let expected = expected.map(|start| format!("{start}, node0 29600 1 two words INFO"));
    assert_eq!(finished.sorted_lines(), expected);
    site.net.until_nothing_is_left();
}

#[test]
fn hosts_from_a_file() {
    let Some(site) = Site::new() else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(
        &file,
        "# the tests' machines\nnode1 slots=2\n\nme@node0 # as many as --nproc-per-node says\n",
    )
    .unwrap();
    let flags =
        format!("--rsh {} --nproc_per_node 3 --hostfile {}", site.ssh, file.path().display());
    let finished = run(&mut script(&flags, "echo $RANK $(hostname) $MASTER_ADDR"));
    let lines =
        ["0 node1 node1", "1 node1 node1", "2 node0 node1", "3 node0 node1", "4 node0 node1"];
    assert_eq!((finished.code, finished.sorted_lines()), (Some(0), lines.into()), "{finished:?}");
    fs::write(&file, "node0\nnode1 slots 2\n").unwrap();
    let finished = run(&mut script(&flags, ""));
    let expected = format!(
        "flow-launch: --hostfile: {}, line 2 is 'node1 slots 2'; it must be HOST, HOST:N or HOST \
         slots=N, with N workers from 1 and an IPv6 address in brackets\n",
        file.path().display()
    );
    assert_eq!((finished.code, finished.stderr), (Some(2), expected));
    site.net.until_nothing_is_left();
}

#[test]
fn an_agent_on_this_machine_needs_no_ssh() {
    let Some(site) = Site::new() else { return };
    let hosts = format!("--rsh {} --hosts {}:1,{}:1", site.ssh, ipv4(0), ipv4(1));
    let finished = site.net.within(0, || run(&mut script(&hosts, "echo $RANK of $WORLD_SIZE")));
    assert_eq!((finished.code, finished.stdout.lines().count()), (Some(0), 2), "{finished:?}");
    let only_here = format!("{hosts} --rsh false");
    let finished = site.net.within(0, || run(&mut script(&only_here, IDLE)));
    let expected = format!(
        "flow-launch: cannot start flow-launch on {}: false ended with exit code 1\n",
        ipv4(1)
    );
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(1), expected.as_str()));
    let finished = run(&mut script("--hosts localhost:2 -x NOSUCH", "echo $RANK of $WORLD_SIZE"));
    assert_eq!(
        (finished.code, finished.sorted_lines()),
        (Some(0), vec!["0 of 2", "1 of 2"]),
        "{finished:?}"
    );
    let note = "flow-launch: --export NOSUCH: there is no NOSUCH here, or it is not UTF-8; \
                NOSUCH=VALUE sets it\n";
    assert_eq!(finished.stderr, note);
    site.net.until_nothing_is_left();
}

#[test]
fn a_failure_on_one_host_ends_all_and_is_reported_once() {
    let Some(site) = Site::new() else { return };
    let gate = Gate::new();
    let text =
        format!("{}; [ $RANK != 2 ] || {{ echo boom >&2; exit 3; }}; exec sleep 1000", gate.wait());
    let running = Running::start(&mut site.job("", &text));
    gate.open();
    let finished = running.finish();
    assert_eq!(finished.code, Some(3), "{finished:?}");
    let report = [
        "flow-launch: rank 2 (local rank 0, pid ",
        "flow-launch:   | boom",
        "on host node0: ranks 0-1 stopped",
    ];
    for line in report {
        assert_eq!(lines(&finished, line).len(), 1, "{line} in {finished:?}");
    }
    assert!(lines(&finished, "host node1) failed with exit code 3").len() == 1, "{finished:?}");
    site.net.until_nothing_is_left();
}

#[test]
fn a_host_that_cannot_be_reached_is_named_and_ends_all() {
    let Some(site) = Site::new() else { return };
    let flags = format!("--rsh {} --hosts node0:1,nowhere:1,node1:1", site.ssh);
    let start = Instant::now();
    let finished = run(&mut script(&flags, "echo started"));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(255), ""), "{finished:?}");
    let expected = [
        "nowhere: ssh: Could not resolve hostname nowhere".to_string(),
        format!(
            "flow-launch: cannot start flow-launch on nowhere: {0} ended with exit code 255; `{0} \
             nowhere true` must work without a password; `flow-launch doctor --hosts nowhere` says \
             more",
            site.ssh
        ),
    ];
    assert_eq!(finished.stderr.lines().collect::<Vec<_>>(), expected);
    // The others would wait ten minutes for it.
    assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
    let finished = run(&mut script("--rsh /nowhere/ssh --hosts node0:1,node1:1", "echo started"));
    assert_eq!(finished.code, Some(127), "{finished:?}");
    assert!(
        finished.stderr.contains("flow-launch: cannot run /nowhere/ssh: No such file"),
        "{finished:?}"
    );
    site.net.until_nothing_is_left();
}

/// Nobody has sent a signal, so that nothing is said of one.
#[test]
fn a_host_that_fails_late_ends_all_without_a_word_on_signals() {
    let Some(site) = Site::new() else { return };
    let gate = Gate::new();
    let rsh = format!(
        "sh -c 'case $1 in nowhere) {}; exit 255; esac; exec {} \"$@\"' sh",
        gate.wait(),
        site.ssh
    );
    let mut command = launcher(&[
        "--rsh",
        &rsh,
        "--hosts",
        "node0:1,nowhere:1,node1:1",
        "sh",
        "-c",
        "echo started",
    ]);
    let running = Running::start(&mut command);
    // With their guards.
    until("two agents wait", || [0, 1].iter().all(|node| site.net.processes(*node).len() == 2));
    gate.open();
    let finished = running.finish();
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(255), ""), "{finished:?}");
    assert_eq!(finished.stderr.lines().count(), 1, "{finished:?}");
    assert!(
        finished.stderr.starts_with("flow-launch: cannot start flow-launch on nowhere: "),
        "{finished:?}"
    );
    site.net.until_nothing_is_left();
}

#[test]
fn a_host_that_does_not_answer_is_given_up() {
    let start = |flags: &str, rsh: &str| {
        let mut command = launcher(&["--rsh", rsh, "--hosts", "node0:1"]);
        run(command.args(flags.split_whitespace()).args(["sh", "-c", "echo started"]))
    };
    let finished = start("--rdzv-conf join_timeout=1", "sh -c 'sleep 1000'");
    let expected = "flow-launch: no answer from node0 for 1 s (--rdzv-conf join_timeout)\n";
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(1), expected));
    let finished = start("", "true");
    let expected = "flow-launch: cannot start flow-launch on node0: true ended with exit code 0\n";
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(1), expected));
}

#[test]
fn what_a_host_lacks_is_said() {
    let Some(site) = Site::new() else { return };
    // Each machine has a /dev/shm of its own.
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let finished = run(site.job("", "echo started").current_dir(&folder));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{finished:?}");
    let expected = format!("there is no folder {}; flow-launch starts in", folder.path().display());
    assert!(!lines(&finished, &expected).is_empty(), "{finished:?}");
    assert!(
        !lines(&finished, "flow-launch: cannot start flow-launch on node").is_empty(),
        "{finished:?}"
    );
    let arguments = ["--rsh", &site.ssh, "--hosts", "node0:1,node1:1", "nosuchprogram"];
    let finished = run(&mut launcher(&arguments));
    assert_eq!(finished.code, Some(2), "{finished:?}");
    assert_eq!(lines(&finished, "no program nosuchprogram").len(), 1, "{finished:?}");
    site.net.until_nothing_is_left();
}

#[test]
fn nothing_survives_a_head_that_is_killed() {
    let Some(site) = Site::new() else { return };
    let running = site.idle("");
    running.signal(Signal::KILL);
    running.finish();
    site.net.until_nothing_is_left();
    // At all moments of a start.
    for step in 0..15 {
        let running = Running::start(&mut site.job("", IDLE));
        thread::sleep(Duration::from_millis(7 * step));
        running.signal(Signal::KILL);
        running.finish();
        site.net.until_nothing_is_left();
    }
}

#[test]
fn a_signal_goes_to_all_workers() {
    let Some(site) = Site::new() else { return };
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let trap = "trap 'echo INT; exit 1' INT; trap 'echo TERM; exit 1' TERM; echo ready $RANK; \
                    while true; do sleep 0.05; done";
        let running = site.ready(&mut site.job("", trap));
        running.signal(signal);
        let finished = running.finish();
        assert_eq!(finished.code, Some(code), "{finished:?}");
        // An agent may hear from the other that the job is to end before the signal comes: then its
        // workers get SIGTERM.
        let name = if signal == Signal::INT { "INT" } else { "TERM" };
        let reported: Vec<_> = finished.stdout.lines().collect();
        assert!(reported.len() == 3 && reported.contains(&name), "{finished:?}");
        site.net.until_nothing_is_left();
    }
}

#[test]
fn a_signal_while_a_host_is_being_reached_ends_at_once() {
    for (signal, code) in [(Signal::INT, Some(130)), (Signal::KILL, None)] {
        // A remote shell that does not look at its standard input.
        let mut command =
            launcher(&["--rsh", "sh -c 'exec sleep 1000'", "--hosts", "node0:1", "true"]);
        let running = Running::start(&mut command);
        let name = |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let is_reaching = || children(running.pid()).into_iter().any(|pid| name(pid) == "sleep\n");
        until("the remote shell runs", is_reaching);
        let shell = children(running.pid());
        running.signal(signal);
        assert_eq!(running.finish().code, code);
        until_gone(&shell);
    }
}

#[test]
fn a_connection_that_is_lost_ends_all() {
    let Some(site) = Site::new() else { return };
    let running = site.idle("");
    // What was started last is the way to node1.
    let ssh = *children(running.pid()).last().unwrap();
    kill_process(Pid::from_raw(ssh).unwrap(), Signal::KILL).unwrap();
    let finished = running.finish();
    assert!(finished.code.is_some_and(|code| code != 0), "{finished:?}");
    assert!(finished.stderr.contains("node1"), "{finished:?}");
    site.net.until_nothing_is_left();
}

/// Although the other would wait for it to be started again.
#[test]
fn a_lost_agent_is_not_waited_for() {
    let Some(site) = Site::new() else { return };
    let running = site.idle("--max-restarts 3");
    let is_agent = |pid: &&i32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("--control-stdin"))
    };
    let agent = *site.net.processes(1).iter().filter(is_agent).min().unwrap();
    kill_process(Pid::from_raw(agent).unwrap(), Signal::KILL).unwrap();
    let finished = running.finish();
    assert_eq!(finished.code, Some(137), "{finished:?}");
    assert!(finished.stderr.contains("node 1 (host node1) was lost"), "{finished:?}");
    site.net.until_nothing_is_left();
}

/// As those of shells that greet whoever comes.
#[test]
fn what_comes_before_the_agent_is_no_output_of_the_program() {
    let Some(site) = Site::new() else { return };
    let rsh = format!("sh -c 'echo Welcome; exec {} \"$@\"' sh", site.ssh);
    let finished = run(&mut launcher(&["--rsh", &rsh, "--hosts", "me@node1:1", "echo", "hello"]));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "hello\n"), "{finished:?}");
    assert_eq!(finished.stderr, "me@node1: Welcome\n");
    site.net.until_nothing_is_left();
}

#[test]
fn the_secret_is_in_no_command_line_and_no_agents_environment() {
    let Some(site) = Site::new() else { return };
    let secret = "3c9fb0b1-the-secret-of-this-test";
    let running = site.ready(site.job("", IDLE).env("FLOW_TOKEN", secret));
    let has =
        |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).contains(secret);
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let reported: Vec<_> = processes.filter(|process| has(&process.join("cmdline"))).collect();
    assert!(reported.is_empty(), "{reported:?}");
    let remote: Vec<_> = [0, 1].into_iter().flat_map(|node| site.net.processes(node)).collect();
    assert!(remote.len() >= 7, "two agents, two guards, three workers: {remote:?}");
    assert!(!remote.iter().any(|pid| has(Path::new(&format!("/proc/{pid}/environ")))));
    running.signal(Signal::TERM);
    assert_eq!(running.finish().code, Some(143));
    site.net.until_nothing_is_left();
}

#[test]
fn a_dry_run_starts_nothing() {
    let arguments = [
        "--dry-run",
        "--rsh",
        "/nowhere/ssh",
        "--hosts",
        "me@node0:2,node1",
        "--tee",
        "3",
        "train",
        "a b",
    ];
    let finished = run(&mut launcher(&arguments));
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""), "{finished:?}");
    assert!(
        finished.stdout.starts_with("nodes: 2\n\nnode 0, host me@node0, by /nowhere/ssh\n  /"),
        "{finished:?}"
    );
    assert!(
        finished.stdout.contains("'--node-rank=1' '--master-addr=node0' train 'a b'\n"),
        "{finished:?}"
    );
    assert!(
        finished.stdout.contains(" FLOW_TOKEN ") && !finished.stdout.contains("secret"),
        "{finished:?}"
    );
}

/// Machines that the real ssh reaches from the first.
struct Sshd {
    net: Net,
    folder: TempDir,
    servers: Vec<Agent>,
}

impl Sshd {
    /// None, and a line that says why, where there is none.
    fn start() -> Option<Sshd> {
        let net = Net::new(3)?;
        Sshd::try_start(net)
            .inspect_err(|why| println!("SKIPPED: hosts by the real ssh: {why}"))
            .ok()
    }

    fn try_start(net: Net) -> Result<Sshd, String> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
        let sshd =
            folders.find_map(|folder| Some(folder.join("sshd")).filter(|sshd| sshd.is_file()));
        let sshd = sshd.ok_or("no sshd is installed (openssh-server)")?;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let keygen = run(Command::new("ssh-keygen").args([
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-f",
            &at("key"),
        ]));
        assert_eq!(keygen.code, Some(0), "{keygen:?}");
        let key = at("key");
        let server = format!(
            "HostKey {key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\nPidFile none\nUsePAM \
             no\nPermitRootLogin yes\n"
        );
        let client = format!(
            "IdentityFile {key}\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel \
             ERROR\n"
        );
        fs::write(at("server"), server).unwrap();
        fs::write(at("client"), client).unwrap();
        let mut servers = Vec::new();
        for node in [1, 2] {
            let server =
                net.start(node, Command::new(&sshd).args(["-D", "-e", "-f", &at("server")]));
            let address = format!("{}:22", ipv4(node));
            let listens = || net.within(0, || TcpStream::connect(&address).is_ok());
            until("sshd listens", || listens() || !is_alive(server.pid));
            if !is_alive(server.pid) {
                return Err(server.stderr().trim().replace('\n', "; "));
            }
            servers.push(server);
        }
        Ok(Sshd { net, folder, servers })
    }

    /// A job with two workers on one machine and one on another.
    fn job(&self, text: &str) -> Running {
        let rsh =
            format!("ssh -F {} -o BatchMode=yes", self.folder.path().join("client").display());
        let hosts = format!("{}:2,{}:1", ipv4(1), ipv4(2));
        let mut command = launcher(&["--rsh", &rsh, "--hosts", &hosts, "sh", "-c", text]);
        self.net.within(0, || Running::start(&mut command))
    }

    fn until_only_servers_are_left(&self) {
        for (node, server) in [1, 2].into_iter().zip(&self.servers) {
            until("only sshd is left", || self.net.processes(node) == [server.pid]);
        }
    }
}

#[test]
fn the_real_ssh() {
    let Some(sshd) = Sshd::start() else { return };
    let finished = sshd.job("echo $RANK of $WORLD_SIZE, $GROUP_RANK").finish();
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""), "{finished:?}");
    assert_eq!(finished.sorted_lines(), ["0 of 3, 0", "1 of 3, 0", "2 of 3, 1"]);
    let finished = sshd.job("[ $RANK = 2 ] || exec sleep 1000; exit 7").finish();
    assert_eq!(
        (finished.code, lines(&finished, "failed with exit code 7").len()),
        (Some(7), 1),
        "{finished:?}"
    );
    for signal in [Signal::INT, Signal::KILL] {
        let mut running = sshd.job("echo ready; exec sleep 1000");
        (0..3).for_each(|_| assert_eq!(running.line(), "ready"));
        running.signal(signal);
        let code = (signal == Signal::INT).then_some(130);
        assert_eq!(running.finish().code, code);
        sshd.until_only_servers_are_left();
    }
    fs::remove_file(sshd.folder.path().join("key.pub")).unwrap();
    let finished = sshd.job("echo started").finish();
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(255), ""), "{finished:?}");
    assert!(finished.stderr.contains("Permission denied"), "{finished:?}");
    assert!(finished.stderr.contains("true` must work without a password"), "{finished:?}");
}
