//! The command line, validated into a [`Job`].

mod flags;
mod hosts;
mod meeting;
mod output;
mod settings;

use std::cell::RefCell;
use std::ffi::OsString;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::ArgMatches;
use nix::sys::signal::Signal;

pub use self::meeting::NO_ID;
use self::settings::{Environment, Setting, Settings};
use crate::events;
use crate::job::{Job, NumaBinding, Processes, Program, ProgramKind, Stdin};

/// A command line that makes no sense: one line that says what was wrong and what would be right.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// As torchrun's, Slurm's and Kubernetes'.
const GRACE: Duration = Duration::from_secs(30);

/// As torchrun's.
const SIGNALS: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];

impl Job {
    /// Reads a whole command line, program name first, and the environment. `--help` and
    /// `--version` are answered here and end the process.
    pub fn parse(
        arguments: impl IntoIterator<Item = OsString>,
        environment: Environment<'_>,
    ) -> Result<Job, Usage> {
        let arguments = flags::with_np(arguments);
        let validate = |matches| {
            Job::validate(&Settings { matches, environment, warnings: RefCell::default() })
        };
        match flags::command().try_get_matches_from(&arguments) {
            Ok(matches) => validate(matches),
            Err(error) if !error.use_stderr() => error.exit(),
            Err(error) => {
                // What a flag has taken for its value may be the reason, as in --nproc-per-node
                // train.py --epochs 2.
                let so_far =
                    flags::command().ignore_errors(true).try_get_matches_from(&arguments).ok();
                let wrong = so_far
                    .filter(|matches| program(matches).is_err())
                    .and_then(|matches| validate(matches).err());
                Err(wrong
                    .filter(|wrong| !wrong.0.starts_with(NO_PROGRAM))
                    .unwrap_or_else(|| explain(&error)))
            }
        }
    }

    fn validate(settings: &Settings<'_>) -> Result<Job, Usage> {
        settings.refuse_flags_as_values()?;
        output::refuse_plugins(settings)?;
        ignore_what_has_no_meaning(settings)?;
        let numa_bindings = [
            ("node", NumaBinding::Node),
            ("socket", NumaBinding::Socket),
            ("exclusive", NumaBinding::Exclusive),
            ("core-complex", NumaBinding::CoreComplex),
        ];
        let timeout = || {
            settings
                .get("shutdown-timeout")
                .or_else(|| settings.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
        };
        let processes =
            settings.get("nproc-per-node").map_or(Ok(Processes::Count(1)), |s| processes(&s))?;
        let hosts = hosts::hosts(settings, processes)?;
        let mut job = Job {
            processes,
            role: settings.get_text("role")?.unwrap_or_else(|| "default".into()),
            nodes: meeting::nodes(settings)?,
            hosts,
            max_restarts: settings.get_number("max-restarts", 0, "a number from 0")?.unwrap_or(0),
            grace: timeout().map_or(Ok(GRACE), |setting| setting.seconds())?,
            hang_timeout: settings
                .get("hang-timeout")
                .map(|setting| hang_timeout(&setting))
                .transpose()?,
            signals: settings
                .get("signals-to-handle")
                .map_or(Ok(SIGNALS.into()), |names| signals(&names, settings))?,
            stdin: settings.get("stdin").map(|setting| stdin(&setting)).transpose()?,
            numa_binding: settings
                .get("numa-binding")
                .map(|setting| setting.one_of(&numa_bindings))
                .transpose()?,
            virtual_local_rank: settings.is_on("virtual-local-rank")?,
            output: output::output(settings)?,
            events: [
                settings.get_path("events")?,
                settings.variable(events::VARIABLE).map(Setting::into_path),
            ]
            .into_iter()
            .flatten()
            .collect(),
            quiet: settings.is_on("quiet")?,
            dry_run: settings.is_on("dry-run")?,
            warnings: Vec::new(),
            // Last: it may be missing because a flag before it lacks its value, which is the better
            // thing to say.
            program: {
                let (name, arguments) = program(&settings.matches)?;
                Program { kind: program_kind(settings)?, name, arguments }
            },
        };
        job.warnings = settings.warnings.take();
        Ok(job)
    }
}

const NO_PROGRAM: &str = "no program given";

/// PROGRAM and its arguments.
fn program(matches: &ArgMatches) -> Result<(OsString, Vec<OsString>), Usage> {
    let mut command = matches.get_many(flags::COMMAND).into_iter().flatten().cloned();
    let name = command.next().filter(|name: &OsString| !name.is_empty());
    let name = name.ok_or_else(|| {
        let last = last_option(matches)
            .map(|(flag, value)| format!(" after --{flag} {}", value.display()));
        let last = last.unwrap_or_default();
        Usage(format!("{NO_PROGRAM}{last}; usage: flow-launch [OPTIONS] PROGRAM [ARGS...]"))
    })?;
    Ok((name, command.collect()))
}

/// The last flag that has a value: it may have taken PROGRAM for it.
fn last_option(matches: &ArgMatches) -> Option<(&'static str, &OsString)> {
    let options = flags::FLAGS.iter().filter(|flag| flag.value.is_some());
    let given = options.filter_map(|flag| Some((matches.indices_of(flag.name)?.max()?, flag.name)));
    let (_, name) = given.max()?;
    Some((name, matches.get_one(name)?))
}

/// One line for what clap says in several.
fn explain(error: &clap::Error) -> Usage {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
    if let (ErrorKind::UnknownArgument, Some(ContextValue::String(flag))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    {
        let name = flag.trim_start_matches('-');
        let candidates = flag.strip_prefix("--").map(flags::candidates).unwrap_or_default();
        if candidates.len() > 1 {
            return Usage(format!("{flag} is short for several: --{}", candidates.join(", --")));
        }
        let similar = match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(similar)) => Some(similar.trim_start_matches('-')),
            _ => None,
        };
        if let Some(meant) = flags::elsewhere(name).or(similar) {
            return Usage(format!(
                "there is no {flag}; did you mean --{}?",
                meant.replace('_', "-")
            ));
        }
    }
    Usage(format!("{line}; see flow-launch --help"))
}

