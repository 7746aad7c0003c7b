//! Ranks that lack something agree on what all of them can use; programs that ask for gloo get flow.

use flow_harness::cli::{launcher, run};
use flow_harness::python::python;
use flow_harness::{Finished, executable};

use crate::{is_skipped, script, with_flow};

/// `parts.py` on so many ranks, with these variables of the first and others of rank 1.
fn parts(ranks: &str, all: &[(&str, &str)], second: &[&str]) -> Finished {
    let (python, script) = (python(), script("parts.py"));
    let flags = ["--nproc-per-node", ranks, "--no-python", &python, &script];
    let mut job = launcher(&flags);
    run(with_flow(job.args(second)).envs(all.iter().copied()))
}

/// That all ranks use the part in Python, of which one line says why: these words.
fn is_pythons(finished: &Finished, ranks: usize, reason: &str) {
    let expected = "flow_torch.fallback [2.0, 2.0, 2.0]\n".replace("2.0", &format!("{ranks}.0"));
    assert_eq!(finished.stdout, expected.repeat(ranks), "{finished:?}");
    let said = "flow_torch: all ranks use the slower part in Python: rank ";
    assert_eq!(finished.stderr.matches(said).count(), 1, "{finished:?}");
    assert!(finished.stderr.contains(reason), "{finished:?}");
}

#[test]
fn a_rank_without_a_compiler() {
    if is_skipped() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let cache = format!("FLOW_CACHE={}", cache.path().display());
    let finished = parts("2", &[], &["CXX=/nonexistent/c++ -pipe", &cache]);
    is_pythons(
        &finished,
        2,
        "rank 1: its C++ part is compiled at first use, and there is no /none",
    );
    let finished = parts("2", &[], &["FLOW_CACHE=here"]);
    is_pythons(&finished, 2, "rank 1: there is no folder for its C++ part: FLOW_CACHE is to be an");
}

/// A compiler that fails when all ranks wait for it. It is not tried again.
#[test]
fn a_compiler_that_fails() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let compiler = folder.path().join("c++");
    let wait =
        "until [ $(ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c \"$FLOW_CACHE.*/lock\") -ge 3 ]";
    executable(
        &compiler,
        format!(
            "#!/bin/sh\n{wait}; do sleep 0.1; done\necho tried >>$0.log\necho 'a.h: error: nothing'\n\
             exit 1\n"
        ),
    );
    let cache = folder.path().join("cache");
    let variables = [("CXX", &compiler), ("FLOW_CACHE", &cache)];
    let finished = parts("3", &variables.map(|(name, path)| (name, path.to_str().unwrap())), &[]);
    is_pythons(
        &finished,
        3,
        "rank 0: its C++ part does not compile: a.h: error: nothing (all that ",
    );
    assert_eq!(std::fs::read_to_string(folder.path().join("c++.log")).unwrap(), "tried\n");
}

#[test]
fn a_rank_without_the_library() {
    if is_skipped() {
        return;
    }
    let missing = "FLOW_COMM_LIBRARY=/nonexistent/libflow_comm.so";
    let reason = "flow_torch: rank 1 cannot join: /nonexistent/libflow_comm.so is missing: ";
    let finished = parts("2", &[], &[missing]);
    assert_eq!(finished.stdout.matches(reason).count(), 2, "{finished:?}");
    // What asked for gloo gets it.
    let variables = [("FLOW_TORCH", "1"), ("PYTHONWARNINGS", "default")];
    let finished = parts("2", &variables, &[missing]);
    let expected = "torch.distributed.distributed_c10d [2.0, 2.0, 2.0]\n".repeat(2);
    assert_eq!(finished.stdout, expected, "{finished:?}");
    let said =
        finished.stderr.matches("FLOW_TORCH=1 has no effect, gloo is used: flow_torch: rank 1");
    assert_eq!(said.count(), 1, "{finished:?}");
}

#[test]
fn what_asks_for_gloo_gets_flow_on_cpus_and_keeps_the_rest() {
    if is_skipped() {
        return;
    }
    let (python, script) = (python(), script("gloo.py"));
    let flags = ["--nproc-per-node", "2", "--no-python", &python, &script];
    let finished = run(with_flow(&mut launcher(&flags)).env("FLOW_TORCH", "1"));
    let flow = "flow flow {'cpu': 'Backend'} 2";
    let both = "cpu:flow,cuda:gloo";
    let expected = [
        format!("GLOO: {flow}"),
        format!("none: {flow}"),
        format!("cpu:gloo: {flow}"),
        format!("a mesh: {flow}"),
        format!("with a GPU: {both} {both} {{'cpu': 'Backend', 'cuda': 'ProcessGroupGloo'}} 2"),
        "cpu:gloo,cuda:nccl: cpu:flow,cuda:nccl".into(),
        "nccl: nccl".into(),
        "cuda:nccl: cuda:nccl".into(),
    ];
    assert_eq!(finished.stdout.lines().collect::<Vec<_>>(), expected, "{finished:?}");
}
