//! Calls of NCCL that enqueue: how they are made, and what they are given.

use std::ffi::c_void;

use flow_kernels::cuda::{DeviceBuffer, Stream};
use flow_kernels::{DType, ReduceOp};

use super::communicator::{Communicator, CommunicatorError};
use super::library::Library;
use super::result::NcclError;
use super::sys::{Nccl, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};

impl Communicator {
    /// Calls the function `name` of NCCL, which enqueues one operation.
    pub fn call(
        &self,
        name: &'static str,
        function: impl FnOnce(&Nccl, ncclComm_t) -> ncclResult_t,
    ) -> Result<(), CommunicatorError> {
        let _lock = self.lock_calls()?;
        Ok(self.library.check(name, function(&self.library.nccl, self.work.0))?)
    }

    /// Makes one operation of those that `body` enqueues.
    pub fn grouped(
        &self,
        body: impl FnOnce(&Library, ncclComm_t) -> Result<(), NcclError>,
    ) -> Result<(), CommunicatorError> {
        let _lock = self.lock_calls()?;
        self.library.group_start()?;
        let result = body(self.library, self.work.0);
        let end = self.library.group_end(); // in any case
        Ok(result.and(end)?)
    }

    /// Sends and receives blocks as one operation: NCCL has no other way to let them overlap.
    ///
    /// # Safety
    ///
    /// Blocks lie within their buffers. Until what this enqueues on `stream` is over, nobody else
    /// uses the buffers, and they are not freed.
    pub unsafe fn exchange(
        &self,
        sends: &[PeerBlock<'_>],
        receives: &[PeerBlock<'_>],
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let stream = stream.handle().cast();
        self.grouped(|library, comm| {
            for block in sends {
                let (data, count, dtype) = block.parts();
                let peer = block.peer as i32;
                // SAFETY: the memory holds `count` elements; the caller's promise.
                let sent = unsafe { library.nccl.ncclSend(data, count, dtype, peer, comm, stream) };
                library.check("ncclSend", sent)?;
            }
            for block in receives {
                let (data, count, dtype) = block.parts();
                let peer = block.peer as i32;
                // SAFETY: as above.
                let received =
                    unsafe { library.nccl.ncclRecv(data, count, dtype, peer, comm, stream) };
                library.check("ncclRecv", received)?;
            }
            Ok(())
        })
    }
}

impl Communicator {
    /// Returns NCCL's name of a reduction. The mean of one rank is its sum: NCCL's kernel for that
    /// mean (2.28.9) does not write the last elements.
    pub fn operator(&self, op: ReduceOp) -> ncclRedOp_t {
        match op {
            ReduceOp::Avg if self.size() == 1 => ncclRedOp_t::ncclSum,
            ReduceOp::Avg => ncclRedOp_t::ncclAvg,
            ReduceOp::Sum => ncclRedOp_t::ncclSum,
            ReduceOp::Product => ncclRedOp_t::ncclProd,
            ReduceOp::Min => ncclRedOp_t::ncclMin,
            ReduceOp::Max => ncclRedOp_t::ncclMax,
        }
    }

    /// Enqueues the reduction of `buffer` over all ranks.
    ///
    /// # Safety
    ///
    /// Until what this enqueues on `stream` is over, nobody else uses the buffer, and it is not
    /// freed.
    pub unsafe fn all_reduce(
        &self,
        buffer: &mut dyn DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let (data, count, dtype) = parts(buffer);
        let op = self.operator(op);
        let stream = stream.handle().cast();
        self.call("ncclAllReduce", |nccl, comm| {
            // SAFETY: the memory holds `count` elements; the caller's promise.
            unsafe { nccl.ncclAllReduce(data, data, count, dtype, op, comm, stream) }
        })
    }
}

/// A part of a buffer, to or from `peer`.
pub struct PeerBlock<'a> {
    pub buffer: &'a dyn DeviceBuffer,
    /// Its first byte.
    pub start: usize,
    pub bytes: usize,
    pub peer: usize,
}

impl PeerBlock<'_> {
    /// Returns address, number of elements and type.
    pub fn parts(&self) -> (*mut c_void, usize, ncclDataType_t) {
        let dtype = self.buffer.dtype();
        (
            (self.buffer.address() as usize + self.start) as *mut _,
            self.bytes / dtype.size(),
            data_type(dtype),
        )
    }
}

/// Returns the number of elements.
pub fn count(buffer: &impl DeviceBuffer) -> usize {
    buffer.bytes() / buffer.dtype().size()
}

/// Returns a buffer's equal blocks, one for each of `peers`.
pub fn blocks(buffer: &impl DeviceBuffer, peers: usize) -> Vec<PeerBlock<'_>> {
    let bytes = buffer.bytes() / peers;
    (0..peers).map(|peer| PeerBlock { buffer, start: peer * bytes, bytes, peer }).collect()
}

/// Returns a buffer's blocks, of `counts[peer]` elements each; those that are empty are left out.
pub fn blocks_of<'a>(buffer: &'a impl DeviceBuffer, counts: &[usize]) -> Vec<PeerBlock<'a>> {
    let size = buffer.dtype().size();
    let mut start = 0;
    let mut blocks = Vec::new();
    for (peer, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let bytes = count * size;
        blocks.push(PeerBlock { buffer, start, bytes, peer });
        start += bytes;
    }
    blocks
}

/// Returns address, number of elements and type.
pub fn parts<B: DeviceBuffer + ?Sized>(buffer: &B) -> (*mut c_void, usize, ncclDataType_t) {
    let dtype = buffer.dtype();
    (buffer.address() as usize as *mut _, buffer.bytes() / dtype.size(), data_type(dtype))
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U8 => ncclDataType_t::ncclUint8,
    }
}
