//! The back-end of torch.distributed over this library: the programs in `pytorch/tests`, with
//! PyTorch as it is, under flow-launch and other launchers.
//!
//! | file | subject |
//! |---|---|
//! | `main` | what the ranks compute, with the part in C++ and with that in Python |
//! | `parts` | ranks that lack something; programs that ask for gloo |
//! | `machines` | how ranks on several machines meet |
//! | `wheel` | the wheel, installed, under each launcher and library |

mod machines;
mod parts;
mod wheel;

use std::process::Command;
use std::sync::OnceLock;

use flow_harness::cli::{launcher, run};
use flow_harness::python::{have, python};
use flow_harness::{
    Finished, Process, TEST_TIMEOUT, assert_contains, job, once_in_a_run, program, root,
};

/// Who does the communication.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Cpp,
    /// There is no compiler.
    Python,
}

const PARTS: [Part; 2] = [Part::Cpp, Part::Python];

/// Says why, where there is no PyTorch, or what its C++ part is compiled with.
fn is_skipped() -> bool {
    static COMPILER: OnceLock<Result<(), String>> = OnceLock::new();
    if !have("torch") {
        return true;
    }
    let compiler = COMPILER.get_or_init(|| once_in_a_run("flow_torch-compiler", finds_compiler));
    if let Err(missing) = compiler {
        println!("SKIPPED: PyTorch over flow: {missing}");
    }
    compiler.is_err()
}

/// An error says what is missing to compile the part in C++.
fn finds_compiler() -> Result<(), String> {
    let program = "import flow_torch.extension; flow_torch.extension.compiler()";
    let finished = run(with_flow(Command::new(python()).args(["-c", program])));
    let error = finished.stderr.lines().last().unwrap_or("");
    // Anything else would be a fault of ours, which the tests show.
    if ["Python.h is missing", "there is no"].iter().any(|what| error.contains(what)) {
        return Err(error.to_owned());
    }
    Ok(())
}

fn script(name: &str) -> String {
    root().join("pytorch/tests").join(name).display().to_string()
}

/// With flow_torch as it is in the checkout, compiled once for all tests.
fn with_flow(command: &mut Command) -> &mut Command {
    with_part(command, Part::Cpp)
}

fn with_part(command: &mut Command, part: Part) -> &mut Command {
    let library = program("libflow_comm.so");
    let cache = library.ancestors().nth(2).unwrap().join("tmp/flow_torch");
    if part == Part::Python {
        command.env("CXX", "/nonexistent/c++").env("FLOW_CACHE", cache.join("nothing"));
    } else {
        command.env("FLOW_CACHE", cache);
    }
    command
        .env("FLOW_COMM_LIBRARY", library)
        .env("PYTHONPATH", root().join("pytorch"))
        .env("OMP_NUM_THREADS", "1")
        .env("PYTHONWARNINGS", "ignore")
}

/// For two ranks.
fn torchrun() -> Command {
    let mut command = Command::new(python());
    command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]);
    // Else it asks for this machine's name, which a container may not know.
    command.args(["--local-addr", "127.0.0.1"]);
    command
}

/// The script on so many ranks under flow-launch.
fn launch(ranks: &str, part: Part, name: &str, arguments: &[&str]) -> Finished {
    let (python, script) = (python(), script(name));
    let flags = ["--nproc-per-node", ranks, "--no-python", &python, &script];
    run(with_part(launcher(&flags).args(arguments), part))
}

/// That the script ends well on two ranks, and each says of so many cases that they are good.
fn all_good(part: Part, name: &str, arguments: &[&str], cases: usize) {
    let finished = launch("2", part, name, arguments);
    let good = finished.stdout.lines().filter(|line| line.ends_with(": good")).count();
    assert!(finished.code == Some(0) && good == 2 * cases, "{finished:?}");
}

#[test]
fn collectives_and_messages_are_gloos() {
    if is_skipped() {
        return;
    }
    for part in PARTS {
        let finished = launch("3", part, "collectives.py", &[]);
        let is_same = finished.stdout == "same\nsame\nsame\n";
        assert!(finished.code == Some(0) && is_same, "{finished:?}");
    }
}

#[test]
fn ddp_and_fsdp_train_as_over_gloo_under_torchrun() {
    if is_skipped() {
        return;
    }
    for part in PARTS {
        let finished = run(with_part(torchrun().arg(script("training.py")), part));
        assert!(finished.code == Some(0), "{finished:?}");
        let same = finished.stdout.lines().filter(|line| line.ends_with(": same bits"));
        assert_eq!(same.count(), 11, "{finished:?}");
    }
}

#[test]
fn flows_ddp_trains_as_torchs_over_gloo() {
    if !is_skipped() {
        all_good(Part::Cpp, "ddp.py", &[], 44);
    }
}

#[test]
fn what_only_flows_ddp_does() {
    if !is_skipped() {
        all_good(Part::Cpp, "ddp_alone.py", &[], 16);
    }
}

/// Three ranks, one of which has an empty batch, against one process.
#[test]
fn batch_norms_take_the_statistics_of_all_ranks() {
    if is_skipped() {
        return;
    }
    for part in PARTS {
        let finished = launch("3", part, "batchnorm.py", &["flow"]);
        let good = finished.stdout.lines().filter(|line| line.ends_with(": good")).count();
        assert!(finished.code == Some(0) && good == 3 * 9, "{finished:?}");
    }
}