fn program_kind(settings: &Settings) -> Result<ProgramKind, Usage> {
    let [is_module, no_python] = [settings.is_on("module")?, settings.is_on("no-python")?];
    Ok(match (settings.is_on("run-path")?, is_module, no_python) {
        (true, true, _) => {
            return Err(Usage("--module and --run-path exclude each other; give one".into()))
        }
        (false, true, true) => {
            return Err(Usage("--module and --no-python exclude each other; give one".into()))
        }
        (true, false, _) => ProgramKind::Script,
        (false, true, false) => ProgramKind::Module,
        (false, false, true) => ProgramKind::Executable,
        (false, false, false) => ProgramKind::ByName,
    })
}

fn processes(setting: &Setting) -> Result<Processes, Usage> {
    match setting.text()? {
        "auto" => Ok(Processes::Auto),
        "cpu" => Ok(Processes::Cpu),
        "gpu" => Ok(Processes::Gpu),
        _ => setting.number(1, "a number from 1, or auto, cpu or gpu").map(Processes::Count),
    }
}

fn stdin(setting: &Setting) -> Result<Stdin, Usage> {
    match setting.text()? {
        "all" => Ok(Stdin::All),
        "none" => Ok(Stdin::None),
        _ => setting.number(0, "all, none or a rank").map(Stdin::Rank),
    }
}

fn hang_timeout(setting: &Setting) -> Result<Duration, Usage> {
    let timeout = setting.seconds()?;
    if timeout.is_zero() {
        return Err(setting.wrong("more than 0 seconds; leave it out for no limit"));
    }
    Ok(timeout)
}

/// Names with or without SIG. As with torchrun, one that makes no sense is skipped.
fn signals(setting: &Setting, settings: &Settings) -> Result<Vec<Signal>, Usage> {
    let mut signals = Vec::new();
    for name in setting.text()?.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let upper = name.to_uppercase();
        let upper = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
        let skip = |what| {
            settings.warn(format!("{} has '{name}', which is skipped: it {what}", setting.source()))
        };
        match upper.parse() {
            Err(_) => skip("names no signal"),
            Ok(Signal::SIGKILL | Signal::SIGSTOP) => skip("cannot be caught"),
            Ok(Signal::SIGCHLD | Signal::SIGPIPE) => skip("is flow-launch's own"),
            Ok(signal) if !signals.contains(&signal) => signals.push(signal),
            Ok(_) => {}
        }
    }
    Ok(signals)
}

