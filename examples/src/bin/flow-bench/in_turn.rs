//! What benches have in common that train in blocks of two kinds, which take turns.

use clap::Args;

use crate::models::Model;

/// So small that weights, on which times depend, stay alike.
pub const LEARNING_RATE: f64 = 1e-6;

#[derive(Args)]
pub struct Options {
    #[arg(long, value_enum, default_value = "mobilenet")]
    pub model: Model,
    /// Blocks of each, in turn
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: u32,
    /// Steps in each block
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// Print a JSON line
    #[arg(long)]
    pub json: bool,
}
