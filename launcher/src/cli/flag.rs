//! A flag: its spellings, its value and its descriptions.

use std::ffi::OsString;

use clap::builder::{PossibleValuesParser, ValueParser};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, ValueHint};

/// A flag with a value.
#[derive(Clone, Copy)]
pub struct Valued(pub &'static Flag);

/// A flag that is given or not.
#[derive(Clone, Copy)]
pub struct Switch(pub &'static Flag);

/// A flag that may be repeated; each of its values counts.
#[derive(Clone, Copy)]
pub struct List(pub &'static Flag);

/// A flag. It may be written with underscores too.
pub struct Flag {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub short: Option<char>,
    /// Name of its value, if it has one.
    pub value: Option<&'static str>,
    /// The words that its value may be. Some flags take numbers, too.
    pub words: &'static [&'static str],
    /// The variable `PET_<NAME>` is its default, as in torchrun.
    pub has_variable: bool,
    /// It may be repeated, and each value counts.
    pub is_list: bool,
    pub heading: &'static str,
    /// One line for `--help`. Empty for flags that only torchrun needs: accepted, and left out.
    pub help: &'static str,
    /// Empty if there is none.
    pub default: &'static str,
    /// The full description, in Markdown.
    pub meaning: &'static str,
    /// The difference from torchrun's flag; empty if there is none.
    pub differs: &'static str,
}

impl Flag {
    /// Returns all spellings, without leading dashes; the name is the first.
    pub fn spellings(&self) -> impl Iterator<Item = String> + '_ {
        let names = std::iter::once(&self.name).chain(self.aliases);
        names.flat_map(|name| {
            let other = name.contains('-').then(|| name.replace('-', "_"));
            std::iter::once(name.to_string()).chain(other)
        })
    }

    /// Whether this word, with its dashes, is the flag or short for it.
    pub fn is_meant_by(&self, word: &str) -> bool {
        match (word.strip_prefix("--"), word.strip_prefix('-')) {
            (Some(name), _) => {
                !name.is_empty() && self.spellings().any(|spelling| spelling.starts_with(name))
            }
            (None, Some(name)) => self.short.is_some_and(|short| name.chars().eq([short])),
            (None, None) => false,
        }
    }

    /// Returns the argument for clap.
    pub fn argument(&self) -> Arg {
        let help = match self.default {
            "" => self.help.into(),
            default => format!("{} [default: {default}]", self.help),
        };
        let argument =
            Arg::new(self.name).long(self.name).aliases(self.spellings().skip(1)).help(help);
        let argument = argument.help_heading(self.heading).hide(self.help.is_empty());
        let argument = if let Some(short) = self.short { argument.short(short) } else { argument };
        let action = if self.is_list { ArgAction::Append } else { ArgAction::Set };
        match self.value {
            Some(value) => argument
                .value_name(value)
                .value_hint(hint(value))
                .value_parser(ValueParser::os_string())
                .allow_hyphen_values(true)
                .action(action),
            None => argument.action(ArgAction::SetTrue),
        }
    }

    /// Returns the argument for completions and the manual page.
    pub fn full_argument(&self) -> Arg {
        let argument = self.argument().long_help(self.long_help());
        if self.words.is_empty() {
            return argument;
        }
        // Shells complete the words; the manual page has them in its text.
        argument.value_parser(PossibleValuesParser::new(self.words)).hide_possible_values(true)
    }

    /// Returns the flag and its value for another command line, if it is given on this one.
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

    /// Gives the flag other names.
    pub const fn alias(mut self, aliases: &'static [&'static str]) -> Flag {
        self.aliases = aliases;
        self
    }

    /// Gives the flag a letter.
    pub const fn short(mut self, short: char) -> Flag {
        self.short = Some(short);
        self
    }

    /// Sets the words that its value may be.
    pub const fn words(mut self, words: &'static [&'static str]) -> Flag {
        self.words = words;
        self
    }

    /// Lets the flag be repeated; each value counts.
    pub const fn list(mut self) -> Flag {
        self.is_list = true;
        self
    }

    /// Sets the default, as the pages show it.
    pub const fn default(mut self, default: &'static str) -> Flag {
        self.default = default;
        self
    }

    /// Sets the full description, in Markdown.
    pub const fn meaning(mut self, meaning: &'static str) -> Flag {
        self.meaning = meaning;
        self
    }

    /// Sets the difference from torchrun's flag.
    pub const fn differs(mut self, differs: &'static str) -> Flag {
        self.differs = differs;
        self
    }

    /// Returns the variable that stands in for it, if any.
    pub fn variable(&self) -> Option<String> {
        self.has_variable.then(|| format!("PET_{}", self.name.replace('-', "_").to_uppercase()))
    }

    /// Returns the description for the manual page, in plain text.
    pub fn long_help(&self) -> String {
        let default = match self.default {
            "" => String::new(),
            default => format!(" Default: {default}."),
        };
        let variable = self.variable().map(|name| format!(" Variable: {name}."));
        let aliases = self.aliases.iter().map(|alias| format!(" Also --{alias}."));
        let variable = variable.unwrap_or_default();
        format!("{}.{default}{variable}{}", plain_text(self.meaning), aliases.collect::<String>())
    }

    /// For flags that torchrun lacks, or reads from the command line only.
    pub const fn without_variable(mut self) -> Flag {
        self.has_variable = false;
        self
    }
}

/// Makes a flag with a value.
pub const fn option(
    heading: &'static str,
    name: &'static str,
    value: &'static str,
    help: &'static str,
) -> Flag {
    Flag { value: Some(value), ..switch(heading, name, help) }
}

/// Makes a flag without a value.
pub const fn switch(heading: &'static str, name: &'static str, help: &'static str) -> Flag {
    Flag {
        name,
        aliases: &[],
        short: None,
        value: None,
        words: &[],
        has_variable: true,
        is_list: false,
        heading,
        help,
        default: "",
        meaning: "",
        differs: "",
    }
}

/// Markdown without its quotes and links.
fn plain_text(markdown: &str) -> String {
    let mut text = markdown.replace('`', "");
    while let (Some(open), Some(middle), Some(end)) =
        (text.find('['), text.find("]("), text.rfind(".md"))
    {
        let close = end + text[end..].find(')').unwrap_or(0);
        let name = text[open + 1..middle].to_string();
        text.replace_range(open..=close, &name);
    }
    text
}

/// Returns the kind of words with which a shell completes a value.
fn hint(value: &str) -> ValueHint {
    match value {
        "FILE" => ValueHint::FilePath,
        "DIR" => ValueHint::DirPath,
        "HOST" => ValueHint::Hostname,
        "COMMAND" => ValueHint::CommandString,
        _ => ValueHint::Other,
    }
}
