//! A command line that makes no sense: exit code 2 and one line that names what is wrong.

mod common;
use common::{launcher, run};

#[test]
fn one_line_each() {
    let table = [
        ("", "no program given"),
        ("--nproc_per_node 2", "no program given"),
        ("nosuchprogram", "no program nosuchprogram"),
        ("./nosuchprogram", "no such file"),
        ("nosuch.py", "no program nosuch.py"),
        ("/tmp", "folder"),
        ("/etc/passwd", "not executable"),
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
        ("--master_addr --grace true", "'--grace'"),
        ("--grace -1 true", "'-1'"),
        ("--grace soon true", "'soon'"),
        ("--grace nan true", "'nan'"),
        ("--grace inf true", "'inf'"),
        ("--nnodes 0 true", "'0'"),
        ("--node_rank 1 true", "--node_rank is 1"),
        ("--nnodes 2 true", "--master_addr and --master_port"),
        ("--nnodes 2 --master_addr a true", "--master_port"),
        ("--nnodes 2 --node_rank 2 --master_addr a --master_port 1 true", "below 2"),
        ("--nnodes 70000 --nproc_per_node 70000 --master_addr a --master_port 1 true", "too many workers"),
        ("--nosuchflag true", "--nosuchflag"),
        ("--prefix=2 true", "--prefix"),
    ];
    for (line, named) in table {
        let finished = run(&mut launcher(&line.split_whitespace().collect::<Vec<_>>()));
        assert_eq!(finished.code, Some(2), "{line}: {finished:?}");
        assert_eq!(finished.stdout, "", "{line}");
        let is_one_line = finished.stderr.starts_with("flow-launch: ") && finished.stderr.lines().count() == 1;
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
fn help_is_answered() {
    let finished = run(&mut launcher(&["--help"]));
    assert_eq!(finished.code, Some(0));
    for flag in ["--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--grace", "--prefix"]
    {
        assert!(finished.stdout.contains(flag), "{flag}");
    }
}
