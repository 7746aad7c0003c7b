//! The mean over all ranks, sent as `Half`.

use tch::Kind;

use crate::bucket::comm_hook::CommHook;

/// Averages gradients over all ranks and sends them as `Kind::Half`: half the bytes of `Float`.
/// Half numbers reach to 65504 only: gradients beyond that become infinite.
///
/// Gradients are rounded to this type once before and once after. On the CPU they are averaged in
/// single precision; on GPUs they are scaled before they are rounded, and NCCL adds in this type.
///
/// PyTorch's `fp16_compress_hook` divides half numbers before it adds them. The results differ only
/// for gradients below 2^-14: Flow keeps one bit more of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fp16Compress;

impl CommHook for Fp16Compress {
    fn kind(&self) -> Option<Kind> {
        Some(Kind::Half)
    }
}
