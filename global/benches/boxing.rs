//! What boxing costs, between real processes: the launcher starts this program again, as its ranks.
//! Each pair is beside its limit: memory copies, on as many ranks at once, of as many bytes as the
//! pair has to read and to write if nothing is staged (half of what is read and written together).
//! Medians of rounds in which both take turns, and the ratio of the best rounds, which other work on
//! the machine disturbs least.
//!
//! `cargo build --release -p flow-launch && cargo bench -p flow-global --bench boxing [PAIR]`

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use flow_global::boxing::plan::{Layout, Plan};
use flow_global::{distribute_tensor, GlobalTensor, Placement, Sbp, B, P, S};
use flow_tensor::{ProcessGroup, ReduceOp, TensorCollectives};
use tch::{Device, Kind, Tensor};

const ROUNDS: usize = 9;
const ROWS: usize = 64;
const SIZES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];

type Error = Box<dyn std::error::Error>;

/// A way that a tensor lies.
type Lying<'a> = (&'a Placement, &'a [Sbp]);

fn main() -> Result<(), Error> {
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    if std::env::var_os("RANK").is_some() {
        return rank(only.as_deref());
    }
    let program = std::env::current_exe()?;
    // target/release/deps/boxing-..., beside target/release/flow-launch.
    let folder = program.ancestors().nth(2).map(PathBuf::from).unwrap_or_default();
    for ranks in ["2", "4"] {
        let mut launch = Command::new(folder.join("flow-launch"));
        launch.args(["--nproc_per_node", ranks]).arg(&program).args(&only);
        let status = launch.status().map_err(|error| {
            format!("{error}: build the launcher by cargo build --release -p flow-launch")
        })?;
        if !status.success() {
            return Err(format!("{ranks} ranks: {status}").into());
        }
    }
    Ok(())
}

fn rank(only: Option<&str>) -> Result<(), Error> {
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    let size = group.world_size();
    let line = Placement::all(&group)?;
    if group.rank() == 0 {
        println!(
            "{:<28}{:>5}{:>9}{:>10}{:>10}{:>8}{:>10}{:>7}{:>7}",
            "", "ranks", "KiB", "us", "received", "GB/s", "limit us", "ratio", "best"
        );
    }
    let bench = |name: &str, from: Lying, to: Lying| match only {
        Some(only) if !name.contains(only) => Ok(()),
        _ => SIZES.iter().try_for_each(|&bytes| pair(&group, name, bytes, from, to)),
    };
    bench("S0 > B", (&line, &[S(0)]), (&line, &[B]))?;
    bench("S1 > B", (&line, &[S(1)]), (&line, &[B]))?;
    bench("P > B", (&line, &[P]), (&line, &[B]))?;
    bench("P > S0", (&line, &[P]), (&line, &[S(0)]))?;
    bench("P > S1", (&line, &[P]), (&line, &[S(1)]))?;
    bench("S0 > S1", (&line, &[S(0)]), (&line, &[S(1)]))?;
    bench("S1 > S0", (&line, &[S(1)]), (&line, &[S(0)]))?;
    bench("B > S0", (&line, &[B]), (&line, &[S(0)]))?;
    bench("B > S1", (&line, &[B]), (&line, &[S(1)]))?;
    let ranks: Vec<usize> = (0..size).collect();
    let (low, high) = ranks.split_at(size / 2);
    let on = |ranks: &[usize]| Placement::new(&group, ranks.to_vec());
    let (low, high) = (on(low)?, on(high)?);
    bench("S0 > S0, other ranks", (&low, &[S(0)]), (&high, &[S(0)]))?;
    bench("S0 > B, other ranks", (&low, &[S(0)]), (&high, &[B]))?;
    bench("P > S1, other ranks", (&low, &[P]), (&high, &[S(1)]))?;
    bench("S0 > S1, half to all", (&low, &[S(0)]), (&line, &[S(1)]))?;
    if size == 4 {
        let mesh = Placement::new(&group, [[0, 1], [2, 3]])?;
        bench("2x2: S0 S1 > B B", (&mesh, &[S(0), S(1)]), (&mesh, &[B, B]))?;
        bench("2x2: S0 B > B B", (&mesh, &[S(0), B]), (&mesh, &[B, B]))?;
        bench("2x2: S0 P > S0 B", (&mesh, &[S(0), P]), (&mesh, &[S(0), B]))?;
        bench("2x2: P P > B B", (&mesh, &[P, P]), (&mesh, &[B, B]))?;
        bench("2x2: P S1 > S0 S1", (&mesh, &[P, S(1)]), (&mesh, &[S(0), S(1)]))?;
        bench("2x2: S0 S1 > S1 S0", (&mesh, &[S(0), S(1)]), (&mesh, &[S(1), S(0)]))?;
    }
    match only {
        None => small(&group, &line),
        Some(_) => Ok(()),
    }
}

