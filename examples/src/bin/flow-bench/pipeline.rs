//! A step of a pipeline of linear layers, beside the time that its ranks would need if none were ever
//! idle.

use anyhow::Result;
use clap::Args;
use flow::plan::schedule::{simulate, Costs};
use flow::prelude::*;

use crate::timing::{median, time};

const BLOCKS: usize = 5;
const STEPS: usize = 5;

#[derive(Args)]
pub struct Options {
    /// gpipe, 1f1b, interleaved, zb-h1 or zb-v
    #[arg(long, default_value = "1f1b")]
    schedule: String,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 8)]
    micro_batches: usize,
    /// Rows of a micro-batch
    #[arg(long, default_value_t = 128)]
    rows: i64,
    /// Width of the layers
    #[arg(long, default_value_t = 512)]
    width: i64,
    /// Layers of the model, a multiple of the stages
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let ranks = group.world_size();
    tch::set_num_threads(1);
    tch::manual_seed(0);
    let schedule = Schedule::named(&options.schedule, ranks, 2, options.micro_batches)?;
    let layers = options.layers / schedule.stages();
    let stage = |vs: &nn::Path| {
        (0..layers).fold(nn::seq(), |stage, _| {
            let layer = nn::linear(vs, options.width, options.width, Default::default());
            stage.add(layer).add_fn(|x| x.relu())
        })
    };
    let all: Vec<usize> = (0..ranks).collect();
    let mesh = Mesh::new(&group, &all, &[ranks])?.with_names(&["pp"])?;
    let vs = nn::VarStore::new(Device::Cpu);
    let mut pipeline = Pipeline::builder(&mesh, "pp")
        .schedule(schedule.clone())
        .build(|_| Ok(Box::new(stage(&vs.root()))))?;
    let rows = options.rows * options.micro_batches as i64;
    let x = Tensor::randn([rows, options.width], (Kind::Float, Device::Cpu));
    let mut piped = || -> Result<()> {
        pipeline.step(&[x.shallow_clone()], |outputs, _| outputs[0].square().mean(Kind::Float))?;
        Ok(())
    };
    // What one rank of them has to do, without a pipeline: all ranks at once, as in the pipeline.
    let own = nn::VarStore::new(Device::Cpu);
    let stages: Vec<_> =
        (0..schedule.stages_of(group.rank()).len()).map(|_| stage(&own.root())).collect();
    let part = x.narrow(0, 0, options.rows).set_requires_grad(true);
    let mut alone = || -> Result<()> {
        for _ in 0..options.micro_batches {
            for stage in &stages {
                stage.forward(&part).square().mean(Kind::Float).f_backward()?;
            }
        }
        Ok(())
    };
    let (mut pipes, mut ideal) = (Vec::new(), Vec::new());
    for _ in 0..BLOCKS {
        group.barrier()?;
        piped()?;
        pipes.extend(time(STEPS, &mut piped)?);
        group.barrier()?;
        alone()?;
        ideal.extend(time(STEPS, &mut alone)?);
    }
    if group.rank() == 0 {
        let [pipe, ideal] = [&mut pipes, &mut ideal].map(|times| median(times).as_secs_f64() * 1e3);
        let bubble = simulate(&schedule, &Costs::default())?.bubble(0);
        let (efficiency, name) = (ideal / pipe, &options.schedule);
        if options.json {
            let line = serde_json::json!({
                "bench": "pipeline", "schedule": name, "ranks": ranks, "step_ms": pipe,
                "ideal_ms": ideal, "efficiency": efficiency, "limit": 1.0 - bubble,
            });
            println!("{line}");
        } else {
            println!(
                "pipeline, {name}: a step takes {pipe:.3} ms, {ideal:.3} ms without idle time: \
                 efficiency {efficiency:.3} of at most {:.3}",
                1.0 - bubble
            );
        }
    }
    Ok(())
}
