//! Measures boxing. Each pair is beside its limit: memory copies on as many ranks at once. They
//! copy as many bytes as the pair has to read and to write if nothing is staged: half of what is
//! read and written together. Medians of rounds in which both take turns, and the ratio of the best
//! rounds, which other work on the machine disturbs least.
//!
//! `scripts/peers/boxing.py` has the same pairs on one axis for PyTorch.

use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use flow::global::boxing::plan::{BoxingPlan, TensorLayout};
use flow::global::{B, GlobalTensor, P, Placement, S, Sbp, distribute_tensor};
use flow_ddp::{DeviceKind, ProcessGroup, TensorCollectives};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::sizes::{parse_size, size_name};

const ROUNDS: usize = 9;
const ROWS: usize = 64;

#[derive(Args)]
pub struct Options {
    /// Bytes of the tensor, several with commas between them: multiples of 256
    #[arg(long, value_delimiter = ',', value_parser = parse_size, allow_hyphen_values = true,
          default_values_t = [4 << 10, 64 << 10, 1 << 20, 16 << 20])]
    sizes: Vec<usize>,
    /// Only this pair, such as "S0 > B"; can be given several times
    #[arg(long = "pair", value_name = "NAME")]
    pairs: Vec<String>,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

/// A way that a tensor lies.
type Lying<'a> = (&'a Placement, &'a [Sbp]);

/// A name, and from what to what.
type Pair<'a> = (&'a str, Lying<'a>, Lying<'a>);

pub fn run(options: &Options) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    group.use_device(DeviceKind::Cpu)?;
    tch::set_num_threads(1);
    for bytes in &options.sizes {
        ensure!(bytes % (4 * ROWS) == 0, "--sizes {bytes} is no multiple of {}", 4 * ROWS);
    }
    let size = group.world_size();
    ensure!(size >= 2, "boxing takes at least 2 ranks: start them by flow-launch");
    if group.rank() == 0 && !options.json {
        println!(
            "{:<28}{:>5}{:>9}{:>10}{:>10}{:>8}{:>10}{:>7}{:>7}",
            "", "ranks", "size", "us", "received", "GB/s", "limit us", "ratio", "best"
        );
    }
    let line = Placement::all(&group)?;
    let ranks: Vec<usize> = (0..size).collect();
    let (low, high) = ranks.split_at(size / 2);
    let low = Placement::new(&group, low.to_vec())?;
    let high = Placement::new(&group, high.to_vec())?;
    let mut all: Vec<Pair> = vec![
        ("S0 > B", (&line, &[S(0)]), (&line, &[B])),
        ("S1 > B", (&line, &[S(1)]), (&line, &[B])),
        ("P > B", (&line, &[P]), (&line, &[B])),
        ("P > S0", (&line, &[P]), (&line, &[S(0)])),
        ("P > S1", (&line, &[P]), (&line, &[S(1)])),
        ("S0 > S1", (&line, &[S(0)]), (&line, &[S(1)])),
        ("S1 > S0", (&line, &[S(1)]), (&line, &[S(0)])),
        ("B > S0", (&line, &[B]), (&line, &[S(0)])),
        ("B > S1", (&line, &[B]), (&line, &[S(1)])),
        ("S0 > S0, other ranks", (&low, &[S(0)]), (&high, &[S(0)])),
        ("S0 > B, other ranks", (&low, &[S(0)]), (&high, &[B])),
        ("P > S1, other ranks", (&low, &[P]), (&high, &[S(1)])),
        ("S0 > S1, half to all", (&low, &[S(0)]), (&line, &[S(1)])),
    ];
    let mesh = (size == 4).then(|| Placement::new(&group, [[0, 1], [2, 3]])).transpose()?;
    if let Some(mesh) = &mesh {
        all.extend([
            ("2x2: S0 S1 > B B", (mesh, &[S(0), S(1)]), (mesh, &[B, B])),
            ("2x2: S0 B > B B", (mesh, &[S(0), B]), (mesh, &[B, B])),
            ("2x2: S0 P > S0 B", (mesh, &[S(0), P]), (mesh, &[S(0), B])),
            ("2x2: P P > B B", (mesh, &[P, P]), (mesh, &[B, B])),
            ("2x2: P S1 > S0 S1", (mesh, &[P, S(1)]), (mesh, &[S(0), S(1)])),
            ("2x2: S0 S1 > S1 S0", (mesh, &[S(0), S(1)]), (mesh, &[S(1), S(0)])),
        ] as [Pair; 6]);
    }
    let names: Vec<&str> = all.iter().map(|pair| pair.0).collect();
    for name in &options.pairs {
        ensure!(names.contains(&name.as_str()), "no pair {name:?} on {size} ranks: {names:?}");
    }
    for pair in all {
        if options.pairs.is_empty() || options.pairs.iter().any(|name| name == pair.0) {
            options.sizes.iter().try_for_each(|&bytes| measure(&group, options, pair, bytes))?;
        }
    }
    Ok(())
}

