//! A step of a pipeline of linear layers, beside the time that its ranks would need if none were ever
//! idle.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use flow::prelude::*;

use crate::timing::{block, median};

const BLOCKS: usize = 5;
const STEPS: usize = 5;
/// Stages of a rank, where the schedule has several.
const CHUNKS: usize = 2;

#[derive(Args)]
pub struct Options {
    /// Any of gpipe, 1f1b, interleaved, zb-h1, zb-v: blocks of their steps take turns
    #[arg(long, value_delimiter = ',', default_values_t = ["1f1b".to_string()])]
    schedules: Vec<String>,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 8)]
    micro_batches: usize,
    /// Rows of a micro-batch
    #[arg(long, default_value_t = 128)]
    rows: i64,
    /// Width of the layers
    #[arg(long, default_value_t = 512)]
    width: i64,
    /// Layers of the model, a multiple of twice the ranks
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    /// Print a JSON line
    #[arg(long)]
    json: bool,
}

/// A schedule's pipeline and how long its steps take. The simulator has the part of a step in which
/// this rank is busy, given what forwards and backwards took. It is of a step in each block. Not on
/// GPUs, where the host knows only how long it has enqueued them.
struct Candidate<'a> {
    name: &'a str,
    pipeline: Pipeline,
    times: Vec<Duration>,
    limits: Vec<f64>,
}

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = group.use_device(options.device)?;
    let ranks = group.world_size();
    let layers = options.layers;
    ensure!(
        layers > 0 && layers.is_multiple_of(CHUNKS * ranks),
        "--layers {layers} is no multiple of {}: {CHUNKS} stages for each of {ranks} ranks",
        CHUNKS * ranks
    );
    tch::set_num_threads(1);
    tch::manual_seed(0);
    let all: Vec<usize> = (0..ranks).collect();
    let mesh = Mesh::new(&group, &all, &[ranks])?.with_names(&["pp"])?;
    let candidates = options.schedules.iter().map(|name| {
        let schedule = Schedule::named(name, ranks, CHUNKS, options.micro_batches)?;
        let vs = nn::VarStore::new(device);
        let layers = layers / schedule.stages();
        let pipeline = Pipeline::builder(&mesh, "pp")
            .schedule(schedule)
            .build(|_| Ok(Box::new(stage(&vs.root(), layers, options.width))))?;
        Ok(Candidate { name, pipeline, times: Vec::new(), limits: Vec::new() })
    });
    let mut candidates = candidates.collect::<Result<Vec<_>>>()?;
    let rows = options.rows * options.micro_batches as i64;
    let x = Tensor::randn([rows, options.width], (Kind::Float, device));
    // What one rank of them has to do, without a pipeline: all ranks at once, as in the pipeline.
    let vs = nn::VarStore::new(device);
    let layers_of_rank = stage(&vs.root(), layers / ranks, options.width);
    let part = x.narrow(0, 0, options.rows).set_requires_grad(true);
    let mut ideal = Vec::new();
    for _ in 0..BLOCKS {
        for Candidate { pipeline, times, limits, .. } in &mut candidates {
            times.extend(block(&group, device, STEPS, &mut || {
                pipeline.step(&[x.shallow_clone()], |outputs, _| {
                    outputs[0].square().mean(Kind::Float)
                })?;
                Ok(())
            })?);
            if device == Device::Cpu {
                limits.push(1.0 - pipeline.report()?.predicted_bubble);
            }
        }
        ideal.extend(block(&group, device, STEPS, &mut || {
            for _ in 0..options.micro_batches {
                layers_of_rank.forward(&part).square().mean(Kind::Float).f_backward()?;
            }
            Ok(())
        })?);
    }
    if group.rank() == 0 {
        let ideal = median(&mut ideal);
        for candidate in &mut candidates {
            print(options, ranks, candidate, ideal)?;
        }
    }
    Ok(())
}

fn stage(vs: &nn::Path, layers: usize, width: i64) -> nn::Sequential {
    (0..layers).fold(nn::seq(), |stage, _| {
        stage.add(nn::linear(vs, width, width, Default::default())).add_fn(|x| x.relu())
    })
}

fn print(
    options: &Options,
    ranks: usize,
    candidate: &mut Candidate,
    ideal: Duration,
) -> Result<()> {
    let Candidate { name, times, limits, .. } = candidate;
    let [step, ideal] = [median(times), ideal].map(|time| time.as_secs_f64() * 1e3);
    limits.sort_by(f64::total_cmp);
    let limit = limits.get(limits.len() / 2);
    let efficiency = ideal / step;
    if options.json {
        let mut line = serde_json::json!({
            "bench": "pipeline", "schedule": name, "ranks": ranks, "step_ms": step,
            "ideal_ms": ideal, "efficiency": efficiency,
        });
        if let Some(&limit) = limit {
            line["limit"] = limit.into();
        }
        println!("{line}");
    } else {
        let limit = limit.map(|limit| format!(" of at most {limit:.3}")).unwrap_or_default();
        println!(
            "pipeline, {name}: a step takes {step:.3} ms, {ideal:.3} ms without idle time: \
             efficiency {efficiency:.3}{limit}"
        );
    }
    Ok(())
}
