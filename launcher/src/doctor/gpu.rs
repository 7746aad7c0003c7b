//! Probes of GPUs, their driver and NCCL.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::doctor::fact::Fact;
use crate::doctor::python;
use crate::libtorch::{self, Libtorch};
use crate::plan::host::LocalHost;

/// The oldest that `flow-comm` takes, as NCCL writes it.
const OLDEST_NCCL: u32 = 21800;

/// What `probe.py libraries` finds.
#[derive(Deserialize)]
struct Libraries {
    /// The newest CUDA that the driver can run.
    cuda: Option<String>,
    cuda_error: Option<String>,
    nccl: Option<Nccl>,
    /// The reasons against the files before it.
    refused: Vec<String>,
}

#[derive(Deserialize)]
struct Nccl {
    code: u32,
    file: String,
}

/// Returns GPUs, driver and NCCL.
pub fn gpus(timeout: Duration) -> Vec<Fact> {
    let host = LocalHost::this();
    let mut facts = vec![devices(&host, &models(Path::new("/proc/driver/nvidia/gpus")))];
    let mut arguments = vec![OsString::from("libraries")];
    arguments.extend(nccl_files());
    match python::ask::<Libraries>(arguments, timeout) {
        Ok(found) => facts.extend(libraries(found, host.gpus)),
        Err(why) if host.gpus > 0 => {
            facts.push(
                Fact::ok("NCCL", format!("not looked for: {why}")).advise(
                    "looking for the driver and NCCL takes python3; nvidia-smi may say more",
                ),
            );
        }
        Err(_) => {}
    }
    facts
}

fn devices(host: &LocalHost, models: &[String]) -> Fact {
    let mut value = match host.gpus {
        0 => "none".into(),
        count => format!("{count}: {}", models.join(", ")),
    };
    if let Some(visible) = host.visible_devices() {
        value += &format!(", CUDA_VISIBLE_DEVICES is '{visible}'");
    }
    let fact = Fact::ok("GPUs", value);
    if host.gpus > 0 || models.is_empty() || host.visible_devices().is_some() {
        return fact;
    }
    fact.advise(format!(
        "the driver has {}, but /dev has none: docker run --gpus all, or ask the scheduler for some",
        models.len()
    ))
}

/// Returns the models of the driver's GPUs.
fn models(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let texts = entries
        .flatten()
        .map(|entry| fs::read_to_string(entry.path().join("information")).unwrap_or_default());
    let model = |text: String| {
        let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
        model.map_or("unknown".into(), |model| model.trim().to_string())
    };
    texts.map(model).collect()
}

/// Returns the files that may be NCCL, in the order in which `flow-comm` takes them.
fn nccl_files() -> Vec<OsString> {
    let libtorch = libtorch::named();
    let has_cuda = libtorch
        .as_ref()
        .and_then(|folder| Libtorch::at(folder).ok())
        .is_some_and(|libtorch| libtorch.has_cuda);
    let beside = libtorch.and_then(|folder| {
        Some(folder.canonicalize().ok()?.parent()?.join("nvidia/nccl/lib/libnccl.so.2"))
    });
    // libtorch with CUDA has loaded its own before anybody looks for one.
    let own = beside.clone().filter(|file| has_cuda && file.exists());
    let names = ["libnccl.so.2", "libnccl.so"].map(OsString::from);
    let beside = beside.filter(|file| file.exists());
    let files = own.into_iter().map(OsString::from).chain(names);
    files.chain(beside.map(OsString::from)).chain(nccl_path()).collect()
}

fn nccl_path() -> Option<OsString> {
    std::env::var_os("FLOW_NCCL_PATH").filter(|path| !path.is_empty())
}

fn libraries(found: Libraries, gpus: u32) -> Vec<Fact> {
    let install = "pip install nvidia-nccl-cu13, or the package libnccl2, and FLOW_NCCL_PATH where \
                   it is not found by itself";
    let mut facts = Vec::new();
    match (found.cuda, found.cuda_error) {
        (Some(cuda), None) => facts.push(Fact::ok("driver", format!("for CUDA up to {cuda}"))),
        (_, Some(error)) if gpus > 0 => facts
            .push(Fact::ok("driver", error).broken("nvidia-smi must work; in a container as well")),
        _ => {}
    }
    let nccl = match found.nccl {
        Some(Nccl { code, file }) => {
            let fact = Fact::ok("NCCL", format!("{}, {file}", version(code)));
            if code < OLDEST_NCCL { Err((fact, "2.18 or newer is needed")) } else { Ok(fact) }
        }
        None if gpus > 0 || nccl_path().is_some() => {
            Err((Fact::ok("NCCL", found.refused.join("; ")), install))
        }
        None => Ok(Fact::ok("NCCL", "none")),
    };
    facts.push(match nccl {
        Ok(fact) => fact,
        Err((fact, advice)) if gpus > 0 => fact.broken(advice),
        Err((fact, advice)) => fact.advise(advice),
    });
    facts
}

/// Reads NCCL's number for a version, which has had two digits more since 2.9.
fn version(code: u32) -> String {
    let unit = if code < 10_000 { 1_000 } else { 10_000 };
    format!("{}.{}.{}", code / unit, code % unit / 100, code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::fact::State;

    fn found(nccl: Option<u32>, cuda_error: Option<&str>) -> Libraries {
        Libraries {
            cuda: Some("12.8".into()),
            cuda_error: cuda_error.map(String::from),
            nccl: nccl.map(|code| Nccl { code, file: "libnccl.so.2".into() }),
            refused: vec!["libnccl.so.2: no such file".into()],
        }
    }

    fn states(found: Libraries, gpus: u32) -> Vec<State> {
        libraries(found, gpus).iter().map(|fact| fact.state).collect()
    }

    #[test]
    fn without_gpus_nothing_of_theirs_is_broken() {
        assert_eq!(states(found(None, None), 0), [State::Ok, State::Ok]);
        assert_eq!(states(found(Some(2804), Some("no driver")), 0), [State::Advice]);
        assert_eq!(states(found(None, None), 1), [State::Ok, State::Broken]);
        assert_eq!(states(found(Some(22809), Some("error 999")), 1), [State::Broken, State::Ok]);
        assert_eq!((version(2804), version(22809)), ("2.8.4".into(), "2.28.9".into()));
    }

    #[test]
    fn gpus_that_only_the_driver_sees_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = folder.path().join("0000:1b:00.0");
        fs::create_dir(&gpu).unwrap();
        fs::write(gpu.join("information"), "Model: \t NVIDIA H100\nIRQ: 1\n").unwrap();
        let models = models(folder.path());
        assert_eq!(models, ["NVIDIA H100"]);
        let mut host = LocalHost::default();
        assert_eq!(devices(&host, &models).state, State::Advice);
        host.gpus = 1;
        assert_eq!(devices(&host, &models), Fact::ok("GPUs", "1: NVIDIA H100"));
    }
}
