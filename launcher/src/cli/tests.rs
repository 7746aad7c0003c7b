//! Whole command lines.

use super::*;
use crate::job::Rendezvous;
use proptest::prelude::*;

/// Parses with these variables in the environment.
fn parse_with(variables: &[(&str, &str)], arguments: &[&str]) -> Result<Job, Usage> {
    let environment =
        |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| v.into());
    Job::parse(
        std::iter::once("flow-launch").chain(arguments.iter().copied()).map(OsString::from),
        &environment,
    )
}

/// Parses words separated by spaces.
pub fn parse(line: &str) -> Result<Job, Usage> {
    parse_with(&[], &line.split_whitespace().collect::<Vec<_>>())
}

/// Returns the error of a command line.
pub fn refusal(line: &str) -> String {
    parse(line).expect_err(line).0
}

#[test]
fn defaults() {
    let job = parse("train").unwrap();
    assert_eq!(
        job.program,
        Program { kind: ProgramKind::ByName, name: "train".into(), arguments: vec![] }
    );
    assert_eq!(job.processes, Processes::Count(1));
    assert_eq!((job.nodes.min, job.nodes.max), (1, 1));
    assert_eq!(job.nodes.rendezvous, Rendezvous::Alone { master_addr: None, master_port: None });
    assert_eq!(
        (job.role.as_str(), job.nodes.id.as_str(), job.max_restarts),
        ("default", "none", 0)
    );
    assert_eq!((job.grace, job.hang_timeout), (Duration::from_secs(30), None));
    assert_eq!(job.signals, SIGNALS);
    assert_eq!((job.stdin, job.numa_binding, job.events), (None, None, vec![]));
    assert_eq!((job.dry_run, job.quiet), (false, false));
    assert_eq!(job.warnings, [""; 0]);
    assert!(!job.output.prefix && !job.output.oneflow_names && job.output.log_dir.is_none());
}

#[test]
fn both_spellings_and_the_last_one_wins() {
    let dashes =
        "--nproc-per-node=2 --nnodes 3 --node-rank 1 --master-addr h --master-port 9 --grace 0.5 p";
    let underscores = "--nproc_per_node 7 --nproc_per_node 2 --nnodes=3 --node_rank=1 --master_addr=h \
         --master_port=9 --prefix --shutdown_timeout=.5 p";
    let mut first = parse(dashes).unwrap();
    first.output.prefix = true;
    assert_eq!(first, parse(underscores).unwrap());
    assert_eq!(first.grace, Duration::from_millis(500));
}

#[test]
fn every_flag_in_every_spelling() {
    for flag in flag_table::FLAGS {
        for spelling in flag.spellings() {
            let taken =
                flags::command().try_get_matches_from(["f", &format!("--{spelling}"), "1", "p"]);
            assert!(taken.is_ok_and(|matches| matches.contains_id(flag.name)), "{spelling}");
        }
    }
}

#[test]
fn flags_may_be_shortened_while_it_is_clear_which_is_meant() {
    assert_eq!(parse("--nproc 3 train").unwrap().processes, Processes::Count(3));
    assert_eq!(parse("--nproc_p=3 train").unwrap().processes, Processes::Count(3));
    assert_eq!(parse("--max 3 train").unwrap().max_restarts, 3);
    assert!(parse("--virt train").unwrap().virtual_local_rank);
    let line = refusal("--master 3 train");
    assert!(
        line.contains("--master-addr") && line.contains("--master-port") && !line.contains('\n'),
        "{line}"
    );
    assert!(refusal("--h train").contains("--help, --hang-timeout"));
    assert!(refusal("--rdzv-c=timeout=x train").contains("--rdzv-conf"));
    assert!(refusal("--nosuch train").contains("--nosuch"));
}

