//! A wrong command line: exit code 2 and one line that names what is wrong.

use flow_harness::assert_contains;
use flow_harness::cli::{launcher, run};

use std::process::Command;

#[test]
fn one_line_each() {
    let table = [
        ("", "no program given"),
        ("--nproc_per_node 2", "no program given"),
        ("nosuchprogram", "no program nosuchprogram"),
        ("./nosuchprogram", "no such file"),
        ("nosuch.py", "nor in the current folder"),
        ("/tmp", "is a folder, and has no __main__.py"),
        ("/etc/passwd", "--run-path /etc/passwd"),
        ("--nproc_per_node 0 true", "'0'"),
        ("--nproc_per_node -1 true", "'-1'"),
        ("--nproc-per-node=-1 true", "'-1'"),
        ("--nproc_per_node abc true", "'abc'"),
        ("--nproc_per_node 1.5 true", "'1.5'"),
        ("--nproc_per_node", "--nproc-per-node"),
        ("--master_port 0 true", "'0'"),
        ("--master_port -1 true", "'-1'"),
        ("--master_port 70000 true", "'70000'"),
        ("--master_port x true", "'x'"),
        ("--nproc_per_node train.py --epochs 3", "--nproc-per-node is 'train.py'"),
        ("--role train.py", "after --role train.py"),
        ("--nprocs-per-node 2 true", "did you mean --nproc-per-node?"),
        ("--num_processes 2 true", "did you mean --nproc-per-node?"),
        ("--master_addr --grace true", "--master-addr lacks its value: '--grace'"),
        ("--grace -1 true", "'-1'"),
        ("--grace soon true", "'soon'"),
        ("--grace nan true", "'nan'"),
        ("--grace inf true", "'inf'"),
        ("--nnodes 0 true", "'0'"),
        ("--elastic inplace true", "'inplace'"),
        ("--elastic in-place true", "needs two workers"),
        ("--min-workers 1 true", "--min-workers needs --elastic in-place"),
        ("--elastic in-place --min-workers 0 true", "'0'"),
        ("--elastic in-place --min-workers 2 true", "more than the 1 of --nproc-per-node"),
        ("--node_rank 1 true", "--node-rank is '1'"),
        ("--nnodes 2 true", "--master-addr"),
        ("--nnodes 2:1 true", "'2:1'"),
        ("--nnodes 1:2 --master_addr a true", "--rdzv-endpoint"),
        ("--nnodes 2 --rdzv-backend c10d true", "--rdzv-endpoint"),
        ("--rdzv_backend etcd true", "static or c10d"),
        ("--nnodes 2 --rdzv_endpoint a:b true", "'a:b'"),
        ("--rdzv_conf join true", "KEY=VALUE"),
        ("--standalone --nnodes 2 true", "--standalone"),
        ("--nnodes 2 --node_rank 2 --master_addr a --master_port 1 true", "below 2"),
        (
            "--nnodes 80000 --nproc_per_node 60000 --master_addr a --master_port 1 true",
            "too many workers",
        ),
        ("--nproc_per_node 999999999 true", "at most 65536"),
        ("--nosuchflag true", "--nosuchflag"),
        ("--master x true", "--master-addr, --master-port"),
        ("--tee 4 true", "'4'"),
        ("-r 0:x true", "'0:x'"),
        ("-m --no-python true", "--no-python"),
        ("--numa_binding all true", "core-complex"),
        ("--logs-specs mine true", "plug-ins"),
        ("--events= true", "a path"),
        ("--prefix=2 true", "--prefix"),
    ];
    for (line, named) in table {
        let finished = run(&mut launcher(&line.split_whitespace().collect::<Vec<_>>()));
        assert_eq!(finished.code, Some(2), "{line}: {finished:?}");
        assert_eq!(finished.stdout, "", "{line}");
        let is_one_line =
            finished.stderr.starts_with("flow-launch: ") && finished.stderr.lines().count() == 1;
        assert!(is_one_line && finished.stderr.contains(named), "{line}: {}", finished.stderr);
    }
}

#[test]
fn an_empty_program_is_no_program() {
    let finished = run(&mut launcher(&[""]));
    assert_eq!(finished.code, Some(2));
    assert!(finished.stderr.contains("no program given"));
}

