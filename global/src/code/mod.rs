//! Operations that are more than the same operation on the locals.
//!
//! | file | subject |
//! |---|---|
//! | `context` | an operation on its way |
//! | `reductions` | means and norms over split dimensions |
//! | `losses` | means over split samples |
//! | `indexing` | embeddings of a split vocabulary |
//! | `normalization` | batch norm over a split batch |
//! | `random` | random numbers by logical element |
//! | `checks` | comparisons of shapes, which need no elements |

mod checks;
mod context;
mod indexing;
mod losses;
mod normalization;
mod random;
mod reductions;

pub use context::{Code, Context};
pub use random::draws;

/// The code of an operation whose signature asks for it; its name is without the `_` of in-place ones.
pub fn of(name: &str) -> Option<Code> {
    Some(match name {
        "mean" => reductions::mean,
        "linalg_vector_norm" => reductions::norm,
        "mse_loss" => losses::mse_loss,
        "mse_loss_backward" => losses::mse_loss_backward,
        "nll_loss_forward" | "nll_loss2d_forward" => losses::nll_loss,
        "embedding" => indexing::embedding,
        "cudnn_batch_norm" | "native_batch_norm" | "_native_batch_norm_legit" => {
            normalization::batch_norm
        }
        "cudnn_batch_norm_backward" => normalization::cudnn_batch_norm_backward,
        "native_batch_norm_backward" => normalization::batch_norm_backward,
        name if random::draws(name) => random::draw,
        "new_empty_strided" => random::new_empty_strided,
        _ => return None,
    })
}

/// The code of an operation that never runs on the locals.
pub fn always(name: &str) -> Option<Code> {
    (name == "is_same_size").then_some(checks::is_same_size as Code)
}
