//! The ways to start a scenario.

use std::process::Command;

use flow_harness::{launcher, program, rank_commands};

use crate::fakes::use_fake_cuda;

/// How many ranks a worker runs as threads of its process.
pub(super) const IN_PROCESS: &str = "FLOW_TEST_IN_PROCESS";

/// One way to start a scenario.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub(super) start: Start,
    /// A name and an environment variable with its value.
    mode: Option<(&'static str, &'static str, &'static str)>,
    pub(super) fake_cuda: bool,
    pub(super) shared: bool,
    flags: &'static [&'static str],
    variables: &'static [(&'static str, &'static str)],
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Start {
    Launched(usize),
    ByHand(&'static [usize]),
    InProcess(usize),
    Mpirun(&'static [usize]),
    Machines(&'static [usize]),
}

/// So many ranks under flow-launch, on one node.
pub const fn launched(ranks: usize) -> Job {
    Job::new(Start::Launched(ranks))
}

/// So many ranks on each node, started without flow-launch, so that nobody stops the others when
/// one fails: rank 0 serves the rendezvous. All nodes are this machine.
pub const fn by_hand(nodes: &'static [usize]) -> Job {
    Job::new(Start::ByHand(nodes))
}

/// So many ranks that are threads of one process.
pub const fn in_process(ranks: usize) -> Job {
    Job::new(Start::InProcess(ranks))
}

/// So many ranks on each node under mpirun, connected by MPI. All nodes are this machine.
pub const fn mpirun(nodes: &'static [usize]) -> Job {
    Job::new(Start::Mpirun(nodes))
}

/// So many ranks on each machine, each with a flow-launch and a network namespace of its own.
pub const fn machines(nodes: &'static [usize]) -> Job {
    Job::new(Start::Machines(nodes))
}

impl Job {
    const fn new(start: Start) -> Self {
        Self { start, mode: None, fake_cuda: false, shared: false, flags: &[], variables: &[] }
    }

    /// In the mode `name`, which this environment variable sets.
    pub const fn mode(
        self,
        name: &'static str,
        variable: &'static str,
        value: &'static str,
    ) -> Self {
        Self { mode: Some((name, variable, value)), ..self }
    }

    /// On the fake CUDA and NCCL instead of the CPU.
    pub const fn on_fake_cuda(self) -> Self {
        Self { fake_cuda: true, ..self }
    }

    /// One job for all scenarios of a file, one after the other, each with a group of its own: for
    /// programs that take long to start. Scenarios with a check of their own, and those that make
    /// their groups themselves, do not share it.
    pub const fn shared(self) -> Self {
        Self { shared: true, ..self }
    }

    /// With these flags of flow-launch.
    pub const fn flags(self, flags: &'static [&'static str]) -> Self {
        Self { flags, ..self }
    }

    /// With these environment variables.
    pub const fn env(self, variables: &'static [(&'static str, &'static str)]) -> Self {
        Self { variables, ..self }
    }

    /// The number of ranks on each node.
    pub fn nodes(&self) -> Vec<usize> {
        match self.start {
            Start::Launched(ranks) | Start::InProcess(ranks) => vec![ranks],
            Start::ByHand(nodes) | Start::Mpirun(nodes) | Start::Machines(nodes) => nodes.to_vec(),
        }
    }

    /// Whether this program can start it: one that is compiled with MPI starts MPI's jobs only.
    pub(super) fn is_of_this_program(&self) -> bool {
        matches!(self.start, Start::Mpirun(_)) == cfg!(feature = "mpi")
    }

    pub(super) fn title(&self) -> String {
        let ranks = |count: usize| format!("{count} rank{}", if count == 1 { "" } else { "s" });
        let several = |what: &str, nodes: &[usize]| {
            let nodes: Vec<String> = nodes.iter().map(usize::to_string).collect();
            format!("{what} of {}", nodes.join("+"))
        };
        let mut title = match self.start {
            Start::Launched(count) => ranks(count),
            Start::ByHand([count]) => format!("{} by hand", ranks(*count)),
            Start::ByHand(nodes) => several("nodes", nodes),
            Start::InProcess(count) => format!("{} in one process", ranks(count)),
            Start::Mpirun([count]) => format!("{} by mpirun", ranks(*count)),
            Start::Mpirun(nodes) => several("MPI, nodes", nodes),
            Start::Machines(nodes) => several("machines", nodes),
        };
        if let Some((name, ..)) = self.mode {
            title = format!("{title}, {name}");
        }
        if self.fake_cuda {
            title.push_str(", fake CUDA");
        }
        title
    }

    /// The name of the test of all scenarios of `file` that share it.
    pub(super) fn name_in(&self, file: &str) -> String {
        format!("{file} ({})", self.title())
    }

    /// What to start: one command for each rank, for each machine, or for the job.
    pub(super) fn commands(&self, worker: &str, arguments: &[&str]) -> Vec<Command> {
        let mut commands = match self.start {
            Start::Launched(ranks) => vec![launcher(ranks, self.flags, worker, arguments)],
            Start::ByHand(nodes) => rank_commands(nodes, worker, arguments),
            Start::InProcess(ranks) => {
                let mut command = Command::new(program(worker));
                command.args(arguments).env(IN_PROCESS, ranks.to_string());
                vec![command]
            }
            Start::Mpirun(nodes) => vec![by_mpirun(nodes, worker, arguments)],
            Start::Machines(nodes) => {
                let machine = |(node, ranks): (usize, &usize)| {
                    let count = nodes.len().to_string();
                    let node = node.to_string();
                    let address = flow_harness::net::ipv4(0);
                    let mut flags = vec!["--nnodes", &count, "--node_rank", &node];
                    flags.extend(["--master_addr", &address, "--master_port", "29500"]);
                    flags.extend(self.flags);
                    let mut command = launcher(*ranks, &flags, worker, arguments);
                    command.env("FLOW_TOKEN", "secret");
                    command
                };
                nodes.iter().enumerate().map(machine).collect()
            }
        };
        for command in &mut commands {
            command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
            command.envs(self.mode.map(|(_, variable, value)| (variable, value)));
            if self.fake_cuda {
                use_fake_cuda(command);
                command.env("FLOW_TEST_DEVICE", "cuda");
            }
            command.envs(self.variables.iter().copied());
        }
        commands
    }
}

/// Ranks that mpirun starts. Several nodes are what the variables of a launcher say.
fn by_mpirun(nodes: &[usize], worker: &str, arguments: &[&str]) -> Command {
    let mut script = String::new();
    if nodes.len() > 1 {
        let mut rank = 0;
        script.push_str("case $OMPI_COMM_WORLD_RANK in\n");
        for (node, &count) in nodes.iter().enumerate() {
            for local in 0..count {
                script.push_str(&format!(
                    "{rank}) export LOCAL_RANK={local} LOCAL_WORLD_SIZE={count} \
                     GROUP_RANK={node};;\n"
                ));
                rank += 1;
            }
        }
        script.push_str("esac\nexport RANK=$OMPI_COMM_WORLD_RANK ");
        script.push_str("WORLD_SIZE=$OMPI_COMM_WORLD_SIZE FLOW_TRANSPORT=${FLOW_TRANSPORT-mpi}\n");
    }
    script.push_str("exec \"$@\"");
    run_script(nodes.iter().sum(), &script, worker, arguments)
}

/// Has mpirun start so many ranks by a shell script, whose arguments are the rank's program.
pub(super) fn run_script(ranks: usize, script: &str, worker: &str, arguments: &[&str]) -> Command {
    let ranks = ranks.to_string();
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-np", &ranks, "sh", "-c", script]);
    command.arg("sh").arg(program(worker)).args(arguments);
    command
}
