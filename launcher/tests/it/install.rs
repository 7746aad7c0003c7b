//! `cargo install --path launcher` needs no libtorch.

use flow_harness::cli::run;
use flow_harness::python::unoptimized;
use flow_harness::root;

use std::process::Command;

/// cargo, without libtorch: it runs outside of the checkout, whose configuration names one.
fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    command.args(["--locked", "--offline"]).args(arguments).current_dir("/").env_remove("LIBTORCH");
    command
}

#[test]
fn it_is_built_without_collectives_and_libtorch() {
    let manifest = root().join("launcher/Cargo.toml");
    let mut tree = cargo(&["tree", "--prefix", "none", "--manifest-path"]);
    // `--edges normal,build`: tests may use more.
    let crates = run(tree.arg(manifest).args(["--edges", "normal,build"])).success();
    assert!(crates.contains("flow-store "), "{crates}");
    for absent in ["flow-comm ", "flow-kernels ", "cudarc ", "torch-sys "] {
        assert!(!crates.contains(absent), "{absent}: {crates}");
    }
}

#[test]
fn cargo_installs_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut install = cargo(&["install", "--debug", "--path"]);
    install.arg(root().join("launcher")).arg("--root").arg(folder.path());
    run(unoptimized(&mut install)).success();
    let version = run(Command::new(folder.path().join("bin/flow-launch")).arg("--version"));
    assert!(version.success().starts_with("flow-launch "));
}
