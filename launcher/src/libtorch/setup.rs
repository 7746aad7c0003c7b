//! `flow-launch setup-libtorch`: finds or downloads libtorch, for crates without a checkout of Flow.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use super::{Libtorch, VERSIONS, named};
use crate::cli::flags;
use crate::cli::setup_libtorch::{self, Request};
use crate::cli::usage::Usage;
use crate::plan::program;

/// What a checkout's `scripts/setup` runs, too.
const SCRIPT: &str = include_str!("libtorch.py");

/// Prints the line that exports LIBTORCH, or writes cargo's configuration; returns the exit code.
pub fn main(arguments: &[OsString]) -> anyhow::Result<u8> {
    program::note_namesake(flags::SETUP_LIBTORCH);
    let request = setup_libtorch::request(arguments)?;
    let here = std::env::current_dir().context("the current folder is gone")?;
    let lock = here.ancestors().map(|folder| folder.join("Cargo.lock")).find(|lock| lock.is_file());
    let version = match &request.version {
        Some(version) => version.clone(),
        None => version_for(lock.as_deref())?.into(),
    };
    let Some(folder) = folder(&version, &request)? else { return Ok(1) };
    let Some(shown) = folder.to_str() else { bail!("{} is not UTF-8", folder.display()) };
    if request.cargo_config {
        let top = lock.as_deref().and_then(Path::parent).unwrap_or(&here);
        configure(&top.join(".cargo/config.toml"), shown)?;
    } else {
        println!("export LIBTORCH={}", shlex::try_quote(shown)?);
    }
    Ok(0)
}

/// Returns the version of libtorch that the `tch` in Cargo.lock is for.
fn version_for(lock: Option<&Path>) -> anyhow::Result<&'static str> {
    let known = VERSIONS.map(|(tch, libtorch)| format!("{libtorch} for tch {tch}")).join(", or ");
    let Some(lock) = lock else {
        return Err(Usage(format!(
            "there is no Cargo.lock here: run this in the crate's folder, after cargo \
             generate-lockfile, or give --torch {known}"
        ))
        .into());
    };
    let text =
        fs::read_to_string(lock).with_context(|| format!("cannot read {}", lock.display()))?;
    let (_, rest) = text.split_once("\nname = \"tch\"\nversion = \"").unwrap_or_default();
    let tch = rest.split('"').next().unwrap_or_default();
    let found = VERSIONS.iter().find(|(version, _)| tch.starts_with(&format!("{version}.")));
    let Some((_, libtorch)) = found else {
        let tch = if tch.is_empty() { "no tch".into() } else { format!("tch {tch}") };
        let lock = lock.display();
        return Err(Usage(format!("{lock} has {tch}; give --torch {known}")).into());
    };
    Ok(libtorch)
}

/// Returns the folder of libtorch: LIBTORCH's, if that is the right one, or Python's torch, or one
/// in the cache, where it is put if it is not there. None if it cannot be had: Python has said why.
fn folder(version: &str, request: &Request) -> anyhow::Result<Option<PathBuf>> {
    let fits = |found: &Libtorch| found.version == version && (found.has_cuda || !request.cuda);
    if let Some(folder) = named()
        && Libtorch::at(&folder).is_ok_and(|found| fits(&found))
    {
        return Ok(Some(folder));
    }
    let kind = if request.cuda { "cuda" } else { "cpu" };
    let cached = cache()?.join(format!("libtorch-{version}-{kind}"));
    let mut python = Command::new(program::python(flags::SETUP_LIBTORCH)?);
    python.args(["-B", "-c", SCRIPT, version, kind]).arg(cached);
    python.stdin(Stdio::null()).stdout(Stdio::piped());
    let child = python.spawn().context("cannot run Python")?;
    let output = child.wait_with_output().context("cannot read what Python says")?;
    if !output.status.success() {
        return Ok(None);
    }
    let line = output.stdout.strip_suffix(b"\n").unwrap_or(&output.stdout);
    let folder = PathBuf::from(OsString::from_vec(line.into()));
    let shown = folder.display();
    match Libtorch::at(&folder) {
        Ok(found) if fits(&found) => Ok(Some(folder)),
        Ok(found) => bail!("{shown} is libtorch {}, not {version} ({kind})", found.version),
        Err(why) => bail!("{shown} is no libtorch: {why}; remove it"),
    }
}

