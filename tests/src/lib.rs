//! Helpers of the multi-process tests: starting workers, under the real flow-launch or by hand, and
//! hearing from them.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest that a job of these tests may take before it counts as stuck.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The program `name` of this workspace, of the running test's profile, and as new as its sources.
pub fn program(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let path = FOLDER.get_or_init(|| {
        let test = std::env::current_exe().expect("a test knows its own path");
        let folder = test.ancestors().nth(2).expect("tests lie in target/<profile>/deps");
        build(env!("CARGO_MANIFEST_DIR").as_ref(), folder);
        folder.to_owned()
    });
    let path = path.join(name);
    assert!(path.is_file(), "{} is missing: is it a program of this workspace?", path.display());
    path
}

/// Has cargo build what is older than its sources among the programs of the workspace of `package`,
/// into `target/<profile>`, the `folder`. Otherwise a test of one package would run the programs of
/// others as they happen to lie there. Takes no time where all are new; other processes that do the
/// same wait for cargo's lock.
pub fn build(package: &Path, folder: &Path) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
    let profile = folder.file_name().and_then(|name| name.to_str()).expect("a profile has a name");
    let profile = if profile == "debug" { "dev" } else { profile };
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--workspace", "--bins", "--examples", "--profile", profile]);
    command
        .env("CARGO_TARGET_DIR", folder.parent().expect("it lies in target"))
        .current_dir(package);
    let output = command.output().expect("cargo starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The instruction sets that libtorch has kernels for: the variables by which it, MKL and oneDNN
/// behave as on a CPU that has no better one. Those that this CPU lacks are left out, with a
/// printed reason.
pub fn instruction_sets() -> Vec<[(&'static str, &'static str); 3]> {
    let variables = |aten, mkl, onednn| {
        [
            ("ATEN_CPU_CAPABILITY", aten),
            ("MKL_ENABLE_INSTRUCTIONS", mkl),
            ("ONEDNN_MAX_CPU_ISA", onednn),
        ]
    };
    let mut sets = vec![variables("default", "SSE4_2", "SSE41")];
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let has_avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        for (name, found, set) in [
            ("AVX2", has_avx2, variables("avx2", "AVX2", "AVX2")),
            ("AVX-512", has_avx2 && has_avx512, variables("avx512", "AVX512", "AVX512_CORE")),
        ] {
            if found {
                sets.push(set);
            } else {
                println!("SKIPPED: what depends on rounding, as libtorch computes with {name}: this CPU lacks it");
            }
        }
    }
    sets
}

/// What a process said, and how it ended.
#[derive(Debug)]
pub struct Finished {
    /// Its id, while it ran.
    pub pid: u32,
    /// How it ended.
    pub status: ExitStatus,
    /// All it wrote to its standard output.
    pub stdout: String,
    /// All it wrote to its standard error.
    pub stderr: String,
}

impl Finished {
    /// The output of a process that must have succeeded.
    pub fn success(self) -> String {
        assert!(
            self.status.success(),
            "{}\nstdout:\n{}\nstderr:\n{}",
            self.status,
            self.stdout,
            self.stderr
        );
        self.stdout
    }
}

/// All `parts` are in `text`.
pub fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// A running process whose output is collected; killed when dropped.
pub struct Process {
    child: Child,
    stdout: Collected,
    stderr: Collected,
}

