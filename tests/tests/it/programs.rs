//! No test runs a program that is older than its sources.

use std::fs;
use std::process::Command;

use flow_tests::{Process, TEST_TIMEOUT, build};
use tempfile::tempdir;

#[test]
fn a_program_older_than_its_sources_is_built_anew() {
    let package = tempdir().unwrap();
    fs::create_dir(package.path().join("src")).unwrap();
    let manifest = "[package]\nname = \"says\"\nedition = \"2021\"\n\n[workspace]\n";
    fs::write(package.path().join("Cargo.toml"), manifest).unwrap();
    fs::write(package.path().join("src/lib.rs"), "").unwrap(); // libraries are built too
    let release = package.path().join("target/release");
    for word in ["old", "new"] {
        fs::write(package.path().join("src/main.rs"), format!("fn main() {{ print!({word:?}) }}"))
            .unwrap();
        build(package.path(), &release);
        let output =
            Process::start(Command::new(release.join("says"))).finish(TEST_TIMEOUT).success();
        assert_eq!(output, word);
    }
}
