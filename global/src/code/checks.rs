//! Comparisons of shapes: every rank knows the logical ones.

use flow_autograd::global::Scalar;

use super::context::Context;
use crate::error::Result;

/// Tells whether two logical tensors have the same sizes.
pub fn is_same_size(context: &mut Context<'_, '_>) -> Result<()> {
    let is_same = context.call.sizes(0) == context.call.sizes(1);
    context.give_scalar(Scalar::Bool(is_same))
}
