//! Files of workers' output and errors: `--log-dir`, `--redirects`, `--tee`, filters, error files.

use flow_harness::Finished;
use flow_harness::cli::{Running, children, run, script, until, until_gone};
use flow_harness::python::{have, python, startup};

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;

/// A script in each worker, with these flags and its logs below this folder.
fn logged(folder: &Path, flags: &str, text: &str) -> Command {
    script(&format!("--log-dir {} {flags}", folder.display()), text)
}

/// The only entry of a folder.
fn only(folder: &Path) -> PathBuf {
    let entries: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries[0].clone()
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn streams_go_where_redirects_and_tee_send_them() {
    let folder = tempfile::tempdir().unwrap();
    let text = "echo out $RANK; echo err $RANK >&2";
    let flags =
        "--nproc-per-node 3 --rdzv-id ../a/b --redirects 0:3,1:1 --tee 1:2,2:3 --role trainer";
    let finished = run(&mut logged(folder.path(), flags, text));
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), "[trainer2]:out 2\n"));
    let mut errors: Vec<_> = finished.stderr.lines().collect();
    errors.sort_unstable();
    assert_eq!(errors, ["[trainer1]:err 1", "[trainer2]:err 2"]);
    let launch = only(folder.path());
    assert!(
        launch.file_name().unwrap().to_str().unwrap().starts_with(".._a_b_"),
        "{}",
        launch.display()
    );
    for rank in 0..3 {
        let files = launch.join(format!("attempt_0/{rank}"));
        assert_eq!(read(files.join("stdout.log")), format!("out {rank}\n"));
        assert_eq!(read(files.join("stderr.log")), format!("err {rank}\n"));
    }
}

#[test]
fn what_is_redirected_and_nothing_else_is_written_by_the_worker_itself() {
    let folder = tempfile::tempdir().unwrap();
    let text = "readlink /proc/self/fd/1";
    let finished = run(&mut logged(folder.path(), "--redirects 1", text));
    assert_eq!(finished.stdout, "");
    let file = only(folder.path()).join("attempt_0/0/stdout.log");
    assert_eq!(read(file.clone()).trim_end(), file.to_str().unwrap());
    let filtered = run(&mut logged(
        &folder.path().join("2"),
        "--redirects 1 --duplicate-stdout-filters pipe",
        text,
    ));
    assert_eq!(filtered.stdout, "");
    let attempt = only(&folder.path().join("2")).join("attempt_0");
    assert!(read(attempt.join("0/stdout.log")).starts_with("pipe:"));
    assert!(read(attempt.join("filtered_stdout.log")).starts_with("[default0]:pipe:"));
}

#[test]
fn only_some_ranks_are_shown_and_all_are_logged() {
    let folder = tempfile::tempdir().unwrap();
    let flags = "--nproc-per-node 3 --local-ranks-filter 0,2";
    let text = "echo out $RANK";
    assert_eq!(run(&mut script(flags, text)).sorted_lines(), ["out 0", "out 2"]);
    let finished = run(&mut logged(folder.path(), &format!("{flags} --tee 3"), text));
    assert_eq!(finished.sorted_lines(), ["[default0]:out 0", "[default2]:out 2"]);
    assert_eq!(read(only(folder.path()).join("attempt_0/1/stdout.log")), "out 1\n");
    let failed = run(&mut script(
        "--nproc-per-node 2 --local-ranks-filter 0",
        "[ $RANK = 0 ] || { echo why >&2; exit 3; }; sleep 60",
    ));
    assert_eq!(failed.code, Some(3));
    assert!(
        failed.stderr.contains("the last line of its stderr:\nflow-launch:   | why\n"),
        "{}",
        failed.stderr
    );
}

#[test]
fn lines_that_are_looked_for_are_copied() {
    let folder = tempfile::tempdir().unwrap();
    let text = "printf 'loss 1\\nother\\nstep 5 loss'; printf 'bar 1\\rloss bar\\rbar 3\\n' >&2";
    let flags = "--nproc-per-node 2 --tee 3 --duplicate-stdout-filters loss,5 \
                 --duplicate-stderr-filters loss";
    let finished = run(&mut logged(folder.path(), flags, text));
    assert_eq!(finished.code, Some(0));
    let attempt = only(folder.path()).join("attempt_0");
    let stdout = read(attempt.join("filtered_stdout.log"));
    let mut lines: Vec<_> = stdout.lines().collect();
    lines.sort_unstable();
    let expected = [
        "[default0]:loss 1",
        "[default0]:step 5 loss",
        "[default1]:loss 1",
        "[default1]:step 5 loss",
    ];
    assert_eq!(lines, expected);
    let stderr = read(attempt.join("filtered_stderr.log"));
    assert_eq!(stderr.matches("]:loss bar\n").count(), 2, "{stderr}");
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
}

