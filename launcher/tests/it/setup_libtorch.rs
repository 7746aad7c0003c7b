//! `flow-launch setup-libtorch`: the wheels are small ones that the tests make, at an index of their
//! own, from which the real pip takes them.

use flow_harness::cli::{launcher, run};
use flow_harness::{Finished, assert_contains};

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Makes wheels of libtorch and what it needs, and an index of them, whose checksums are theirs or,
/// for the last argument `wrong`, not.
const INDEX: &str = r##"
import hashlib, os, platform, sys, zipfile
folder, version, checksum = sys.argv[1:]
header = f'#define TORCH_VERSION \\\n  "{version}"\n'
torch = {"torch/lib/libtorch_cpu.so": "", "torch/lib/libtorch_python.so": "", "torch/include/torch/headeronly/version.h": header}
runtime = {"nvidia/cu13/lib/libcudart.so.13": ""}
packages = [("torch", version, torch), ("nvidia-cuda-runtime", "13.0.96", runtime), ("nvidia-cuda-cupti", "13.0.85", {})]
for name, version, files in packages:
    page = os.path.join(folder, name)
    os.makedirs(page)
    stem = f"{name.replace('-', '_')}-{version}"
    file = f"{stem}-py3-none-manylinux_2_28_{platform.machine()}.whl"
    info = f"{stem}.dist-info"
    files = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", f"{info}/RECORD": "",
             f"{info}/WHEEL": "Wheel-Version: 1.0\n"}
    with zipfile.ZipFile(os.path.join(page, file), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    with open(os.path.join(page, file), "rb") as wheel:
        digest = hashlib.sha256(wheel.read()).hexdigest() if checksum == "right" else "0" * 64
    with open(os.path.join(page, "index.html"), "w") as index:
        index.write(f'<!DOCTYPE html><html><body><a href="{file}#sha256={digest}">{file}</a></body></html>')
"##;

/// Why flow-launch cannot get wheels here, if so.
fn obstacle() -> Option<&'static str> {
    let has_pip = run(Command::new("python3").args(["-c", "import pip"])).code == Some(0);
    let has_torch = run(Command::new("python3").args(["-c", "import torch"])).code == Some(0);
    if !has_pip { Some("python3 has no pip") } else { has_torch.then_some("python3 has torch") }
}

/// A crate, an index and a cache.
struct Site(TempDir);

impl Site {
    /// None, said aloud, where python3 has no pip.
    fn new(version: &str, checksum: &str) -> Option<Site> {
        if let Some(why) = obstacle() {
            println!("SKIPPED: setting up libtorch: {why}");
            return None;
        }
        let site = Site(tempfile::tempdir().unwrap());
        let mut make = Command::new("python3");
        make.args(["-c", INDEX]).arg(site.path("index")).args([version, checksum]);
        run(&mut make).success();
        fs::create_dir(site.path("crate")).unwrap();
        Some(site)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Says which tch the crate is built with.
    fn lock(&self, tch: &str) {
        let lock = format!("version = 4\n\n[[package]]\nname = \"tch\"\nversion = \"{tch}\"\n");
        fs::write(self.path("crate/Cargo.lock"), lock).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = launcher(&[&["setup-libtorch"], arguments].concat());
        command.current_dir(self.path("crate")).env_remove("LIBTORCH").env_remove("PYTHONPATH");
        command.env("FLOW_CACHE", self.path("cache")).env_remove("PYTHON_EXEC");
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PIP_") {
                command.env_remove(name);
            }
        }
        command.env("PIP_CONFIG_FILE", "/dev/null");
        command.env("PIP_INDEX_URL", format!("file://{}", self.path("index").display()));
        command
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        run(&mut self.command(arguments))
    }

    fn libtorch(&self, version: &str) -> PathBuf {
        self.path(&format!("cache/libtorch-{version}-cpu/torch"))
    }
}

#[test]
fn it_is_downloaded_once_for_the_tch_of_the_crate() {
    let Some(site) = Site::new("2.11.0", "right") else { return };
    site.lock("0.24.0");
    let libtorch = site.libtorch("2.11.0");
    let expected = format!("export LIBTORCH={}\n", libtorch.display());
    let finished = site.run(&[]);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout, expected, "{finished:?}");
    assert_contains(&finished.stderr, &["getting torch 2.11.0 (cpu)"]);
    assert!(libtorch.join("lib/libtorch_cpu.so").is_file());
    assert!(!libtorch.join("lib/libtorch_python.so").exists(), "Python's part is left out");
    assert!(libtorch.with_file_name("nvidia/cu13/lib/libcudart.so.13").is_file());

    // Nothing is downloaded again.
    fs::remove_dir_all(site.path("index")).unwrap();
    let again = site.run(&[]);
    assert_eq!((again.code, again.stdout, again.stderr), (Some(0), expected, String::new()));
}

