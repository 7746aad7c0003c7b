//! How workers are started: command, arguments, environment.

use flow_harness::cli::{Running, launcher, run, script};
use flow_harness::{executable, free_port, is_free_port};

use std::fs;
use std::process::Command;

#[test]
fn environment_of_one_node() {
    let names =
        "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $NODE_RANK $MASTER_ADDR";
    let finished = run(&mut script("--nproc_per_node 3", &format!("echo {names}")));
    assert_eq!(finished.code, Some(0));
    assert_eq!(finished.stderr, "");
    let lines = ["0 0 3 3 0 0 127.0.0.1", "1 1 3 3 0 0 127.0.0.1", "2 2 3 3 0 0 127.0.0.1"];
    assert_eq!(finished.sorted_lines(), lines);
}

#[test]
fn workers_share_a_port_a_store_and_a_token() {
    let finished =
        run(&mut script("--nproc_per_node 2", "echo $MASTER_PORT $FLOW_STORE $FLOW_TOKEN"));
    let lines = finished.sorted_lines();
    assert_eq!(lines[0], lines[1]);
    let words: Vec<_> = lines[0].split(' ').collect();
    assert!(words[0].parse::<u16>().unwrap() > 0);
    assert!(words[1].starts_with("tcp://127.0.0.1:"));
    assert_eq!(words[2].len(), 32);
    assert_ne!(
        lines,
        run(&mut script("--nproc_per_node 2", "echo $MASTER_PORT $FLOW_STORE $FLOW_TOKEN"))
            .sorted_lines()
    );
}

/// As users number them.
#[test]
fn two_jobs_at_ports_side_by_side() {
    let mut ports = (20_000..30_000).step_by(2);
    let port = ports.find(|port| is_free_port(*port) && is_free_port(port + 1)).unwrap();
    let node = |job: u16, rank: u32| {
        let flags = format!(
            "--nnodes 2 --node-rank {rank} --master-addr 127.0.0.1 --master-port {}",
            port + job
        );
        Running::start(&mut script(&flags, "echo $MASTER_PORT $FLOW_STORE; sleep 0.3"))
    };
    for (job, agent) in [(0, node(0, 0)), (1, node(1, 0)), (0, node(0, 1)), (1, node(1, 1))] {
        let finished = agent.finish();
        let line = format!("{0} tcp://127.0.0.1:{0}\n", port + job);
        assert_eq!((finished.code, finished.stdout), (Some(0), line), "{}", finished.stderr);
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let finished = run(&mut script(&format!("--master-port {port}"), "true"));
    assert_eq!((finished.code, finished.stderr.lines().count()), (Some(1), 1), "{finished:?}");
    assert!(
        finished.stderr.contains(&format!("port {port}"))
            && finished.stderr.contains("--master-port")
    );
    // It says that there is one node, whatever the environment of several has left.
    let flags = format!("--standalone --master-addr 192.0.2.1 --master-port {port}");
    let finished = run(&mut script(&flags, "echo $MASTER_ADDR"));
    assert_eq!((finished.code, &*finished.stdout, &*finished.stderr), (Some(0), "127.0.0.1\n", ""));
}

#[test]
fn an_address_of_another_machine_is_a_warning() {
    let finished = run(&mut script("--master-addr 192.0.2.1", "echo $MASTER_ADDR"));
    assert_eq!((finished.code, &*finished.stdout), (Some(0), "192.0.2.1\n"));
    assert_eq!(finished.stderr.lines().count(), 1, "{}", finished.stderr);
    assert!(
        finished.stderr.contains("192.0.2.1 is no address of this host"),
        "{}",
        finished.stderr
    );
}

#[test]
fn three_nodes_meet_at_the_first() {
    let port = free_port();
    let names = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $NODE_RANK \
                 $MASTER_ADDR $MASTER_PORT";
    let node = |rank: u32| {
        let flags = format!(
            "--nnodes 3 --node-rank={rank} --nproc-per-node 2 --master-addr 127.0.0.1 \
             --master-port {port}"
        );
        // A store that happens to be in the environment is not this job's.
        let mut command = script(&flags, &format!("echo {names} ${{FLOW_STORE%:*}}"));
        Running::start(command.env("FLOW_STORE", "tcp://old:1"))
    };
    let nodes = [2, 1, 0].map(node).map(Running::finish);
    for (node, finished) in [2, 1, 0].iter().zip(&nodes) {
        let line = |local: u32| {
            format!(
                "{} {local} 6 2 {node} {node} 127.0.0.1 {port} tcp://127.0.0.1",
                2 * node + local
            )
        };
        assert_eq!(
            (finished.code, finished.sorted_lines()),
            (Some(0), vec![&*line(0), &*line(1)]),
            "{finished:?}"
        );
    }
}

#[test]
fn omp_threads_are_chosen_and_said_once() {
    let line =
        |flags: &str| run(script(flags, "echo $OMP_NUM_THREADS").env_remove("OMP_NUM_THREADS"));
    let several = line("--nproc_per_node 64");
    assert_eq!(several.stderr.matches("OMP_NUM_THREADS=").count(), 1, "{}", several.stderr);
    assert_eq!(several.stderr.lines().count(), 1);
    assert!(several.sorted_lines().iter().all(|threads| threads.parse::<u32>().unwrap() >= 1));
    let one = line("");
    assert_eq!((one.stdout.as_str(), one.stderr.as_str()), ("\n", ""));
    let chosen =
        run(script("--nproc_per_node 2", "echo $OMP_NUM_THREADS").env("OMP_NUM_THREADS", "7"));
    assert_eq!((chosen.stdout.as_str(), chosen.stderr.as_str()), ("7\n7\n", ""));
}

#[test]
fn arguments_of_the_program_are_untouched() {
    let arguments = ["--nproc_per_node", "9", "--", "--help", "", "a b", "*", "-x=\"1\""];
    let finished = run(launcher(&["printf", "<%s>"]).args(arguments));
    assert_eq!(finished.stdout, "<--nproc_per_node><9><--><--help><><a b><*><-x=\"1\">");
    let escaped =
        run(&mut launcher(&["--nproc_per_node", "1", "--", "printf", "<%s>", "--", "-1"]));
    assert_eq!(escaped.stdout, "<--><-1>");
}

#[test]
fn programs_by_path_beside_and_on_path() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        executable(&path, text);
        path
    };
    let by_path = write("tool", "#!/bin/sh\necho by path");
    assert_eq!(run(&mut launcher(&[by_path.to_str().unwrap()])).stdout, "by path\n");
    assert_eq!(run(launcher(&["./tool"]).current_dir(&folder)).stdout, "by path\n");
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    assert_eq!(run(launcher(&["tool"]).env("PATH", &path)).stdout, "by path\n");
    let hint = run(launcher(&["tool"]).current_dir(&folder));
    assert!(hint.code == Some(2) && hint.stderr.contains("write ./tool"), "{hint:?}");

    // Beside flow-launch comes before PATH.
    let bin = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::hard_link(env!("CARGO_BIN_EXE_flow-launch"), bin.path().join("flow-launch")).unwrap();
    executable(bin.path().join("tool"), "#!/bin/sh\necho beside");
    let finished = run(Command::new(bin.path().join("flow-launch")).arg("tool").env("PATH", &path));
    assert_eq!(finished.stdout, "beside\n", "{finished:?}");
}

