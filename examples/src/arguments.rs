//! Command lines whose errors are one line.

use clap::error::ErrorKind;
use clap::Parser;

/// The program's arguments. Help and version go to stdout; a usage error is one line, and exit code
/// 2.
pub fn parse<A: Parser>() -> A {
    A::try_parse().unwrap_or_else(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            let command = A::command();
            let names: Vec<&str> = command.get_subcommands().map(|sub| sub.get_name()).collect();
            eprintln!("error: a subcommand is missing: {}; see --help", names.join(", "));
            std::process::exit(2)
        }
        let text = error.to_string();
        let more =
            |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
        let lines = text.lines().map(str::trim).take_while(|line| !more(line));
        eprintln!("{}", lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" "));
        std::process::exit(2)
    })
}
