//! One test of a scenario: it starts a job, and decides whether that went well.

use std::process::Command;

use flow_harness::net::{Agent, Net};
use flow_harness::{Finished, Process, TEST_TIMEOUT};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::job::{Job, Start, run_script};

/// One test: a scenario in one of its jobs.
pub struct Test {
    /// The scenario, as the worker knows it: `FILE::NAME`; or `FILE (JOB)`, for all that share the job.
    pub name: String,
    /// How it is started.
    pub job: &'static Job,
    /// A folder of its own.
    pub folder: TempDir,
}

impl Test {
    /// The commands of the job: one for each rank, for each machine, or for the launcher.
    pub fn commands(&self) -> Vec<Command> {
        let mut commands = self.job.commands(&worker(), &[&self.name]);
        if self.job.fake_cuda {
            let waits = self.folder.path().join("waits");
            commands.iter_mut().for_each(|command| _ = command.env("FLOW_FAKE_WAITS", &waits));
        }
        commands
    }

    /// Has mpirun start so many ranks by a shell script, whose arguments are the rank's program.
    pub fn mpirun(&self, ranks: usize, script: &str) -> Command {
        run_script(ranks, script, &worker(), &[&self.name])
    }

    /// Starts the ranks of a job without a launcher.
    pub fn ranks(&self) -> Vec<Process> {
        let start = self.job.start;
        assert!(
            matches!(start, Start::ByHand(_) | Start::InProcess(_)),
            "a launcher starts these ranks"
        );
        self.commands().into_iter().map(Process::start).collect()
    }

    /// Starts flow-launch or mpirun.
    pub fn launcher(&self) -> Process {
        let mut commands = self.commands();
        assert!(!matches!(self.job.start, Start::ByHand(_) | Start::Machines(_)), "no launcher");
        Process::start(commands.remove(0))
    }

    /// Starts flow-launch on each machine of a network. None, and a printed reason, where this
    /// machine does not allow it.
    pub fn machines(&self) -> Option<(Net, Vec<Agent>)> {
        let net = Net::new(self.job.nodes().len())?;
        let commands = self.commands();
        let agents = commands.iter().enumerate();
        let agents = agents.map(|(node, command)| net.start(node, command)).collect();
        Some((net, agents))
    }

    /// Runs the job of flow-launch to its end, which is the same on all machines: what all have written
    /// to stdout, and the first to stderr. None, and a printed reason, where this machine does not
    /// allow it.
    pub fn finish(&self) -> Option<Finished> {
        if !matches!(self.job.start, Start::Machines(_)) {
            return Some(self.launcher().finish_unless_silent(TEST_TIMEOUT));
        }
        let (net, agents) = self.machines()?;
        let mut ends = agents.into_iter().map(Agent::finish);
        let mut whole = ends.next()?;
        for end in ends {
            assert_eq!(end.code, whole.code, "{whole:?} {end:?}");
            whole.stdout += &end.stdout;
        }
        net.until_nothing_is_left();
        Some(whole)
    }

    /// The job ends well, as every rank reports. Each scenario of a job has [`TEST_TIMEOUT`]: its ranks
    /// write its name when it begins.
    pub fn passes(&self) {
        let passed = |ranks: usize| format!("{} passed\n", self.name).repeat(ranks);
        let nodes = self.job.nodes();
        match self.job.start {
            Start::ByHand(_) | Start::InProcess(_) => {
                for rank in self.ranks() {
                    assert_eq!(rank.finish_unless_silent(TEST_TIMEOUT).success(), passed(1));
                }
            }
            Start::Launched(_) | Start::Mpirun(_) => {
                let output = self.launcher().finish_unless_silent(TEST_TIMEOUT).success();
                assert_eq!(output, passed(nodes.iter().sum()));
            }
            Start::Machines(_) => {
                let Some((net, agents)) = self.machines() else { return };
                for (agent, ranks) in agents.into_iter().zip(nodes) {
                    assert_eq!(agent.finish().success(), passed(ranks));
                }
                net.until_nothing_is_left();
            }
        }
    }
}

/// The name of this program.
fn worker() -> String {
    let path = std::env::current_exe().expect("a program knows its own path");
    path.file_name().expect("it has a name").to_string_lossy().into_owned()
}

/// What a process printed that ended well, without what [`super::main`] prints.
pub fn lines(finished: Finished) -> Vec<String> {
    let own = |line: &&str| !line.ends_with(" passed");
    finished.success().lines().filter(own).map(str::to_owned).collect()
}

/// Sends a process of the test a signal.
pub fn signal(process: &Process, signal: Signal) {
    let pid = Pid::from_raw(process.pid() as i32).expect("a process's id is not 0");
    kill_process(pid, signal).expect("the process is ours");
}