#[test]
fn variables_stand_in_for_flags() {
    let variables = [
        ("PET_NPROC_PER_NODE", "3"),
        ("PET_NNODES", ""),
        ("PET_ROLE", "actor"),
        ("PET_MODULE", "1"),
    ];
    let job = parse_with(&variables, &["train"]).unwrap();
    assert_eq!(
        (job.processes, job.nodes.max, job.role.as_str()),
        (Processes::Count(3), 1, "actor")
    );
    assert_eq!(job.program.kind, ProgramKind::Module);
    let job = parse_with(&variables, &["--nproc_per_node", "2", "train"]).unwrap();
    assert_eq!(job.processes, Processes::Count(2));
    assert_eq!(
        parse_with(&[("PET_MODULE", "0")], &["train"]).unwrap().program.kind,
        ProgramKind::ByName
    );
    for (variable, value) in [
        ("PET_NNODES", "x"),
        ("PET_STANDALONE", "yes"),
        ("PET_RDZV_CONF", "x"),
        ("PET_MASTER_PORT", "0"),
    ] {
        assert!(parse_with(&[(variable, value)], &["train"]).unwrap_err().0.contains(variable));
    }
    // Those that torchrun reads from the command line only.
    assert!(parse_with(&[("PET_NUMA_BINDING", "x"), ("PET_LOGS_SPECS", "x")], &["train"]).is_ok());
}

#[test]
fn shutdown_timeout_has_two_variables() {
    let elastic = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7");
    let grace =
        |variables: &[_], line: &[&str]| parse_with(variables, line).unwrap().grace.as_secs();
    assert_eq!(grace(&[elastic], &["p"]), 7);
    assert_eq!(grace(&[elastic, ("PET_SHUTDOWN_TIMEOUT", "8")], &["p"]), 8);
    assert_eq!(grace(&[elastic], &["--grace", "9", "p"]), 9);
    assert!(parse_with(&[(elastic.0, "soon")], &["p"]).unwrap_err().0.contains(elastic.0));
}

#[test]
fn kinds_of_programs() {
    let kind = |line: &str| parse(line).unwrap().program.kind;
    assert_eq!(kind("-m package.train"), ProgramKind::Module);
    assert_eq!(kind("--no_python train.py"), ProgramKind::Executable);
    assert_eq!(kind("--run-path --no-python train"), ProgramKind::Script);
    assert!(refusal("-m --no-python train").contains("--no-python"));
    assert!(refusal("-m --run-path train").contains("--run-path"));
}

#[test]
fn signals_by_name() {
    let signals = |names: &str| parse(&format!("--signals-to-handle {names} p")).unwrap().signals;
    assert_eq!(signals("SIGTERM,usr1,TERM"), [Signal::TERM, Signal::USR1]);
    for (wrong, why) in
        [("SIGKILL", "caught"), ("STOP", "caught"), ("SIGPIPE", "own"), ("9", "no signal")]
    {
        let job = parse(&format!("--signals-to-handle {wrong},TERM,{wrong} p")).unwrap();
        assert_eq!(job.signals, [Signal::TERM]);
        let [warning] = &job.warnings[..] else { panic!("{:?}", job.warnings) };
        assert!(warning.contains(wrong) && warning.contains(why), "{warning}");
    }
}

#[test]
fn who_reads_the_input() {
    let stdin = |who: &str| parse(&format!("--stdin {who} p")).unwrap().stdin;
    assert_eq!(stdin("all"), Some(Stdin::All));
    assert_eq!(stdin("none"), Some(Stdin::None));
    assert_eq!(stdin("3"), Some(Stdin::Rank(3)));
    for wrong in ["-1", "some", "0,1"] {
        assert!(refusal(&format!("--stdin {wrong} p")).contains("all, none or a rank"), "{wrong}");
    }
}