impl Process {
    /// Starts `command`, without any variable of a launcher that the test itself may run under.
    pub fn start(mut command: Command) -> Self {
        let inherited = std::env::vars().map(|(name, _)| name);
        let launchers =
            ["RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMPI_", "SLURM_", "FLOW_"];
        let set: Vec<_> = command.get_envs().map(|(name, _)| name.to_owned()).collect();
        for name in inherited.filter(|name| launchers.iter().any(|prefix| name.starts_with(prefix)))
        {
            if !set.iter().any(|own| *own == *name) {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let stdout = Collected::from(child.stdout.take().expect("it is piped"));
        let stderr = Collected::from(child.stderr.take().expect("it is piped"));
        Self { child, stdout, stderr }
    }

    /// The id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process has written `text` to its standard output.
    pub fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.stdout.so_far().contains(text) {
            let ended = self.child.try_wait().expect("the child is ours").is_some();
            assert!(
                !ended && Instant::now() < deadline,
                "no {text:?} from {}:\n{}",
                self.pid(),
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process has ended, at most for `time`.
    pub fn finish(mut self, time: Duration) -> Finished {
        let deadline = Instant::now() + time;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child is ours") {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "{} runs for more than {time:?}:\n{}",
                self.pid(),
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        };
        Finished { pid: self.pid(), status, stdout: self.stdout.all(), stderr: self.stderr.all() }
    }

    fn output(&self) -> String {
        format!("stdout:\n{}\nstderr:\n{}", self.stdout.so_far(), self.stderr.so_far())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A pipe that is read as it fills.
struct Collected {
    text: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Collected {
    fn from(mut pipe: impl Read + Send + 'static) -> Self {
        let text = Arc::<Mutex<Vec<u8>>>::default();
        let written = Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                written.lock().unwrap_or_else(PoisonError::into_inner).extend(&buffer[..count]);
            }
        });
        Self { text, reader: Some(reader) }
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap_or_else(PoisonError::into_inner))
            .into_owned()
    }

    fn all(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader does not panic");
        }
        self.so_far()
    }
}

/// `flow-launch --nproc_per_node <ranks> <flags> <worker> <arguments>`, to be started.
pub fn launcher(ranks: usize, flags: &[&str], worker: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program("flow-launch"));
    command
        .arg("--nproc_per_node")
        .arg(ranks.to_string())
        .args(flags)
        .arg(program(worker))
        .args(arguments);
    // Less than AMX: some virtual machines announce it and let nobody use it, and oneDNN "could not
    // create a primitive".
    command.env("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16");
    command
}

/// Runs `worker` as `ranks` ranks under flow-launch to its good end; returns what they wrote.
pub fn launch(ranks: usize, worker: &str, arguments: &[&str]) -> String {
    Process::start(launcher(ranks, &[], worker, arguments)).finish(PATIENCE).success()
}

/// A worker to be started by hand as rank `rank` of the job `job`.
pub fn rank(job: &str, rank: usize, size: usize, worker: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program(worker));
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("TORCHELASTIC_RUN_ID", job).args(arguments);
    command
}

/// Starts `size` ranks by hand: nobody stops the others when one fails.
pub fn ranks(size: usize, worker: &str, arguments: &[&str]) -> Vec<Process> {
    let job = job();
    (0..size).map(|r| Process::start(rank(&job, r, size, worker, arguments))).collect()
}

/// Starts ranks by hand on several nodes of this machine: so many on each.
pub fn ranks_on_nodes(nodes: &[usize], worker: &str, arguments: &[&str]) -> Vec<Process> {
    // Nobody else takes a port of 127.0.0.1 in the moment between: the kernel hands them out in
    // turn.
    let free =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.expect("there is a free port").port().to_string();
    let (job, size) = (job(), nodes.iter().sum());
    let places = nodes
        .iter()
        .enumerate()
        .flat_map(|(node, &count)| (0..count).map(move |local| (node, count, local)));
    let start = |(number, (node, count, local)): (usize, (usize, usize, usize))| {
        let mut command = rank(&job, number, size, worker, arguments);
        command.env("LOCAL_RANK", local.to_string()).env("LOCAL_WORLD_SIZE", count.to_string());
        command
            .env("GROUP_RANK", node.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port);
        Process::start(command)
    };
    places.enumerate().map(start).collect()
}

/// A name for a job that no other has.
pub fn job() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("flow-tests-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Where the stand-ins for the CUDA driver, its compiler and NCCL are; see `stand-in`.
pub const STAND_IN: &str = env!("FLOW_STAND_IN");

/// Has `command` use the stand-ins, with eight GPUs; None, with a printed reason, where another
/// NCCL is found before ours.
pub fn on_stand_in(mut command: Command) -> Option<Command> {
    let stand_in = |command: &mut Command| {
        let nccl = Path::new(STAND_IN).join("libnccl_stand_in.so");
        command
            .env("LD_LIBRARY_PATH", STAND_IN)
            .env("FLOW_NCCL_PATH", nccl)
            .env("FLOW_STAND_IN_GPUS", "8");
        // What the stand-in for the compiler makes is of no use to others.
        command.env("FLOW_CACHE", Path::new(STAND_IN).join("cache")).env_remove("FLOW_NVRTC");
    };
    let mut which = rank(&job(), 0, 1, "check_nccl", &["library"]);
    stand_in(&mut which);
    let found = Process::start(which).finish(PATIENCE).success();
    if found.contains("stand_in") {
        stand_in(&mut command);
        return Some(command);
    }
    println!(
        "SKIPPED: NCCL groups on stand-ins: this machine has an NCCL of its own, {}",
        found.trim()
    );
    None
}
