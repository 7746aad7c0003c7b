//! Measures Flow. `scripts/bench` runs it beside PyTorch and prints the ratios.
//!
//! `flow-launch --nproc_per_node 2 flow-bench allreduce`, `flow-bench limit`,
//! `flow-launch --nproc_per_node 2 flow-bench step --model mlp`
//!
//! On GPUs, where `scripts/gpu-check` runs it: `flow-bench launch`, `step` and `losses` with
//! `--device cuda`.

mod allreduce;
mod launch;
mod limit;
mod losses;
mod models;
mod step;
mod timeline;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser};

/// Measures Flow: medians, from rank 0.
#[derive(Parser)]
#[command(name = "flow-bench")]
enum Command {
    /// All-reduce of f32 sums, on all ranks
    Allreduce(allreduce::Options),
    /// What an all-reduce between two ranks could reach at best: two threads sum two buffers in
    /// place
    Limit(Sizes),
    /// A training step without and with Ddp, on all ranks
    Step(step::Options),
    /// The losses of a short training with Ddp, on all ranks
    Losses(losses::Options),
    /// The host's time to launch the reduction of a bucket on a GPU, on all ranks
    Launch(launch::Options),
}

/// What is measured and how it is printed.
#[derive(Args)]
struct Sizes {
    /// Bytes of a buffer, several with commas between them
    #[arg(long, value_delimiter = ',', value_parser = parse_size, allow_hyphen_values = true,
          default_values_t = [4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20])]
    sizes: Vec<usize>,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

fn parse_size(text: &str) -> Result<usize, String> {
    let bytes = text
        .parse()
        .ok()
        .filter(|bytes: &usize| *bytes != 0 && bytes.is_multiple_of(size_of::<f32>()));
    bytes.ok_or_else(|| "a buffer of f32 takes a multiple of 4 bytes, at least 4".into())
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let result = match flow_examples::arguments::parse() {
        Command::Allreduce(options) => allreduce::run(&options),
        Command::Limit(sizes) => limit::run(&sizes),
        Command::Step(options) => step::run(&options),
        Command::Losses(options) => losses::run(&options),
        Command::Launch(options) => launch::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("flow-bench: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// How often to repeat what took these times, for `total` altogether.
fn repetitions(warm_up: &mut [Duration], total: Duration) -> usize {
    let one = median(warm_up).max(Duration::from_nanos(100));
    total.div_duration_f64(one).max(5.0) as usize
}

/// How long each of `count` calls takes.
fn time<E>(count: usize, mut run: impl FnMut() -> Result<(), E>) -> Result<Vec<Duration>, E> {
    let one = |_| {
        let start = Instant::now();
        run().map(|()| start.elapsed())
    };
    (0..count).map(one).collect()
}

fn median(times: &mut [Duration]) -> Duration {
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1
}

fn mean(times: &[Duration]) -> Duration {
    times.iter().sum::<Duration>() / times.len() as u32
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn size_name(bytes: usize) -> String {
    match bytes {
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}
