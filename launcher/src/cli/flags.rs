//! The table of all flags.

use std::ffi::OsString;

use clap::builder::ValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

/// A flag. It may be written with underscores too.
pub struct Flag {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    short: Option<char>,
    /// Name of its value, if it has one.
    pub value: Option<&'static str>,
    /// The variable `PET_<NAME>` is its default, as in torchrun.
    pub has_variable: bool,
    /// It may be repeated, and each value counts.
    is_list: bool,
    heading: &'static str,
    /// Empty for flags that only torchrun needs: accepted, and left out of `--help`.
    help: &'static str,
}

impl Flag {
    /// All spellings, without leading dashes.
    pub fn spellings(&self) -> impl Iterator<Item = String> + '_ {
        [self.name, &self.name.replace('-', "_")]
            .map(String::from)
            .into_iter()
            .chain(self.aliases.iter().map(|a| a.to_string()))
    }

    /// Whether this word, with its dashes, is the flag or short for it.
    fn is_meant_by(&self, word: &str) -> bool {
        match (word.strip_prefix("--"), word.strip_prefix('-')) {
            (Some(name), _) => {
                !name.is_empty() && self.spellings().any(|spelling| spelling.starts_with(name))
            }
            (None, Some(letter)) => self.short.is_some_and(|short| letter.chars().eq([short])),
            (None, None) => false,
        }
    }

    fn argument(&self) -> Arg {
        let argument =
            Arg::new(self.name).long(self.name).aliases(self.spellings().skip(1)).help(self.help);
        let argument = argument.help_heading(self.heading).hide(self.help.is_empty());
        let argument = if let Some(short) = self.short { argument.short(short) } else { argument };
        let action = if self.is_list { ArgAction::Append } else { ArgAction::Set };
        match self.value {
            Some(value) => argument
                .value_name(value)
                .value_parser(ValueParser::os_string())
                .allow_hyphen_values(true)
                .action(action),
            None => argument.action(ArgAction::SetTrue),
        }
    }

    /// The flag and its value for another command line, if it is given on this one.
    pub fn given(&self, matches: &ArgMatches) -> Option<OsString> {
        if matches.value_source(self.name) != Some(ValueSource::CommandLine) {
            return None;
        }
        let mut given = OsString::from(format!("--{}", self.name));
        if self.value.is_some() {
            given.push("=");
            given.push(matches.get_one::<OsString>(self.name)?);
        }
        Some(given)
    }

    const fn alias(mut self, aliases: &'static [&'static str]) -> Flag {
        self.aliases = aliases;
        self
    }

    const fn short(mut self, short: char) -> Flag {
        self.short = Some(short);
        self
    }

    const fn list(mut self) -> Flag {
        self.is_list = true;
        self
    }

    /// For flags that torchrun lacks, or reads from the command line only.
    const fn without_variable(mut self) -> Flag {
        self.has_variable = false;
        self
    }
}

const fn option(
    heading: &'static str,
    name: &'static str,
    value: &'static str,
    help: &'static str,
) -> Flag {
    Flag {
        name,
        aliases: &[],
        short: None,
        value: Some(value),
        has_variable: true,
        is_list: false,
        heading,
        help,
    }
}

const fn switch(heading: &'static str, name: &'static str, help: &'static str) -> Flag {
    Flag {
        name,
        aliases: &[],
        short: None,
        value: None,
        has_variable: true,
        is_list: false,
        heading,
        help,
    }
}

const WORKERS: &str = "Workers";
const PROGRAM: &str = "Program";
const NODES: &str = "Nodes";
const OUTPUT: &str = "Output";

