//! What README and docs/your-crate.md say of a crate of one's own works as it is written there.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use flow_harness::python::unoptimized;
use flow_tests::Process;

/// The first block of code in this language after `text`, and what follows it.
fn block<'a>(page: &'a str, text: &str, language: &str) -> (&'a str, &'a str) {
    let after = |rest: &'a str, text: &str| Some(rest.split_once(text)?.1);
    let code =
        after(page, text).and_then(|rest| after(after(rest, &format!("```{language}"))?, "\n"));
    code.and_then(|code| code.split_once("```"))
        .unwrap_or_else(|| panic!("the page has no {language} after {text:?}"))
}

/// What cargo compiles anew for a crate that is no member of the workspace, though the folder has it:
/// Flow's crates, and `tch`, of whose dependencies the crate turns on other features.
const ANEW: &[&str] = &[
    "flow-autograd",
    "flow-comm",
    "flow-ddp",
    "flow-global",
    "flow-kernels",
    "flow-pipeline",
    "flow-plan",
    "flow-store",
    "flow-tensor",
    "flow-train",
    "tch",
];

/// The page's `cargo`: it installs flow-launch as other tests do, unoptimized, and builds the crate in
/// the folder that it shares with the checkout.
const CARGO: &str = "cargo() {
    case $1 in
        install) command cargo \"$@\" --debug ;;
        *) CARGO_TARGET_DIR=$SHARED_TARGET command cargo \"$@\" ;;
    esac
}
";

/// The crate lies in the checkout's target folder and shares it, so that what both depend on is
/// compiled once. What is compiled anew is not optimized: that takes less time.
#[test]
fn a_crate_of_ones_own() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let readme = fs::read_to_string(checkout.join("README.md")).unwrap();
    let page = fs::read_to_string(checkout.join("docs/your-crate.md")).unwrap();
    let (program, _) = block(&readme, "## Your program", "rust");
    let (manifest, rest) = block(&page, "`Cargo.toml`:", "toml");
    let (config, rest) = block(rest, "`.cargo/config.toml`", "toml");
    let (build, rest) = block(rest, "`build.rs`", "rust");
    let (commands, _) = block(rest, "Then build and run", "sh");

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("my-training");
    let installed = folder.with_file_name("installed");
    let target = folder.ancestors().nth(2).unwrap();
    let flow = |text: &str| text.replace("../flow", checkout.to_str().unwrap());
    let _ = fs::remove_dir_all(&installed);
    fs::create_dir_all(folder.join("src")).unwrap();
    fs::create_dir_all(folder.join(".cargo")).unwrap();
    // It is no member of the workspace around it, and compiles dependencies as that does.
    let mut own = "\n[workspace]\n\n[profile.release.package.\"*\"]\ndebug = false\n".to_owned();
    for name in ANEW {
        own += &format!("\n[profile.release.package.{name}]\nopt-level = 0\n");
    }
    fs::write(folder.join("Cargo.toml"), flow(manifest) + &own).unwrap();
    fs::write(folder.join(".cargo/config.toml"), flow(config)).unwrap();
    fs::write(folder.join("build.rs"), build).unwrap();
    fs::write(folder.join("src/main.rs"), program).unwrap();
    let _ = fs::remove_file(folder.join("target"));
    symlink(target, folder.join("target")).unwrap();

    let mut shell = Command::new("bash");
    shell.args(["-euxc", &(CARGO.to_owned() + &flow(commands))]).current_dir(&folder);
    let path = std::env::var("PATH").unwrap();
    shell
        .env("PATH", format!("{}:{path}", installed.join("bin").display()))
        .env("CARGO_INSTALL_ROOT", &installed);
    unoptimized(&mut shell).env("SHARED_TARGET", target).env("CARGO_NET_OFFLINE", "true");
    shell.env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only"); // as the checkout's own
    shell.env_remove("LD_LIBRARY_PATH");
    if std::env::var_os("LIBTORCH").is_some_and(|folder| folder == *checkout.join(".libtorch")) {
        shell.env_remove("LIBTORCH"); // cargo has set it for this test
    }
    let finished = Process::start(shell).finish(Duration::from_secs(1800));
    assert!(finished.code == Some(0), "{finished:?}");
}