#[test]
fn python_scripts_run_unbuffered() {
    let folder = tempfile::tempdir().unwrap();
    let text = "import sys, os\nprint(os.environ['RANK'], sys.argv[1:], sys.stdout.write_through, \
                flush=False)\n";
    fs::write(folder.path().join("train.py"), text).unwrap();
    let finished = run(launcher(&["train.py", "--lr", "1"]).current_dir(&folder));
    assert_eq!(finished.stdout, "0 ['--lr', '1'] True\n", "{finished:?}");
}

#[test]
fn what_cannot_be_executed_is_said_by_the_worker() {
    let folder = tempfile::tempdir().unwrap();
    for (text, code, hint) in
        [("#!/no/such/interpreter\n", 127, "interpreter"), ("#!/tmp\n", 126, "denied")]
    {
        let path = folder.path().join("tool");
        executable(&path, text);
        let finished = run(&mut launcher(&[path.to_str().unwrap()]));
        assert_eq!(finished.code, Some(code), "{finished:?}");
        assert!(
            finished.stderr.contains("cannot run") && finished.stderr.contains(hint),
            "{}",
            finished.stderr
        );
    }
}

#[test]
fn workers_have_no_stdin_and_inherit_no_blocked_signals() {
    let finished = run(&mut script("", "cat; grep SigBlk /proc/self/status"));
    assert_eq!(finished.stdout, "SigBlk:\t0000000000000000\n");
}

#[test]
fn too_few_descriptors_are_reported() {
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -n 20; exec \"$0\" --nproc_per_node 50 sleep 1000",
        env!("CARGO_BIN_EXE_flow-launch"),
    ]);
    command.env("OMP_NUM_THREADS", "1");
    let finished = run(&mut command);
    assert_eq!((finished.code, finished.stderr.lines().count()), (Some(1), 1), "{finished:?}");
    assert!(
        finished.stderr.contains("cannot start rank ") && finished.stderr.contains("ulimit -n"),
        "{finished:?}"
    );
}
