//! Command lines whose errors are one line.

use clap::Parser;
use clap::error::ErrorKind;

/// Parses the program's arguments. Help and version go to stdout; a usage error is one line, and exit
/// code 2.
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
        let mut lines = Vec::new();
        for line in error.to_string().lines() {
            if line.starts_with("Usage:") || line.starts_with("For more information") {
                break;
            }
            if !line.trim().is_empty() {
                lines.push(line.trim().to_owned());
            }
        }
        eprintln!("{}", lines.join(" "));
        std::process::exit(2)
    })
}
