//! What `scripts/test` says of steps that fail, and what `scripts/libclang` finds.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use flow_tests::{Finished, Process, PATIENCE};
use tempfile::tempdir;

fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Runs `scripts/test` in a checkout whose set-up and cargo are these shell scripts, without
/// libclang.
fn test(setup: &str, cargo: &str) -> Finished {
    let folder = tempdir().unwrap();
    for name in [".ci", "scripts"] {
        let copied =
            Command::new("cp").arg("-r").arg(checkout().join(name)).arg(folder.path()).status();
        assert!(copied.unwrap().success());
    }
    fs::create_dir(folder.path().join("bin")).unwrap();
    for (name, text) in
        [("scripts/setup", setup), ("scripts/libclang", "exit 1"), ("bin/cargo", cargo)]
    {
        let file = folder.path().join(name);
        fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new(folder.path().join("scripts/test"));
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", folder.path().join("bin").display()));
    Process::start(command).finish(PATIENCE)
}

/// What the script says at its end, without the time that it took.
fn end(finished: &Finished) -> Vec<&str> {
    let end = finished.stdout.rsplit("\n\n").next().unwrap_or_default();
    end.lines()
        .filter(|line| !line.starts_with("took ") && !line.starts_with("SKIPPED: "))
        .collect()
}

const PASSES: &str = "echo 'test result: ok. 12 passed; 0 failed; 0 ignored'";

#[test]
fn all_is_well() {
    let cargo = format!("[ $1 != test ] || {PASSES}");
    let finished = test("", &cargo);
    assert_eq!(
        (finished.status.code(), end(&finished)),
        (Some(0), vec!["12 passed, 0 failed"]),
        "{finished:?}"
    );
    assert!(
        finished.stdout.contains("SKIPPED: groups over MPI: no mpicc or no libclang"),
        "{finished:?}"
    );
}

#[test]
fn steps_that_fail_are_named_and_counted_and_the_others_run() {
    let cargo = format!("case $1 in fmt | clippy) exit 1 ;; test) {PASSES} ;; esac");
    let finished = test("", &cargo);
    let expected = vec!["failed: cargo fmt", "failed: cargo clippy", "12 passed, 2 failed"];
    assert_eq!((finished.status.code(), end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn tests_that_fail_are_named_and_counted() {
    let cargo = "[ $1 = test ] || exit 0
        echo 'test good ... ok'
        echo 'test bad ... FAILED'
        echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'
        echo 'error: test failed, to rerun pass `-p some --lib`'
        exit 101";
    let finished = test("", cargo);
    let expected = vec!["failed: bad", "1 passed, 1 failed"];
    assert_eq!((finished.status.code(), end(&finished)), (Some(1), expected), "{finished:?}");

    let crash = "echo 'error: test failed, to rerun pass `-p other --lib`'; exit 101";
    let finished = test("", &cargo.replace("exit 101", crash));
    let expected = vec!["failed: bad", "failed: cargo test, outside a test", "1 passed, 2 failed"];
    assert_eq!((finished.status.code(), end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn a_failed_build_is_told_last() {
    let finished =
        test("", "case $1 in build | test) echo 'error: could not compile'; exit 101 ;; esac");
    let expected =
        vec!["failed: cargo build", "failed: cargo test, outside a test", "0 passed, 2 failed"];
    assert_eq!((finished.status.code(), end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn without_set_up_there_is_nothing_else() {
    let finished = test("echo 'setup: error: no network' >&2; exit 1", PASSES);
    let expected = vec!["failed: set-up", "0 passed, 1 failed"];
    assert_eq!((finished.status.code(), end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn cut_off_in_a_step_it_says_so() {
    let finished = test("", "[ $1 != doc ] || kill -TERM $PPID");
    let expected = vec!["failed: cargo doc, which was cut off", "0 passed, 1 failed"];
    assert_eq!((finished.status.code(), end(&finished)), (Some(1), expected), "{finished:?}");
}

/// As bindgen has it: not libclang-cpp, and only what is a library.
#[test]
fn libclang_is_what_bindgen_loads() {
    let folder = tempdir().unwrap();
    let found = |place: &Path| {
        let mut command = Command::new(checkout().join("scripts/libclang"));
        command.env("LIBCLANG_PATH", place);
        let finished = Process::start(command).finish(PATIENCE);
        assert_eq!(finished.status.success(), !finished.stdout.is_empty(), "{finished:?}");
        finished.status.success().then(|| finished.stdout.trim_end().to_owned())
    };
    let elf = b"\x7fELF\x02\x01";
    assert_eq!(found(folder.path()), None);
    for (name, contents) in
        [("libclang-cpp.so.14", elf.as_slice()), ("libclang.so", b"none"), ("libclangX.so", elf)]
    {
        fs::write(folder.path().join(name), contents).unwrap();
        assert_eq!(found(folder.path()), None, "{name}");
        assert_eq!(found(&folder.path().join(name)), None, "{name}");
    }
    for name in ["libclang.so", "libclang-14.so", "libclang.so.1", "libclang-14.so.14.0.6"] {
        let file = folder.path().join(name);
        fs::write(&file, elf).unwrap();
        for place in [folder.path(), &file] {
            assert_eq!(found(place).as_deref(), file.to_str());
        }
        fs::remove_file(file).unwrap();
    }
}
