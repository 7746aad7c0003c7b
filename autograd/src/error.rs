//! The crate's error type.

/// An error of a hook, a callback or a function of the user's.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Errors outside `backward`.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A parameter has room for one [`GradHook`](crate::GradHook).
    #[error("the tensor has a gradient hook already; drop that GradHook first")]
    HookInstalled,
    /// A tensor's elements are not, one after the other, in CPU memory.
    #[error(
        "a tensor's bytes can only be used if it is dense, contiguous and on the CPU; this one is \
         {0}"
    )]
    NotPlainMemory(String),
    /// Memory does not fit the tensor it is for.
    #[error("{0}")]
    UnfitMemory(String),
    /// libtorch has no CUDA part that could be used.
    #[error("libtorch cannot use CUDA: {0}")]
    NoCuda(String),
    /// libtorch or the shim refused.
    #[error("{operation}: {reason}")]
    Libtorch {
        /// The function of this crate.
        operation: &'static str,
        /// The error's text.
        reason: String,
    },
}
