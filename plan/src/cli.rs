//! The command line.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use flow_plan::{Constraints, Recompute, ScheduleKind};

/// Lists layouts of a training job on N ranks, the fastest first
///
/// A layout is data x tensor x pipeline parallel, micro-batch, schedule, stage of ZeRO and
/// recomputation. Time, memory, traffic and idle time are predicted: docs/planner.md.
#[derive(Parser)]
#[command(name = "flow-plan", version, term_width = 120, args_conflicts_with_subcommands = true)]
#[command(subcommand_negates_reqs = true, infer_long_args = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub search: SearchArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// Prints measured runs beside what is predicted for them
    Compare(CompareArgs),
    /// Draws when each rank of a pipeline computes what; without a name, a table of all schedules
    Schedule(ScheduleArgs),
}

#[derive(Args)]
pub struct SearchArgs {
    /// The model, its batch, and how it is trained (docs/planner.md)
    #[arg(value_name = "MODEL.json", required = true)]
    pub model: Option<PathBuf>,
    /// Ranks in all
    #[arg(short = 'n', long, value_name = "N", required = true, value_parser = count())]
    pub ranks: Option<usize>,
    /// The machines, if not those in MODEL.json
    #[arg(long, value_name = "FILE")]
    pub cluster: Option<PathBuf>,
    /// Number of layouts that are listed
    #[arg(long, value_name = "N", default_value = "10", value_parser = count())]
    pub top: usize,
    /// Says what each number is made of
    #[arg(long)]
    pub explain: bool,
    /// Prints all numbers as JSON
    #[arg(long, conflicts_with = "explain")]
    pub json: bool,
    #[command(flatten)]
    pub layout: LayoutArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Only layouts with")]
pub struct LayoutArgs {
    /// So many ranks of data parallelism
    #[arg(long, value_name = "N", value_parser = count())]
    dp: Option<usize>,
    /// So many ranks of tensor parallelism
    #[arg(long, value_name = "N", value_parser = count())]
    tp: Option<usize>,
    /// So many ranks of a pipeline
    #[arg(long, value_name = "N", value_parser = count())]
    pp: Option<usize>,
    /// So many samples in a micro-batch
    #[arg(long, value_name = "N", value_parser = count())]
    micro_batch: Option<usize>,
    /// This schedule
    #[arg(long, value_name = "NAME", value_parser = schedule())]
    schedule: Option<ScheduleKind>,
    /// So many stages on each rank of an interleaved schedule
    #[arg(long, value_name = "N", value_parser = count())]
    chunks: Option<usize>,
    /// This stage of ZeRO: else 0, 1 and, as in Flow's FullyShard, 3
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u8).range(..4))]
    zero: Option<u8>,
    /// Weights once for all ranks of a node, as in Flow's Fsdp, or not
    #[arg(long, value_name = "BOOL")]
    shared_weights: Option<bool>,
    /// This recomputation of activations: else none and full, which Flow has
    #[arg(long, value_name = "WHAT", value_parser = recompute())]
    recompute: Option<Recompute>,
    /// Sequence parallelism, or none
    #[arg(long, value_name = "BOOL")]
    sequence_parallel: Option<bool>,
}

impl LayoutArgs {
    /// Returns the constraints that these options are.
    pub fn wanted(&self) -> Constraints {
        Constraints {
            data: self.dp,
            tensor: self.tp,
            pipeline: self.pp,
            micro_batch: self.micro_batch,
            schedule: self.schedule,
            chunks: self.chunks,
            zero: self.zero,
            shared_weights: self.shared_weights,
            recompute: self.recompute,
            sequence_parallel: self.sequence_parallel,
        }
    }
}

#[derive(Args)]
pub struct CompareArgs {
    /// Measured runs (docs/planner.md)
    #[arg(value_name = "RUNS.json")]
    pub runs: PathBuf,
    /// The machines, if not those in RUNS.json
    #[arg(long, value_name = "FILE")]
    pub cluster: Option<PathBuf>,
    /// Prints all numbers as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct ScheduleArgs {
    #[arg(value_name = "NAME", value_parser = schedule())]
    pub schedule: Option<ScheduleKind>,
    /// Ranks of the pipeline
    #[arg(long, value_name = "N", value_parser = count())]
    pub pp: usize,
    /// Micro-batches of a step
    #[arg(long, value_name = "N", value_parser = count())]
    pub micro_batches: usize,
    /// Stages on each rank of an interleaved schedule
    #[arg(long, value_name = "N", default_value = "2", value_parser = count())]
    pub chunks: usize,
    /// Time of the forward of all that a rank has, in any unit
    #[arg(long, allow_negative_numbers = true, value_name = "TIME", default_value = "1")]
    pub forward: f64,
    /// Time of the gradients of inputs
    #[arg(long, allow_negative_numbers = true, value_name = "TIME", default_value = "1")]
    pub backward_input: f64,
    /// Time of the gradients of weights
    #[arg(long, allow_negative_numbers = true, value_name = "TIME", default_value = "1")]
    pub backward_weight: f64,
    /// Time from a send until what was sent is there
    #[arg(long, allow_negative_numbers = true, value_name = "TIME", default_value = "0")]
    pub send: f64,
}

fn count() -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::new().range(1..)
}

fn schedule() -> impl TypedValueParser<Value = ScheduleKind> {
    PossibleValuesParser::new(ScheduleKind::ALL.map(ScheduleKind::name))
        .try_map(|name| find(&ScheduleKind::ALL, |kind| kind.name() == name))
}

fn recompute() -> impl TypedValueParser<Value = Recompute> {
    PossibleValuesParser::new(Recompute::ALL.map(Recompute::name))
        .try_map(|name| find(&Recompute::ALL, |recompute| recompute.name() == name))
}

fn find<T: Copy>(all: &[T], is: impl Fn(&T) -> bool) -> Result<T, &'static str> {
    all.iter().copied().find(is).ok_or("no such name")
}