pub const FLAGS: &[Flag] = &[
    option(
        WORKERS,
        "nproc-per-node",
        "N",
        "Workers on this node: a number, auto, cpu or gpu [default: 1]",
    )
    .short('n'),
    option(WORKERS, "max-restarts", "N", "Starts anew after a failure [default: 0]"),
    option(
        WORKERS,
        "shutdown-timeout",
        "SECONDS",
        "From SIGTERM to SIGKILL; also --grace [default: 30]",
    )
    .alias(&["grace"]),
    option(
        WORKERS,
        "hang-timeout",
        "SECONDS",
        "Longest wait in a collective, or to join [default: none]",
    )
    .without_variable(),
    option(
        WORKERS,
        "signals-to-handle",
        "NAMES",
        "Passed on to workers [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT]",
    ),
    option(
        WORKERS,
        "stdin",
        "WHO",
        "Who reads the input: all, none or a rank [default: Python all, others 0]",
    )
    .without_variable(),
    option(
        WORKERS,
        "numa-binding",
        "KIND",
        "Cores for each: node, socket, exclusive or core-complex",
    )
    .without_variable(),
    switch(WORKERS, "virtual-local-rank", "Each sees one GPU, its own, and LOCAL_RANK 0"),
    option(WORKERS, "role", "NAME", "Told to them as ROLE_NAME [default: default]"),
    switch(PROGRAM, "module", "PROGRAM is a Python module").short('m'),
    switch(PROGRAM, "no-python", "PROGRAM runs as it is, even if its name ends in .py"),
    switch(PROGRAM, "run-path", "PROGRAM is a Python script, whatever its name"),
    option(NODES, "nnodes", "N|MIN:MAX", "Nodes in the job [default: 1]"),
    option(
        NODES,
        "node-rank",
        "N",
        "This node, from 0, where --master-addr names node 0 [default: 0]",
    ),
    option(NODES, "master-addr", "HOST", "Address of node 0"),
    option(
        NODES,
        "master-port",
        "PORT",
        "Port on node 0 [default: 29500; for one node a free one]",
    ),
    option(
        NODES,
        "rdzv-endpoint",
        "HOST[:PORT]",
        "Where nodes meet, in any order [default port: 29400]",
    ),
    option(NODES, "rdzv-backend", "KIND", "static (by --master-addr) or c10d (by --rdzv-endpoint)"),
    option(NODES, "rdzv-id", "ID", "Tells this job from others"),
    option(
        NODES,
        "rdzv-conf",
        "KEY=VALUE,...",
        "join_timeout, last_call_timeout, heartbeat_timeout, is_host",
    ),
    switch(NODES, "standalone", "One node, whatever the other flags say"),
    option(NODES, "local-addr", "HOST", "Address at which others reach this node"),
    option(
        NODES,
        "hosts",
        "HOST[:N],...",
        "Start a node with N workers on each, by ssh; also --host",
    )
    .alias(&["host"])
    .without_variable(),
    option(NODES, "hostfile", "FILE", "The same; a line is HOST, HOST:N or HOST slots=N")
        .without_variable(),
    option(
        NODES,
        "export",
        "NAME[=VALUE]",
        "A variable for all hosts, beside FLOW_*, NCCL_* and the like",
    )
    .short('x')
    .list()
    .without_variable(),
    option(NODES, "rsh", "COMMAND", "In place of ssh, with its options; or FLOW_RSH")
        .without_variable(),
    switch(OUTPUT, "prefix", "Put the rank before each line, as on a terminal").without_variable(),
    option(OUTPUT, "log-dir", "DIR", "For the files of --redirects and --tee"),
    option(
        OUTPUT,
        "redirects",
        "STREAMS",
        "To files: 0 none, 1 stdout, 2 stderr, 3 both; or by rank 0:3,10:1",
    )
    .short('r')
    .alias(&["redirect"]),
    option(OUTPUT, "tee", "STREAMS", "To files and here; STREAMS as above").short('t'),
    option(OUTPUT, "local-ranks-filter", "RANKS", "Show only these: 0,2"),
    option(
        OUTPUT,
        "duplicate-stdout-filters",
        "TEXTS",
        "Copy lines with one of a,b to filtered_stdout.log",
    ),
    option(
        OUTPUT,
        "duplicate-stderr-filters",
        "TEXTS",
        "Copy lines with one of a,b to filtered_stderr.log",
    ),
    switch(OUTPUT, "redirect-stdout-and-stderr", "OneFlow's --redirects 3").without_variable(),
    option(OUTPUT, "logdir", "DIR", "OneFlow's --log-dir [default: log]").without_variable(),
    option(OUTPUT, "events", "FILE", "Write what happens, a JSON object a line").without_variable(),
    switch(OUTPUT, "quiet", "Of flow-launch's own lines only those of errors")
        .short('q')
        .without_variable(),
    switch(OUTPUT, "dry-run", "Print what would be started").without_variable(),
    option(OUTPUT, "event-log-handler", "NAME", ""),
    option(OUTPUT, "logs-specs", "NAME", "").without_variable(),
    option(WORKERS, "monitor-interval", "SECONDS", ""),
    option(WORKERS, "start-method", "NAME", ""),
    switch(PROGRAM, "use-env", "").without_variable(),
];

