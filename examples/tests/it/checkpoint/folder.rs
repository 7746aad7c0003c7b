//! The folder of the checkpoints: one job's, on a disk that all see, and there to last.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use flow_tests::{Process, job, program, rank};

use super::job::{Folder, LONG, alone, error, kill, run, until};

#[test]
fn a_folder_that_cannot_be_written_is_an_error() {
    let folder = Folder::new();
    fs::write(folder.path("checkpoint"), "a file").unwrap();
    let expected = format!("mnist: cannot make the folder {}: ", folder.path("checkpoint"));
    let text = error(&folder.job(&[]));
    assert!(text.starts_with(&expected) && text.lines().count() == 1, "{text}");
}

#[test]
fn a_folder_is_for_one_job_until_that_has_ended() {
    let folder = Folder::new();
    let endless = folder.job(&["--epochs", "1000000", "--checkpoint-every", "10"]);
    let job = Process::start(alone(&endless));
    folder.until_step(10);
    let text = error(&endless);
    let expected = format!(
        "mnist: another job writes checkpoints to {}; give each job a folder of its own\n",
        folder.path("checkpoint")
    );
    assert_eq!(text, expected);

    let mut next = Process::start(alone(&endless));
    let lock = PathBuf::from(folder.path("checkpoint/.checkpoint.lock"));
    let opened = || {
        let files = fs::read_dir(format!("/proc/{}/fd", next.pid())).unwrap();
        files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|file| file == lock))
    };
    until("the next job waits for the lock", opened);
    kill(job.pid());
    next.wait_for("going on in epoch ");
}

#[test]
fn a_disk_that_cannot_be_read_is_an_error_on_all_ranks_and_removes_nothing() {
    let folder = Folder::new();
    let arguments = folder.job(&["--epochs", "1", "--checkpoint-every", "20"]);
    run(2, &arguments);
    assert_eq!(folder.steps(), [20, 30]);
    let model = folder.model(30);
    fs::rename(&model, folder.path("kept")).unwrap();
    symlink("/proc/self/mem", &model).unwrap(); // reading it is an input/output error

    let job = job();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let ranks = [0, 1].map(|number| Process::start(rank(&job, number, 2, "mnist", &arguments)));
    for (started, source) in ranks.into_iter().zip(["", "rank 0: "]) {
        let finished = started.finish(LONG);
        let expected =
            format!("mnist: {source}cannot read {}: Input/output error", model.display());
        assert!(finished.code == Some(1) && finished.stderr.starts_with(&expected), "{finished:?}");
    }
    fs::rename(folder.path("kept"), &model).unwrap();
    assert_eq!(folder.steps(), [20, 30]);
}

/// Two ranks, each in a folder of its own, as on machines without a common disk.
#[test]
fn a_checkpoint_that_rank_0_does_not_see_is_an_error() {
    let folder = Folder::new();
    let places = ["0", "1"].map(|name| folder.path(name));
    places.iter().for_each(|place| fs::create_dir(place).unwrap());
    let arguments =
        folder.arguments(&["--epochs", "1", "--checkpoint", "local", "--checkpoint-every", "20"]);
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let run = |places: [&String; 2]| {
        let job = job();
        let start = |number: usize| {
            let mut command = rank(&job, number, 2, "mnist", &arguments);
            command.current_dir(places[number]);
            Process::start(command)
        };
        [0, 1].map(start).map(|rank| rank.finish(LONG))
    };
    let [first, other] = &places;
    for finished in run([first, other]) {
        finished.success();
    }
    assert!(!Path::new(other).join("local").exists());

    let expected = |seen: &str| {
        format!(
            "mnist: rank 1 sees step-30 in local, but rank 0 sees {seen}; use a disk that all \
             machines share\n"
        )
    };
    for seen in ["none", "step-20"] {
        for finished in run([other, first]) {
            assert_eq!((finished.code, finished.stderr), (Some(1), expected(seen)));
        }
        copy(&Path::new(first).join("local/step-20"), &Path::new(other).join("local/step-20"));
    }
}

#[test]
fn new_folders_are_there_after_a_loss_of_power() {
    if Command::new("strace").arg("-V").output().is_err() {
        println!("SKIPPED: flushing of new folders: there is no strace");
        return;
    }
    let folder = Folder::new();
    let mut command = Command::new("strace");
    command.args([
        "-f",
        "-y",
        "-e",
        "trace=mkdir,mkdirat,fsync",
        program("mnist").to_str().unwrap(),
    ]);
    command
        .args(folder.arguments(&["--steps", "1", "--checkpoint", "new/folders/here"]))
        .current_dir(folder.path(""));
    let finished = Process::start(command).finish(LONG);
    assert!(
        finished.code == Some(0) && Path::new(&folder.path("new/folders/here/step-1")).exists(),
        "{finished:?}"
    );
    let mut calls = finished.stderr.lines();
    let flushed = |call: &str, folder: &Path| {
        call.contains("fsync(") && call.contains(&format!("<{}>)", folder.display()))
    };
    for made in ["new", "new/folders", "new/folders/here"] {
        let parent = PathBuf::from(folder.path(made)).parent().unwrap().to_owned();
        assert!(calls.any(|call| call.contains(&format!("mkdir(\"{made}\""))), "{finished:?}");
        assert!(calls.any(|call| flushed(call, &parent)), "{finished:?}");
    }
    assert!(
        calls.any(|call| flushed(call, folder.path("new/folders/here").as_ref())),
        "{finished:?}"
    );
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap().map(|file| file.unwrap()) {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}
