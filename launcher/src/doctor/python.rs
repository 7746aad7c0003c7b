//! Probes of Python, PyTorch, flow_torch and libtorch.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::doctor::command::{last_line, output};
use crate::doctor::fact::Fact;
use crate::libtorch::{self, Libtorch, VERSIONS};
use crate::plan::program;

const PROBE: &str = include_str!("probe.py");

/// What `probe.py python` finds.
#[derive(Deserialize)]
struct Interpreter {
    version: String,
    executable: String,
    /// The folder of its torch.
    torch: Option<PathBuf>,
}

/// What `probe.py torch` finds.
#[derive(Deserialize)]
struct Torch {
    torch: Option<String>,
    cuda: Option<String>,
    torch_error: Option<String>,
    flow_torch: Option<String>,
    flow_torch_error: Option<String>,
}

/// Has Python probe for something; an error says why it could not.
pub fn ask<T: DeserializeOwned>(arguments: Vec<OsString>, timeout: Duration) -> Result<T, String> {
    let python = program::python("the doctor").map_err(|usage| usage.0)?;
    let mut command = vec![python, "-c".into(), PROBE.into()];
    command.extend(arguments);
    let output = output(command, timeout)?;
    if !output.status.success() {
        return Err(last_line(&output.stderr));
    }
    // What others print, such as sitecustomize, comes before.
    serde_json::from_str(&last_line(&output.stdout)).map_err(|error| error.to_string())
}

/// Returns Python, and the libtorch that Rust programs are built with.
pub fn python_and_libtorch(timeout: Duration) -> Vec<Fact> {
    let found = ask::<Interpreter>(vec!["python".into()], timeout);
    let torch = found.as_ref().ok().and_then(|python| python.torch.clone());
    let python = match found {
        Ok(Interpreter { version, executable, .. }) => {
            Fact::ok("Python", format!("{version}, {executable}"))
        }
        Err(why) => {
            Fact::ok("Python", why).advise("Python programs and flow-launch setup-libtorch need it")
        }
    };
    vec![python, libtorch(libtorch::named().as_deref(), torch.as_deref())]
}

/// `named` is by LIBTORCH, `pythons` is Python's torch.
fn libtorch(named: Option<&Path>, pythons: Option<&Path>) -> Fact {
    let Some(folder) = named else {
        let Some((folder, found)) = pythons.and_then(|at| Some((at, Libtorch::at(at).ok()?)))
        else {
            return Fact::ok("libtorch", "LIBTORCH is not set, and Python has no torch").advise(
                "Rust programs are built with it, Python programs need none: flow-launch \
                 setup-libtorch gets it",
            );
        };
        let value =
            format!("{} is Python's, {}; LIBTORCH is not set", found.version, folder.display());
        return Fact::ok("libtorch", value);
    };
    let shown = folder.display();
    match Libtorch::at(folder) {
        Err(why) => Fact::ok("libtorch", format!("LIBTORCH is {shown}: {why}"))
            .broken("unset it, or set it to what flow-launch setup-libtorch prints"),
        Ok(Libtorch { version, has_cuda }) => {
            let kind = if has_cuda { "with CUDA" } else { "for CPUs" };
            let fact = Fact::ok("libtorch", format!("{version} {kind}, LIBTORCH is {shown}"));
            let is_known = VERSIONS.iter().any(|(_, known)| *known == version);
            if is_known { fact } else { fact.advise(known_versions()) }
        }
    }
}

fn known_versions() -> String {
    let pairs = VERSIONS.map(|(tch, libtorch)| format!("tch {tch} needs libtorch {libtorch}"));
    format!("{}: flow-launch setup-libtorch gets it", pairs.join(", "))
}

/// Returns PyTorch and flow_torch, which are imported.
pub fn torch(timeout: Duration) -> Vec<Fact> {
    let found = match ask::<Torch>(vec!["torch".into()], timeout) {
        Ok(found) => found,
        // Where there is no Python, another fact says so.
        Err(_) if program::python("the doctor").is_err() => return Vec::new(),
        Err(why) => {
            return vec![Fact::ok("PyTorch", why).broken(
                "python3 -c 'import torch' shows more; a slow disk may take longer than --timeout",
            )];
        }
    };
    let cuda = found.cuda.map_or("for CPUs".into(), |version| format!("for CUDA {version}"));
    let torch = match (found.torch, found.torch_error) {
        (Some(version), _) => Fact::ok("PyTorch", format!("{version}, {cuda}")),
        (None, Some(error)) => Fact::ok("PyTorch", format!("import torch: {error}"))
            .broken("install it anew, or one that fits this Python and driver"),
        (None, None) => return vec![Fact::ok("PyTorch", "none")],
    };
    let flow_torch = match (found.flow_torch, found.flow_torch_error) {
        (Some(origin), _) => Fact::ok("flow_torch", origin),
        (None, Some(error)) => Fact::ok("flow_torch", error)
            .advise("without its C++ part a slower one in Python is used, if that can be"),
        (None, None) => Fact::ok("flow_torch", "none"),
    };
    vec![torch, flow_torch]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::fact::State;

    use std::fs;

    fn made(version: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let header = folder.path().join("include/torch/headeronly/version.h");
        fs::create_dir_all(header.parent().unwrap()).unwrap();
        fs::create_dir(folder.path().join("lib")).unwrap();
        let text =
            format!("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION \\\n  \"{version}\"\n");
        fs::write(header, text).unwrap();
        fs::write(folder.path().join("lib/libtorch_cpu.so"), "").unwrap();
        folder
    }

    #[test]
    fn libtorch_is_named_or_pythons() {
        let (right, other) = (made("2.11.0"), made("2.12.0"));
        let (right, other) = (Some(right.path()), Some(other.path()));
        let is = |named, pythons| libtorch(named, pythons).state;
        assert_eq!(is(right, None), State::Ok);
        assert_eq!(is(other, right), State::Advice);
        assert_eq!(is(None, other), State::Ok);
        assert_eq!(is(None, None), State::Advice);
        assert_eq!(is(Some(Path::new("/nowhere")), right), State::Broken);
        assert_eq!(is(Some(Path::new("libtorch")), right), State::Broken);
    }
}
