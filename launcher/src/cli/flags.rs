//! The command line that the table of flags makes.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};

use super::flag_table::{self as table, FLAGS};
use super::usage::Usage;

/// The name of the argument with PROGRAM and its arguments.
pub const COMMAND: &str = "command";

/// The subcommands. They count only as the first argument.
pub const TRACE: &str = "trace";
/// Says what is on this machine.
pub const DOCTOR: &str = "doctor";
/// Shows what a job does.
pub const TOP: &str = "top";
/// Finds or downloads libtorch.
pub const SETUP_LIBTORCH: &str = "setup-libtorch";

/// The name of the argument of `flow-launch trace`.
const TIMELINE: &str = "timeline";

/// Names of arguments of `flow-launch top`.
pub const JOB: &str = "job";
pub const ONCE: &str = "once";
pub const HTTP: &str = "http";

/// Names of arguments of `flow-launch doctor`, the first of `flow-launch top` as well.
pub const JSON: &str = "json";
pub const TIMEOUT: &str = "timeout";

/// Names of arguments of `flow-launch setup-libtorch`.
pub const CUDA: &str = "cuda";
pub const TORCH: &str = "torch";
pub const CARGO_CONFIG: &str = "cargo-config";

const ABOUT: &str = "\
Starts PROGRAM once per worker, passes on the output, and stops all workers when one fails.

PROGRAM is a path, a name beside flow-launch, or a name on PATH; a .py or .pyz file, or a folder with __main__.py,
runs with python3 -u.
Everything after PROGRAM is PROGRAM's. Flags may be written with underscores, and shortened.";

const USAGE: &str = "\
flow-launch [OPTIONS] PROGRAM [ARGS...]
       flow-launch top [OPTIONS] [JOB]         Show what a running job does
       flow-launch trace FILE                  Summarize a timeline that --trace has written
       flow-launch doctor [OPTIONS]            Say what is on this machine, and what to do about what is wrong
       flow-launch setup-libtorch [OPTIONS]    Find or download the libtorch that Rust programs are built with";

/// Returns the command line for `--help`.
pub fn command() -> Command {
    with_flags(FLAGS.iter().map(|flag| flag.argument()), true)
}

/// Returns the command line for completions and the manual page: with full descriptions, PROGRAM,
/// and the subcommands.
pub fn full_command() -> Command {
    let flags = FLAGS.iter().filter(|flag| !flag.help.is_empty());
    with_flags(flags.map(|flag| flag.full_argument()), false)
        .subcommands([top_command(), trace_command(), doctor_command(), setup_libtorch_command()])
        .disable_help_subcommand(true)
}

/// Returns the command line of `flow-launch trace`.
pub fn trace_command() -> Command {
    Command::new(TRACE)
        .bin_name("flow-launch trace")
        .about("Prints a summary of a timeline that flow-launch --trace FILE has written")
        .arg(
            Arg::new(TIMELINE)
                .required(true)
                .value_name("FILE")
                .value_hint(ValueHint::FilePath)
                .value_parser(ValueParser::path_buf())
                .help("The timeline"),
        )
}

/// Returns the command line of `flow-launch top`.
pub fn top_command() -> Command {
    let switch = |name: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue);
    let job = Arg::new(JOB).value_name("JOB");
    let http = Arg::new(HTTP).long(HTTP).value_name("ADDRESS");
    let of_endpoint = [
        (
            table::RDZV_ENDPOINT,
            "Where the leading node of a job elsewhere is; it asks for FLOW_TOKEN",
        ),
        (table::RDZV_ID, "The id of that job"),
    ];
    Command::new(TOP)
        .bin_name("flow-launch top")
        .about("Shows what a running job does: each rank's steps, communication, waits and memory")
        .term_width(120)
        .args_override_self(true)
        .arg(job.help("A job of this machine: its id, or the process number of its flow-launch"))
        .arg(switch(JSON).help("Print a line of JSON a second"))
        .arg(switch(ONCE).help("Print one line"))
        .arg(http.help("Serve a page at PORT of this machine only, or at HOST:PORT"))
        .args(of_endpoint.map(|(flag, help)| flag.0.argument().help(help)))
}