/// A pair at one size, beside its limit.
fn pair(
    group: &ProcessGroup,
    name: &str,
    bytes: usize,
    from: Lying,
    to: Lying,
) -> Result<(), Error> {
    let _no_grad = tch::no_grad_guard();
    let shape = [ROWS, bytes / 4 / ROWS];
    let tensor = Tensor::ones([ROWS as i64, (bytes / 4 / ROWS) as i64], (Kind::Float, Device::Cpu));
    let tensor = distribute_tensor(&tensor, from.0, from.1)?;
    let [old, new] = [from, to].map(|(placement, sbp)| Layout { placement, sbp });
    let plan = Plan::new(&shape, old, new);
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
        let [limit, boxing] = &times[..] else { return Ok(()) };
        let received = plan.received() * 4 / to.0.ranks().len();
        println!(
            "{name:<28}{:>5}{:>9}{:>10.1}{:>10}{:>8.2}{:>10.1}{:>7.2}{:>7.2}",
            group.world_size(),
            bytes >> 10,
            boxing.median,
            received,
            received as f64 / boxing.median / 1e3,
            limit.median,
            limit.median / boxing.median,
            limit.best / boxing.best
        );
    }
    Ok(())
}

/// How many elements a rank reads and writes if nothing is staged.
fn traffic(plan: &Plan, from: Layout, rank: usize) -> usize {
    let part = from.placement.position(rank).and_then(|position| {
        let reduction = plan.reduction.as_ref()?;
        let group = reduction.groups.iter().find(|group| group.contains(&position))?;
        Some((group.len() + 1) * reduction.parts[position].as_ref()?.elements())
    });
    // The parts of an all-reduce are reduced where they are needed.
    let is_copied = |from: usize| from != rank || plan.reduction.is_none();
    let copied = plan.copies.iter().filter(|copy| copy.to == rank && is_copied(copy.from));
    part.unwrap_or(0) + copied.map(|copy| 2 * copy.region.elements()).sum::<usize>()
}

/// A small boxing beside the collective that it is, and beside a copy and that.
fn small(group: &ProcessGroup, line: &Placement) -> Result<(), Error> {
    let _no_grad = tch::no_grad_guard();
    let plain = Tensor::ones([1024], (Kind::Float, Device::Cpu));
    let mut sum = plain.copy();
    let tensor = distribute_tensor(&plain, line, [P])?;
    let times = take_turns(
        group,
        1000,
        &mut [
            &mut || Ok(group.all_reduce_tensor(&mut sum, ReduceOp::Sum)?),
            &mut || Ok(group.all_reduce_tensor(&mut plain.copy(), ReduceOp::Sum)?),
            &mut || {
                let _: () = drop(tensor.to_global(line, [B])?);
                Ok(())
            },
        ],
    )?;
    if group.rank() == 0 {
        println!(
            "4 KiB, {} ranks, best rounds: all_reduce_tensor {:.2} us, of a copy {:.2} us, P > B {:.2} us",
            group.world_size(),
            times[0].best,
            times[1].best,
            times[2].best
        );
    }
    Ok(())
}

/// Times of rounds, in microseconds a call.
struct Times {
    median: f64,
    best: f64,
}

fn take_turns(
    group: &ProcessGroup,
    calls: usize,
    work: &mut [&mut dyn FnMut() -> Result<(), Error>],
) -> Result<Vec<Times>, Error> {
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
