//! Machines for tests: namespaces with a network between them, each with its own host name,
//! processes and `/dev/shm`.
//!
//! The kernel ends a machine with the thread that made it, however that ends, and with the machine
//! all its processes, its network and its shared memory. Nothing has a name that could stay behind
//! or be in another test's way.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, pipe};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;

use crate::cli::{children, is_alive, until, wait_for_status};
use crate::{Finished, executable};

/// Nodes `node0`, `node1`, ... at one switch.
pub struct Net {
    switch: Machine,
    nodes: Vec<Machine>,
}

/// The address of a node.
pub fn ipv4(node: usize) -> String {
    format!("10.0.0.{}", node + 1)
}

/// The address of a node.
pub fn ipv6(node: usize) -> String {
    format!("fd00::{}", node + 1)
}

impl Net {
    /// None, and a line that says why, where this machine does not allow it.
    pub fn new(nodes: usize) -> Option<Net> {
        Net::make(nodes)
            .inspect_err(|why| println!("SKIPPED: jobs on several machines: {why}"))
            .ok()
    }

    fn make(count: usize) -> Result<Net, String> {
        let switch =
            Machine::start("ip link add name bridge type bridge && ip link set bridge up")?;
        let hosts: String =
            (0..count).map(|node| format!("{} node{node}\\n", ipv4(node))).collect();
        let mut nodes = Vec::new();
        for node in 0..count {
            // The file of host names lives on, without a name, where it is mounted.
            let machine = Machine::start(&format!(
                "hostname node{node} && mount -t tmpfs tmpfs /dev/shm && printf '127.0.0.1 \
                 localhost\\n{hosts}' >/dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts \
                 && rm /dev/shm/hosts"
            ))?;
            switch.configure(&format!(
                "ip link add name port{node} type veth peer name eth0 netns {} && \
                 ip link set port{node} master bridge up",
                machine.init
            ))?;
            machine.configure(&format!(
                "ip addr add {}/24 dev eth0 && ip addr add {}/64 dev eth0 nodad && ip link set \
                 eth0 up",
                ipv4(node),
                ipv6(node)
            ))?;
            nodes.push(machine);
        }
        Ok(Net { switch, nodes })
    }

