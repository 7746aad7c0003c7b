//! Ranks that lack something agree on what all of them can use; programs that ask for gloo get flow.

use flow_harness::cli::{launcher, run};
use flow_harness::python::python;
use flow_harness::{Finished, executable};

use crate::several::Several;
use crate::{Part, is_skipped, script, with_flow};

const RANKS: usize = 3;

/// That all ranks use the part in Python, of which one line says why: these words.
fn is_pythons(printed: &Finished, reason: &str) {
    let expected = "flow_torch.fallback [3.0, 3.0, 3.0]\n".repeat(RANKS);
    assert_eq!(printed.stdout, expected, "{printed:?}");
    let said = "flow_torch: all ranks use the slower part in Python: rank ";
    assert_eq!(printed.stderr.matches(said).count(), 1, "{printed:?}");
    assert!(printed.stderr.contains(reason), "{printed:?}");
}

/// That no rank joins without the library.
fn is_an_error(printed: &Finished) {
    let reason = "flow_torch: rank 1 cannot join: /nonexistent/libflow_comm.so is missing: ";
    assert_eq!(printed.stdout.matches(reason).count(), RANKS, "{printed:?}");
}

/// That what asked for gloo gets it without the library.
fn is_gloo(printed: &Finished) {
    let expected = "torch.distributed.distributed_c10d [3.0, 3.0, 3.0]\n".repeat(RANKS);
    assert_eq!(printed.stdout, expected, "{printed:?}");
    let said = "FLOW_TORCH=1 has no effect, gloo is used: flow_torch: rank 1";
    assert_eq!(printed.stderr.matches(said).count(), 1, "{printed:?}");
}

/// A compiler, the library, a folder to compile in. A compiler that fails does so when all ranks wait
/// for it, and is not tried again.
#[test]
fn ranks_that_lack_something() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (compiler, cache, empty) =
        (folder.path().join("c++"), folder.path().join("cache"), folder.path().join("empty"));
    let wait =
        "until [ $(ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c \"$FLOW_CACHE.*/lock\") -ge 3 ]";
    executable(
        &compiler,
        format!(
            "#!/bin/sh\n{wait}; do sleep 0.1; done\necho tried >>$0.log\necho 'a.h: error: nothing'\n\
             exit 1\n"
        ),
    );
    let fails = [("CXX", compiler.to_str().unwrap()), ("FLOW_CACHE", cache.to_str().unwrap())];
    let empty = format!("FLOW_CACHE={}", empty.display());
    let missing = "FLOW_COMM_LIBRARY=/nonexistent/libflow_comm.so";

    let mut several = Several::new();
    let mut add = |all: &[(&str, &str)], second: &[&str]| {
        several.add(Part::Cpp, all, "parts.py", second);
    };
    add(&[], &["CXX=/nonexistent/c++ -pipe", &empty]);
    add(&[], &["FLOW_CACHE=here"]);
    add(&fails, &[]);
    add(&[], &[missing]);
    add(&[("FLOW_TORCH", "1")], &[missing]);
    let printed = several.launched(RANKS);

    is_pythons(&printed[0], "rank 1: its C++ part is compiled at first use, and there is no /none");
    is_pythons(&printed[1], "rank 1: there is no folder for its C++ part: FLOW_CACHE is to be an");
    is_pythons(
        &printed[2],
        "rank 0: its C++ part does not compile: a.h: error: nothing (all that ",
    );
    assert_eq!(std::fs::read_to_string(folder.path().join("c++.log")).unwrap(), "tried\n");
    is_an_error(&printed[3]);
    is_gloo(&printed[4]);
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
