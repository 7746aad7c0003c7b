//! Checks of `Ddp` by name, each to be started as two or three ranks: `check_ddp NAME`.

mod accumulation;
mod equivalence;
mod helpers;
mod lifecycle;
mod models;
mod nested;
mod options;
mod reported;
mod tied;
mod unfit;
mod unused;

use anyhow::{Context, Result};
use flow_comm::ProcessGroup;

type Check = fn(&ProcessGroup) -> Result<()>;

const CHECKS: &[(&str, Check)] = &[
    ("linear", equivalence::linear),
    ("mlp", equivalence::mlp),
    ("lenet", equivalence::lenet),
    ("mobilenet", equivalence::mobilenet),
    ("shared_gradients", equivalence::shared_gradients),
    ("no_sync", accumulation::no_sync),
    ("guards", accumulation::guards),
    ("several_forwards", accumulation::several_forwards),
    ("cleared_gradients", accumulation::cleared_gradients),
    ("unused_found", unused::found),
    ("unused_now_and_then", unused::now_and_then),
    ("unused_everywhere", unused::everywhere),
    ("unused_accumulated", unused::accumulated),
    ("nested", nested::reduced),
    ("nested_unused", nested::unused),
    ("nested_twice", nested::twice),
    ("unused_reported", reported::unused),
    ("frozen_later", reported::frozen_later),
    ("differing_models", reported::differing_models),
    ("unfit_models", reported::unfit_models),
    ("unfit_tensors", unfit::tensors),
    ("replaced_buffers", unfit::replaced_buffers),
    ("tied", tied::trained),
    ("tied_names", tied::named),
    ("wrapped_twice", tied::wrapped_twice),
    ("frozen", lifecycle::frozen),
    ("buffers", lifecycle::buffers),
    ("changed", lifecycle::changed),
    ("wrapped_again", lifecycle::wrapped_again),
    ("joined_again", lifecycle::joined_again),
    ("sub_group", lifecycle::sub_group),
    ("memory", lifecycle::memory),
    ("waits", lifecycle::waits),
    ("sampler", lifecycle::sampler),
    ("alone", lifecycle::alone),
    ("kinds", options::kinds),
    ("communication_kinds", options::communication_kinds),
    ("many_buckets", options::many_buckets),
    ("ready_order", options::ready_order),
    ("layouts", options::layouts),
];

fn main() -> Result<()> {
    let name = std::env::args().nth(1).context("the name of a check is missing")?;
    let (_, check) = CHECKS
        .iter()
        .find(|(n, _)| *n == name)
        .with_context(|| format!("there is no check {name}"))?;
    let group = ProcessGroup::from_env()?;
    models::choose_device(&group)?;
    tch::set_num_threads(1);
    check(&group).with_context(|| format!("{name}, rank {}", group.rank()))?;
    group.barrier()?;
    if group.rank() == 0 {
        println!("{name} holds on {} ranks", group.world_size());
    }
    Ok(())
}
