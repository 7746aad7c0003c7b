//! New global tensors with the sizes and the kind of another tensor, plain or global, or with its kind
//! only (`new_zeros` and others).

use tch::{Scalar, Tensor};

use crate::create;
use crate::error::Result;
use crate::local::distribute_tensor;
use crate::placement::Placement;
use crate::sbp::Sbp;

/// `name = of(arguments before the sizes; arguments after them)`: with the sizes and the kind of
/// `tensor`.
macro_rules! like {
    ($name:ident = $of:ident($($before:ident: $b:ty),*; $($after:ident: $a:ty),*)) => {
        #[doc = concat!("See [`", stringify!($of), "`](crate::", stringify!($of), ").")]
        ///
        /// # Errors
        /// The same.
        pub fn $name(
            tensor: &Tensor,
            $($before: $b,)*
            $($after: $a,)*
            placement: &Placement,
            sbp: impl AsRef<[Sbp]>,
        ) -> Result<Tensor> {
            create::$of($($before,)* tensor.size(), $($after,)* tensor.kind(), placement, sbp)
        }
    };
}

like!(empty_like = empty(;));
like!(zeros_like = zeros(;));
like!(ones_like = ones(;));
like!(full_like = full(; value: impl Into<Scalar>));
like!(rand_like = rand(;));
like!(randn_like = randn(;));
like!(randint_like = randint(low: i64, high: i64;));

/// `name = of(arguments after the sizes)`: with the kind of `tensor`.
macro_rules! new {
    ($name:ident = $of:ident($($after:ident: $a:ty),*)) => {
        #[doc = concat!("See [`", stringify!($of), "`](crate::", stringify!($of), ").")]
        /// Makes a tensor of the kind of `tensor`, as the other functions `new_...` do. On a
        /// tensor's own placement, tch's methods of these names do the same.
        ///
        /// # Errors
        /// The same.
        pub fn $name(
            tensor: &Tensor,
            sizes: impl AsRef<[i64]>,
            $($after: $a,)*
            placement: &Placement,
            sbp: impl AsRef<[Sbp]>,
        ) -> Result<Tensor> {
            create::$of(sizes, $($after,)* tensor.kind(), placement, sbp)
        }
    };
}

new!(new_empty = empty());
new!(new_zeros = zeros());
new!(new_ones = ones());
new!(new_full = full(value: impl Into<Scalar>));

/// Distributes `data` as [`distribute_tensor`] does: it is the same on all ranks, and converted to
/// the kind of `tensor`.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn new_tensor(
    tensor: &Tensor,
    data: &Tensor,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    distribute_tensor(&data.to_kind(tensor.kind()), placement, sbp)
}
