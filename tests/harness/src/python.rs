//! Python as the tests use it: PYTHON or python3, and an environment in which flow-launch's wheel
//! is installed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::cli::run;
use crate::once::{once_in_a_run, temporary};
use crate::{program, root};

/// The interpreter that has PyTorch, if any has.
pub fn python() -> String {
    std::env::var("PYTHON").unwrap_or_else(|_| "python3".into())
}

/// The folder of that interpreter's packages; none, where there is no interpreter.
fn packages() -> String {
    let program = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let output = Command::new(python()).args(["-c", program]).output();
    output
        .map_or(String::new(), |output| String::from_utf8(output.stdout).unwrap().trim_end().into())
}

/// The folder of what Python begins with where PYTHONPATH has it: with it, PyTorch is imported
/// sooner.
pub fn startup() -> PathBuf {
    root().join("tests/harness/startup")
}

/// What goes to PYTHONPATH for PyTorch, and for the libraries that
/// `scripts/setup --python-libraries` gets.
pub fn python_path() -> String {
    let libraries = root().join(".python-libraries");
    format!("{}:{}:{}", startup().display(), libraries.display(), packages())
}

/// Whether there is such a module; says so if not.
pub fn have(module: &str) -> bool {
    let program = format!(
        "import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)"
    );
    let mut command = Command::new(python());
    let found = command
        .args(["-c", &program])
        .env("PYTHONPATH", python_path())
        .status()
        .is_ok_and(|s| s.success());
    if !found {
        let option = if module == "torch" { "--pytorch" } else { "--python-libraries" };
        println!(
            "SKIPPED: Python's {module}: {} has none (scripts/setup {option} gets it)",
            python()
        );
    }
    found
}

/// The folder of programs of an environment in which the wheel of `scripts/wheel` is installed;
/// None, said aloud, where it cannot be made. It is made once in a run of tests.
pub fn installed() -> Option<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = temporary().join("wheel");
        once_in_a_run("wheel", || install(&folder))?;
        Ok(folder.join("bin"))
    });
    if let Err(reason) = folder {
        println!("SKIPPED: flow-launch's wheel: {reason}");
    }
    folder.as_deref().ok()
}

/// Has cargo build in a folder of its own, as tests run what is in target/release; and quickly, for
/// the profile `dev`.
pub fn unoptimized(command: &mut Command) -> &mut Command {
    command
        .env("CARGO_TARGET_DIR", temporary().join("unoptimized"))
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
}

/// An error says what is missing to make the wheel.
fn install(folder: &Path) -> Result<(), String> {
    let _ = std::fs::remove_dir_all(folder);
    let wheel = wheel(&folder.join("made"), "")?;
    let mut make = Command::new(python());
    run(make.args(["-m", "venv", "--without-pip"]).arg(folder)).success();
    let mut install = Command::new("python3");
    install
        .args(["-m", "pip", "--python"])
        .arg(folder.join("bin/python"))
        .args(["install", "--quiet", "--no-index", "--disable-pip-version-check"])
        .arg(wheel);
    run(install.env_remove("PYTHONPATH")).success();
    Ok(())
}

/// Has `scripts/wheel` make the wheel of the workspace's programs in this folder, with the C++ part for the
/// PyTorch of these Pythons. An error says what is missing.
pub fn wheel(folder: &Path, pythons: &str) -> Result<PathBuf, String> {
    let flow_launch = program("flow-launch");
    let binaries = flow_launch.parent().expect("it lies in target/<profile>");
    // The launcher's own tests do not build it.
    if !binaries.join("libflow_comm.so").is_file() {
        return Err("libflow_comm.so is missing: cargo build --workspace makes it".into());
    }
    let mut make = Command::new(root().join("scripts/wheel"));
    make.arg(folder)
        .arg("--quiet")
        .env("FLOW_BINARIES", binaries)
        .env("FLOW_TORCH_PYTHONS", pythons);
    let made = run(make.env_remove("PYTHONPATH"));
    if made.stderr.contains("No matching distribution found for setuptools") {
        return Err("pip cannot get setuptools".into());
    }
    made.success();
    let files = std::fs::read_dir(folder).expect("the wheel is there");
    let mut wheels = files.map(|file| file.expect("it is readable").path());
    Ok(wheels.next().expect("there is one"))
}
