//! The mean over all ranks, sent as `BFloat16`.

use tch::Kind;

use crate::bucket::comm_hook::CommHook;

/// Averages gradients over all ranks and sends them as `Kind::BFloat16`: half the bytes of `Float`.
/// Their range is that of `Float`; 8 bits of precision are left.
///
/// Gradients are rounded to this type once before and once after. On the CPU they are averaged in
/// single precision; on GPUs they are scaled before they are rounded, and NCCL adds in this type.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bf16Compress;

impl CommHook for Bf16Compress {
    fn kind(&self) -> Option<Kind> {
        Some(Kind::BFloat16)
    }
}
