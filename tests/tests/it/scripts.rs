//! What `scripts/test` says of steps that fail, and what `scripts/libclang` and `scripts/circles`
//! find.

use std::fs;
use std::path::Path;
use std::process::Command;

use flow_tests::{Finished, Process, TEST_TIMEOUT, executable};
use tempfile::tempdir;

fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Runs `scripts/test` in a checkout whose set-up and cargo are these shell scripts, without
/// libclang, with so many GB of free disk.
fn test(setup: &str, cargo: &str, free: usize) -> Finished {
    let folder = tempdir().unwrap();
    for name in [".ci", "scripts"] {
        let copied =
            Command::new("cp").arg("-r").arg(checkout().join(name)).arg(folder.path()).status();
        assert!(copied.unwrap().success());
    }
    fs::write(folder.path().join("Cargo.toml"), "members = []\n").unwrap();
    fs::create_dir_all(folder.path().join("some/src")).unwrap();
    let ignored = "#[test]\n#[ignore = \"takes minutes\"]\nfn slow() {}\n";
    fs::write(folder.path().join("some/src/lib.rs"), ignored).unwrap();
    fs::create_dir(folder.path().join("bin")).unwrap();
    let df = format!("echo blocks; echo disk 0 0 {}", free * 1024 * 1024);
    for (name, text) in [
        ("scripts/setup", setup),
        ("scripts/libclang", "exit 1"),
        ("bin/cargo", cargo),
        ("bin/df", &df),
    ] {
        executable(folder.path().join(name), format!("#!/bin/sh\n{text}\n"));
    }
    let mut command = Command::new(folder.path().join("scripts/test"));
    let path = std::env::var("PATH").unwrap();
    command
        .arg("--retry")
        .env("PATH", format!("{}:{path}", folder.path().join("bin").display()))
        .env("FLOW_TEST_RUNNER", "cargo");
    Process::start(command).finish(TEST_TIMEOUT)
}

/// What the script says at its end of what failed, and its counts.
fn end(finished: &Finished) -> Vec<&str> {
    finished
        .stdout
        .lines()
        .filter(|line| {
            line.starts_with("failed: ")
                || line.starts_with("FLAKY: ")
                || line.contains(" passed, ")
        })
        .collect()
}

/// A cargo whose tests do what the shell commands `tests` say, and whose documentation tests pass.
fn cargo(tests: &str) -> String {
    format!(
        "case \"$*\" in
            *--no-run*) ;;
            *--doc*) echo 'test documented ... ok' ;;
            test*) echo '     Running unittests (target/release/deps/some-0123abcd)'
                {tests} ;;
        esac"
    )
}

const PASSES: &str = "echo 'test good ... ok'";
const FAILS: &str = "echo 'test bad ... FAILED'
    echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'
    echo 'error: test failed, to rerun pass `-p some --lib`'
    exit 101";

#[test]
fn all_is_well() {
    let finished = test("", &cargo(PASSES), 100);
    assert_eq!((finished.code, end(&finished)), (Some(0), vec!["2 passed, 0 failed"]));
    for said in [
        "seconds of each step:",
        "not run: slow: takes minutes",
        "SKIPPED: groups over MPI: no mpicc or no libclang",
    ] {
        assert!(finished.stdout.contains(said), "{said}: {finished:?}");
    }
}

