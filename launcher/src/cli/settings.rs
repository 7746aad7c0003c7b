//! The value of a flag: from the command line, or else from its variable.

use std::cell::RefCell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ArgMatches;

use super::flag::{Flag, List, Switch, Valued};
use super::flag_table::FLAGS;
use super::flags;
use super::usage::Usage;
use crate::report::text::printable;

/// Looks up a variable of the environment.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The value of a flag.
pub struct Setting {
    /// `--flag`, or the name of its variable.
    source: String,
    value: OsString,
}

/// All flags with their values.
pub struct Settings<'a> {
    pub matches: ArgMatches,
    pub environment: Environment<'a>,
    /// Notices for the user about ignored values.
    pub warnings: RefCell<Vec<String>>,
}

impl Settings<'_> {
    /// Makes the settings of a parsed command line and an environment.
    pub fn new(matches: ArgMatches, environment: Environment<'_>) -> Settings<'_> {
        Settings { matches, environment, warnings: RefCell::default() }
    }

    /// Returns the value of a flag. Its variable counts only if it is not empty.
    pub fn get(&self, Valued(flag): Valued) -> Option<Setting> {
        match self.matches.get_one::<OsString>(flag.name) {
            Some(value) => Some(Setting::given(flag, value)),
            None => self.stand_in(flag),
        }
    }

    /// Returns the value of the flag's variable.
    fn stand_in(&self, flag: &Flag) -> Option<Setting> {
        self.variable(&flag.variable()?)
    }

    /// Returns a variable that is set and not empty.
    pub fn variable(&self, name: &str) -> Option<Setting> {
        let value = (self.environment)(name).filter(|value| !value.is_empty())?;
        Some(Setting { source: name.into(), value })
    }

    /// Whether a flag without a value is on. Its variable is a number; 0 is off.
    pub fn is_on(&self, Switch(flag): Switch) -> Result<bool, Usage> {
        match self.stand_in(flag) {
            Some(setting) if !self.matches.get_flag(flag.name) => {
                Ok(setting.number(i64::MIN, "0 or 1")? != 0)
            }
            _ => Ok(self.matches.get_flag(flag.name)),
        }
    }

    /// Returns all values of a flag that may be repeated.
    pub fn get_all(&self, List(flag): List) -> Vec<Setting> {
        let values = self.matches.get_many::<OsString>(flag.name).into_iter().flatten();
        values.map(|value| Setting::given(flag, value)).collect()
    }

    /// Records a warning, once.
    pub fn warn(&self, warning: String) {
        let mut warnings = self.warnings.borrow_mut();
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }

    /// Refuses a flag as the value of another flag, whose own value is missing.
    pub fn refuse_flags_as_values(&self) -> Result<(), Usage> {
        for flag in FLAGS.iter().filter(|flag| flag.value.is_some()) {
            let taken =
                self.matches.get_one::<OsString>(flag.name).and_then(|value| value.to_str());
            if let Some(other) = taken.filter(|value| flags::is_flag(value)) {
                return Err(Usage(format!(
                    "--{} lacks its value: '{other}' follows it",
                    flag.name
                )));
            }
        }
        Ok(())
    }

    /// Returns a flag's value as text.
    pub fn get_text(&self, flag: Valued) -> Result<Option<String>, Usage> {
        self.get(flag).map(|setting| setting.text().map(String::from)).transpose()
    }

    /// Returns a flag's value as a number of at least `least`. `right` says in an error what it
    /// must be.
    pub fn get_number<T: FromStr + PartialOrd>(
        &self,
        flag: Valued,
        least: T,
        right: &str,
    ) -> Result<Option<T>, Usage> {
        self.get(flag).map(|setting| setting.number(least, right)).transpose()
    }

    /// Returns a flag's value as a host name or an address.
    pub fn get_host(&self, flag: Valued) -> Result<Option<String>, Usage> {
        self.get(flag).map(|setting| setting.host()).transpose()
    }

    /// Returns a flag's value as a path, which is not empty.
    pub fn get_path(&self, flag: Valued) -> Result<Option<PathBuf>, Usage> {
        match self.get(flag) {
            Some(setting) if setting.value.is_empty() => Err(setting.wrong("a path")),
            setting => Ok(setting.map(|setting| setting.value.into())),
        }
    }
}