#[test]
fn a_libtorch_that_is_named_is_taken_if_it_is_the_right_one() {
    let Some(site) = Site::new("2.13.0", "right") else { return };
    let finished = site.run(&["--torch", "2.13.0"]);
    let libtorch = site.libtorch("2.13.0");
    assert_eq!(
        finished.stdout,
        format!("export LIBTORCH={}\n", libtorch.display()),
        "{finished:?}"
    );
    let elsewhere = site.path("my libtorch");
    fs::rename(&libtorch, &elsewhere).unwrap();
    fs::remove_dir_all(site.path("cache")).unwrap();
    site.lock("0.26.0");
    let taken = run(site.command(&[]).env("LIBTORCH", &elsewhere));
    let expected = format!("export LIBTORCH='{}'\n", elsewhere.display());
    assert_eq!((taken.code, taken.stdout, taken.stderr), (Some(0), expected, String::new()));
    let other = run(site.command(&[]).env("LIBTORCH", "/nonexistent"));
    assert_contains(&other.stdout, &["/cache/libtorch-2.13.0-cpu/torch"]);
}

#[test]
fn a_wheel_with_another_checksum_is_refused() {
    let Some(site) = Site::new("2.11.0", "wrong") else { return };
    let finished = site.run(&["--torch=2.11.0"]);
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""), "{finished:?}");
    assert_contains(&finished.stderr, &["setup: error: pip could not get", "HASHES"]);
    let left: Vec<_> = fs::read_dir(site.path("cache")).unwrap().collect();
    assert_eq!(left.len(), 1, "only the lock is left: {left:?}");
}

/// cargo tells build scripts, as that of torch-sys, the libtorch.
#[test]
fn cargos_configuration_names_it() {
    let Some(site) = Site::new("2.11.0", "right") else { return };
    let package = site.path("crate");
    let manifest = "[package]\nname = \"mine\"\nedition = \"2024\"\n\n[workspace]\n";
    fs::write(package.join("Cargo.toml"), manifest).unwrap();
    fs::create_dir(package.join("src")).unwrap();
    fs::write(package.join("src/main.rs"), "fn main() { println!(env!(\"FOUND\")) }").unwrap();
    let build = "fn main() { println!(\"cargo:rustc-env=FOUND={}\", std::env::var(\"LIBTORCH\").unwrap()) }";
    fs::write(package.join("build.rs"), build).unwrap();
    let finished = site.run(&["--cargo-config", "--torch", "2.11.0"]);
    let libtorch = site.libtorch("2.11.0");
    assert_contains(&finished.stdout, &["/.cargo/config.toml has LIBTORCH = \"", " now"]);
    let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    cargo.args(["run", "--quiet", "--offline"]).current_dir(&package).env_remove("LIBTORCH");
    let said = run(cargo.env("CARGO_TARGET_DIR", site.path("target"))).success();
    assert_eq!(Path::new(said.trim()), libtorch);
}

#[test]
fn what_is_missing_is_said_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let setup = |arguments: &[&str]| {
        let mut command = launcher(&[&["setup-libtorch"], arguments].concat());
        command.current_dir(folder.path()).env_remove("LIBTORCH").env_remove("PYTHON_EXEC");
        command
    };
    let is_one_line = |finished: &Finished, code: i32, texts: &[&str]| {
        assert_eq!(
            (finished.code, finished.stderr.lines().count()),
            (Some(code), 1),
            "{finished:?}"
        );
        assert_contains(&finished.stderr, texts);
    };
    let no_lock = run(&mut setup(&[]));
    is_one_line(&no_lock, 2, &["no Cargo.lock here", "--torch 2.11.0 for tch 0.24"]);
    is_one_line(&run(&mut setup(&["--gpu"])), 2, &["'--gpu'", "setup-libtorch --help"]);
    let relative = run(setup(&["--torch", "2.11.0"]).env("FLOW_CACHE", "cache"));
    is_one_line(&relative, 2, &["FLOW_CACHE to an absolute path"]);
    let python = run(setup(&["--torch", "2.11.0"]).env("PYTHON_EXEC", "/nonexistent"));
    is_one_line(&python, 2, &["PYTHON_EXEC is '/nonexistent'"]);
    let help = run(&mut setup(&["--help"]));
    assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""), "{help:?}");
    assert_contains(&help.stdout, &["flow-launch setup-libtorch [OPTIONS]", "--cargo-config"]);
}
