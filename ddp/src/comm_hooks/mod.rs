//! Communication hooks, for [`DdpBuilder::comm_hook`](crate::DdpBuilder::comm_hook).
//!
//! | here | in `torch.distributed.algorithms.ddp_comm_hooks` |
//! |---|---|
//! | [`AllReduce`] (the default) | `default_hooks.allreduce_hook` |
//! | [`Fp16Compress`] | `default_hooks.fp16_compress_hook` |
//! | [`Bf16Compress`] | `default_hooks.bf16_compress_hook` |
//! | [`PowerSgd`] | `powerSGD_hook.powerSGD_hook` |
//! | [`PostLocalSgd`] | `post_localSGD_hook.post_localSGD_hook` |
//! | [`TopK`] | none |
//! | [`NoiseScale`], around another one | none |
//! | [`Quantize`] | `quantization_hooks.quantization_pertensor_hook`, `quantization_perchannel_hook` |
//!
//! For a hook of your own implement [`CommHook`](crate::CommHook).

mod all_reduce;
mod bf16_compress;
mod fp16_compress;
mod noise_scale;
mod post_local_sgd;
mod power_sgd;
mod quantize;
mod top_k;

pub use all_reduce::AllReduce;
pub use bf16_compress::Bf16Compress;
pub use fp16_compress::Fp16Compress;
pub use noise_scale::NoiseScale;
pub use post_local_sgd::PostLocalSgd;
pub use power_sgd::PowerSgd;
pub use quantize::Quantize;
pub use top_k::TopK;

use tch::Kind;

/// Returns the kind in which a hook computes with gradients of this kind.
pub(crate) fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        other => other,
    }
}
