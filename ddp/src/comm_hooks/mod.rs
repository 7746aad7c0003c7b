//! Communication hooks, for [`DdpBuilder::comm_hook`](crate::DdpBuilder::comm_hook).
//!
//! | here | in `torch.distributed.algorithms.ddp_comm_hooks` |
//! |---|---|
//! | [`AllReduce`] (the default) | `default_hooks.allreduce_hook` |
//! | [`Fp16Compress`] | `default_hooks.fp16_compress_hook` |
//! | [`Bf16Compress`] | `default_hooks.bf16_compress_hook` |
//!
//! For a hook of your own implement [`CommHook`](crate::CommHook), as
//! `examples/src/bin/noise_scale.rs` does.

mod all_reduce;
mod bf16_compress;
mod fp16_compress;

pub use all_reduce::AllReduce;
pub use bf16_compress::Bf16Compress;
pub use fp16_compress::Fp16Compress;