/// Three ranks: gradients are divided before they are summed up.
#[test]
fn flows_ddp_on_three_ranks() {
    if is_skipped() {
        return;
    }
    let cases = ["many buckets", "types", "layouts", "gradients of every kind"];
    let finished = launch("3", Part::Cpp, "ddp.py", &cases);
    let good = finished.stdout.lines().filter(|line| line.ends_with(": good")).count();
    assert!(finished.code == Some(0) && good == 3 * cases.len(), "{finished:?}");
}

#[test]
fn forks_and_memory() {
    if !is_skipped() {
        all_good(Part::Cpp, "forks.py", &[], 8);
    }
}

#[test]
fn what_would_hang_or_give_wrong_data() {
    if !is_skipped() {
        PARTS.into_iter().for_each(|part| all_good(part, "hazards.py", &[], 15));
    }
}

#[test]
fn ranks_that_disagree_where_bytes_are_moved() {
    if !is_skipped() {
        PARTS.into_iter().for_each(|part| all_good(part, "disagreements.py", &[], 18));
    }
}

#[test]
fn interrupts_come_at_once() {
    if is_skipped() {
        return;
    }
    for part in PARTS {
        let folder = tempfile::tempdir().unwrap();
        all_good(part, "interrupts.py", &[folder.path().to_str().unwrap()], 27);
    }
}

/// Without `destroy_process_group`: each rank prints a line in a callback that runs, or begins,
/// after the program's last line.
#[test]
fn the_end_of_the_program_waits_for_callbacks() {
    if is_skipped() {
        return;
    }
    for part in PARTS {
        for (case, said) in [
            ("callback_that_sends", "has answered"),
            ("callback_that_begins_late", "has 2"),
            ("receive_without_a_partner", ""),
            ("callback_that_asks_others", "was asked"),
            ("end_that_is_interrupted", "has ended"),
        ] {
            let finished = launch("2", part, "ending.py", &[case]);
            let expected = match said {
                "" => vec![],
                said => [0, 1].map(|rank| format!("rank {rank} {said}")).to_vec(),
            };
            let is_right = finished.code == Some(0) && finished.sorted_lines() == expected;
            assert!(is_right, "{case}: {finished:?}");
        }
    }
}

#[test]
fn ranks_meet_however_often_they_have_tried() {
    if is_skipped() {
        return;
    }
    for part in PARTS {
        let folder = tempfile::tempdir().unwrap();
        let finished = launch("2", part, "joining.py", &[folder.path().to_str().unwrap()]);
        let good = finished.stdout.lines().filter(|line| line.ends_with(": good")).count();
        assert!(finished.code == Some(0) && good == 2 * 6, "{finished:?}");
    }
}

#[test]
fn timeouts_and_monitored_barrier() {
    if !is_skipped() {
        PARTS.into_iter().for_each(|part| all_good(part, "limits.py", &[], 5));
    }
}

#[test]
fn distributed_checkpoint() {
    if is_skipped() {
        return;
    }
    for part in PARTS {
        let folder = tempfile::tempdir().unwrap();
        let finished = launch("2", part, "checkpoint.py", &[folder.path().to_str().unwrap()]);
        let same = finished.stdout.lines().filter(|line| line.ends_with(": same bits"));
        assert!(finished.code == Some(0) && same.count() == 4, "{finished:?}");
    }
}

#[test]
fn processes_of_mp_spawn() {
    if is_skipped() {
        return;
    }
    let store = std::env::temp_dir().join(job());
    let mut command = Command::new(python());
    let finished = run(with_flow(command.arg(script("spawned.py")).arg(&store)));
    let _ = std::fs::remove_file(store);
    let is_right = finished.stdout == "flow 1.5\n".repeat(2);
    assert!(finished.code == Some(0) && is_right, "{finished:?}");
}

/// Each attempt makes its groups anew; torchrun's agent keeps the store of the first.
#[test]
fn ranks_that_are_started_again_go_on() {
    if is_skipped() {
        return;
    }
    let (python, script) = (python(), script("restarted.py"));
    let mut theirs = torchrun();
    theirs.args(["--max-restarts", "1", "--monitor-interval", "0.1", &script]);
    let flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--no-python", &python, &script];
    for mut start in [theirs, launcher(&flags)] {
        let folder = tempfile::tempdir().unwrap();
        let finished = run(with_flow(start.arg(folder.path())));
        let ends = "attempt 1, from step 3: -9.0\n".repeat(2);
        assert!(finished.code == Some(0) && finished.stdout == ends, "{finished:?}");
    }
}

/// By `MASTER_ADDR`, without a launcher: a launcher would end the other rank.
#[test]
fn a_rank_that_is_killed_is_named() {
    if is_skipped() {
        return;
    }
    let cpp = ["async", "backward", "ddp"].map(|how| (how, Part::Cpp));
    for (how, part) in cpp.into_iter().chain([("backward", Part::Python)]) {
        let store = std::env::temp_dir().join(job());
        let rank = |rank: &str| {
            let mut command = Command::new(python());
            command.arg(script("killed.py")).args([how, store.to_str().unwrap(), rank]);
            with_part(&mut command, part);
            Process::start(command)
        };
        let [first, second] = ["0", "1"].map(rank);
        let first = first.finish(TEST_TIMEOUT);
        assert_eq!(second.finish(TEST_TIMEOUT).code, None);
        assert_eq!(first.code, Some(3), "{first:?}");
        assert_contains(&first.stdout, &["rank 0: all_reduce #", " failed: rank 1 (pid ", "died"]);
        let _ = std::fs::remove_file(store);
    }
}
