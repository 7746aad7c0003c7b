//! The table of cases, a file for each family of operations, and how a case is checked.

mod attention;
mod autograd;
pub mod case;
pub mod check;
mod convolution;
mod creation;
mod gathered;
mod in_place;
mod indexing;
mod kinds;
mod losses;
mod matmul;
mod normalization;
mod pointwise;
mod reductions;
mod shapes;
mod views;

use case::Case;

/// All cases.
pub fn cases() -> Vec<Case> {
    [
        attention::cases(),
        autograd::cases(),
        convolution::cases(),
        creation::cases(),
        gathered::cases(),
        in_place::cases(),
        indexing::cases(),
        kinds::cases(),
        losses::cases(),
        matmul::cases(),
        normalization::cases(),
        pointwise::cases(),
        reductions::cases(),
        shapes::cases(),
        views::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