/// Returns a pair at one size, beside its limit.
fn measure(
    group: &ProcessGroup,
    options: &Options,
    (name, from, to): Pair,
    bytes: usize,
) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let shape = [ROWS, bytes / 4 / ROWS];
    let tensor = Tensor::ones([ROWS as i64, (bytes / 4 / ROWS) as i64], (Kind::Float, Device::Cpu));
    let tensor = distribute_tensor(&tensor, from.0, from.1)?;
    let [old, new] = [from, to].map(|(placement, sbp)| TensorLayout { placement, sbp });
    let plan = BoxingPlan::new(&shape, old, new);
    let moved = traffic(&plan, old, group.rank()) * 4 / 2;
    let mut copies = [group.alloc_shared::<u8>(moved)?, group.alloc_shared::<u8>(moved)?];
    let calls = ((8 << 20) / bytes).clamp(4, 64);
    let times = take_turns(
        group,
        calls,
        &mut [
            &mut || {
                let [one, other] = &mut copies;
                one.copy_from_slice(other);
                Ok(())
            },
            &mut || {
                let _: () = drop(tensor.to_global(to.0, to.1)?);
                Ok(())
            },
        ],
    )?;
    if group.rank() == 0 {
        let received = plan.received() * 4 / to.0.ranks().len();
        let ranks = group.world_size();
        let [limit, boxing] = &times[..] else { return Ok(()) };
        if options.json {
            let line = json!({
                "bench": "boxing", "pair": name, "bytes": bytes, "ranks": ranks,
                "median_us": boxing.median, "limit_us": limit.median,
            });
            println!("{line}");
        } else {
            println!(
                "{name:<28}{ranks:>5}{:>9}{:>10.1}{received:>10}{:>8.2}{:>10.1}{:>7.2}{:>7.2}",
                size_name(bytes),
                boxing.median,
                received as f64 / boxing.median / 1e3,
                limit.median,
                limit.median / boxing.median,
                limit.best / boxing.best
            );
        }
    }
    Ok(())
}

/// Returns how many elements a rank reads and writes if nothing is staged.
fn traffic(plan: &BoxingPlan, from: TensorLayout, rank: usize) -> usize {
    let part = from.placement.position(rank).and_then(|position| {
        let reduction = plan.reduction.as_ref()?;
        let group = reduction.groups.iter().find(|group| group.contains(&position))?;
        Some((group.len() + 1) * reduction.parts[position].as_ref()?.elements())
    });
    let mut elements = part.unwrap_or(0);
    for copy in plan.copies.iter().filter(|copy| copy.to == rank) {
        // The parts of an all-reduce are reduced where they are needed.
        if copy.from != rank || plan.reduction.is_none() {
            elements += 2 * copy.region.elements();
        }
    }
    elements
}

/// Times of rounds, in microseconds a call.
struct Times {
    median: f64,
    best: f64,
}

fn take_turns(
    group: &ProcessGroup,
    calls: usize,
    work: &mut [&mut dyn FnMut() -> Result<()>],
) -> Result<Vec<Times>> {
    let mut times = vec![Vec::new(); work.len()];
    for round in 0..ROUNDS + 1 {
        for (work, times) in work.iter_mut().zip(&mut times) {
            group.barrier()?;
            let start = Instant::now();
            for _ in 0..calls {
                work()?;
            }
            group.barrier()?;
            // The first round warms up.
            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    Ok(times.iter().map(|times| Times { median: times[ROUNDS / 2], best: times[0] }).collect())
}