/// The name of the argument with PROGRAM and its arguments.
pub const COMMAND: &str = "command";

const ABOUT: &str = "\
Starts PROGRAM once per worker, passes on the output, and stops all workers when one fails.

PROGRAM is a path, a name beside flow-launch, or a name on PATH; a .py or .pyz file, or a folder with __main__.py,
runs with python3 -u.
Everything after PROGRAM is PROGRAM's. Flags may be written with underscores, and shortened.";

pub fn command() -> Command {
    let program = Arg::new(COMMAND).num_args(0..).value_parser(ValueParser::os_string());
    Command::new("flow-launch")
        .version(env!("CARGO_PKG_VERSION"))
        .about(ABOUT)
        .override_usage("flow-launch [OPTIONS] PROGRAM [ARGS...]")
        .term_width(120)
        .args_override_self(true)
        .infer_long_args(true)
        .args(FLAGS.iter().map(Flag::argument))
        .arg(program.hide(true).trailing_var_arg(true))
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
            *argument = if is_apart {
                "--nproc-per-node".into()
            } else {
                format!("--nproc-per-node={count}").into()
            };
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
        "nproc-per-node",
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
    ("nnodes", &["num-nodes", "num-machines", "nodes"]),
    ("node-rank", &["machine-rank"]),
    ("master-addr", &["main-process-ip"]),
    ("master-port", &["main-process-port"]),
];

/// Our flag for another launcher's name.
pub fn elsewhere(name: &str) -> Option<&'static str> {
    let name = name.replace('_', "-");
    ELSEWHERE.iter().find(|(_, names)| names.contains(&name.as_str())).map(|(flag, _)| *flag)
}

/// The flags that a shortened one could stand for.
pub fn candidates(start: &str) -> Vec<&'static str> {
    let fits = |flag: &&Flag| flag.spellings().any(|spelling| spelling.starts_with(start));
    let of_clap = ["help", "version"].into_iter().filter(|name| name.starts_with(start));
    of_clap.chain(FLAGS.iter().filter(fits).map(|flag| flag.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_makes_a_command_line() {
        command().debug_assert();
    }

    #[test]
    fn help_has_a_line_for_each_flag_and_is_short() {
        let help = command().render_help().to_string();
        for flag in FLAGS.iter().filter(|flag| !flag.help.is_empty()) {
            let name = format!("--{}", flag.name);
            assert!(
                help.lines().any(|line| line.contains(&name) && line.ends_with(flag.help)),
                "{name}"
            );
        }
        assert!(help.lines().count() <= 60, "{help}");
    }

    #[test]
    fn the_documentation_has_each_flag() {
        let page = include_str!("../../../README.md");
        for flag in FLAGS {
            assert!(page.contains(&format!("`--{}", flag.name)), "{}", flag.name);
            assert!(
                flag.aliases.iter().all(|alias| page.contains(&format!("`--{alias}`"))),
                "{}",
                flag.name
            );
        }
    }
}