impl Setting {
    /// Returns the value of a flag on the command line.
    fn given(flag: &Flag, value: &OsString) -> Setting {
        Setting { source: format!("--{}", flag.name), value: value.clone() }
    }

    /// Makes a setting that comes from `source`, which is no flag.
    pub fn preset(source: &str, value: &str) -> Setting {
        Setting { source: source.into(), value: value.into() }
    }

    /// Returns the error that something else is missing.
    pub fn needs(&self, what: &str) -> Usage {
        Usage(format!("{} is '{}', which needs {what}", self.source, self.shown()))
    }

    /// Returns the error about a value.
    pub fn wrong(&self, right: &str) -> Usage {
        Usage(format!("{} is '{}'; it must be {right}", self.source, self.shown()))
    }

    /// Returns the value, for a message of one line.
    fn shown(&self) -> String {
        printable(&self.value.to_string_lossy())
    }

    /// Returns the value as a path.
    pub fn into_path(self) -> PathBuf {
        self.value.into()
    }

    /// Returns where the value comes from: a flag or a variable.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the value as it was written.
    pub fn literal(&self) -> Result<&str, Usage> {
        self.value.to_str().ok_or_else(|| self.wrong("UTF-8"))
    }

    /// Returns the value without quotes and white space around it: names and numbers contain
    /// neither; paths and texts to look for may.
    pub fn text(&self) -> Result<&str, Usage> {
        self.literal().map(|text| unquoted(text.trim()).trim())
    }

    /// Returns the value as a number of at least `least`. `right` says in an error what it must be.
    pub fn number<T: FromStr + PartialOrd>(&self, least: T, right: &str) -> Result<T, Usage> {
        let number = self.text()?.parse().ok().filter(|number| *number >= least);
        number.ok_or_else(|| self.wrong(right))
    }

    /// Returns the value as a time in seconds.
    pub fn seconds(&self) -> Result<Duration, Usage> {
        seconds(self.text()?)
            .ok_or_else(|| self.wrong(&format!("a number of seconds from 0 to {LONGEST}")))
    }

    /// Reads a host name or an address; an IPv6 address may be in brackets.
    pub fn host(&self) -> Result<String, Usage> {
        host(self.text()?).ok_or_else(|| self.wrong("a host name or an address"))
    }

    /// Reads one of some words.
    pub fn one_of<T: Copy>(&self, words: &[(&str, T)]) -> Result<T, Usage> {
        let text = self.text()?;
        let found = words.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| *value).ok_or_else(|| {
            let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            self.wrong(&format!("one of {}", words.join(", ")))
        })
    }
}

/// Removes the quotes that are left around a value when a command line comes from a list in YAML.
pub fn unquoted(text: &str) -> &str {
    for quote in ['\'', '"'] {
        let inside = text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
        if let Some(inside) = inside {
            return inside;
        }
    }
    text
}

/// The longest time that is accepted, in seconds.
pub const LONGEST: f64 = 1e6;

/// Reads a time in seconds; None if it is no such time.
pub fn seconds(text: &str) -> Option<Duration> {
    text.parse()
        .ok()
        .filter(|seconds| (0.0..=LONGEST).contains(seconds))
        .map(Duration::from_secs_f64)
}

/// Reads `host`, `host:number`, `[v6]` or `[v6]:number`.
pub fn host_and_number<N: FromStr>(text: &str) -> Option<(String, Option<N>)> {
    let end_of_host = text.rfind(']').map_or(0, |end| end + 1);
    let (name, number) = match text[end_of_host..].split_once(':') {
        Some((rest, number)) => (&text[..end_of_host + rest.len()], Some(number.parse().ok()?)),
        None => (text, None),
    };
    let host = host(name).filter(|host| !host.contains(':') || name.starts_with('['))?;
    Some((host, number))
}

/// Reads a host name or an address; None if it is neither.
pub fn host(text: &str) -> Option<String> {
    let host = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let is_name = host.chars().all(|c| c.is_ascii_alphanumeric() || "._:%-".contains(c));
    (is_name && !host.is_empty() && !host.starts_with('-')).then(|| host.into())
}
