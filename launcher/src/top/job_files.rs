//! The files by which the jobs of this machine are found. Each agent has one, which only its user can
//! read, as it has the job's secret. The agent locks it before it gets its name: a file that nobody locks
//! is that of an agent that was killed, and whoever finds it removes it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use crate::cli::usage::Usage;
use crate::report::text::printable;

/// What the name of a file ends with.
const EXTENSION: &str = "json";

/// What it ends with while the file is being written.
const NEW: &str = "new";

/// A file that has this name for so long is not being written.
const WRITING: Duration = Duration::from_secs(60);

/// What a file says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobFile {
    /// The agent's process.
    pub pid: u32,
    /// The job's id.
    pub job: String,
    /// The program, as the user has named it.
    pub program: String,
    /// The address at which the job's agents meet: the same in the files of all.
    pub endpoint: String,
    /// A store that says who leads, and the token that it asks for.
    pub address: String,
    pub token: String,
}

/// The file of this agent, until dropped.
pub struct OwnJobFile {
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl OwnJobFile {
    /// Writes it, in the first folder that takes it.
    pub fn create(job: &JobFile) -> anyhow::Result<OwnJobFile> {
        let mut result = Err(anyhow!("there is no folder for it"));
        for folder in folders() {
            result = OwnJobFile::create_in(&folder, job);
            match &result {
                Ok(_) => break,
                Err(error) => log::debug!("no job file: {error:#}"),
            }
        }
        result
    }

    fn create_in(folder: &Path, job: &JobFile) -> anyhow::Result<OwnJobFile> {
        make(folder)?;
        let mut number = [0; 8];
        getrandom(&mut number, GetRandomFlags::empty())?;
        let name = format!("{:016x}", u64::from_ne_bytes(number));
        let new = folder.join(format!(".{name}.{NEW}"));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
        let file = file.with_context(|| format!("cannot make {}", new.display()))?;
        let mut own = OwnJobFile { path: new, file };
        flock(&own.file, FlockOperation::NonBlockingLockExclusive)?;
        own.file.write_all(&serde_json::to_vec(job)?)?;
        let path = folder.join(format!("{name}.{EXTENSION}"));
        fs::rename(&own.path, &path)?;
        own.path = path;
        Ok(own)
    }
}

impl Drop for OwnJobFile {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path, &self.file) {
            log::debug!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Removes a file, unless another one has its name by now.
fn remove(path: &Path, file: &File) -> io::Result<()> {
    let named = fs::symlink_metadata(path)?;
    let own = file.metadata()?;
    if (named.dev(), named.ino()) == (own.dev(), own.ino()) {
        fs::remove_file(path)?;
    }
    Ok(())
}

/// Finds the job with this id, or whose flow-launch has this process number: the only one if no name is
/// given.
pub fn find(name: Option<&str>) -> anyhow::Result<JobFile> {
    let mut jobs = Vec::new();
    for folder in folders() {
        match check(&folder) {
            Ok(()) => jobs.extend(list(&folder)?),
            Err(error) => log::debug!("no jobs: {error:#}"),
        }
    }
    choose(jobs, name).map_err(anyhow::Error::from)
}

fn choose(mut jobs: Vec<JobFile>, name: Option<&str>) -> Result<JobFile, Usage> {
    let all = names(&jobs);
    if let Some(name) = name {
        jobs.retain(|job| job.job == name || job.pid.to_string() == name);
    }
    // Several agents of a job may run on one machine.
    jobs.sort_by_key(|job| job.pid);
    let mut known = Vec::new();
    jobs.retain(|job| {
        let own = (job.endpoint.clone(), job.token.clone());
        let is_new = !known.contains(&own);
        known.push(own);
        is_new
    });
    let elsewhere = "for one elsewhere give --rdzv-endpoint and --rdzv-id";
    match (jobs.len(), name) {
        (1, _) => Ok(jobs.remove(0)),
        (0, _) if all.is_empty() => {
            Err(Usage(format!("no job of yours runs on this machine; {elsewhere}")))
        }
        (0, name) => Err(Usage(format!(
            "no job of yours is '{}'; there are {all}; {elsewhere}",
            printable(name.unwrap_or_default())
        ))),
        _ => Err(Usage(format!("several jobs run; name one: {}", names(&jobs)))),
    }
}

fn names(jobs: &[JobFile]) -> String {
    let names = jobs.iter().map(|job| {
        let JobFile { pid, job, program, .. } = job;
        format!("{pid} ({}, id {})", printable(program), printable(job))
    });
    names.collect::<Vec<_>>().join(", ")
}

/// Returns the jobs whose agents live. Removes the files of others.
fn list(folder: &Path) -> anyhow::Result<Vec<JobFile>> {
    let mut jobs = Vec::new();
    let entries = fs::read_dir(folder);
    for entry in entries.with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let extension = path.extension().unwrap_or_default();
        if extension != EXTENSION && extension != NEW {
            continue;
        }
        match read(&path) {
            Ok(job) => jobs.extend(job),
            // It may have been removed meanwhile.
            Err(error) => log::debug!("no job in {}: {error:#}", path.display()),
        }
    }
    Ok(jobs)
}

/// Reads a file; None if its agent does not live.
fn read(path: &Path) -> anyhow::Result<Option<JobFile>> {
    let no_links = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut file = OpenOptions::new().read(true).custom_flags(no_links).open(path)?;
    let about = file.metadata()?;
    if about.uid() != geteuid().as_raw() || !about.is_file() {
        bail!("it is another user's");
    }
    let is_new = path.extension().is_some_and(|extension| extension == NEW);
    if is_new && about.modified()?.elapsed().unwrap_or_default() <= WRITING {
        return Ok(None);
    }
    if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        remove(path, &file)?;
        return Ok(None);
    }
    if is_new {
        return Ok(None);
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(Some(serde_json::from_str(&text)?))
}

/// Returns where the files may be: programs of one user may have different environments.
fn folders() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|folder| folder.is_absolute() && folder.is_dir());
    let temporary = std::env::temp_dir().join(format!("flow-{}", geteuid().as_raw()));
    runtime.map(|folder| folder.join("flow")).into_iter().chain([temporary]).collect()
}

