//! What flags and variables do to the workers.

use flow_harness::cli::{launcher, run, script};
use flow_harness::executable;

use std::fs;
use std::process::Command;

#[test]
fn variables_stand_in_for_flags() {
    let mut command = script("", "echo $RANK $ROLE_NAME $TORCHELASTIC_MAX_RESTARTS");
    command.env("PET_NPROC_PER_NODE", "2").env("PET_ROLE", "actor").env("PET_MAX_RESTARTS", "3");
    assert_eq!(run(&mut command).sorted_lines(), ["0 actor 3", "1 actor 3"]);
    let finished =
        run(script("--role critic --nproc 1", "echo $RANK $ROLE_NAME")
            .env("PET_NPROC_PER_NODE", "2"));
    assert_eq!(finished.stdout, "0 critic\n");
}

#[test]
fn the_environment_is_torchruns() {
    let names = "$GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE $ROLE_NAME $TORCHELASTIC_RESTART_COUNT \
                 $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_USE_AGENT_STORE $TORCHELASTIC_RUN_ID \
                 $TORCH_NCCL_ASYNC_ERROR_HANDLING $TORCHELASTIC_SIGNALS_TO_HANDLE";
    let flags = "--nproc_per_node 2 --rdzv-id job7 --signals-to-handle TERM,USR1";
    let finished =
        run(script(flags, &format!("echo {names}")).env_remove("TORCH_NCCL_ASYNC_ERROR_HANDLING"));
    let lines = [
        "1 0 2 default 0 0 True job7 1 SIGTERM,SIGUSR1",
        "1 1 2 default 0 0 True job7 1 SIGTERM,SIGUSR1",
    ];
    assert_eq!(finished.sorted_lines(), lines, "{finished:?}");
    let finished =
        run(script("", &format!("echo {names}")).env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"));
    assert!(finished.stdout.contains(" 0 SIGTERM,SIGINT,SIGHUP,SIGQUIT"), "{finished:?}");
}

#[test]
fn jobs_of_one_node_have_ids_of_their_own() {
    let id = |flags: &str| run(&mut script(flags, "echo $TORCHELASTIC_RUN_ID")).stdout;
    let first = id("--standalone --rdzv-id mine");
    assert_eq!(first.len(), 37, "{first}");
    assert_ne!(first, id("--standalone --rdzv-id mine"));
}

#[test]
fn local_rank_in_arguments() {
    let finished = run(&mut launcher(&[
        "--nproc_per_node",
        "2",
        "echo",
        "${local_rank}.log",
        "${rank}",
        "$$",
    ]));
    assert_eq!(finished.sorted_lines(), ["0.log ${rank} $$", "1.log ${rank} $$"]);
}

#[test]
fn virtual_local_ranks_see_one_gpu_each() {
    let text = "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES";
    let mut command = script("--nproc_per_node 2 --virtual-local-rank", text);
    assert_eq!(run(command.env_remove("CUDA_VISIBLE_DEVICES")).sorted_lines(), ["0 0 0", "1 0 1"]);
    assert_eq!(run(command.env("CUDA_VISIBLE_DEVICES", "6,3")).sorted_lines(), ["0 0 6", "1 0 3"]);
    let finished = run(command.env("CUDA_VISIBLE_DEVICES", "6"));
    assert!(
        finished.code == Some(2) && finished.stderr.contains("CUDA_VISIBLE_DEVICES names 1"),
        "{finished:?}"
    );
}

#[test]
fn oneflows_log_folder_is_in_the_environment() {
    let finished = run(&mut script("--nproc_per_node 2 --logdir /x/log", "echo $GLOG_log_dir"));
    assert_eq!(finished.sorted_lines(), ["/x/log/local_rank_0", "/x/log/local_rank_1"]);
}

#[test]
fn python_by_name_by_flag_and_as_a_module() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["train.py", "train"] {
        let text = "import sys\nprint(__name__, sys.argv[1:], sys.stdout.write_through)\n";
        fs::write(folder.path().join(name), text).unwrap();
    }
    for name in ["shell.py", "other"] {
        executable(folder.path().join(name), "#!/bin/sh\necho other \"$@\"\n");
    }
    let stdout = |arguments: &[&str]| run(launcher(arguments).current_dir(&folder)).stdout;
    for arguments in
        [["--run-path", "train", "x"].as_slice(), &["train.py", "x"], &["-m", "train", "x"]]
    {
        assert_eq!(stdout(arguments), "__main__ ['x'] True\n", "{arguments:?}");
    }
    assert_eq!(stdout(&["--run-path", "--no-python", "train", "x"]), "__main__ ['x'] True\n");
    assert_eq!(stdout(&["--no-python", "./shell.py", "x"]), "other x\n");
    let python = folder.path().join("other");
    let other = |arguments: &[&str]| {
        run(launcher(arguments).env("PYTHON_EXEC", &python).current_dir(&folder)).stdout
    };
    assert_eq!(other(&["train.py", "x"]), "other -u train.py x\n");
    assert_eq!(other(&["--module", "a.b", "-m"]), "other -u -m a.b -m\n");
}