    /// Starts flow-launch, or another program, on a node.
    pub fn start(&self, node: usize, command: &Command) -> Agent {
        let stdout = tempfile::tempfile().unwrap();
        let stderr = tempfile::tempfile().unwrap();
        let mut enter = self.nodes[node].enter(&["--net", "--uts", "--ipc", "--mount", "--pid"]);
        enter.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => enter.env(name, value),
                None => enter.env_remove(name),
            };
        }
        enter.stdout(stdout.try_clone().unwrap()).stderr(stderr.try_clone().unwrap());
        let mut entered = enter.spawn().unwrap();
        let mut pid = 0;
        // One that is refused may be over before anybody sees it.
        until("the program starts", || {
            pid = children(entered.id() as i32).first().copied().unwrap_or_default();
            pid != 0 || entered.try_wait().unwrap().is_some()
        });
        Agent { node, entered, pid, stdout, stderr }
    }

    /// A fake ssh: `PATH HOST COMMAND` runs the command on a node, with nothing of the
    /// caller's environment. It is gone when the folder is dropped.
    pub fn remote_shell(&self) -> (TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ssh");
        let mut cases = String::new();
        for (number, node) in self.nodes.iter().enumerate() {
            cases += &format!(
                "node{number} | {} | {}) pid={} tmp={} ;;\n",
                ipv4(number),
                ipv6(number),
                node.init,
                node.temporary.path().display()
            );
        }
        let script = format!(
            "#!/bin/sh\ncase ${{1#*@}} in\n{cases}*) echo \"ssh: Could not resolve hostname $1\" \
             >&2; exit 255 ;;\nesac\n\
             exec env -i PATH=\"$PATH\" TMPDIR=$tmp nsenter --target $pid --net --uts --ipc \
             --mount --pid -- sh -c \"$2\"\n"
        );
        executable(&path, script);
        let path = path.to_str().unwrap().to_string();
        (folder, path)
    }

    /// Runs a function in the network of a node.
    pub fn within<T: Send>(&self, node: usize, function: impl FnOnce() -> T + Send) -> T {
        let network = File::open(format!("/proc/{}/ns/net", self.nodes[node].init)).unwrap();
        thread::scope(|scope| {
            let entered = scope.spawn(|| {
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(network.as_fd(), kind).unwrap();
                function()
            });
            entered.join().unwrap()
        })
    }

    /// Unplugs a node from the switch.
    pub fn cut(&self, node: usize) {
        self.switch.configure(&format!("ip link set port{node} down")).unwrap();
    }

    /// Plugs a node in again.
    pub fn restore(&self, node: usize) {
        self.switch.configure(&format!("ip link set port{node} up")).unwrap();
    }

    /// How many segments TCP has sent once more on a node, as nobody acknowledged them.
    pub fn retransmits(&self, node: usize) -> u64 {
        let path = format!("/proc/{}/net/snmp", self.nodes[node].init);
        let text = fs::read_to_string(path).unwrap();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let position = names.split(' ').position(|name| name == "RetransSegs").unwrap();
        values.split(' ').nth(position).unwrap().parse().unwrap()
    }

    /// Makes the link of a node slow, both ways: its bits per second, as tc writes them. False, and
    /// a line that says why, where this machine does not allow it.
    pub fn slow(&self, node: usize, rate: &str) -> bool {
        let limit = |link: &str| {
            format!("tc qdisc add dev {link} root tbf rate {rate} burst 2kb latency 2s")
        };
        let limited = self.switch.configure(&limit(&format!("port{node}")));
        let limited = limited.and_then(|()| self.nodes[node].configure(&limit("eth0")));
        limited.inspect_err(|why| println!("SKIPPED: a job over a slow link: {why}")).is_ok()
    }

    /// Ends a node and all its processes; the others learn nothing of it.
    pub fn power_off(&self, node: usize) {
        self.cut(node);
        self.nodes[node].kill();
    }

    /// The processes on a node.
    pub fn processes(&self, node: usize) -> Vec<i32> {
        self.nodes[node].processes()
    }

    /// Waits until no process, shared memory or listening socket is left on any node.
    pub fn until_nothing_is_left(&self) {
        for (number, node) in self.nodes.iter().enumerate() {
            until(&format!("no process is left on node{number}"), || node.processes().is_empty());
            let memory = node.names("root/dev/shm");
            assert!(memory.is_empty(), "left in /dev/shm of node{number}: {memory:?}");
            let listening = node.listening();
            assert!(listening.is_empty(), "still listening on node{number}: {listening:?}");
        }
    }
}

struct Machine {
    /// Its folder of temporary files. What is left there by processes that are killed with the
    /// machine goes with it.
    temporary: TempDir,
    /// Ends with the machine.
    holder: Child,
    /// The machine's first process.
    init: i32,
    /// Processes that are there from the start.
    own: Vec<i32>,
}

