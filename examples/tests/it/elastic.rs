//! The training on ranks that come and go has the bits of one that nothing happened to. Jobs that lose
//! ranks at random are those of `scripts/elastic`.

use std::fs;
use std::path::Path;
use std::process::Command;

use flow_tests::cli::until;
use flow_tests::net::{Agent, Net, ipv4};
use flow_tests::{Process, TEST_TIMEOUT, launcher};
use rustix::process::Signal;
use tempfile::{TempDir, tempdir};

/// A training of a GPT on a text in this folder, of eight steps in an epoch on four virtual ranks.
struct Training(TempDir);

impl Training {
    fn new() -> Training {
        let folder = tempdir().unwrap();
        let numbers: Vec<String> = (0..1200).map(|number| number.to_string()).collect();
        fs::write(folder.path().join("text"), numbers.concat()).unwrap();
        Training(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn command(&self, ranks: usize, flags: &[&str], more: &[&str]) -> Command {
        let [text, weights, losses] =
            ["text", "weights.safetensors", "losses"].map(|name| self.path(name));
        let words = "--model gpt --width 32 --batch-size 2 --checkpoint-every 5";
        let mut arguments: Vec<&str> = words.split_whitespace().collect();
        arguments.extend(["--text", &text, "--save", &weights, "--losses", &losses]);
        arguments.extend(more);
        let mut command = launcher(ranks, flags, "elastic", &arguments);
        // As many on a machine with one rank as on one with two: their sums are ordered alike.
        command.env("OMP_NUM_THREADS", "1");
        command
    }

    /// The weights and the losses that the last training has left.
    fn result(&self) -> (Vec<u8>, String) {
        let weights = fs::read(self.path("weights.safetensors")).unwrap();
        (weights, fs::read_to_string(self.path("losses")).unwrap())
    }

    fn run(&self, ranks: usize, more: &[&str]) -> (Vec<u8>, String) {
        Process::start(self.command(ranks, &[], more)).finish(TEST_TIMEOUT).success();
        self.result()
    }
}

/// The checkpoint is of step 5 and in the first epoch, of 8 steps. The last step is in the second one.
#[test]
fn a_job_that_starts_again_goes_on_from_its_checkpoint() {
    let training = Training::new();
    let undisturbed = training.run(2, &["--steps", "12"]);
    let checkpoints = training.path("checkpoints");
    let (_, losses) = training.run(3, &["--checkpoint", &checkpoints, "--steps", "7"]);
    assert_eq!(losses.lines().count(), 7);
    assert!(undisturbed.1.starts_with(&losses), "{losses:?}");
    assert!(Path::new(&checkpoints).join("step-5").exists());
    let again = training.run(3, &["--checkpoint", &checkpoints, "--steps", "12"]);
    assert!(again == undisturbed, "{} and {}", again.1, undisturbed.1);
    assert_eq!(again.1.lines().count(), 12);
}

/// Two leaders are lost, one after the other. The spare node has the ranks of the first, and the one that
/// comes back those of the second.
#[test]
fn a_training_goes_on_under_another_leader() {
    let Some(net) = Net::new(4) else { return };
    let training = Training::new();
    let [journal, end] = ["journal", "end"].map(|name| training.path(name));
    let endpoint = format!("{}:29400", ipv4(0));
    let flags = "--nnodes 3 --elastic in-place --max-restarts 9 --rdzv-id job --rdzv-conf \
                 last_call_timeout=5,join_timeout=60 --rdzv-endpoint";
    let flags: Vec<&str> = flags.split_whitespace().chain([endpoint.as_str()]).collect();
    let more = ["--epochs", "1000000", "--until", &end, "--journal", &journal];
    let mut command = training.command(1, &flags, &more);
    command.env("FLOW_LOG", "warn,flow_launch::control=info");
    let mut agents: Vec<Agent> = (0..4).map(|node| net.start(node, &command)).collect();
    let leads = |agent: &Agent| agent.stderr().contains("this one leads the job from now on");
    for loss in 0..2 {
        let leader = if loss == 0 { 0 } else { agents.iter().position(leads).unwrap() };
        until_steps(&journal, 3);
        for (index, agent) in agents.iter().enumerate() {
            until("a member has a copy of the store", || index == leader || has_copy(agent));
        }
        let lost = agents.remove(leader);
        let node = lost.node();
        lost.signal(Signal::KILL);
        drop(lost);
        until("another one leads", || agents.iter().any(leads));
        until_steps(&journal, 3);
        if loss == 0 {
            agents.push(net.start(node, &command));
        }
    }
    fs::write(&end, "").unwrap();
    for agent in agents {
        let end = agent.finish();
        assert_eq!(end.code, Some(0), "{end:?}");
    }
    net.until_nothing_is_left();
    let disturbed = training.result();
    let steps = disturbed.1.lines().count().to_string();
    let undisturbed = training.run(2, &["--epochs", "1000000", "--steps", &steps]);
    assert!(disturbed == undisturbed, "{} and {}", disturbed.1, undisturbed.1);
}

/// Waits until ranks have done ten more steps together.
fn until_steps(journal: &str, ranks: usize) {
    let before = steps(journal, ranks);
    until("more steps", || steps(journal, ranks) >= before + 10 * ranks);
}

/// The number of steps that ranks have done while there were so many.
fn steps(journal: &str, ranks: usize) -> usize {
    let text = fs::read_to_string(journal).unwrap_or_default();
    text.lines().filter(|line| line.split(' ').nth(3) == Some(&ranks.to_string())).count()
}

/// Whether an agent has heard last that a member has a copy of the store.
fn has_copy(agent: &Agent) -> bool {
    let said = agent.stderr();
    let told = said.lines().rfind(|line| line.contains("elect the next leader"));
    told.is_some_and(|line| line.contains("3 nodes") && line.ends_with("workers' store"))
}