#[test]
fn programs_of_python_in_a_folder_and_in_one_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("package")).unwrap();
    fs::write(
        folder.path().join("package/__main__.py"),
        "import sys\nprint(__name__, sys.argv[1:])\n",
    )
    .unwrap();
    let zipped = Command::new("python3")
        .args(["-m", "zipapp", "package"])
        .current_dir(&folder)
        .status()
        .unwrap();
    assert!(zipped.success());
    for program in ["package", "./package", "package/", "package.pyz", "./package.pyz"] {
        let finished = run(launcher(&[program, "x"]).current_dir(&folder));
        assert_eq!(
            (finished.code, finished.stdout.as_str()),
            (Some(0), "__main__ ['x']\n"),
            "{program}: {finished:?}"
        );
    }
    fs::write(folder.path().join("trainer"), "print(1)\n").unwrap();
    let finished = run(launcher(&["trainer"]).current_dir(&folder));
    assert!(
        finished.code == Some(2) && finished.stderr.contains("write --run-path trainer"),
        "{finished:?}"
    );
}

#[test]
fn what_torchrun_passes_over_is_a_warning() {
    let flags =
        "--rdzv-conf='timeout=900,nosuch=1,nosuch=2' --signals-to-handle TERM,NOSUCH,KILL,NOSUCH";
    let text = "echo $TORCHELASTIC_SIGNALS_TO_HANDLE";
    let finished = run(&mut script(flags, text));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "SIGTERM\n"), "{finished:?}");
    let lines: Vec<_> = finished.stderr.lines().collect();
    for (line, text) in lines.iter().zip(["'nosuch'", "'NOSUCH'", "'KILL'"]) {
        assert!(line.starts_with("flow-launch: ") && line.contains(text), "{finished:?}");
    }
    assert_eq!(lines.len(), 3, "{finished:?}");
    assert_eq!(run(&mut script(&format!("--quiet {flags}"), text)).stderr, "");
}

#[test]
fn a_quiet_launcher_says_errors_only() {
    let text = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3; echo said >&2; exit 4";
    let flags =
        "--nproc_per_node 2 --max-restarts 1 --rdzv-backend static --event-log-handler console";
    let said = |flags: &str| run(script(flags, text).env_remove("OMP_NUM_THREADS"));
    let finished = said(flags);
    for note in ["OMP_NUM_THREADS", "restart 1 of 1", "--event-log-handler"] {
        assert!(finished.stderr.contains(note), "{note}: {finished:?}");
    }
    let quiet = said(&format!("-q {flags}"));
    assert_eq!(quiet.code, Some(4), "{quiet:?}");
    let of_launcher = quiet.stderr.lines().filter(|line| *line != "said").collect::<Vec<_>>();
    assert!(of_launcher[0].contains("failed with exit code 4"), "{quiet:?}");
    assert!(
        !quiet.stderr.contains("OMP")
            && !quiet.stderr.contains("restart")
            && !quiet.stderr.contains("--event")
    );
}

#[test]
fn mpiruns_flags_say_how_many() {
    for flags in ["-n 2", "-np 2"] {
        assert_eq!(
            run(&mut script(flags, "echo $RANK of $WORLD_SIZE")).sorted_lines(),
            ["0 of 2", "1 of 2"]
        );
    }
}

#[test]
fn workers_run_on_the_cpus_they_are_bound_to() {
    let text = "sed -n 's/^Cpus_allowed_list:.//p' /proc/self/status";
    let whole = run(&mut script("", text)).stdout;
    assert_eq!(run(&mut script("--numa-binding socket", text)).code, Some(0));
    let finished = run(&mut script("--nproc_per_node 2 --numa-binding exclusive", text));
    if finished.code == Some(2) {
        assert!(finished.stderr.contains("1 cores for 2 workers"), "{finished:?}");
        println!("SKIPPED: workers on cores of their own: there is one core");
        return;
    }
    let lines = finished.sorted_lines();
    assert!(
        lines.len() == 2 && lines[0] != lines[1] && !lines.contains(&whole.trim()),
        "{finished:?} of {whole}"
    );
}