#[test]
fn quotes_that_a_list_in_yaml_leaves() {
    let line = "--nproc-per-node='2' --rdzv-conf='timeout=900,last_call_timeout=7' --nnodes=\"2\" \
                --role 'a' --rdzv-endpoint='node0:7' --tee='0:1' --start-method 'fork' \
                --duplicate-stdout-filters='x' --events 'e' p";
    let job = parse(line).unwrap();
    assert_eq!((job.processes, job.nodes.max, job.role.as_str()), (Processes::Count(2), 2, "a"));
    assert_eq!(
        (job.nodes.timeouts.join.as_secs(), job.nodes.timeouts.last_call.as_secs()),
        (900, 7)
    );
    assert_eq!(parse("--rdzv-conf timeout='90' p").unwrap().nodes.timeouts.join.as_secs(), 90);
    // Those that may be meant.
    assert_eq!((job.output.stdout_filters, job.events), (vec!["'x'".into()], vec!["'e'".into()]));
    assert_eq!(parse("--role ' p").unwrap().role, "'");
}

#[test]
fn flags_that_are_no_flags_here() {
    for (wrong, meant) in [
        ("--nprocs-per-node", "--nproc-per-node"),
        ("--num-proc", "--nproc-per-node"),
        ("--num_processes", "--nproc-per-node"),
        ("--max-restart-count", "--max-restarts"),
        ("--num_machines", "--nnodes"),
        ("--main_process_port", "--master-port"),
    ] {
        assert_eq!(
            refusal(&format!("{wrong} 2 train")),
            format!("there is no {wrong}; did you mean {meant}?")
        );
    }
    assert!(refusal("--nosuch train").ends_with("see flow-launch --help"));
}

#[test]
fn mpiruns_ways_to_say_how_many() {
    for line in [
        "-n 3 p",
        "-np 3 p",
        "-np3 p",
        "-np=3 p",
        "-n3 p",
        "--standalone -r 3 -np 3 p",
        "-m -np 3 p",
    ] {
        assert_eq!(parse(line).unwrap().processes, Processes::Count(3), "{line}");
    }
    for line in ["p -np 3", "--max-restarts 1 p -np 3", "-- p -np 3", "--log-dir=x p -np 3"] {
        let job = parse(line).unwrap();
        assert_eq!(
            (job.processes, job.program.arguments),
            (Processes::Count(1), vec!["-np".into(), "3".into()])
        );
    }
}

#[test]
fn a_flag_without_its_value_is_named() {
    for (line, flag) in [
        ("--nproc-per-node train.py", "--nproc-per-node is 'train.py'"),
        ("--nproc-per-node train.py --epochs 3 -x", "--nproc-per-node is 'train.py'"),
        ("-np train.py", "--nproc-per-node is 'train.py'"),
        ("-np=x train.py", "--nproc-per-node is 'x'"),
        ("--role -np 2 w.py", "--role lacks its value: '-np'"),
        ("--nproc-per-node", "--nproc-per-node"),
        (
            "--max-restarts --standalone train.py",
            "--max-restarts lacks its value: '--standalone' follows it",
        ),
        ("--rdzv-id --nnodes=2 train.py", "--rdzv-id lacks its value"),
        ("--role train.py", "no program given after --role train.py"),
        ("--nproc-per-node 2", "no program given after --nproc-per-node 2"),
        ("--standalone", "no program given; usage"),
    ] {
        let line = refusal(line);
        assert!(line.contains(flag), "{line}");
    }
    assert!(refusal("--nproc-per-node 2 --epochs 3 train.py").contains("--epochs"));
}

#[test]
fn white_space_and_control_characters() {
    assert_eq!(parse_with(&[], &["-n", " 3 ", "p"]).unwrap().processes, Processes::Count(3));
    let line = parse_with(&[], &["-n", "3\x1b[2J\n", "p"]).unwrap_err().0;
    assert!(line.starts_with(r"--nproc-per-node is '3\u{1b}[2J\n'; it must be"), "{line}");
}

#[test]
fn what_has_no_meaning_here_is_checked_all_the_same() {
    assert!(parse("--monitor-interval 0.1 --start-method fork --use_env p").is_ok());
    assert!(refusal("--monitor-interval x p").contains("--monitor-interval"));
    assert!(refusal("--start-method x p").contains("forkserver"));
}