impl Machine {
    fn start(set_up: &str) -> Result<Machine, String> {
        let (output, said) = pipe().unwrap();
        // As on a real machine, the first process reaps those whose parents are gone.
        let script = format!(
            "{{ ip link set lo up && {set_up}; }} || exit; sleep infinity & echo ready; wait"
        );
        let mut command = Command::new("setpriv");
        command.args([
            "--pdeathsig",
            "KILL",
            "unshare",
            "--net",
            "--uts",
            "--ipc",
            "--mount",
            "--pid",
        ]);
        command
            .args(["--fork", "--kill-child", "--mount-proc", "sh", "-c", &script])
            .stdin(Stdio::null());
        command.stdout(said.try_clone().unwrap()).stderr(said);
        let holder = command.spawn().map_err(|error| format!("setpriv: {error}"))?;
        drop(command);
        let temporary = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut machine = Machine { temporary, holder, init: 0, own: Vec::new() };
        let mut complaint = "it ends at once".to_string();
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if line == "ready" {
                machine.init = children(machine.holder.id() as i32)[0];
                machine.own = machine.processes();
                return Ok(machine);
            }
            complaint = line;
        }
        Err(complaint)
    }

    /// A command that enters these namespaces of the machine; what to run there is to be added.
    fn enter(&self, namespaces: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string()]).args(namespaces).arg("--");
        command.env("TMPDIR", self.temporary.path());
        command
    }

    /// Runs a script that changes the machine's network.
    fn configure(&self, script: &str) -> Result<(), String> {
        let output = self.enter(&["--net"]).args(["sh", "-c", script]).output().unwrap();
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; "))
        }
    }

    fn processes(&self) -> Vec<i32> {
        let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let Some(here) = namespace(self.init) else { return Vec::new() };
        let all = fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| {
            !self.own.contains(pid) && namespace(*pid).as_ref() == Some(&here) && is_alive(*pid)
        })
        .collect()
    }

    /// The names in a folder below the machine's first process in `/proc`.
    fn names(&self, folder: &str) -> Vec<String> {
        let entries =
            fs::read_dir(format!("/proc/{}/{folder}", self.init)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// The lines of `/proc/net/tcp` on sockets that listen.
    fn listening(&self) -> Vec<String> {
        let table = |name| {
            fs::read_to_string(format!("/proc/{}/net/{name}", self.init)).unwrap_or_default()
        };
        let lines = [table("tcp"), table("tcp6")].concat();
        lines
            .lines()
            .filter(|line| line.split_whitespace().nth(3) == Some("0A"))
            .map(str::to_string)
            .collect()
    }

    fn kill(&self) {
        if let Some(init) = Pid::from_raw(self.init) {
            let _ = kill_process(init, Signal::KILL);
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
        let _ = self.holder.wait();
    }
}

/// A program that runs on a node, as a rule flow-launch.
pub struct Agent {
    node: usize,
    /// nsenter, which ends as the program does.
    entered: Child,
    /// 0 if the program was over before it was seen.
    pub pid: i32,
    stdout: File,
    stderr: File,
}

impl Agent {
    /// The number of the node.
    pub fn node(&self) -> usize {
        self.node
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) {
        let sent = Pid::from_raw(self.pid).is_some_and(|pid| kill_process(pid, signal).is_ok());
        assert!(sent || signal == Signal::KILL, "the program on node{} is over", self.node);
        if signal == Signal::CONT {
            // It stops when its child does.
            kill_process(Pid::from_child(&self.entered), signal).unwrap();
        }
    }

    /// What it has written to its standard output so far.
    pub fn stdout(&self) -> String {
        read(&self.stdout)
    }

    /// What it has written to its standard error so far.
    pub fn stderr(&self) -> String {
        read(&self.stderr)
    }

    /// Waits until the workers have written all of these lines.
    pub fn until_says(&self, lines: &[&str]) {
        until(&format!("node{} says {lines:?}", self.node), || {
            let said = self.stdout();
            lines.iter().all(|line| said.lines().any(|other| other == *line))
        });
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Finished {
        let status = wait_for_status(&mut self.entered);
        Finished::new(self.pid.unsigned_abs(), status, self.stdout(), self.stderr())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if thread::panicking() {
            println!(
                "node{} wrote:\n{}\nand to stderr:\n{}",
                self.node,
                self.stdout(),
                self.stderr()
            );
        }
    }
}

/// All of a file that others still write to with this descriptor's position.
fn read(file: &File) -> String {
    let mut bytes = vec![0; file.metadata().map_or(0, |data| data.len() as usize)];
    let count = file.read_at(&mut bytes, 0).unwrap_or_default();
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}

/// What workers wait at until the test lets them go on. All nodes see it, as on a shared disk.
pub struct Gate(TempDir);

impl Default for Gate {
    fn default() -> Gate {
        Gate(tempfile::tempdir().unwrap())
    }
}

impl Gate {
    /// Closed.
    pub fn new() -> Gate {
        Gate::default()
    }

    /// The shell command that waits.
    pub fn wait(&self) -> String {
        format!("while [ ! -e {} ]; do sleep 0.05; done", self.path().display())
    }

    /// Lets them go on.
    pub fn open(&self) {
        File::create(self.path()).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("open")
    }
}
