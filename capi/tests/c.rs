//! The library from C: programs that are compiled with its header and linked with it.

use std::path::{Path, PathBuf};
use std::process::Command;

use flow_harness::cli::{launcher, run};
use flow_harness::{Process, TEST_TIMEOUT, job, program};

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A program of `tests`, compiled into `folder`.
fn compile(name: &str, folder: &Path) -> PathBuf {
    let library = program("libflow_comm.so");
    let built = folder.join(name);
    let to = library.parent().unwrap().display();
    let mut compiler = Command::new("cc");
    compiler.args(["-x", "c", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"]);
    compiler.arg(here().join("include")).arg(here().join(format!("tests/{name}.c")));
    compiler.arg("-o");
    compiler.arg(&built).args([
        &format!("-L{to}"),
        "-lflow_comm",
        &format!("-Wl,-rpath,{to}"),
        "-lm",
    ]);
    run(&mut compiler).success();
    built
}

#[test]
fn every_function_from_c() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("collectives", folder.path());
    let mut launched =
        launcher(&["--nproc-per-node", "2", "--no-python", program.to_str().unwrap()]);
    let finished = run(launched.env("FLOW_TEST_JOB", job()));
    assert_eq!(finished.sorted_lines(), ["rank 0 is done", "rank 1 is done"], "{finished:?}");

    let job = job();
    let rank = |rank: &str| {
        let mut command = Command::new(&program);
        command.env("RANK", rank).env("WORLD_SIZE", "2").env("TORCHELASTIC_RUN_ID", &job);
        command.arg("killed");
        Process::start(command)
    };
    let [first, second] = ["0", "1"].map(rank);
    assert_eq!(first.finish(TEST_TIMEOUT).success(), "rank 0 is done\n");
    assert_eq!(second.finish(TEST_TIMEOUT).code, None);
}

#[test]
fn a_rank_that_is_started_again_joins_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("elastic", folder.path());
    let flags = ["--nproc-per-node", "3", "--elastic", "in-place", "--max-restarts", "1"];
    let mut launched = launcher(&flags);
    let finished = run(launched.args(["--no-python", program.to_str().unwrap()]));
    let lines = ["rank 0 is done", "rank 1 is done", "rank 2 is done"];
    assert_eq!(finished.sorted_lines(), lines, "{finished:?}");
}

/// The names in `text` that begin with `flow_` and that `ends` follows.
fn functions(text: &str, ends: char) -> Vec<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = text.match_indices("flow_").filter_map(|(at, _)| {
        let is_first = !text[..at].ends_with(is_name);
        let name = text[at..].split(|c| !is_name(c)).next()?;
        (is_first && text[at + name.len()..].starts_with(ends)).then_some(name)
    });
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[test]
fn the_header_declares_what_the_library_has() {
    let header = std::fs::read_to_string(here().join("include/flow_comm.h")).unwrap();
    let (_, code) = header.split_once("*/").unwrap();
    let mut symbols = Command::new("nm");
    symbols.args(["--dynamic", "--defined-only", "--format=posix"]).arg(program("libflow_comm.so"));
    let symbols = run(&mut symbols).success();
    let exported = functions(&symbols, ' ');
    assert!(exported.len() > 20, "{symbols}");
    let declared =
        code.lines().filter(|line| !line.starts_with([' ', '/', '*'])).collect::<Vec<_>>();
    assert_eq!(functions(&declared.join("\n"), '('), exported);
}

#[test]
fn the_header_has_the_codes() {
    let header = std::fs::read_to_string(here().join("include/flow_comm.h")).unwrap();
    let types = flow_comm::DType::ALL.iter().map(|dtype| (dtype.name(), *dtype as u8));
    let ops = flow_comm::ReduceOp::ALL.iter().map(|op| (op.name(), *op as u8));
    // Those of errors are in the library's status.rs only, which C programs cannot ask.
    let status = std::fs::read_to_string(here().join("src/status.rs")).unwrap();
    let errors = status.lines().filter_map(|line| {
        let (name, code) = line.strip_prefix("const ")?.split_once(": c_int = ")?;
        let name = if name == "OK" { name.into() } else { format!("ERROR_{name}") };
        Some((name, code.trim_end_matches(';').parse().unwrap()))
    });
    let names = types.chain(ops).map(|(name, code)| (name.to_uppercase(), code));
    for (name, code) in names.chain(errors) {
        let entry = format!(" FLOW_{name} = {code}");
        let is_whole = |rest: &str| !rest.starts_with(|next: char| next.is_ascii_digit());
        assert!(header.split(&entry).skip(1).any(is_whole), "{entry}");
    }
}