#[test]
fn the_prefix_of_teed_lines_can_be_chosen() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = logged(folder.path(), "--tee 3", "echo hello");
    let finished =
        run(command.env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}/${rank}]: "));
    assert_eq!(finished.stdout, "[default/0]: hello\n");
    let mut command = logged(folder.path(), "--tee 3", "echo hello");
    command.env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "other");
    command.env("PET_LOG_LINE_PREFIX_TEMPLATE", "$role_name of ${hostname}: ");
    let uname = rustix::system::uname();
    let host = uname.nodename().to_str().unwrap();
    assert_eq!(run(&mut command).stdout, format!("default of {host}: hello\n"));
}

#[test]
fn oneflows_names_are_written_anew_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!(
        "--nproc_per_node 2 --redirect_stdout_and_stderr --logdir {}",
        folder.path().display()
    );
    for text in ["echo first $RANK; echo err >&2", "echo second $RANK"] {
        let finished = run(&mut script(&flags, text));
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), ""), "{finished:?}");
    }
    assert_eq!(read(folder.path().join("local_rank_1/stdout")), "second 1\n");
    assert_eq!(read(folder.path().join("local_rank_0/stderr")), "");
}

#[test]
fn each_restart_has_files_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let text = "echo $TORCHELASTIC_RESTART_COUNT; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let finished = run(&mut logged(folder.path(), "--max-restarts 1 --redirects 3", text));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    for attempt in 0..2 {
        assert_eq!(
            read(only(folder.path()).join(format!("attempt_{attempt}/0/stdout.log"))),
            format!("{attempt}\n")
        );
    }
}

#[test]
fn the_report_on_a_redirected_worker_reads_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let finished = run(&mut logged(folder.path(), "--redirects 3", "echo boom >&2; exit 4"));
    let file = only(folder.path()).join("attempt_0/0/stderr.log");
    let expected =
        format!("the last line of its stderr ({}):\nflow-launch:   | boom\n", file.display());
    assert!(finished.code == Some(4) && finished.stderr.contains(&expected), "{finished:?}");
}

#[test]
fn without_a_log_folder_files_are_in_a_temporary_one_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let finished = run(script("--redirects 1", "echo hello").env("TMPDIR", folder.path()));
    let logs = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let logs: Vec<_> = logs.filter(|path| path.join("attempt_0/0/stdout.log").exists()).collect();
    assert!(
        logs.len() == 1 && finished.stderr.contains(logs[0].to_str().unwrap()),
        "{finished:?} {logs:?}"
    );
}

#[test]
fn without_files_all_is_shown_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let text = "echo \"<$TORCHELASTIC_ERROR_FILE>\"";
    let mut command = logged(Path::new("/dev/null"), "--redirects 3 --tee 3", text);
    let finished =
        run(command.env("TORCHELASTIC_ERROR_FILE", "/mine").env("TMPDIR", folder.path()));
    assert_eq!(finished.stdout, "<>\n");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_log_folder_that_cannot_be_made_is_reported() {
    let finished = run(&mut logged(Path::new("/dev/null/logs"), "", "echo started"));
    assert_eq!(
        (finished.code, finished.stdout.as_str(), finished.stderr.lines().count()),
        (Some(1), "", 1)
    );
    assert!(
        finished.stderr.contains("cannot make the log folder /dev/null/logs: "),
        "{finished:?}"
    );
}

#[test]
fn a_full_disk_costs_the_file_and_not_the_console() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("local_rank_0")).unwrap();
    symlink("/dev/full", folder.path().join("local_rank_0/stdout")).unwrap();
    let flags = format!("--logdir {} --tee 1", folder.path().display());
    let finished = run(&mut script(&flags, "echo one; sleep 0.2; echo two"));
    assert_eq!(
        (finished.code, finished.stdout.as_str()),
        (Some(0), "[default0]:one\n[default0]:two\n")
    );
    assert_eq!(
        finished.stderr.matches("local_rank_0/stdout: No space left").count(),
        1,
        "{finished:?}"
    );
}

/// A worker that leaves an error file as torch's @record does, and fails.
const RECORD: &str = r#"printf '{"message":{"message":"E: boom %s","extraInfo":{"py_callstack":"Trace\\nE: boom %s","timestamp":"%s"}}}' \
    $RANK $RANK $((1700000000 - RANK)) > $TORCHELASTIC_ERROR_FILE; echo noise >&2; exit 3"#;

#[test]
fn a_recorded_error_is_reported_and_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let reply = folder.path().join("reply.json");
    let finished = run(script("", RECORD).env("TORCHELASTIC_ERROR_FILE", &reply));
    assert_eq!(finished.code, Some(3));
    let expected = "the last 2 lines of the error it recorded:\nflow-launch:   | \
                    Trace\nflow-launch:   | E: boom 0\n";
    assert!(finished.stderr.contains(expected), "{}", finished.stderr);
    let reply: serde_json::Value = serde_json::from_str(&read(reply)).unwrap();
    assert_eq!(reply["message"]["errorCode"], 3);
    assert_eq!(reply["message"]["message"], "E: boom 0");
}