/// Flags of torchrun that say how it does what is done otherwise here: it polls, and it may fork
/// Python.
fn ignore_what_has_no_meaning(settings: &Settings) -> Result<(), Usage> {
    settings.get("monitor-interval").map(|setting| setting.seconds()).transpose()?;
    let methods = ["spawn", "fork", "forkserver"].map(|name| (name, ()));
    settings.get("start-method").map(|setting| setting.one_of(&methods)).transpose()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Meeting;
    use proptest::prelude::*;

    /// With these variables in the environment.
    fn parse_with(variables: &[(&str, &str)], arguments: &[&str]) -> Result<Job, Usage> {
        let environment =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| v.into());
        Job::parse(
            std::iter::once("flow-launch").chain(arguments.iter().copied()).map(OsString::from),
            &environment,
        )
    }

    /// Of words separated by spaces.
    pub fn parse(line: &str) -> Result<Job, Usage> {
        parse_with(&[], &line.split_whitespace().collect::<Vec<_>>())
    }

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
        assert_eq!(job.nodes.meeting, Meeting::Alone { master_addr: None, master_port: None });
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
        let dashes = "--nproc-per-node=2 --nnodes 3 --node-rank 1 --master-addr h --master-port 9 --grace 0.5 p";
        let underscores =
            "--nproc_per_node 7 --nproc_per_node 2 --nnodes=3 --node_rank=1 --master_addr=h \
                           --master_port=9 --prefix --shutdown_timeout=.5 p";
        let mut first = parse(dashes).unwrap();
        first.output.prefix = true;
        assert_eq!(first, parse(underscores).unwrap());
        assert_eq!(first.grace, Duration::from_millis(500));
    }

    #[test]
    fn every_flag_in_every_spelling() {
        for flag in flags::FLAGS {
            for spelling in flag.spellings() {
                let taken = flags::command().try_get_matches_from([
                    "f",
                    &format!("--{spelling}"),
                    "1",
                    "p",
                ]);
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
            line.contains("--master-addr")
                && line.contains("--master-port")
                && !line.contains('\n'),
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
        assert!(
            parse_with(&[("PET_NUMA_BINDING", "x"), ("PET_LOGS_SPECS", "x")], &["train"]).is_ok()
        );
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
        let signals =
            |names: &str| parse(&format!("--signals-to-handle {names} p")).unwrap().signals;
        assert_eq!(signals("SIGTERM,usr1,TERM"), [Signal::SIGTERM, Signal::SIGUSR1]);
        for (wrong, why) in
            [("SIGKILL", "caught"), ("STOP", "caught"), ("SIGPIPE", "own"), ("9", "no signal")]
        {
            let job = parse(&format!("--signals-to-handle {wrong},TERM,{wrong} p")).unwrap();
            assert_eq!(job.signals, [Signal::SIGTERM]);
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
            assert!(
                refusal(&format!("--stdin {wrong} p")).contains("all, none or a rank"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn quotes_that_a_list_in_yaml_leaves() {
        let line = "--nproc-per-node='2' --rdzv-conf='timeout=900,last_call_timeout=7' --nnodes=\"2\" --role 'a' \
                    --rdzv-endpoint='node0:7' --tee='0:1' --start-method 'fork' --duplicate-stdout-filters='x' \
                    --events 'e' p";
        let job = parse(line).unwrap();
        assert_eq!(
            (job.processes, job.nodes.max, job.role.as_str()),
            (Processes::Count(2), 2, "a")
        );
        assert_eq!(
            (job.nodes.patience.join.as_secs(), job.nodes.patience.last_call.as_secs()),
            (900, 7)
        );
        assert_eq!(parse("--rdzv-conf timeout='90' p").unwrap().nodes.patience.join.as_secs(), 90);
        // Those that may be meant.
        assert_eq!(
            (job.output.stdout_filters, job.events),
            (vec!["'x'".into()], vec!["'e'".into()])
        );
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

    proptest! {
        #[test]
        fn everything_after_the_program_is_the_programs(arguments in prop::collection::vec("(--)?[a-z_=-]{0,12}", 0..8)) {
            let mut line = vec!["--nproc_per_node", "2", "train"];
            line.extend(arguments.iter().map(String::as_str));
            let program = parse_with(&[], &line).unwrap().program;
            prop_assert_eq!(program.name, "train");
            prop_assert_eq!(program.arguments, arguments.iter().map(OsString::from).collect::<Vec<_>>());
        }

        #[test]
        fn any_value_gives_a_job_or_a_single_line(
            flag in prop::sample::select(flags::FLAGS.iter().map(|flag| flag.name).chain(["other"]).collect::<Vec<_>>()),
            value in "[ -~]{0,10}",
        ) {
            if let Err(Usage(line)) = parse_with(&[], &[&format!("--{flag}={value}"), "train"]) {
                prop_assert!(!line.contains('\n') && line.contains(flag), "{line}");
            }
        }

        #[test]
        fn any_variable_gives_a_job_or_names_the_variable(
            flag in prop::sample::select(flags::FLAGS.iter().map(|flag| flag.name).collect::<Vec<_>>()),
            value in "[ -~]{0,10}",
        ) {
            let variable = format!("PET_{}", flag.to_uppercase().replace('-', "_"));
            if let Err(Usage(line)) = parse_with(&[(&variable, &value)], &["train"]) {
                prop_assert!(!line.contains('\n') && line.contains(&variable), "{line}");
            }
        }
    }
}
