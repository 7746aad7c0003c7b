//! The back-end of torch.distributed over this library: the programs in `pytorch/tests`, with
//! PyTorch as it is, under flow-launch and other launchers.
//!
//! | file | subject |
//! |---|---|
//! | `main` | what the ranks compute, with the part in C++ and with that in Python |
//! | `parts` | ranks that lack something; programs that ask for gloo |
//! | `several` | programs that share a job |
//! | `machines` | how ranks on several machines meet |
//! | `changing` | groups whose ranks change |
//! | `from_others` | the programs of docs/from-others.md |
//! | `wheel` | the wheel, installed, under each launcher and library |

mod changing;
mod from_others;
mod machines;
mod parts;
mod several;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use flow_harness::cli::{launcher, run};
use flow_harness::python::{have, python, startup};
use flow_harness::{
    Finished, Process, TEST_TIMEOUT, assert_contains, job, once_in_a_run, program, root,
};
use several::{Several, words_of};

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
    if error.contains("there is no") {
        return Err(error.to_owned());
    }
    Ok(())
}

fn script(name: &str) -> String {
    root().join("pytorch/tests").join(name).display().to_string()
}

/// With flow_torch as it is in the checkout, compiled once for all tests.
fn with_flow(command: &mut Command) -> &mut Command {
    let path = [startup(), root().join("pytorch")];
    command
        .env("FLOW_CACHE", cache())
        .env("FLOW_COMM_LIBRARY", program("libflow_comm.so"))
        .env("PYTHONPATH", std::env::join_paths(path).unwrap())
        .env("OMP_NUM_THREADS", "1")
        .env("PYTHONWARNINGS", "ignore")
        // Else PyTorch 2.15 leaves a file in the user's cache where an operation fails.
        .env("TORCH_FR_DUMP_ON_TIMEOUT", "0")
}

/// What a program has, beside that, for this part.
fn variables(part: Part) -> Vec<(&'static str, PathBuf)> {
    match part {
        Part::Cpp => vec![],
        Part::Python => {
            vec![("CXX", "/nonexistent/c++".into()), ("FLOW_CACHE", cache().join("nothing"))]
        }
    }
}

/// Where the part in C++ is kept.
fn cache() -> PathBuf {
    program("libflow_comm.so").ancestors().nth(2).unwrap().join("tmp/flow_torch")
}

/// For two ranks.
fn torchrun() -> Command {
    let mut command = Command::new(python());
    command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]);
    // Else it asks for this machine's name, which a container may not know.
    command.args(["--local-addr", "127.0.0.1"]);
    command
}

/// What the programs print, each with both parts, on so many ranks under flow-launch.
fn with_both_parts(ranks: usize, programs: &[(&str, &[&str])]) -> Vec<Finished> {
    let mut several = Several::new();
    for (name, arguments) in programs {
        PARTS.into_iter().for_each(|part| several.add(part, &[], name, arguments));
    }
    several.launched(ranks)
}

/// The lines that a program prints, but for those that say why a case did not run: the test prints
/// these, and here is their number.
fn lines_and_skipped(printed: &Finished) -> (Vec<&str>, usize) {
    let (mut skipped, lines): (Vec<&str>, Vec<&str>) =
        printed.stdout.lines().partition(|line| line.starts_with("SKIPPED: "));
    let count = skipped.len();
    skipped.sort_unstable();
    skipped.dedup();
    skipped.iter().for_each(|line| println!("{line}"));
    (lines, count)
}

/// That each of so many ranks says of so many cases that they are good, or why it cannot run them.
fn all_good(printed: &Finished, ranks: usize, cases: usize) {
    let (lines, skipped) = lines_and_skipped(printed);
    let good = lines.iter().filter(|line| line.ends_with(": good")).count();
    assert_eq!(good + skipped, ranks * cases, "{printed:?}");
}

#[test]
fn collectives_and_messages_are_gloos() {
    if is_skipped() {
        return;
    }
    for printed in with_both_parts(3, &[("collectives.py", &[])]) {
        assert_eq!(lines_and_skipped(&printed).0, ["same"; 3], "{printed:?}");
    }
}

#[test]
fn all_reduces_without_what_surrounds_them() {
    if is_skipped() {
        return;
    }
    for printed in with_both_parts(3, &[("at_once.py", &[])]) {
        assert_eq!(lines_and_skipped(&printed).0, ["same"; 3], "{printed:?}");
    }
}

