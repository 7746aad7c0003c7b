//! The command line, validated into a [`Job`].

pub mod doctor;
mod flag;
mod flag_table;
pub mod flags;
mod hosts;
mod output;
mod pages;
pub mod rendezvous;
mod settings;
pub mod setup_libtorch;
pub mod top;
pub mod usage;

use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

use clap::ArgMatches;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use rustix::process::Signal;

use self::flag_table as table;
use self::settings::{Environment, Setting, Settings};
use self::usage::Usage;
use crate::job::{Job, NumaBinding, Processes, Program, ProgramKind, Stdin};
use crate::report::events;
use crate::signal;

/// The default of torchrun, Slurm and Kubernetes.
const GRACE: Duration = Duration::from_secs(30);

/// torchrun's default.
const SIGNALS: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];

impl Job {
    /// Reads a whole command line, program name first, and the environment. Answers `--help`,
    /// `--version`, `--completions` and `--man` here and ends the process.
    pub fn parse(
        arguments: impl IntoIterator<Item = OsString>,
        environment: Environment<'_>,
    ) -> Result<Job, Usage> {
        let arguments = flags::with_np(arguments);
        let matches = match flags::command().try_get_matches_from(&arguments) {
            Ok(matches) => matches,
            Err(error) if !error.use_stderr() => error.exit(),
            Err(error) => {
                return Err(taken_program(&arguments, environment).unwrap_or(explain(&error)));
            }
        };
        let settings = Settings::new(matches, environment);
        if let Some(text) = pages::requested(&settings)? {
            // An error is a reader that has gone.
            let _ = std::io::stdout().write_all(&text);
            std::process::exit(0);
        }
        Job::validate(&settings)
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
        let grace = settings
            .get(table::SHUTDOWN_TIMEOUT)
            .or_else(|| settings.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"));
        let processes = settings
            .get(table::NPROC_PER_NODE)
            .map_or(Ok(Processes::Count(1)), |s| processes(&s))?;
        let hosts = hosts::hosts(settings, processes)?;
        let mut job = Job {
            processes,
            role: settings.get_text(table::ROLE)?.unwrap_or_else(|| "default".into()),
            nodes: rendezvous::nodes(settings)?,
            hosts,
            max_restarts: settings
                .get_number(table::MAX_RESTARTS, 0, "a number from 0")?
                .unwrap_or(0),
            is_in_place: in_place(settings)?,
            min_workers: settings.get_number(table::MIN_WORKERS, 1, "a number from 1")?,
            grace: grace.map_or(Ok(GRACE), |setting| setting.seconds())?,
            hang_timeout: settings
                .get(table::HANG_TIMEOUT)
                .map(|setting| hang_timeout(&setting))
                .transpose()?,
            signals: settings
                .get(table::SIGNALS_TO_HANDLE)
                .map_or(Ok(SIGNALS.into()), |names| signals(&names, settings))?,
            stdin: settings.get(table::STDIN).map(|setting| stdin(&setting)).transpose()?,
            numa_binding: settings
                .get(table::NUMA_BINDING)
                .map(|setting| setting.one_of(&numa_bindings))
                .transpose()?,
            virtual_local_rank: settings.is_on(table::VIRTUAL_LOCAL_RANK)?,
            output: output::output(settings)?,
            events: [
                settings.get_path(table::EVENTS)?,
                settings.variable(events::VARIABLE).map(Setting::into_path),
            ]
            .into_iter()
            .flatten()
            .collect(),
            trace: settings.get_path(table::TRACE)?,
            top: settings.is_on(table::TOP)?,
            quiet: settings.is_on(table::QUIET)?,
            dry_run: settings.is_on(table::DRY_RUN)?,
            warnings: Vec::new(),
            // Last: if PROGRAM is missing because a flag has taken it for its value, the error
            // about that flag is the better one.
            program: {
                let (name, arguments) = program(&settings.matches)?;
                Program { kind: program_kind(settings)?, name, arguments }
            },
        };
        job.warnings = settings.warnings.take();
        check_elastic(&job)?;
        if job.top && job.hosts.as_ref().is_some_and(|hosts| hosts.list.len() == 1) {
            let text = "--top needs two hosts or more; `flow-launch top` on the host shows the job";
            return Err(Usage(text.into()));
        }
        Ok(job)
    }
}

/// Whether `--elastic` says that the others go on when a worker fails.
fn in_place(settings: &Settings<'_>) -> Result<bool, Usage> {
    let kinds = [("restart", false), ("in-place", true)];
    let kind = settings.get(table::ELASTIC).map(|setting| setting.one_of(&kinds)).transpose()?;
    Ok(kind.unwrap_or(false))
}

/// Checks the flags of jobs whose workers are started anew one by one.
fn check_elastic(job: &Job) -> Result<(), Usage> {
    if !job.is_in_place {
        return match job.min_workers {
            Some(_) => Err(Usage("--min-workers needs --elastic in-place".into())),
            None => Ok(()),
        };
    }
    if job.nodes.max > 1 || job.hosts.is_some() {
        return Ok(());
    }
    match (job.min_workers, job.processes) {
        (Some(min), Processes::Count(count)) if min > count => Err(Usage(format!(
            "--min-workers {min} is more than the {count} of --nproc-per-node: give at most that"
        ))),
        (_, Processes::Count(1)) => {
            let reason = "--elastic in-place needs two workers, of which one goes on: give \
                          --nproc-per-node";
            Err(Usage(reason.into()))
        }
        _ => Ok(()),
    }
}

const NO_PROGRAM: &str = "no program given";

/// Returns PROGRAM and its arguments.
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

/// Returns the last flag with a value: it may have taken PROGRAM for it.
fn last_option(matches: &ArgMatches) -> Option<(&'static str, &OsString)> {
    let options = table::FLAGS.iter().filter(|flag| flag.value.is_some());
    let given = options.filter_map(|flag| Some((matches.indices_of(flag.name)?.max()?, flag.name)));
    let (_, name) = given.max()?;
    Some((name, matches.get_one(name)?))
}

/// Returns the error about a flag that has taken PROGRAM for its value, if this is why a command
/// line is none, as in `--nproc-per-node train.py --epochs 2`. clap then complains of PROGRAM's own
/// flags. Clap gives no values with an error, so it reads the command line again.
fn taken_program(arguments: &[OsString], environment: Environment<'_>) -> Option<Usage> {
    let so_far = flags::command().ignore_errors(true).try_get_matches_from(arguments).ok()?;
    program(&so_far).err()?;
    let wrong = Job::validate(&Settings::new(so_far, environment)).err()?;
    Some(wrong).filter(|wrong| !wrong.0.starts_with(NO_PROGRAM))
}

/// Makes one line of clap's error of several lines.
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
    let is_path = settings.is_on(table::RUN_PATH)?;
    let is_module = settings.is_on(table::MODULE)?;
    let no_python = settings.is_on(table::NO_PYTHON)?;
    Ok(match (is_path, is_module, no_python) {
        (true, true, _) => {
            return Err(Usage("--module and --run-path exclude each other; give one".into()));
        }
        (false, true, true) => {
            return Err(Usage("--module and --no-python exclude each other; give one".into()));
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

/// Names with or without SIG. As with torchrun, an unknown one is skipped.
fn signals(setting: &Setting, settings: &Settings) -> Result<Vec<Signal>, Usage> {
    let mut signals = Vec::new();
    for name in setting.text()?.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let upper = name.to_uppercase();
        let upper = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
        let fault = match signal::named(&upper) {
            None => "names no signal",
            Some(Signal::KILL | Signal::STOP) => "cannot be caught",
            Some(Signal::CHILD | Signal::PIPE) => "is flow-launch's own",
            Some(signal) => {
                if !signals.contains(&signal) {
                    signals.push(signal);
                }
                continue;
            }
        };
        settings.warn(format!("{} has '{name}', which is skipped: it {fault}", setting.source()));
    }
    Ok(signals)
}

/// Checks flags of torchrun that have no meaning here: they are about how it polls and forks
/// Python.
fn ignore_what_has_no_meaning(settings: &Settings) -> Result<(), Usage> {
    settings.get(table::MONITOR_INTERVAL).map(|setting| setting.seconds()).transpose()?;
    let methods = ["spawn", "fork", "forkserver"].map(|name| (name, ()));
    settings.get(table::START_METHOD).map(|setting| setting.one_of(&methods)).transpose()?;
    Ok(())
}

#[cfg(test)]
mod tests;
