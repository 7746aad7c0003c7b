//! Checks of what callers pass to collectives.

use flow_kernels::DType;

use super::ProcessGroup;
use crate::buffer::Buffer;
use crate::error::Result;
use crate::shm::Raw;

impl ProcessGroup {
    pub(super) fn raw<B: Buffer + ?Sized>(&self, operation: &str, buffer: &B) -> Result<(Raw, DType)> {
        let bytes = buffer.bytes();
        // Collectives only read what they are given as input.
        self.elements(operation, Raw { data: bytes.as_ptr().cast_mut(), bytes: bytes.len() }, buffer.dtype())
    }

    pub(super) fn raw_mut<B: Buffer + ?Sized>(&self, operation: &str, buffer: &mut B) -> Result<(Raw, DType)> {
        let dtype = buffer.dtype();
        let bytes = buffer.bytes_mut();
        self.elements(operation, Raw { data: bytes.as_mut_ptr(), bytes: bytes.len() }, dtype)
    }

    /// Checks that memory consists of aligned elements: nothing at all may lie anywhere.
    fn elements(&self, operation: &str, raw: Raw, dtype: DType) -> Result<(Raw, DType)> {
        let aligned = raw.bytes == 0 || (raw.data as usize).is_multiple_of(dtype.size());
        if aligned && raw.bytes.is_multiple_of(dtype.size()) {
            return Ok((raw, dtype));
        }
        let reason = format!("{} bytes at {:p} are not aligned elements of {dtype}", raw.bytes, raw.data);
        Err(self.argument(operation, reason))
    }

    /// Input and output whose lengths must be in the ratio `(input, output)`.
    pub(super) fn pair<I, O>(
        &self,
        operation: &str,
        input: &I,
        output: &mut O,
        ratio: (usize, usize),
    ) -> Result<(Raw, Raw, DType)>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, from) = self.raw(operation, input)?;
        let (output, to) = self.raw_mut(operation, output)?;
        if from != to {
            return Err(self.argument(operation, format!("input is {from} but output is {to}: they must be alike")));
        }
        if input.bytes * ratio.1 != output.bytes * ratio.0 {
            let reason = format!(
                "input of {} and output of {} elements do not fit: output must be {} elements",
                input.bytes / from.size(),
                output.bytes / from.size(),
                input.bytes / from.size() * ratio.1 / ratio.0,
            );
            return Err(self.argument(operation, reason));
        }
        Ok((input, output, from))
    }

    pub(super) fn check_rank(&self, operation: &str, what: &str, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        Err(self.argument(operation, format!("{what} {rank} is not a rank: it must be 0 to {}", self.world_size() - 1)))
    }

    pub(super) fn check_peer(&self, operation: &str, peer: usize) -> Result<()> {
        self.check_rank(operation, "peer", peer)?;
        if peer == self.rank() {
            return Err(self.argument(operation, format!("rank {peer} is this rank itself: a peer is another one")));
        }
        Ok(())
    }

    pub(super) fn check_root_side(&self, operation: &str, what: &str, given: bool, root: usize) -> Result<()> {
        if given == (self.rank() == root) {
            return Ok(());
        }
        let reason = format!("the root (rank {root}), and no other rank, gives the {what}");
        Err(self.argument(operation, reason))
    }
}
