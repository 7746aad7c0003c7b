//! The files of a job: what workers print, and the errors they record.
//!
//! Below the log folder they are named as torchrun names them, in a folder of this start of
//! flow-launch:
//! `<run id>_<name of this launch>/attempt_<n>/<local rank>/{stdout.log, stderr.log, error.json}`
//! and, for all workers, `attempt_<n>/filtered_{stdout,stderr}.log`; or as OneFlow does:
//! `local_rank_<n>/{stdout,stderr}`.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::agent::reaper::Reaper;
use crate::job::OutputOptions;
use crate::output::log_file::{Filter, LogFile};
use crate::output::routing::{self, BOTH, Routes, StreamKind};
use crate::output::tee::StreamTee;

/// The folders of a job's files.
pub struct LogFiles {
    routes: Routes,
    /// The folder with the workers' stream files, if any stream may go to a file.
    streams: Option<PathBuf>,
    /// The folder with the workers' error files.
    errors: Option<PathBuf>,
    oneflow_names: bool,
    /// A notice for the user.
    pub note: Option<String>,
}

impl LogFiles {
    /// Makes the folders. Without a log folder, error files are in a temporary folder, which is
    /// removed when the launcher ends.
    pub fn create(
        output: &OutputOptions,
        routes: Routes,
        run_id: &str,
        reaper: &Reaper,
    ) -> anyhow::Result<LogFiles> {
        let oneflow_names = output.oneflow_names;
        let mut logs = LogFiles { routes, streams: None, errors: None, oneflow_names, note: None };
        if routing::is_nowhere(output) {
            return Ok(logs);
        }
        if routing::wants_files(output) || output.log_dir.is_some() && !oneflow_names {
            let folder = output.log_dir.clone().unwrap_or_else(std::env::temp_dir);
            let folder = make_log_folder(folder, oneflow_names, run_id, reaper.name())?;
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
            match reaper.temporary_folder() {
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

    /// Opens the files of a worker's streams; `worker` is its index.
    pub fn tees(
        &self,
        attempt: u32,
        worker: usize,
        rank: u32,
        local_rank: u32,
    ) -> io::Result<Vec<StreamTee>> {
        let mut tees = Vec::with_capacity(BOTH.len());
        for which in BOTH {
            let route = self.routes.of(which, rank, local_rank);
            let file = if route.file { self.stream(attempt, local_rank, which)? } else { None };
            tees.push(StreamTee::new(2 * worker + which as usize, which, route, file));
        }
        Ok(tees)
    }

    fn stream(
        &self,
        attempt: u32,
        local_rank: u32,
        which: StreamKind,
    ) -> io::Result<Option<LogFile>> {
        let Some(folder) = &self.streams else { return Ok(None) };
        let path = if self.oneflow_names {
            folder.join(format!("local_rank_{local_rank}")).join(which.name())
        } else {
            worker_folder(folder, attempt, local_rank).join(format!("{}.log", which.name()))
        };
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        // OneFlow truncates its files, but a restart must keep what led to it.
        LogFile::open(path, self.oneflow_names && attempt == 0).map(Some)
    }

    /// Returns the file in which a worker records its error, if it has one.
    pub fn error_file(&self, attempt: u32, local_rank: u32) -> Option<PathBuf> {
        Some(worker_folder(self.errors.as_ref()?, attempt, local_rank).join("error.json"))
    }

    /// Removes an error file that an earlier worker has left.
    pub fn clear_error_file(&self, attempt: u32, local_rank: u32) -> io::Result<()> {
        let Some(file) = self.error_file(attempt, local_rank) else { return Ok(()) };
        file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::remove_file(&file).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })
    }

    /// Opens the files for filtered lines of all workers.
    pub fn filters(&self, attempt: u32) -> io::Result<[Option<Filter>; 2]> {
        let [stdout, stderr] = BOTH.map(|which| self.filter(attempt, which));
        Ok([stdout?, stderr?])
    }

    fn filter(&self, attempt: u32, which: StreamKind) -> io::Result<Option<Filter>> {
        let (Some(folder), needles @ [_, ..]) = (&self.streams, self.routes.needles(which)) else {
            return Ok(None);
        };
        let folder = if self.oneflow_names {
            folder.clone()
        } else {
            folder.join(format!("attempt_{attempt}"))
        };
        std::fs::create_dir_all(&folder)?;
        let file = LogFile::open(folder.join(format!("filtered_{}.log", which.name())), false)?;
        Ok(Some(Filter::new(needles, file)))
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
    let cannot = || format!("cannot make the log folder {}", folder.display());
    // Absolute: a worker may change its current folder and must still find its error file.
    let folder = std::path::absolute(&folder).with_context(cannot)?;
    std::fs::create_dir_all(&folder).with_context(cannot)?;
    if oneflow_names {
        return Ok(folder);
    }
    let own = folder.join(format!("{}_{launch}", file_name(run_id)));
    DirBuilder::new().mode(0o700).create(&own).with_context(cannot)?;
    Ok(own)
}

/// Returns a run id as part of a file name, which cannot lead out of the folder.
fn file_name(run_id: &str) -> String {
    let name: String = run_id.chars().take(100).collect();
    name.replace(|c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c), "_")
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

    fn logs(base: &Path, oneflow_names: bool) -> LogFiles {
        let all = StreamMap::All(Streams { stdout: true, stderr: true });
        let output = OutputOptions {
            prefix: false,
            log_dir: None,
            oneflow_names,
            redirects: all.clone(),
            tee: all,
            prefix_template: None,
            shown: None,
            stdout_filters: Vec::new(),
            stderr_filters: Vec::new(),
        };
        let routes = Routes::new(&output, "default", "node0", false);
        LogFiles {
            routes,
            streams: Some(base.into()),
            errors: Some(base.into()),
            oneflow_names,
            note: None,
        }
    }

    fn write(logs: &LogFiles, attempt: u32, text: &str) -> PathBuf {
        let mut file = logs.stream(attempt, 3, StreamKind::Stderr).unwrap().unwrap();
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
}