/// Rank 1 fails, and takes its time to end; rank 0 fails because of that, and is faster. flow-launch
/// stands still until both have ended, so that it finds them together. The times of files go by ticks
/// of the kernel: rank 0 writes until its file is newer.
#[test]
fn who_recorded_its_error_first_is_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let record = RECORD.split("; echo noise").next().unwrap();
    let gate = folder.path().join("gate");
    let text = format!(
        "has_ended() {{ grep -q '^State:.*Z' /proc/$1/status; }}
         if [ $RANK = 1 ]; then
             {record}; kill -STOP $PPID; echo > {0}
             until [ -s {0}.0 ] && has_ended $(cat {0}.0); do sleep 0.02; done
             {{ until has_ended $$; do sleep 0.02; done; kill -CONT $PPID; }} & exit 3
         fi
         until [ -e {0} ]; do sleep 0.02; done
         until [ $TORCHELASTIC_ERROR_FILE -nt {0} ]; do {record}; done
         echo $$ > {0}.0; exit 4",
        gate.display()
    );
    let finished = run(&mut script("--nproc-per-node 2", &text));
    assert_eq!(finished.code, Some(3), "{finished:?}");
    let (_, report) = finished.stderr.split_once("flow-launch: rank ").expect(&finished.stderr);
    assert!(report.starts_with("1 (local rank 1, ") && report.contains("E: boom 1"), "{report}");
}

#[test]
fn garbage_in_an_error_file_does_no_harm() {
    let text = "head -c 100000 /dev/urandom > $TORCHELASTIC_ERROR_FILE; echo why >&2; exit 3";
    let finished = run(&mut script("", text));
    assert!(finished.code == Some(3) && finished.stderr.contains("  | why\n"), "{finished:?}");
}

/// Torch's own decorator, where there is a torch.
#[test]
fn torchs_record_is_understood() {
    if !have("torch") {
        return;
    }
    let python = python();
    let folder = tempfile::tempdir().unwrap();
    let program = "from torch.distributed.elastic.multiprocessing.errors import record\n\
                   @record\ndef main():\n    raise ValueError('boom')\nmain()\n";
    fs::write(folder.path().join("train.py"), program).unwrap();
    let text = format!("exec {python} {}", folder.path().join("train.py").display());
    let finished = run(script("", &text).env("PYTHONPATH", startup()));
    assert_eq!(finished.code, Some(1));
    assert!(finished.stderr.contains("lines of the error it recorded:\n"), "{}", finished.stderr);
    assert!(finished.stderr.contains("flow-launch:   | ValueError: boom\n"), "{}", finished.stderr);
}

#[test]
fn the_temporary_folder_goes_with_the_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let is_empty = || fs::read_dir(folder.path()).unwrap().count() == 0;
    let temporary = |text: &str| {
        let mut command = script("--nproc-per-node 2", text);
        command.env("TMPDIR", folder.path());
        command
    };
    let Finished { code, .. } = run(&mut temporary("echo {} > $TORCHELASTIC_ERROR_FILE"));
    assert!(code == Some(0) && is_empty());
    let Finished { code, .. } = run(&mut temporary(RECORD));
    assert!(code == Some(3) && is_empty());

    let text = "echo $$; while :; do echo x >> $TORCHELASTIC_ERROR_FILE; done";
    for victim in ["the launcher", "the guard"] {
        let mut running = Running::start(&mut temporary(text));
        let pids = running.numbers(2);
        assert!(!is_empty());
        if victim == "the guard" {
            let guard =
                children(running.pid()).into_iter().find(|pid| !pids.contains(pid)).unwrap();
            let guard = rustix::process::Pid::from_raw(guard).unwrap();
            rustix::process::kill_process(guard, Signal::KILL).unwrap();
            running.signal(Signal::TERM);
        } else {
            running.signal(Signal::KILL);
        }
        running.finish();
        until_gone(&pids);
        until(&format!("the folder is gone after the death of {victim}"), is_empty);
    }
}

#[test]
fn much_output_costs_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    const BYTES: u64 = 256 << 20;
    let one_line = format!("head -c {BYTES} /dev/zero | tr '\\0' x");
    let many_lines = format!("yes $(printf %0999d 7) | head -c {BYTES}");
    for (flags, text) in [("", one_line), ("--tee 1", many_lines)] {
        let logs = folder.path().join("logs");
        let text = format!("{text}; grep VmHWM /proc/$PPID/status >&2");
        let mut command = logged(&logs, flags, &text);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let finished = flow_harness::cli::finish(child);
        let peak: u64 = finished
            .stderr
            .split_whitespace()
            .nth(1)
            .and_then(|peak| peak.parse().ok())
            .expect(&finished.stderr);
        assert!(finished.code == Some(0) && peak < 32 * 1024, "{flags} {text}: {peak} KiB");
        if flags == "--tee 1" {
            let file = only(&logs).join("attempt_0/0/stdout.log");
            assert_eq!(fs::metadata(file).unwrap().len(), BYTES);
        }
        fs::remove_dir_all(&logs).unwrap();
    }
}