/// Returns the command line of `flow-launch setup-libtorch`.
pub fn setup_libtorch_command() -> Command {
    let switch = |name: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue);
    let torch = Arg::new(TORCH).long(TORCH).value_name("VERSION");
    Command::new(SETUP_LIBTORCH)
        .bin_name("flow-launch setup-libtorch")
        .about(
            "Finds the libtorch for the tch in Cargo.lock, or downloads it once, by Python's pip, \
             and prints the line that exports LIBTORCH",
        )
        .term_width(120)
        .args_override_self(true)
        .arg(switch(CUDA).help("libtorch with its CUDA libraries"))
        .arg(torch.help("This version, whatever Cargo.lock says"))
        .arg(switch(CARGO_CONFIG).help("Write .cargo/config.toml in place of printing the line"))
}

/// Returns the command line of `flow-launch doctor`.
pub fn doctor_command() -> Command {
    let json = Arg::new(JSON).long(JSON).action(ArgAction::SetTrue);
    let timeout = Arg::new(TIMEOUT).long(TIMEOUT).value_name("SECONDS").default_value("30");
    let of_hosts = [
        (table::HOSTS, "Ask the doctor of each of these hosts, too, by ssh"),
        (table::HOSTFILE, "The same; a line is HOST, HOST:N or HOST slots=N"),
        (table::RSH, "In place of ssh, with its options; or FLOW_RSH"),
    ];
    Command::new(DOCTOR)
        .bin_name("flow-launch doctor")
        .about(
            "Says what is on this machine, a fact a line, and what to do about what is wrong. Ends \
             with 1 if something is broken, else with 0",
        )
        .term_width(120)
        .args_override_self(true)
        .arg(json.help("Print the facts as one line of JSON"))
        .arg(
            timeout
                .value_parser(ValueParser::os_string())
                .help("Longest wait for a command, such as ssh or import torch"),
        )
        .args(of_hosts.map(|(flag, help)| flag.0.argument().help(help)))
}

fn with_flags(flags: impl Iterator<Item = Arg>, hides_program: bool) -> Command {
    let program = Arg::new(COMMAND).num_args(0..).value_parser(ValueParser::os_string());
    let program = program.value_name("PROGRAM").help("The program to start, and its arguments");
    Command::new("flow-launch")
        .version(env!("CARGO_PKG_VERSION"))
        .about(ABOUT)
        .override_usage(USAGE)
        .term_width(120)
        .args_override_self(true)
        .infer_long_args(true)
        .args(flags)
        .arg(
            program
                .hide(hides_program)
                .trailing_var_arg(true)
                .value_hint(ValueHint::CommandWithArguments),
        )
}

/// Returns the file that `flow-launch trace` is to summarize. Answers `--help` here and ends the
/// process.
pub fn timeline(arguments: &[OsString]) -> Result<PathBuf, Usage> {
    let matches = parse(trace_command(), arguments);
    let mut matches = matches
        .map_err(|_| Usage("usage: flow-launch trace FILE, with a file of --trace".into()))?;
    Ok(matches.remove_one(TIMELINE).unwrap_or_default()) // it is required
}

/// Reads the arguments of a subcommand. Answers `--help` here and ends the process.
pub fn parse(command: Command, arguments: &[OsString]) -> Result<ArgMatches, Usage> {
    let name = command.get_bin_name().unwrap_or_default().to_string();
    let words = std::iter::once(OsString::from(&name)).chain(arguments.iter().cloned());
    match command.try_get_matches_from(words) {
        Ok(matches) => Ok(matches),
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            Err(Usage(format!("{line}; see {name} --help")))
        }
    }
}

/// Replaces mpirun's `-np` (or `-np=2`, `-np2`), which clap would read as `-n p`, by
/// `--nproc-per-node`, but not after PROGRAM.
pub fn with_np(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let mut rest = arguments.iter_mut().skip(1);
    while let Some(argument) = rest.next() {
        if let Some(count) = argument.to_str().and_then(|text| text.strip_prefix("-np")) {
            let count = count.strip_prefix('=').unwrap_or(count);
            let is_apart = count.is_empty();
            let name = table::NPROC_PER_NODE.0.name;
            *argument =
                if is_apart { format!("--{name}") } else { format!("--{name}={count}") }.into();
        }
        let Some(text) = argument.to_str().filter(|text| text.starts_with('-') && *text != "--")
        else {
            break;
        };
        if FLAGS.iter().any(|flag| flag.value.is_some() && flag.is_meant_by(text)) {
            rest.next();
        }
    }
    arguments
}

