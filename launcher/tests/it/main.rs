//! flow-launch, as its users run it.

mod clusters;
mod container;
mod doctor;
mod dry_run;
mod elastic;
mod events;
mod failure;
mod flags;
mod hosts;
mod install;
mod libraries;
mod logs;
mod net;
mod nodes;
mod output;
mod python_api;
mod pytorch;
mod restart;
mod setup_libtorch;
mod signals;
mod start;
mod stdin;
mod terminal;
mod trace;
mod usage;
mod watchdog;
