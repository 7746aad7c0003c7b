//! Jobs in place that lose hosts.

use std::process::Child;

use flow_harness::cli::wait;
use tempfile::NamedTempFile;

use super::*;

/// A job in place on three hosts, and what it writes.
struct InPlace {
    site: Site,
    gate: Gate,
    head: Child,
    said: NamedTempFile,
}

impl InPlace {
    /// All workers run, and the followers would elect another leader.
    fn start(text: &str) -> Option<InPlace> {
        let net = Net::new(3)?;
        let (_folder, ssh) = net.remote_shell();
        let gate = Gate::new();
        let flags = format!(
            "--rsh {ssh} --hosts node0,node1,node2 --nproc-per-node 2 --elastic in-place --min-workers 2"
        );
        let said = NamedTempFile::new().unwrap();
        let mut command = script(&flags, &format!("echo ready; {}; {text}", gate.wait()));
        command.env("FLOW_LOG", "warn,flow_launch::control=info");
        command.stdout(said.reopen().unwrap()).stderr(said.reopen().unwrap());
        let head = command.spawn().unwrap();
        let job = InPlace { site: Site { net, ssh, _folder }, gate, head, said };
        until("all have started", || job.count("ready\n") == 6);
        until("the followers would elect another leader", || job.count("one has a copy") >= 2);
        Some(job)
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    fn count(&self, text: &str) -> usize {
        self.said().matches(text).count()
    }

    fn until_smaller(&self) {
        until("the job goes on", || self.count("the job goes on with 4 workers") > 0);
        assert_eq!(self.count("ready\n"), 6, "{}", self.said());
    }

    /// Lets the workers go on; returns the exit code.
    fn end(&mut self) -> Option<i32> {
        self.gate.open();
        let code = wait(&mut self.head);
        self.site.net.until_nothing_is_left();
        code
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        let _ = self.head.kill();
        let _ = self.head.wait();
    }
}

fn kill_all(pids: &[i32]) {
    for pid in pids {
        // It may have ended with another.
        let _ = kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL);
    }
}

/// Also without the first, which leads the job. The job ends well without it.
#[test]
fn a_job_in_place_goes_on_without_a_host() {
    for lost in [0, 2] {
        let Some(mut job) = InPlace::start("exit 0") else { return };
        match lost {
            0 => kill_all(&job.site.net.processes(0)),
            _ => job.site.net.power_off(lost),
        }
        job.until_smaller();
        assert_eq!(job.end(), Some(0), "{}", job.said());
        let expected = format!("flow-launch: node{lost} is lost: ");
        assert!(job.said().contains(&expected), "{}", job.said());
    }
}

/// The host lives: its workers are killed there.
#[test]
fn a_job_in_place_goes_on_without_a_host_whose_connection_is_lost() {
    for lost in [0, 1] {
        let Some(mut job) = InPlace::start("exit 0") else { return };
        let shell = children(job.head.id() as i32)[lost];
        kill_all(&[shell]);
        job.until_smaller();
        until("its workers have ended", || job.site.net.processes(lost).is_empty());
        assert_eq!(job.end(), Some(0), "{}", job.said());
    }
}

#[test]
fn a_job_in_place_that_fails_on_the_hosts_that_are_left_fails() {
    let Some(mut job) = InPlace::start("exit 7") else { return };
    kill_all(&job.site.net.processes(1));
    job.until_smaller();
    assert_eq!(job.end(), Some(7), "{}", job.said());
}

#[test]
fn a_job_in_place_of_which_no_host_is_left_fails() {
    let Some(mut job) = InPlace::start("exit 0") else { return };
    for node in 0..3 {
        kill_all(&job.site.net.processes(node));
    }
    assert_eq!(job.end(), Some(137), "{}", job.said());
}

/// The remote shell ends well, and has started nothing.
#[test]
fn a_job_in_place_fails_if_a_host_starts_nothing() {
    let flags = "--rsh true --hosts node0,node1,node2 --elastic in-place --min-workers 1";
    let finished = run(&mut script(flags, "exit 0"));
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stderr.contains("cannot start flow-launch on node"), "{finished:?}");
}
