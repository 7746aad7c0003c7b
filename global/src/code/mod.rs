//! Operations that are more than the same operation on the locals.
//!
//! | file | subject |
//! |---|---|
//! | `context` | an operation on its way |
//! | `reductions` | means and norms over split dimensions; sums and products in half precision |
//! | `losses` | losses of split samples: means, and sums in half precision |
//! | `indexing` | embeddings of a split vocabulary |
//! | `normalization` | batch norm over a split batch |
//! | `group_norm` | group norm, which has the size of the batch as an argument |
//! | `random` | random numbers by logical element |
//! | `checks` | comparisons of shapes, which need no elements |

mod checks;
mod context;
mod group_norm;
pub mod indexing;
mod losses;
mod normalization;
mod random;
mod reductions;

pub use context::{Code, Context};
pub use random::draws;

/// Returns the code of an operation whose signature asks for it; its name is without the `_` of
/// in-place ones.
pub fn of(name: &str) -> Option<Code> {
    Some(match name {
        "sum" => reductions::sum,
        "mean" => reductions::mean,
        "prod" => reductions::product,
        "linalg_vector_norm" | "norm" => reductions::norm,
        "mse_loss" => losses::mse_loss,
        "mse_loss_backward" => losses::mse_loss_backward,
        "smooth_l1_loss" => losses::smooth_l1_loss,
        "smooth_l1_loss_backward" => losses::smooth_l1_loss_backward,
        "huber_loss" => losses::huber_loss,
        "huber_loss_backward" => losses::huber_loss_backward,
        "binary_cross_entropy" => losses::binary_cross_entropy,
        "binary_cross_entropy_backward" => losses::binary_cross_entropy_backward,
        "binary_cross_entropy_with_logits" => losses::binary_cross_entropy_with_logits,
        "nll_loss_forward" | "nll_loss2d_forward" => losses::nll_loss,
        "embedding" => indexing::embedding,
        "cudnn_batch_norm" | "native_batch_norm" | "_native_batch_norm_legit" => {
            normalization::batch_norm
        }
        "cudnn_batch_norm_backward" => normalization::cudnn_batch_norm_backward,
        "native_batch_norm_backward" => normalization::batch_norm_backward,
        "native_group_norm" => group_norm::group_norm,
        "native_group_norm_backward" => group_norm::group_norm_backward,
        name if random::draws(name) => random::draw,
        "new_empty_strided" => random::new_empty_strided,
        _ => return None,
    })
}

/// Returns whether sizes are among an operation's arguments, so that the operation itself runs on
/// whole tensors only.
pub fn takes_sizes(name: &str) -> bool {
    matches!(name, "native_group_norm" | "native_group_norm_backward")
}

/// Returns the code of an operation that never runs on the locals.
pub fn always(name: &str) -> Option<Code> {
    (name == "is_same_size").then_some(checks::is_same_size as Code)
}
