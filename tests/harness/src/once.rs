//! Work that all tests need, and one process does for all of a run.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::PathBuf;

use rustix::fs::{FlockOperation, flock};

/// Does `work`, which `name` names, unless another process of this run of tests has done it; waits
/// while one does it. Returns what came of it. `cargo test` runs all tests of a program in one
/// process, which calls this once. `cargo nextest` runs each test in a process of its own, and tells
/// all of them the run's id.
pub fn once_in_a_run(name: &str, work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let Ok(run) = std::env::var("NEXTEST_RUN_ID") else { return work() };
    let folder = temporary();
    fs::create_dir_all(&folder).expect("the folder of files of tests can be made");
    let path = folder.join(name).with_extension("run");
    let options = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = options.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    // Held until the file is closed.
    flock(&file, FlockOperation::LockExclusive).expect("a file can be locked");
    let mut text = String::new();
    file.read_to_string(&mut text).expect("the run and what came of the work");
    if let Some(outcome) = text.strip_prefix(&run) {
        return match outcome.trim() {
            "" => Ok(()),
            reason => Err(reason.to_owned()),
        };
    }
    let outcome = work();
    let reason = outcome.as_ref().err().map_or("", String::as_str);
    file.set_len(0).and_then(|()| file.rewind()).expect("the file can be emptied");
    write!(file, "{run} {reason}").expect("the file can be written");
    outcome
}

/// Cargo's folder for the files of tests: target/tmp.
pub(crate) fn temporary() -> PathBuf {
    let own = std::env::current_exe().expect("a program knows its own path");
    // A test lies in target/<profile>/deps, a worker that runs its tests in target/<profile>.
    let mut folders = own.ancestors().skip(1).filter(|folder| !folder.ends_with("deps"));
    folders.next().expect("it lies in target/<profile>").with_file_name("tmp")
}