#[test]
fn a_variable_that_makes_no_sense_is_named() {
    let table = [
        ("PET_NPROC_PER_NODE", "many"),
        ("PET_NODE_RANK", "1"),
        ("PET_STANDALONE", "yes"),
        ("PET_TEE", "0:"),
        ("PET_SHUTDOWN_TIMEOUT", "soon"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"),
    ];
    for (variable, value) in table {
        let finished = run(launcher(&["true"]).env(variable, value));
        assert_eq!((finished.code, finished.stderr.lines().count()), (Some(2), 1), "{finished:?}");
        assert!(
            finished.stderr.contains(&format!("{variable} is '{value}'")),
            "{}",
            finished.stderr
        );
    }
}

#[test]
fn help_is_answered() {
    let finished = run(&mut launcher(&["--help"]));
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""));
    assert!(finished.stdout.lines().all(|line| line.len() <= 120), "{}", finished.stdout);
    for text in [
        "Workers:",
        "Program:",
        "Nodes:",
        "Output:",
        "--nproc-per-node <N>",
        "-m, --module",
        "--grace",
        "flow-launch top [OPTIONS] [JOB]",
        "flow-launch trace FILE",
        "flow-launch doctor [OPTIONS]",
        "flow-launch setup-libtorch [OPTIONS]",
    ] {
        assert!(finished.stdout.contains(text), "{text}");
    }
    assert!(!finished.stdout.contains("--monitor-interval"));
    assert!(run(&mut launcher(&["--version"])).stdout.starts_with("flow-launch "));
}

/// bash itself says what its completions offer.
#[test]
fn bash_completes_flags_their_words_and_the_subcommand() {
    let completions = run(&mut launcher(&["--completions", "bash"]));
    assert_eq!((completions.code, completions.stderr.as_str()), (Some(0), ""));
    // torchrun's name of the flag.
    let same = run(&mut launcher(&["--print_completion", "bash"]));
    assert_eq!(same.stdout, completions.stdout);
    let offered = |line: &str| {
        let words: Vec<_> = std::iter::once("flow-launch").chain(line.split(' ')).collect();
        let [.., previous, current] = words[..] else { unreachable!() };
        let script = format!(
            "{}\nCOMP_WORDS=({}); COMP_CWORD={}\n\
             _flow__launch flow-launch '{current}' '{previous}'; echo \"${{COMPREPLY[@]}}\"",
            completions.stdout,
            words.join(" "),
            words.len() - 1
        );
        let output = Command::new("bash").args(["-c", &script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim_end().to_string()
    };
    assert_eq!(offered("--nproc"), "--nproc-per-node");
    assert_eq!(offered("--numa-binding s"), "socket");
    assert_eq!(offered("tr"), "trace");
    assert_eq!(offered("doc"), "doctor");
}

#[test]
fn subcommands_have_a_help_of_their_own() {
    let help = run(&mut launcher(&["trace", "--help"]));
    assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""), "{help:?}");
    assert_contains(&help.stdout, &["summary of a timeline", "flow-launch trace <FILE>"]);
    let wrong = run(&mut launcher(&["trace", "one", "two"]));
    assert_eq!((wrong.code, wrong.stderr.lines().count()), (Some(2), 1), "{wrong:?}");
    assert_contains(&wrong.stderr, &["usage: flow-launch trace FILE"]);
    let help = run(&mut launcher(&["doctor", "--help"]));
    assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""), "{help:?}");
    assert_contains(&help.stdout, &["flow-launch doctor [OPTIONS]", "--json", "--hostfile"]);
    let wrong = run(&mut launcher(&["doctor", "--nproc", "2"]));
    assert_eq!((wrong.code, wrong.stderr.lines().count()), (Some(2), 1), "{wrong:?}");
    assert_contains(&wrong.stderr, &["'--nproc'", "see flow-launch doctor --help"]);
}

#[test]
fn the_manual_page_describes_the_flags() {
    let manual = run(&mut launcher(&["--man"]));
    assert_eq!((manual.code, manual.stderr.as_str()), (Some(0), ""));
    for text in [
        ".TH flow-launch 1",
        ".SH SYNOPSIS",
        "\\fBflow\\-launch trace\\fR FILE",
        ".SH COMMANDS",
        "\\fBflow\\-launch doctor\\fR",
        "\\-\\-nproc\\-per\\-node",
        "PET_NNODES",
    ] {
        assert!(manual.stdout.contains(text), "{text} in {}", manual.stdout);
    }
    let refused = run(&mut launcher(&["--completions", "csh"]));
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("bash, elvish") || refused.stderr.contains("one of bash"));
}