#[test]
fn bindings_and_times() {
    assert_eq!(
        parse("--numa-binding core-complex p").unwrap().numa_binding,
        Some(NumaBinding::CoreComplex)
    );
    assert!(refusal("--numa-binding x p").contains("core-complex"));
    assert_eq!(
        parse("--hang_timeout 1.5 p").unwrap().hang_timeout,
        Some(Duration::from_millis(1500))
    );
    assert!(refusal("--hang-timeout 0 p").contains("leave it out"));
}

fn flag_names() -> Vec<&'static str> {
    flag_table::FLAGS.iter().map(|flag| flag.name).collect()
}

proptest! {
    #[test]
    fn everything_after_the_program_is_the_programs(
        arguments in prop::collection::vec("(--)?[a-z_=-]{0,12}", 0..8),
    ) {
        let mut line = vec!["--nproc_per_node", "2", "train"];
        line.extend(arguments.iter().map(String::as_str));
        let program = parse_with(&[], &line).unwrap().program;
        prop_assert_eq!(program.name, "train");
        let expected: Vec<_> = arguments.iter().map(OsString::from).collect();
        prop_assert_eq!(program.arguments, expected);
    }

    #[test]
    fn any_value_gives_a_job_or_a_single_line(
        flag in prop::sample::select([flag_names(), vec!["other"]].concat()),
        value in "[ -~]{0,10}",
    ) {
        if let Err(Usage(line)) = parse_with(&[], &[&format!("--{flag}={value}"), "train"]) {
            prop_assert!(!line.contains('\n') && line.contains(flag), "{line}");
        }
    }

    #[test]
    fn any_variable_gives_a_job_or_names_the_variable(
        flag in prop::sample::select(flag_names()),
        value in "[ -~]{0,10}",
    ) {
        let variable = format!("PET_{}", flag.to_uppercase().replace('-', "_"));
        if let Err(Usage(line)) = parse_with(&[(&variable, &value)], &["train"]) {
            prop_assert!(!line.contains('\n') && line.contains(&variable), "{line}");
        }
    }
}

#[test]
fn completions_and_manual_have_every_flag_of_help() {
    let page = |line: &str| {
        let words = std::iter::once("flow-launch").chain(line.split(' '));
        let matches = flags::command().try_get_matches_from(words).unwrap();
        let environment = |_: &str| None;
        let settings = Settings::new(matches, &environment);
        pages::requested(&settings).unwrap().map(|text| String::from_utf8(text).unwrap())
    };
    assert_eq!(page("train"), None);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = page(&format!("--completions {shell}")).unwrap();
        for flag in ["nproc-per-node", "rdzv-endpoint", "hosts", "dry-run", "log-dir"] {
            assert!(script.contains(flag), "{flag} in {shell}");
        }
        assert!(!script.contains("monitor-interval"), "{shell}");
    }
    let manual = page("--man").unwrap();
    let help = flags::command().render_help().to_string();
    for word in help.split_whitespace().filter(|word| word.starts_with("--")) {
        let name = word.trim_matches(|c: char| !c.is_alphanumeric()).replace('-', "\\-");
        assert!(manual.contains(&name), "{name} in {manual}");
    }
}

/// What shells complete for a flag is what the flag takes.
#[test]
fn the_words_of_a_flag_are_valid() {
    for flag in flag_table::FLAGS.iter().filter(|flag| flag.name != "completions") {
        for word in flag.words {
            let line = format!("--{} {word} train", flag.name);
            let needed = match *word {
                "c10d" => "--rdzv-endpoint host ",
                "in-place" => "--nproc-per-node 2 ",
                _ => "",
            };
            parse(&format!("{needed}{line}"))
                .unwrap_or_else(|Usage(error)| panic!("{line}: {error}"));
        }
        let Some(word) = flag.words.last() else { continue };
        let error = refusal(&format!("--{} nonsense train", flag.name));
        assert!(error.contains(word), "{error}");
    }
}
