//! Command lines whose errors are one line.

use clap::Parser;

/// The program's arguments. Help and version go to stdout; a usage error is one line, and exit code 2.
pub fn parse<A: Parser>() -> A {
    A::try_parse().unwrap_or_else(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        let text = error.to_string();
        let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
        eprintln!("{}", lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" "));
        std::process::exit(2)
    })
}