/// Returns Flow's cache folder.
fn cache() -> Result<PathBuf, Usage> {
    let variable =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let of_user = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let cache = variable("FLOW_CACHE").or_else(|| Some(of_user()?.join("flow")));
    cache
        .filter(|folder| folder.is_absolute())
        .ok_or_else(|| Usage("there is no cache folder: set FLOW_CACHE to an absolute path".into()))
}

/// Has cargo set LIBTORCH, where the environment does not.
fn configure(path: &Path, libtorch: &str) -> anyhow::Result<()> {
    let setting = format!("LIBTORCH = {}", serde_json::to_string(libtorch)?);
    let shown = path.display();
    let before = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("cannot read {shown}")),
    };
    if before.lines().any(|line| line.trim() == setting) {
        println!("{shown} has {setting}");
        return Ok(());
    }
    if before.lines().any(|line| line.trim().starts_with("[env")) {
        bail!("{shown} has an [env] already, which is left as it is: add {setting} there");
    }
    let separator = if before.is_empty() || before.ends_with("\n") { "" } else { "\n" };
    let added = "# Of flow-launch setup-libtorch. LIBTORCH in the environment wins.\n[env]\n";
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    fs::write(path, format!("{before}{separator}{added}{setting}\n"))
        .with_context(|| format!("cannot write {shown}"))?;
    println!("{shown} has {setting} now");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The set-up of a checkout reads Cargo.lock, too.
    #[test]
    fn versions_are_those_of_the_checkout() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/setup");
        let script = fs::read_to_string(script).unwrap();
        let rows = script.lines().filter_map(|line| line.trim().split_once(".*) version="));
        let rows: Vec<_> = rows.map(|(tch, rest)| (tch, rest.split(' ').next().unwrap())).collect();
        assert_eq!(rows, VERSIONS);
    }

    #[test]
    fn the_lock_file_says_which_libtorch() {
        let folder = tempfile::tempdir().unwrap();
        let lock = folder.path().join("Cargo.lock");
        let version = |tch: &str| {
            let text = "version = 4\n\n[[package]]\nname = \"cc\"\nversion = \"1.0.0\"\n";
            fs::write(&lock, format!("{text}{tch}")).unwrap();
            version_for(Some(&lock)).map_err(|error| error.to_string())
        };
        let tch =
            |version: &str| format!("\n[[package]]\nname = \"tch\"\nversion = \"{version}\"\n");
        assert_eq!(version(&tch("0.24.0")), Ok("2.11.0"));
        assert_eq!(version(&tch("0.26.3")), Ok("2.13.0"));
        assert!(version(&tch("0.25.0")).unwrap_err().contains("has tch 0.25.0; give --torch"));
        assert!(version("").unwrap_err().contains("has no tch"));
        let missing = version_for(None).unwrap_err();
        assert!(missing.to_string().contains("no Cargo.lock here") && missing.is::<Usage>());
    }

    #[test]
    fn cargos_configuration_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".cargo/config.toml");
        configure(&path, "/opt/a \"b\"").unwrap();
        let written = fs::read_to_string(&path).unwrap();
        assert!(written.ends_with("[env]\nLIBTORCH = \"/opt/a \\\"b\\\"\"\n"), "{written}");
        configure(&path, "/opt/a \"b\"").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), written);
        let error = configure(&path, "/other").unwrap_err().to_string();
        assert!(error.contains("has an [env] already") && error.contains("\"/other\""), "{error}");
        fs::write(&path, "[build]\njobs = 1").unwrap();
        configure(&path, "/other").unwrap();
        let written = fs::read_to_string(&path).unwrap();
        assert!(written.starts_with("[build]\njobs = 1\n#") && written.ends_with("\"/other\"\n"));
    }
}
