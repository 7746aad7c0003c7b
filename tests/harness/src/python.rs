//! Python as the tests use it: PYTHON or python3, and an environment in which flow-launch's wheel
//! is installed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::cli::run;
use crate::{program, root};

/// The interpreter that has PyTorch, if any has.
pub fn python() -> String {
    std::env::var("PYTHON").unwrap_or_else(|_| "python3".into())
}

/// The folder of that interpreter's packages.
fn packages() -> PathBuf {
    let program = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let output = Command::new(python()).args(["-c", program]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim_end().into()
}

/// What goes to PYTHONPATH for PyTorch, and for the libraries that
/// `scripts/setup --python-libraries` gets.
pub fn python_path() -> String {
    format!("{}:{}", root().join(".python-libraries").display(), packages().display())
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

/// The folder of programs of an environment in which the wheel is installed; None, said aloud,
/// where there is no pip. It is made once by each test program, and named after it.
pub fn installed(name: &str) -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| install(temporary().join(name)));
    if folder.is_none() {
        println!("SKIPPED: flow-launch's wheel: python3 has no pip");
    }
    folder.as_deref()
}

/// Cargo's folder for the files of tests: target/tmp.
fn temporary() -> PathBuf {
    let flow_launch = program("flow-launch");
    flow_launch.ancestors().nth(2).expect("it lies in target/<profile>").join("tmp")
}

fn install(folder: PathBuf) -> Option<PathBuf> {
    if !Command::new("python3")
        .args(["-m", "pip", "--version"])
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return None;
    }
    let _ = std::fs::remove_dir_all(&folder);
    let succeed = |command: &mut Command| {
        let finished = run(command.env_remove("PYTHONPATH"));
        assert_eq!(finished.code, Some(0), "{command:?}: {finished:?}");
        finished.stdout
    };
    succeed(Command::new(python()).args(["-m", "venv", "--without-pip"]).arg(&folder));
    let mut build = Command::new("python3");
    build
        .arg(root().join("scripts/wheel"))
        .arg("--binary")
        .arg(program("flow-launch"))
        .arg("--out")
        .arg(&folder);
    let wheel = succeed(&mut build);
    let mut install = Command::new("python3");
    install.args(["-m", "pip", "--python"]).arg(folder.join("bin/python"));
    succeed(install.args([
        "install",
        "--quiet",
        "--no-index",
        "--disable-pip-version-check",
        wheel.trim_end(),
    ]));
    Some(folder.join("bin"))
}
