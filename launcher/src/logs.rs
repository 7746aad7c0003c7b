//! The files of a job: what workers print, and the errors they record.
//!
//! Below the log folder they are named as torchrun names them, in a folder of this start of
//! flow-launch:
//! `<run id>_<name of this launch>/attempt_<n>/<local rank>/{stdout.log, stderr.log, error.json}`
//! and, for all workers, `attempt_<n>/filtered_{stdout,stderr}.log`; or as OneFlow does:
//! `local_rank_<n>/{stdout,stderr}`.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use memchr::memmem::Finder;
use rustix::fs::OFlags;

use crate::copies::Copies;
use crate::guard::Guard;
use crate::job::Output;
use crate::route::{self, Routes, Which, BOTH};

/// Where files of which kind are.
pub struct Logs {
    routes: Routes,
    /// What is above the workers' folders, if any stream may go to a file.
    streams: Option<PathBuf>,
    /// What is above the folders with error files.
    errors: Option<PathBuf>,
    oneflow_names: bool,
    /// What the user is to know of them.
    pub note: Option<String>,
}

impl Logs {
    /// Makes the folders. Without a log folder, error files are in a temporary one, which goes with
    /// the launcher.
    pub fn create(
        output: &Output,
        routes: Routes,
        run_id: &str,
        guard: &Guard,
    ) -> anyhow::Result<Logs> {
        let oneflow_names = output.oneflow_names;
        let mut logs = Logs { routes, streams: None, errors: None, oneflow_names, note: None };
        if route::is_nowhere(output) {
            return Ok(logs);
        }
        if route::wants_files(output) || output.log_dir.is_some() && !oneflow_names {
            let folder = output.log_dir.clone().unwrap_or_else(std::env::temp_dir);
            let folder = make_log_folder(folder, oneflow_names, run_id, guard.name())?;
            if output.log_dir.is_none() {
                logs.note = Some(format!(
                    "logs are in {}; --log-dir chooses another folder",
                    folder.display()
                ));
            }
            logs.streams = Some(folder);
        }
        if logs.streams.is_some() && !oneflow_names {
            logs.errors = logs.streams.clone();
        } else {
            match guard.temporary_folder() {
                Ok(folder) => logs.errors = Some(folder),
                Err(error) => {
                    logs.note = Some(format!(
                        "workers get no error files: cannot make a temporary folder: {error}"
                    ));
                }
            }
        }
        Ok(logs)
    }

    /// Opens what a worker's streams are copied to; `worker` numbers it.
    pub fn copies(
        &self,
        attempt: u32,
        worker: usize,
        rank: u32,
        local_rank: u32,
    ) -> io::Result<[Copies; 2]> {
        let open = |which: Which| -> io::Result<Copies> {
            let route = self.routes.of(which, rank, local_rank);
            let file = if route.file { self.stream(attempt, local_rank, which)? } else { None };
            Ok(Copies::new(2 * worker + which as usize, which, route, file))
        };
        let [stdout, stderr] = BOTH.map(open);
        Ok([stdout?, stderr?])
    }

    fn stream(&self, attempt: u32, local_rank: u32, which: Which) -> io::Result<Option<LogFile>> {
        let Some(folder) = &self.streams else { return Ok(None) };
        let (folder, name) = match self.oneflow_names {
            true => (folder.join(format!("local_rank_{local_rank}")), which.name().to_string()),
            false => (worker_folder(folder, attempt, local_rank), format!("{}.log", which.name())),
        };
        std::fs::create_dir_all(&folder)?;
        // OneFlow starts its files anew, but a restart must not remove what led to it.
        LogFile::open(folder.join(name), self.oneflow_names && attempt == 0).map(Some)
    }

    /// Where a worker is to record an error, if anywhere.
    pub fn error_file(&self, attempt: u32, local_rank: u32) -> Option<PathBuf> {
        Some(worker_folder(self.errors.as_ref()?, attempt, local_rank).join("error.json"))
    }

    /// Makes room for a worker's error file, where another may have left one.
    pub fn clear_error_file(&self, attempt: u32, local_rank: u32) -> io::Result<()> {
        let Some(file) = self.error_file(attempt, local_rank) else { return Ok(()) };
        file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::remove_file(&file).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })
    }

    /// Opens the files for those lines of all workers that are looked for.
    pub fn filters(&self, attempt: u32) -> io::Result<[Option<Filter>; 2]> {
        let [stdout, stderr] = BOTH.map(|which| self.filter(attempt, which));
        Ok([stdout?, stderr?])
    }

    fn filter(&self, attempt: u32, which: Which) -> io::Result<Option<Filter>> {
        let (Some(folder), needles @ [_, ..]) = (&self.streams, self.routes.needles(which)) else {
            return Ok(None);
        };
        let folder = match self.oneflow_names {
            true => folder.clone(),
            false => folder.join(format!("attempt_{attempt}")),
        };
        std::fs::create_dir_all(&folder)?;
        let file = LogFile::open(folder.join(format!("filtered_{}.log", which.name())), false)?;
        Ok(Some(Filter {
            needles: needles.iter().map(|needle| Finder::new(needle).into_owned()).collect(),
            file,
        }))
    }
}

fn worker_folder(folder: &Path, attempt: u32, local_rank: u32) -> PathBuf {
    folder.join(format!("attempt_{attempt}")).join(local_rank.to_string())
}

