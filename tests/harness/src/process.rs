//! Processes whose output is collected.

use std::fmt;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::TEST_TIMEOUT;

/// What a process wrote, and how it ended.
pub struct Finished {
    /// Its id, while it ran.
    pub pid: u32,
    /// Its exit code; None if a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// All it wrote to its standard output.
    pub stdout: String,
    /// All it wrote to its standard error.
    pub stderr: String,
}

impl Finished {
    pub(crate) fn new(pid: u32, status: ExitStatus, stdout: String, stderr: String) -> Self {
        Self { pid, code: status.code(), signal: status.signal(), stdout, stderr }
    }

    /// The output of a process that must have succeeded.
    pub fn success(self) -> String {
        assert!(self.code == Some(0), "{self:?}");
        self.stdout
    }

    /// The lines of its standard output, sorted.
    pub fn sorted_lines(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }
}

/// For the message of a test that fails: the output as it was, on lines of its own.
impl fmt::Debug for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, code, signal, stdout, stderr } = self;
        writeln!(f, "pid {pid}, exit code {code:?}, signal {signal:?}")?;
        write!(f, "stdout:\n{stdout}\nstderr:\n{stderr}")
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

    /// Whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("the child is ours").is_some()
    }

    /// Waits until the process has written `text` to its standard output.
    pub fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !self.stdout.so_far().contains(text) {
            let has_ended = self.has_ended();
            assert!(
                !has_ended && Instant::now() < deadline,
                "no {text:?} from {}:\n{}",
                self.pid(),
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process has ended, at most for `time`.
    pub fn finish(self, time: Duration) -> Finished {
        let deadline = Instant::now() + time;
        self.finish_while(|_| Instant::now() < deadline)
    }

    /// Waits until the process has ended, which writes something at least once in `time`.
    pub fn finish_unless_silent(self, time: Duration) -> Finished {
        let mut length = 0;
        let mut last = Instant::now();
        self.finish_while(|process| {
            let now = process.stdout.length() + process.stderr.length();
            if now > length {
                length = now;
                last = Instant::now();
            }
            last.elapsed() < time
        })
    }

    fn finish_while(mut self, mut may_run: impl FnMut(&Self) -> bool) -> Finished {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child is ours") {
                break status;
            }
            assert!(
                may_run(&self),
                "{} still runs after {:?}:\n{}",
                self.pid(),
                start.elapsed(),
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        };
        Finished::new(self.pid(), status, self.stdout.all(), self.stderr.all())
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
pub(crate) struct Collected {
    text: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Collected {
    pub(crate) fn from(mut pipe: impl Read + Send + 'static) -> Self {
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

    pub(crate) fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap_or_else(PoisonError::into_inner))
            .into_owned()
    }

    fn length(&self) -> usize {
        self.text.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn all(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader does not panic");
        }
        self.so_far()
    }
}
