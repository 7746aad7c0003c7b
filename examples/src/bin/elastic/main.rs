//! LeNet on Fashion-MNIST, or a small GPT on a text, on ranks that come and go. The weights are the
//! same bits whatever happens.
//!
//!     flow-launch --nproc_per_node 3 --elastic in-place --max-restarts 100 elastic --save weights.safetensors
//!
//! Kill some of its processes, and compare the file with that of a training that nothing happened to.

mod gpt;
mod options;
mod task;
mod train;

use std::process::ExitCode;

use anyhow::{Context, Result};
use flow::prelude::*;
use flow_examples::lenet::accuracy;
use flow_examples::options::write_losses;
use flow_examples::program;
use options::Options;
use task::Task;
use train::{Progress, Trainer};

fn main() -> ExitCode {
    program::run("elastic", run)
}

fn run(options: &Options) -> Result<()> {
    // Before it joins: the others go on until a process that is started again is ready.
    tch::manual_seed(options.seed.into());
    let vs = nn::VarStore::new(Device::Cpu);
    let Task { net, optimizer, train, test } = Task::new(options, &vs)?;
    let group = ProcessGroup::from_env()?;
    let virtual_ranks = options.virtual_ranks.get();
    let mut elastic = Elastic::new(net, &vs, optimizer, Progress::default(), &group)
        .options(move |group| Ddp::builder(group).virtual_ranks(virtual_ranks));
    drop(group);
    let mut trainer = Trainer::new(options, &vs, train)?;
    elastic.run(|training| {
        let mut checkpoints = trainer.begin(training)?;
        while !training.state.is_over && training.state.epoch < options.epochs.get() as u64 {
            trainer.epoch(training, checkpoints.as_mut())?;
            if let Some(test) = &test {
                let accuracy = 100.0 * accuracy(&training.model, &vs, test, 1)?;
                if training.group().rank() == 0 {
                    println!("epoch {}: test accuracy {accuracy:.2} %", training.state.epoch);
                }
            }
            training.state.sampler = None;
            training.state.epoch += 1;
        }
        anyhow::Ok(())
    })?;

    if elastic.group().rank() == 0 {
        if let Some(file) = &options.save {
            vs.save(file).with_context(|| format!("cannot write {}", file.display()))?;
        }
        write_losses(options.losses.as_deref(), &elastic.state().losses)?;
    }
    Ok(())
}