#[test]
fn ddp_and_fsdp_train_as_over_gloo_under_torchrun() {
    if is_skipped() {
        return;
    }
    let mut several = Several::new();
    PARTS.into_iter().for_each(|part| several.add(part, &[], "training.py", &[]));
    several.is_good(2, run(with_flow(torchrun().args(several.words()))));
    for printed in several.printed(2) {
        let same = printed.stdout.lines().filter(|line| line.ends_with(": same bits"));
        assert_eq!(same.count(), 11, "{printed:?}");
    }
}

/// Three ranks, one of which has an empty batch, against one process.
#[test]
fn batch_norms_take_the_statistics_of_all_ranks() {
    if is_skipped() {
        return;
    }
    let printed = with_both_parts(3, &[("batchnorm.py", &["flow"])]);
    printed.iter().for_each(|printed| all_good(printed, 3, 9));
}

/// Three ranks: gradients are divided before they are summed up.
#[test]
fn flows_ddp_on_three_ranks() {
    if is_skipped() {
        return;
    }
    let cases = [
        "many buckets",
        "types",
        "layouts",
        "gradients of every kind",
        "uneven inputs",
        "uneven inputs, fp16 hook",
        "fp16 hook, two types",
        "post-local SGD",
        "optimizer in backward",
        "top-k, error feedback",
        "8 bits per channel, exact",
        "mixed precision",
        "mixed precision, float16",
        "mixed precision, uneven inputs",
    ];
    let mut several = Several::new();
    several.add(Part::Cpp, &[], "ddp.py", &cases);
    all_good(&several.launched(3)[0], 3, cases.len());
}

/// In pairs, as subgroups of four ranks.
#[test]
fn flows_ddp_in_subgroups() {
    if is_skipped() {
        return;
    }
    let cases = ["post-local SGD, pairs", "uneven inputs, post-local SGD"];
    let mut several = Several::new();
    several.add(Part::Cpp, &[], "ddp.py", &cases);
    all_good(&several.launched(4)[0], 4, cases.len());
}

/// What flow's own DDP does as PyTorch's over gloo and what only it does; and what could go wrong
/// with shared memory.
#[test]
fn flows_ddp_and_its_memory() {
    if is_skipped() {
        return;
    }
    let programs = [("ddp.py", 142), ("ddp_alone.py", 27), ("forks.py", 8)];
    let mut several = Several::new();
    for (name, _) in programs {
        several.add(Part::Cpp, &[], name, &[]);
    }
    for (printed, (_, cases)) in several.launched(2).iter().zip(programs) {
        all_good(printed, 2, cases);
    }
}

#[test]
fn what_would_hang_or_give_wrong_data() {
    if is_skipped() {
        return;
    }
    let programs = [("hazards.py", 17), ("disagreements.py", 41), ("limits.py", 5)];
    let printed = with_both_parts(2, &programs.map(|(name, _)| (name, &[][..])));
    for (printed, (_, cases)) in printed.chunks(PARTS.len()).zip(programs) {
        printed.iter().for_each(|printed| all_good(printed, 2, cases));
    }
}

/// Also without `destroy_process_group`: each rank prints a line in a callback that runs, or begins,
/// after the program's last line.
#[test]
fn interrupts_come_at_once_and_the_end_waits_for_callbacks() {
    if is_skipped() {
        return;
    }
    let folders = PARTS.map(|_| tempfile::tempdir().unwrap());
    let ends = [
        ("callback_that_sends", "has answered"),
        ("callback_that_begins_late", "has 2"),
        ("receive_without_a_partner", ""),
        ("callback_that_asks_others", "was asked"),
        ("callback_that_waits_for_a_future", "has 2"),
        ("end_that_is_interrupted", "has ended"),
    ];
    let mut several = Several::new();
    for (part, folder) in PARTS.into_iter().zip(&folders) {
        several.add(part, &[], "interrupts.py", &[folder.path().to_str().unwrap()]);
        for (case, _) in ends {
            several.add(part, &[], "ending.py", &[case]);
        }
    }
    for printed in several.launched(2).chunks(1 + ends.len()) {
        all_good(&printed[0], 2, 27);
        for (printed, (case, said)) in printed[1..].iter().zip(ends) {
            let expected = match said {
                "" => vec![],
                said => [0, 1].map(|rank| format!("rank {rank} {said}")).to_vec(),
            };
            assert_eq!(printed.sorted_lines(), expected, "{case}: {printed:?}");
        }
    }
}

#[test]
fn ranks_meet_however_often_they_have_tried() {
    if is_skipped() {
        return;
    }
    let folders = PARTS.map(|_| tempfile::tempdir().unwrap());
    let mut several = Several::new();
    for (part, folder) in PARTS.into_iter().zip(&folders) {
        several.add(part, &[], "joining.py", &[folder.path().to_str().unwrap()]);
    }
    several.launched(2).iter().for_each(|printed| all_good(printed, 2, 5));
}

