//! The jobs of this machine. Each agent says in a memfd what its job is, and where its store is. Others find
//! that among the descriptors of this user's processes: so nothing is left behind, however an agent ends.

use std::fs::{self, DirEntry, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::bail;
use rustix::fs::{MemfdFlags, OFlags, memfd_create};
use rustix::process::{Resource, geteuid, getrlimit};
use serde::{Deserialize, Serialize};

use crate::cli::usage::Usage;
use crate::report::text::printable;

/// The name of the memfd.
const NAME: &str = "flow-job";

/// Where a descriptor of it leads.
const TARGET: &str = "/memfd:flow-job (deleted)";

/// The most bytes of it.
const BYTES: u64 = 1 << 20;

/// What an agent says of its job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalJob {
    /// The agent's process.
    pub pid: u32,
    /// The job's id.
    pub job: String,
    /// The program, as the user has named it.
    pub program: String,
    /// The address at which the job's agents meet: the same for all.
    pub endpoint: String,
    /// A store that says who leads, and the token that it asks for.
    pub address: String,
    pub token: String,
}

impl LocalJob {
    /// Lets the job be found as long as the memfd is open. Only this user can read it: it has the job's
    /// secret.
    pub fn publish(&self) -> anyhow::Result<File> {
        let text = serde_json::to_vec(self)?;
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < text.len() as u64) {
            bail!("the limit on files (ulimit -f) is too low");
        }
        let mut file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC)?);
        file.write_all(&text)?;
        Ok(file)
    }
}

/// Finds the job with this id, or whose flow-launch has this process number: the only one if no name is
/// given.
pub fn find(name: Option<&str>) -> anyhow::Result<LocalJob> {
    Ok(choose(list(), name)?)
}

fn choose(mut jobs: Vec<LocalJob>, name: Option<&str>) -> Result<LocalJob, Usage> {
    let all = names(&jobs);
    if let Some(name) = name {
        let has_id = jobs.iter().any(|job| job.job == name);
        jobs.retain(|job| job.job == name || !has_id && job.pid.to_string() == name);
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

fn names(jobs: &[LocalJob]) -> String {
    let names = jobs.iter().map(|job| {
        let LocalJob { pid, job, program, .. } = job;
        format!("{pid} ({}, id {})", printable(program), printable(job))
    });
    names.collect::<Vec<_>>().join(", ")
}

/// Returns the jobs of this user's agents.
fn list() -> Vec<LocalJob> {
    let mut jobs = Vec::new();
    for process in entries(Path::new("/proc")) {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        for descriptor in entries(&process.path().join("fd")) {
            let path = descriptor.path();
            if fs::read_link(&path).is_ok_and(|target| target == Path::new(TARGET)) {
                match read(&path, pid) {
                    Ok(job) => jobs.push(job),
                    Err(error) => log::debug!("no job in {}: {error:#}", path.display()),
                }
            }
        }
    }
    jobs
}

/// Returns what is in a folder of /proc. Those of others' processes cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// Reads what the agent with this process number says.
fn read(path: &Path, pid: u32) -> anyhow::Result<LocalJob> {
    // Something else may have the same name in another namespace.
    let file =
        OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let about = file.metadata()?;
    if about.uid() != geteuid().as_raw() || !about.is_file() {
        bail!("it is another user's");
    }
    let mut text = Vec::new();
    file.take(BYTES).read_to_end(&mut text)?;
    let job: LocalJob = serde_json::from_slice(&text)?;
    // A process that is forked from the agent has its descriptors.
    if job.pid != pid {
        bail!("it is process {}'s", job.pid);
    }
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(pid: u32, id: &str, endpoint: &str) -> LocalJob {
        LocalJob {
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
    fn a_job_is_listed_as_long_as_its_agent_has_the_memfd_open() {
        let id = format!("listed-{}", std::process::id());
        let own = job(std::process::id(), &id, "h:1");
        let of_another = job(own.pid + 1, &id, "h:1");
        let listed = || list().into_iter().filter(|job| job.job == id).collect::<Vec<_>>();
        let published = [own.publish().unwrap(), of_another.publish().unwrap()];
        assert_eq!(listed(), [own]);
        drop(published);
        assert_eq!(listed(), []);
    }
}