/// Makes a folder if it is not there.
fn make(folder: &Path) -> anyhow::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", folder.display()))
        }
        _ => check(folder),
    }
}

/// Checks that only this user can write to a folder.
fn check(folder: &Path) -> anyhow::Result<()> {
    let about = fs::symlink_metadata(folder);
    let about = about.with_context(|| format!("cannot read {}", folder.display()))?;
    if !about.is_dir() || about.uid() != geteuid().as_raw() || about.mode() & 0o077 != 0 {
        bail!("{} must be a folder of this user's, with mode 0700", folder.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn job(pid: u32, id: &str, endpoint: &str) -> JobFile {
        JobFile {
            pid,
            job: id.into(),
            program: "train".into(),
            endpoint: endpoint.into(),
            address: format!("h:{pid}"),
            token: "secret".into(),
        }
    }

    #[test]
    fn a_job_is_found_by_id_by_pid_or_as_the_only_one() {
        let jobs = vec![job(7, "a", "h:1"), job(8, "a", "h:1"), job(9, "b", "h:2")];
        let pid = |name| choose(jobs.clone(), name).map(|job| job.pid).map_err(|usage| usage.0);
        assert_eq!((pid(Some("a")), pid(Some("8")), pid(Some("b"))), (Ok(7), Ok(8), Ok(9)));
        assert_eq!(choose(jobs[..2].to_vec(), None).unwrap(), jobs[0]);
        let several = pid(None).unwrap_err();
        assert!(several.contains("7 (train, id a)") && several.contains("9 (train, id b)"));
        assert!(pid(Some("c\n")).unwrap_err().contains(r"no job of yours is 'c\n'; there are 7"));
        assert!(choose(vec![], None).unwrap_err().0.contains("no job of yours runs"));
    }

    #[test]
    fn files_of_agents_that_are_gone_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let text = serde_json::to_vec(&job(7, "a", "h:1")).unwrap();
        let names = ["lives.json", "gone.json", "other.txt", ".old.new", ".fresh.new"];
        for name in names {
            fs::write(path(name), &text).unwrap();
        }
        let long_ago = SystemTime::now() - 2 * WRITING;
        File::options().write(true).open(path(".old.new")).unwrap().set_modified(long_ago).unwrap();
        std::os::unix::fs::symlink(path("lives.json"), path("link.json")).unwrap();
        let lives = File::open(path("lives.json")).unwrap();
        flock(&lives, FlockOperation::LockExclusive).unwrap();
        assert_eq!(list(folder.path()).unwrap(), [job(7, "a", "h:1")]);
        let is_there = names.map(|name| path(name).exists());
        assert_eq!(is_there, [true, false, true, false, true]);
        assert!(path("link.json").is_symlink());
    }

    #[test]
    fn a_file_of_the_same_name_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("flow");
        let about = job(7, "a", "h:1");
        let [own, replaced] = [(); 2].map(|()| OwnJobFile::create_in(&folder, &about));
        let (own, replaced) = (own.unwrap(), replaced.unwrap());
        assert_eq!(fs::metadata(&own.path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(list(&folder).unwrap(), [about.clone(), about]);
        let path = replaced.path.clone();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another's").unwrap();
        drop((own, replaced));
        let left: Vec<_> = folder.read_dir().unwrap().map(|it| it.unwrap().path()).collect();
        assert_eq!(left, [path]);
    }
}