#[test]
fn distributed_checkpoint() {
    if is_skipped() {
        return;
    }
    let folders = PARTS.map(|_| tempfile::tempdir().unwrap());
    let mut several = Several::new();
    for (part, folder) in PARTS.into_iter().zip(&folders) {
        several.add(part, &[], "checkpoint.py", &[folder.path().to_str().unwrap()]);
    }
    for printed in several.launched(2) {
        let same = printed.stdout.lines().filter(|line| line.ends_with(": same bits"));
        assert_eq!(same.count(), 4, "{printed:?}");
    }
}

#[test]
fn checkpoints_beside_the_training() {
    if is_skipped() {
        return;
    }
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [by_cpp, by_python, by_processes] =
        folders.each_ref().map(|folder| folder.path().to_str().unwrap());
    let mut several = Several::new();
    several.add(Part::Cpp, &[], "checkpoint_async.py", &[by_cpp, "threads"]);
    several.add(Part::Python, &[], "checkpoint_async.py", &[by_python, "threads"]);
    let printed = several.launched(2);
    printed.iter().for_each(|printed| all_good(printed, 2, 4));

    // PyTorch starts its processes from the program's file.
    let (python, script) = (python(), script("checkpoint_async.py"));
    let mut job = launcher(&["--nproc-per-node", "2", "--no-python", &python, &script]);
    let finished = run(with_flow(job.args([by_processes, "processes"])).env("FLOW_TORCH", "1"));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    all_good(&finished, 2, 2);
}

/// The first attempts are killed while they write, one of each kind of model.
#[test]
fn ranks_killed_in_a_save_find_the_checkpoint_before() {
    if is_skipped() {
        return;
    }
    let (python, script) = (python(), script("checkpoint_async.py"));
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--nproc-per-node", "2", "--max-restarts", "2", "--no-python", &python, &script];
    let finished = run(with_flow(launcher(&flags).arg(folder.path()).arg("killed")));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    // The last attempt finds what the first one has saved, too.
    all_good(&finished, 2, 3);
}

/// The first attempt is killed while it writes to the memory, the second one while it writes to the disk.
#[test]
fn killed_ranks_go_on_from_the_launchers_memory() {
    if is_skipped() {
        return;
    }
    let (python, script) = (python(), script("checkpoint_memory.py"));
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--nproc-per-node", "2", "--max-restarts", "2", "--no-python", &python, &script];
    let finished = run(with_flow(launcher(&flags).arg(folder.path())));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stderr.matches("was killed by signal 9").count(), 2, "{finished:?}");
    all_good(&finished, 2, 10);
}

/// In turn, at any moment.
#[test]
fn ranks_killed_in_a_save_in_memory_find_it_or_the_one_before() {
    if is_skipped() {
        return;
    }
    let (python, script) = (python(), script("checkpoint_memory_killed.py"));
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--nproc-per-node", "2", "--max-restarts", "5", "--no-python", &python, &script];
    let finished = run(with_flow(launcher(&flags).arg(folder.path()).arg("6")));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    all_good(&finished, 2, 5);
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

/// `killed.py` as this rank, with these cases.
fn killed(store: &Path, rank: usize, cases: &[&str]) -> Command {
    let mut command = Command::new(python());
    command.arg(script("killed.py")).arg(store).arg(rank.to_string()).args(cases);
    with_flow(&mut command);
    command
}

/// That the first rank has named the second in each of these cases, and said this of it.
fn is_named([first, second]: [Finished; 2], cases: &[&str], said: &str) {
    let mut rest = first.stdout.as_str();
    for how in cases {
        let (error, after) =
            rest.split_once(&format!("{how}: 3\n")).unwrap_or_else(|| panic!("{how}: {first:?}"));
        assert_contains(error, &["rank 0: all_reduce #", " failed: rank 1 (pid ", said]);
        rest = after;
    }
    let ends: String = cases.iter().map(|how| format!("{how}: -9\n")).collect();
    assert_eq!(second.stdout, ends, "{second:?}");
}

/// By a file, without a launcher: a launcher would end the other rank.
#[test]
fn a_rank_that_is_killed_is_named() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let of_python = words_of(Part::Python);
    let cases = ["async", "backward", "ddp", "backward"];
    let mut words = cases.to_vec();
    words.splice(3..3, of_python.iter().map(String::as_str));
    let ranks =
        [0, 1].map(|rank| Process::start(killed(&folder.path().join("store"), rank, &words)));
    is_named(ranks.map(|rank| rank.finish(TEST_TIMEOUT)), &cases, "died");
}
