//! Memory that callers pass to collectives.

use flow_kernels::DType;

use super::ProcessGroup;
use crate::backend::BufferView;
use crate::buffer::Buffer;
use crate::error::Result;

impl ProcessGroup {
    pub(super) fn raw<B: Buffer + ?Sized>(
        &self,
        operation: &str,
        buffer: &B,
    ) -> Result<(BufferView, DType)> {
        let bytes = buffer.bytes();
        // Collectives only read what they are given as input.
        self.elements(
            operation,
            BufferView { data: bytes.as_ptr().cast_mut(), bytes: bytes.len() },
            buffer.dtype(),
        )
    }

    pub(super) fn raw_mut<B: Buffer + ?Sized>(
        &self,
        operation: &str,
        buffer: &mut B,
    ) -> Result<(BufferView, DType)> {
        let dtype = buffer.dtype();
        let bytes = buffer.bytes_mut();
        self.elements(operation, BufferView { data: bytes.as_mut_ptr(), bytes: bytes.len() }, dtype)
    }

    /// Checks that memory consists of aligned elements. An empty buffer needs no
    /// valid address.
    fn elements(
        &self,
        operation: &str,
        raw: BufferView,
        dtype: DType,
    ) -> Result<(BufferView, DType)> {
        let aligned = raw.bytes == 0 || (raw.data as usize).is_multiple_of(dtype.size());
        if aligned && raw.bytes.is_multiple_of(dtype.size()) {
            return Ok((raw, dtype));
        }
        let reason =
            format!("{} bytes at {:p} are not aligned elements of {dtype}", raw.bytes, raw.data);
        Err(self.caller().argument(operation, reason))
    }

    /// Input and output whose lengths must be in the ratio `(input, output)`.
    pub(super) fn pair<I, O>(
        &self,
        operation: &str,
        input: &I,
        output: &mut O,
        ratio: (usize, usize),
    ) -> Result<(BufferView, BufferView, DType)>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, from) = self.raw(operation, input)?;
        let (output, to) = self.raw_mut(operation, output)?;
        self.caller().check_pair(operation, (input.bytes, from), (output.bytes, to), ratio)?;
        Ok((input, output, from))
    }
}
