//! The texts that flow-launch prints about itself: shell completions and the manual page.

use std::io;

use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::flag_table as table;
use super::flags;
use super::settings::Settings;
use super::usage::Usage;

/// Returns the text that `--completions` or `--man` asks for, if one of them is given.
pub fn requested(settings: &Settings) -> Result<Option<Vec<u8>>, Usage> {
    let shells = [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell];
    let shells = shells.map(|shell| (shell.to_string(), shell));
    let shells = shells.each_ref().map(|(name, shell)| (name.as_str(), *shell));
    if let Some(shell) = settings.get(table::COMPLETIONS) {
        return Ok(Some(completions(shell.one_of(&shells)?)));
    }
    let is_manual = settings.is_on(table::MAN)?;
    Ok(is_manual.then(|| manual().unwrap_or_default())) // writing to memory does not fail
}

fn completions(shell: Shell) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut flags::full_command(), "flow-launch", &mut text);
    text
}

fn manual() -> io::Result<Vec<u8>> {
    let man = Man::new(flags::full_command());
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    // clap's own synopsis would list every flag.
    let mut synopsis = Roff::new();
    synopsis.control("SH", ["SYNOPSIS"]);
    synopsis.text([bold("flow-launch"), roman(" [OPTIONS] PROGRAM [ARGS...]")]);
    synopsis.control("br", []);
    synopsis.text([bold("flow-launch top"), roman(" [OPTIONS] [JOB]")]);
    synopsis.control("br", []);
    synopsis.text([bold("flow-launch trace"), roman(" FILE")]);
    synopsis.control("br", []);
    synopsis.text([bold("flow-launch doctor"), roman(" [OPTIONS]")]);
    synopsis.control("br", []);
    synopsis.text([bold("flow-launch setup-libtorch"), roman(" [OPTIONS]")]);
    synopsis.to_writer(&mut text)?;
    man.render_description_section(&mut text)?;
    let mut commands = Roff::new();
    commands.control("SH", ["COMMANDS"]);
    for command in flags::full_command().get_subcommands() {
        commands.control("TP", []);
        commands.text([bold(command.get_bin_name().unwrap_or_default())]);
        commands.text([roman(command.get_about().map(ToString::to_string).unwrap_or_default())]);
    }
    commands.to_writer(&mut text)?;
    man.render_options_section(&mut text)?;
    man.render_version_section(&mut text)?;
    Ok(text)
}
