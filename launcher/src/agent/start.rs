//! The start of an agent: everything that it opens before it runs.

use std::ffi::OsString;
use std::io::{IsTerminal, stdout};

use anyhow::Context;
use flow_store::net::host_name;

use crate::agent::checkpoint_memory::CheckpointMemory;
use crate::agent::health::Health;
use crate::agent::reaper::Reaper;
use crate::agent::signals::Signals;
use crate::agent::tracing::Tracing;
use crate::agent::watchdog::Watchdog;
use crate::agent::{Agent, process, worker};
use crate::control::ControlPlane;
use crate::job::Job;
use crate::output::log_files::LogFiles;
use crate::output::routing::Routes;
use crate::output::sink::Sinks;
use crate::plan;
use crate::plan::host::LocalHost;
use crate::report::events::EventLog;
use crate::top::local_jobs::LocalJob;
use crate::top::panel::Panel;

impl Agent {
    /// Joins the job.
    pub fn start(job: Job, local_host: LocalHost, command: Vec<OsString>) -> anyhow::Result<Agent> {
        let local_world_size = plan::local_world_size(&job, &local_host)?;
        process::allow_descriptors(local_world_size);
        // The workers' records are not older.
        flow_store::clock::start();
        let signals = Signals::catch(&job.signals)?;
        let mut sinks =
            Sinks::standard(job.quiet).context("cannot open standard output and standard error")?;
        if job.top {
            Panel::check_terminal(&sinks)?;
        }
        let mut reaper = Reaper::start(job.top)?;
        if let Some(threads) = plan::omp_threads(local_world_size, &local_host) {
            sinks.note(&plan::omp_note(threads, local_world_size, &local_host));
        }
        let host = host_name();
        let routes = Routes::new(&job.output, &job.role, &host, stdout().is_terminal());
        let logs = LogFiles::create(&job.output, routes, &job.nodes.id, &reaper)?;
        logs.note.iter().for_each(|note| sinks.note(note));
        let (watchdog, note) = Watchdog::start(&mut reaper)?.unzip();
        note.flatten().iter().for_each(|note| sinks.note(note));
        let health = Health::start().unwrap_or_else(|error| {
            sinks.note(&error);
            None
        });
        let events = EventLog::open(&job.events, &host)?;
        let control = ControlPlane::open(&job, local_world_size)?;
        let local_job = control.store().and_then(|(address, token)| {
            let local_job = LocalJob {
                pid: std::process::id(),
                job: job.nodes.id.clone(),
                program: job.program.name.to_string_lossy().into(),
                endpoint: ControlPlane::endpoint(&job),
                address: address.into(),
                token: token.into(),
            };
            local_job.publish().inspect_err(|error| log::info!("top finds no job: {error:#}")).ok()
        });
        let panel = control.store().filter(|_| job.top);
        let panel = panel.map(|(address, token)| Panel::start(address.into(), token.into()));
        let tracing = job.trace.as_deref().map(|to| Tracing::start(to, &control, &reaper));
        Ok(Agent {
            tracing: tracing.transpose()?,
            events,
            control,
            host,
            has_joined: false,
            must_rejoin: false,
            group: None,
            assignment: None,
            finished_group: None,
            signalled: None,
            result: None,
            job,
            local_host,
            command,
            local_world_size,
            sinks,
            has_input: worker::has_input(),
            logs,
            signals,
            watchdog,
            health,
            panel: panel.transpose().context("cannot show what the job does (--top)")?,
            _local_job: local_job,
            resumed: Vec::new(),
            checkpoint_memory: CheckpointMemory::new(local_world_size),
            reaper,
        })
    }
}