/// Whether this is a flag, or short for one, with a value or without.
pub fn is_flag(text: &str) -> bool {
    let name = text.split('=').next().unwrap_or_default();
    name == "-np" || FLAGS.iter().any(|flag| flag.is_meant_by(name))
}

/// Other launchers' names for our flags.
const ELSEWHERE: &[(&str, &[&str])] = &[
    (
        table::NPROC_PER_NODE.0.name,
        &[
            "num-proc",
            "num-procs",
            "num-processes",
            "num-workers",
            "num-gpus",
            "ntasks-per-node",
            "ppn",
        ],
    ),
    (table::NNODES.0.name, &["num-nodes", "num-machines", "nodes"]),
    (table::NODE_RANK.0.name, &["machine-rank"]),
    (table::MASTER_ADDR.0.name, &["main-process-ip"]),
    (table::MASTER_PORT.0.name, &["main-process-port"]),
];

/// Returns our flag for another launcher's name.
pub fn elsewhere(name: &str) -> Option<&'static str> {
    let name = name.replace('_', "-");
    ELSEWHERE.iter().find(|(_, names)| names.contains(&name.as_str())).map(|(flag, _)| *flag)
}

/// Returns the flags that a shortened one could stand for.
pub fn candidates(start: &str) -> Vec<&'static str> {
    let mut candidates = vec!["help", "version"];
    candidates.retain(|name| name.starts_with(start));
    let fitting = FLAGS.iter().filter(|flag| flag.spellings().any(|name| name.starts_with(start)));
    candidates.extend(fitting.map(|flag| flag.name));
    candidates
}

#[cfg(test)]
mod tests {
    use super::super::flag::Flag;
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_table_makes_a_command_line() {
        command().debug_assert();
    }

    #[test]
    fn help_has_a_line_for_each_flag_and_is_short() {
        let help = command().render_help().to_string();
        for flag in FLAGS.iter().filter(|flag| !flag.help.is_empty()) {
            let name = format!("--{}", flag.name);
            let is_whole = |line: &&str| line.contains(&name) && line.contains(flag.help);
            let line = help.lines().find(is_whole).unwrap_or_else(|| panic!("{name} in {help}"));
            assert!(flag.default.is_empty() || line.ends_with(']'), "{line}");
        }
        assert!(help.lines().count() <= 70, "{help}");
    }

    #[test]
    fn the_manual_has_plain_text() {
        for flag in FLAGS {
            let text = flag.long_help();
            assert!(!text.contains('`') && !text.contains(".md)"), "{text}");
        }
    }

    /// Returns the rows of one heading, in Markdown.
    fn table(heading: &str) -> String {
        let rows = FLAGS.iter().filter(|flag| flag.heading == heading).map(|flag| {
            let short = flag.short.map(|short| format!("`-{short}`"));
            let aliases = flag.aliases.iter().map(|alias| format!("`--{alias}`"));
            let names = std::iter::once(format!("`--{}`", flag.name)).chain(aliases).chain(short);
            let names = names.collect::<Vec<_>>().join(", ");
            let variable = if flag.has_variable { "yes" } else { "" };
            let Flag { default, meaning, differs, .. } = flag;
            format!("| {names} | {default} | {variable} | {meaning} | {differs} |\n")
        });
        let head = "| flag | default | variable | meaning | torchrun |\n|---|---|---|---|---|\n";
        head.to_string() + &rows.collect::<String>()
    }

    /// Every heading of the table is in the page, as the table has it. With FLOW_UPDATE_DOCS set,
    /// this writes the page.
    #[test]
    fn the_page_of_flags_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/flags.md");
        let page = std::fs::read_to_string(path).unwrap();
        let mut updated = page.clone();
        let headings: BTreeSet<_> = FLAGS.iter().map(|flag| flag.heading).collect();
        for heading in headings {
            let begin = format!("<!-- flags: {heading} -->\n");
            let start = updated.find(&begin).unwrap_or_else(|| panic!("no {begin}")) + begin.len();
            let end = start + updated[start..].find("<!-- end -->").expect("an end of the table");
            updated.replace_range(start..end, &table(heading));
        }
        if std::env::var_os("FLOW_UPDATE_DOCS").is_some() {
            std::fs::write(path, &updated).unwrap();
        }
        assert!(
            std::env::var_os("FLOW_UPDATE_DOCS").is_some() || page == updated,
            "docs/flags.md is stale: FLOW_UPDATE_DOCS=1 cargo test -p flow-launch page_of_flags"
        );
    }
}
