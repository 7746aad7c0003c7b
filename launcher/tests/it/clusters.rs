//! What docs/clusters.md shows works: its sbatch script and its manifests are read from there and
//! run with two agents on this machine, in the environment that the scheduler would make.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use flow_harness::cli::run;
use flow_harness::{
    Finished, Process, TEST_TIMEOUT, executable, free_port, is_free_port, program, root,
};
use tempfile::{TempDir, tempdir};

/// The code blocks of this language in the page, in order.
fn blocks(language: &str) -> Vec<String> {
    let page = fs::read_to_string(root().join("docs/clusters.md")).unwrap();
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|part| part.split("```").next().unwrap().to_owned()).collect()
}

/// A folder for PATH with `my-training`, which says its place, and what else is given.
fn commands(others: &[(&str, &str)]) -> TempDir {
    let folder = tempdir().unwrap();
    let place =
        "echo \"rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $GROUP_RANK\"";
    for (name, text) in [&[("my-training", place)], others].concat() {
        executable(folder.path().join(name), format!("#!/bin/bash\n{text}\n"));
    }
    folder
}

/// PATH with these commands and flow-launch before all others. flow-launch lies among them, as it
/// prefers programs beside it, and target/release may have a `my-training` of another test.
fn path(folder: &Path) -> String {
    executable(folder.join("flow-launch"), fs::read(program("flow-launch")).unwrap());
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

/// Two nodes of two workers each have run.
fn assert_places(stdout: &str) {
    let mut lines: Vec<&str> = stdout.lines().collect();
    lines.sort_unstable();
    let places = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)];
    let places =
        places.map(|(rank, local, node)| format!("rank {rank} of 4, {local} of 2, node {node}"));
    assert_eq!(lines, places);
}

#[test]
fn the_sbatch_script_starts_an_agent_on_each_node() {
    let script = blocks("bash").remove(0);
    // A job id whose port is free: the script makes the port from it.
    let id = (20_000..30_000).find(|port| is_free_port(*port)).unwrap() - 20_000;
    let id = id.to_string();
    let tasks = "for SLURM_NODEID in 0 1; do export SLURM_NODEID; \"${@:2}\" & pids+=($!); done\n\
                 for pid in ${pids[@]}; do wait $pid || exit; done";
    let folder = commands(&[("scontrol", "echo 127.0.0.1; echo other-node"), ("srun", tasks)]);
    let file = folder.path().join("my-training.sbatch");
    fs::write(&file, script).unwrap();
    let mut sbatch = Command::new("bash");
    sbatch.arg(file).env("PATH", path(folder.path())).env("OMP_NUM_THREADS", "1");
    let slurm =
        [("NNODES", "2"), ("JOB_ID", &id), ("JOB_NODELIST", "n[1-2]"), ("GPUS_ON_NODE", "2")];
    sbatch.envs(slurm.map(|(name, value)| (format!("SLURM_{name}"), value)));
    let finished = run(&mut sbatch);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_places(&finished.stdout);
}

/// What a manifest says after `name:`, wherever it is.
fn value<'a>(manifest: &'a str, name: &str) -> &'a str {
    let mut values = manifest.lines().filter_map(|line| line.trim().strip_prefix(name));
    let found = values.find_map(|rest| rest.strip_prefix(": "));
    found.unwrap_or_else(|| panic!("no {name} in {manifest}")).trim_matches('"')
}

/// `command: [...]` of a manifest.
fn command(manifest: &str) -> Vec<String> {
    let list = value(manifest, "command").trim_matches(['[', ']']);
    list.split(", ").map(|word| word.trim_matches('"').to_owned()).collect()
}

/// Runs the manifest's command once a node, with these variables beside those of `node`.
fn pods(
    manifest: &str,
    common: &BTreeMap<String, String>,
    node: impl Fn(usize) -> Vec<(&'static str, String)>,
) {
    let folder = commands(&[]);
    let path = path(folder.path());
    let words = command(manifest);
    let start = |number: usize| {
        let mut pod = Command::new(&words[0]);
        pod.args(&words[1..]).env("PATH", &path).env("OMP_NUM_THREADS", "1");
        Process::start({
            pod.envs(common).env("FLOW_TOKEN", "secret").envs(node(number));
            pod
        })
    };
    let ends: Vec<Finished> =
        [1, 0].map(start).into_iter().map(|pod| pod.finish(TEST_TIMEOUT)).collect();
    let stdout: String = ends.into_iter().map(|end| end.success()).collect();
    assert_places(&stdout);
}

#[test]
fn the_indexed_job_has_what_flow_launch_reads() {
    let manifest = &blocks("yaml")[0];
    let variables = manifest.lines().filter_map(|line| {
        let (name, value) =
            line.trim().strip_prefix("- {name: ")?.strip_suffix('}')?.split_once(", value: ")?;
        Some((name.to_owned(), value.trim_matches('"').to_owned()))
    });
    let mut variables: BTreeMap<String, String> = variables.collect();
    let name = value(manifest, "subdomain");
    assert_eq!(variables["PET_MASTER_ADDR"], format!("{name}-0.{name}"), "the first pod's name");
    assert_eq!(variables["PET_NNODES"], value(manifest, "completions"));
    assert_eq!(variables["PET_NNODES"], value(manifest, "parallelism"));
    for secret in ["PET_NODE_RANK", "FLOW_TOKEN"] {
        assert!(manifest.contains(&format!("- name: {secret}\n          valueFrom: ")), "{secret}");
    }
    variables.insert("PET_MASTER_ADDR".into(), "127.0.0.1".into());
    variables.insert("PET_MASTER_PORT".into(), free_port().to_string());
    pods(manifest, &variables, |index| vec![("PET_NODE_RANK", index.to_string())]);
}

/// The variables are those of the training operator's `setPodEnv`.
#[test]
fn a_pytorchjob_has_what_flow_launch_reads() {
    let manifest = &blocks("yaml")[1];
    let replicas = manifest.lines().filter_map(|line| line.trim().strip_prefix("replicas: "));
    let nodes: usize = replicas.map(|number| number.parse::<usize>().unwrap()).sum();
    let workers: usize = value(manifest, "nprocPerNode").parse().unwrap();
    let port = free_port();
    let common = [
        ("PYTHONUNBUFFERED", "1".to_owned()),
        ("MASTER_PORT", port.to_string()),
        ("PET_MASTER_PORT", port.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("PET_MASTER_ADDR", "127.0.0.1".to_owned()),
        ("WORLD_SIZE", (nodes * workers).to_string()),
        ("PET_NPROC_PER_NODE", workers.to_string()),
        ("PET_NNODES", nodes.to_string()),
    ];
    let common = common.map(|(name, value)| (name.to_owned(), value)).into();
    pods(manifest, &common, |rank| {
        vec![("RANK", rank.to_string()), ("PET_NODE_RANK", rank.to_string())]
    });
}