fn make_log_folder(
    folder: PathBuf,
    oneflow_names: bool,
    run_id: &str,
    launch: &str,
) -> anyhow::Result<PathBuf> {
    let told = || format!("cannot make the log folder {}", folder.display());
    // A worker may change its current folder and must still find its error file.
    let folder = std::path::absolute(&folder).with_context(told)?;
    std::fs::create_dir_all(&folder).with_context(told)?;
    if oneflow_names {
        return Ok(folder);
    }
    let own = folder.join(format!("{}_{launch}", file_name(run_id)));
    DirBuilder::new().mode(0o700).create(&own).with_context(told)?;
    Ok(own)
}

/// Part of a file name: no run id leads out of the folder.
fn file_name(run_id: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    run_id.chars().map(plain).take(100).collect()
}

/// A file to which a worker's output is appended.
pub struct LogFile {
    pub path: PathBuf,
    /// Its size at the start.
    pub start: u64,
    /// None when it was given to the worker, or could not be written.
    file: Option<File>,
}

impl LogFile {
    fn open(path: PathBuf, truncate: bool) -> io::Result<LogFile> {
        let flags = if truncate { OFlags::TRUNC } else { OFlags::empty() };
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .custom_flags(flags.bits() as i32)
            .open(&path)?;
        Ok(LogFile { start: file.metadata()?.len(), file: Some(file), path })
    }

    /// The open file, for the worker itself to write to.
    pub fn take(&mut self) -> Option<File> {
        self.file.take()
    }

    /// Appends; an error closes the file and is told once.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.write_all(bytes).map_err(|error| {
            self.file = None;
            format!(
                "cannot write to {}: {error}; it will lack the rest of the output",
                self.path.display()
            )
        })
    }
}

/// Copies the lines that have one of the needles.
pub struct Filter {
    needles: Vec<Finder<'static>>,
    file: LogFile,
}

impl Filter {
    /// Takes a line, or a piece of one that is too long, or a state of a progress bar.
    pub fn put(&mut self, prefix: &str, segment: &[u8]) -> Result<(), String> {
        let line = segment.trim_ascii_end();
        if !self.needles.iter().any(|needle| needle.find(line).is_some()) {
            return Ok(());
        }
        self.file.write(&[prefix.as_bytes(), line, b"\n"].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{StreamMap, Streams};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn no_run_id_leads_out_of_the_log_folder() {
        let base = tempfile::tempdir().unwrap();
        for id in ["../../up", "/etc", "", "..", "a\0b", &"long".repeat(500)] {
            let folder = make_log_folder(base.path().join("logs"), false, id, "1.2").unwrap();
            assert_eq!(folder.parent(), Some(base.path().join("logs").as_path()), "{id}");
            assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        }
        assert_eq!(make_log_folder(base.path().into(), true, "../x", "1.2").unwrap(), base.path());
        let file = base.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = make_log_folder(file, true, "id", "1.2").unwrap_err();
        assert!(format!("{error:#}").starts_with("cannot make the log folder "), "{error:#}");
    }

    fn logs(base: &Path, oneflow_names: bool) -> Logs {
        let all = StreamMap::All(Streams { stdout: true, stderr: true });
        let output = Output {
            prefix: false,
            log_dir: None,
            oneflow_names,
            redirects: all.clone(),
            tee: all,
            shown: None,
            stdout_filters: Vec::new(),
            stderr_filters: Vec::new(),
        };
        let routes = Routes::new(&output, "default", None, false);
        Logs {
            routes,
            streams: Some(base.into()),
            errors: Some(base.into()),
            oneflow_names,
            note: None,
        }
    }

    fn write(logs: &Logs, attempt: u32, text: &str) -> PathBuf {
        let mut file = logs.stream(attempt, 3, Which::Stderr).unwrap().unwrap();
        file.write(text.as_bytes()).unwrap();
        file.path
    }

    #[test]
    fn names_are_torchruns_or_oneflows() {
        let base = tempfile::tempdir().unwrap();
        assert_eq!(
            write(&logs(base.path(), false), 2, ""),
            base.path().join("attempt_2/3/stderr.log")
        );
        let oneflow = write(&logs(base.path(), true), 0, "old");
        assert_eq!(oneflow, base.path().join("local_rank_3/stderr"));
        write(&logs(base.path(), true), 0, "first");
        write(&logs(base.path(), true), 1, " second");
        assert_eq!(std::fs::read_to_string(oneflow).unwrap(), "first second");
    }

    #[test]
    fn an_error_file_of_another_worker_is_removed() {
        let base = tempfile::tempdir().unwrap();
        let logs = logs(base.path(), false);
        let file = logs.error_file(0, 3).unwrap();
        logs.clear_error_file(0, 3).unwrap();
        std::fs::write(&file, "{}").unwrap();
        logs.clear_error_file(0, 3).unwrap();
        assert!(!file.exists() && file.parent().unwrap().is_dir());
    }

    #[test]
    fn a_file_that_cannot_be_written_is_told_once() {
        let mut full = LogFile::open("/dev/full".into(), false).unwrap();
        assert!(full.write(b"x").unwrap_err().contains("/dev/full"));
        assert_eq!(full.write(b"x"), Ok(()));
    }
}