#[test]
fn steps_that_fail_are_named_and_counted_and_the_others_run() {
    let cargo = format!("case $1 in fmt | clippy) exit 1 ;; esac\n{}", cargo(PASSES));
    let finished = test("", &cargo, 100);
    let expected = vec!["failed: cargo fmt", "failed: cargo clippy", "2 passed, 2 failed"];
    assert_eq!((finished.code, end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn tests_that_fail_are_named() {
    let finished = test("", &cargo(&format!("{PASSES}\n{FAILS}")), 100);
    let expected = vec!["failed: some bad", "2 passed, 1 failed"];
    assert_eq!((finished.code, end(&finished)), (Some(1), expected), "{finished:?}");

    let crash = "echo 'error: test failed, to rerun pass `-p other --lib`'";
    let finished = test("", &cargo(&format!("{PASSES}\n{crash}\n{FAILS}")), 100);
    let expected = vec!["failed: some bad", "failed: tests, outside a test", "2 passed, 2 failed"];
    assert_eq!((finished.code, end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn a_test_that_passes_when_it_runs_once_more_is_flaky() {
    let alone = "case \"$*\" in *'--exact bad'*) echo 'test bad ... ok'; exit ;; esac";
    let finished = test("", &cargo(&format!("{alone}\n{PASSES}\n{FAILS}")), 100);
    let expected = vec!["FLAKY: some bad", "3 passed, 0 failed"];
    assert_eq!((finished.code, end(&finished)), (Some(0), expected), "{finished:?}");
}

#[test]
fn a_failed_build_is_named_last() {
    let cargo = "case $1 in build | test) echo 'error: could not compile'; exit 101 ;; esac";
    let finished = test("", cargo, 100);
    let expected = vec![
        "failed: cargo build",
        "failed: cargo build of tests",
        "failed: tests, outside a test",
        "failed: documentation tests",
        "0 passed, 4 failed",
    ];
    assert_eq!((finished.code, end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn without_set_up_there_is_nothing_else() {
    let setup = "echo 'setup: error: no network' >&2; exit 1";
    let finished = test(setup, &cargo(PASSES), 100);
    let expected = vec!["failed: set-up", "0 passed, 1 failed"];
    assert_eq!((finished.code, end(&finished)), (Some(1), expected), "{finished:?}");
}

#[test]
fn without_room_on_the_disk_nothing_is_begun() {
    let finished = test("", &cargo(PASSES), 2);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stdout.contains("failed: disk: 2 GB are free at "), "{finished:?}");
    assert_eq!(end(&finished).last(), Some(&"0 passed, 1 failed"), "{finished:?}");
}

#[test]
fn cut_off_in_a_step_it_says_so() {
    let finished = test("", "[ $1 != doc ] || kill -TERM $PPID", 100);
    let expected = vec!["failed: cargo doc, which was cut off", "0 passed, 1 failed"];
    assert_eq!((finished.code, end(&finished)), (Some(1), expected), "{finished:?}");
}

/// As bindgen has it: not libclang-cpp, and only what is a library.
#[test]
fn libclang_is_what_bindgen_loads() {
    let folder = tempdir().unwrap();
    let found = |place: &Path| {
        let mut command = Command::new(checkout().join("scripts/libclang"));
        command.env("LIBCLANG_PATH", place);
        let finished = Process::start(command).finish(TEST_TIMEOUT);
        assert_eq!(finished.code == Some(0), !finished.stdout.is_empty(), "{finished:?}");
        (finished.code == Some(0)).then(|| finished.stdout.trim_end().to_owned())
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

/// What `scripts/circles` prints for a crate of these files.
fn circles(files: &[(&str, &str)]) -> Vec<String> {
    let folder = tempdir().unwrap();
    let crate_folder = folder.path().join("sample");
    for (name, text) in files.iter().chain(&[("Cargo.toml", "")]) {
        let file = crate_folder.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    let mut command = Command::new(checkout().join("scripts/circles"));
    command.arg(&crate_folder);
    let Finished { code, stdout, stderr, .. } = Process::start(command).finish(TEST_TIMEOUT);
    let found: Vec<String> = stdout.lines().map(str::to_owned).collect();
    assert_eq!(code, Some(i32::from(!found.is_empty())), "{stderr}");
    found
}

#[test]
fn a_circle_of_files_is_one_line_with_the_places() {
    let found = circles(&[
        ("src/lib.rs", "mod a;\nmod b;\nmod c;\nmod d;"),
        ("src/a.rs", "use crate::{\n    b::{self, B},\n};\npub struct A(B);"),
        ("src/b.rs", "// Not crate::a.\npub struct B;\nfn f() { crate::c::g() }"),
        ("src/c.rs", "pub fn g() { let _ = super::a::A; }"),
        ("src/d.rs", "use crate::a::A;"),
    ]);
    assert_eq!(found, ["sample: src/a.rs:1 -> src/b.rs:3 -> src/c.rs:1 -> src/a.rs"]);
}

#[test]
fn a_larger_knot_is_one_line_with_its_size() {
    let found = circles(&[
        ("src/main.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "use super::b; use super::c;"),
        ("src/b.rs", "use super::a;"),
        ("src/c.rs", "use super::a;"),
    ]);
    assert_eq!(found, ["sample: src/a.rs:1 -> src/b.rs:1 -> src/a.rs (a knot of 3 files)"]);
}

#[test]
fn tests_comments_and_strings_make_no_circle() {
    let found = circles(&[
        ("src/lib.rs", "mod a;\nmod b;"),
        ("src/a.rs", "use crate::b::B;\npub struct A;"),
        (
            "src/b.rs",
            "//! See crate::a::A.\n/// [`A`](crate::a::A)\npub struct B;\n\
             const TEXT: &str = \"crate::a\"; const RAW: &str = r#\"\"crate::a\"#;\n\
             #[cfg(test)]\nmod tests { use super::B; use crate::a::A; fn f() { crate::a::g() } }",
        ),
    ]);
    assert!(found.is_empty(), "{found:?}");
}

/// A name that the parent re-exports is the child's; only what the parent itself defines or does
/// ties the two.
#[test]
fn a_parent_that_re_exports_its_children_does_not_use_them() {
    let lib = ("src/lib.rs", "mod shapes;");
    let square = ("src/shapes/square.rs", "use super::Side;\npub struct Square(Side);");
    let side = ("src/shapes/side.rs", "pub struct Side;");
    let exports = "mod side;\nmod square;\npub use side::*;\npub use square::Square;\n";
    assert!(circles(&[lib, square, side, ("src/shapes/mod.rs", exports)]).is_empty());

    let uses = format!("{exports}use square::Square as Shape; fn f(_: Shape) {{}}\n");
    assert!(circles(&[lib, square, side, ("src/shapes/mod.rs", &uses)]).is_empty());

    let defines = uses.replace("pub use side::*", "pub struct Side");
    assert_eq!(
        circles(&[lib, square, side, ("src/shapes/mod.rs", &defines)]),
        ["sample: src/shapes/mod.rs:5 -> src/shapes/square.rs:1 -> src/shapes/mod.rs"]
    );
}

#[test]
fn headers_that_include_each_other_are_a_circle() {
    let found = circles(&[
        ("fake/a.h", "#include \"b.h\""),
        ("fake/b.h", "#pragma once\n#include \"a.h\""),
    ]);
    assert_eq!(found, ["sample: fake/a.h:1 -> fake/b.h:2 -> fake/a.h"]);
}
