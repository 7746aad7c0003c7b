//! What ranks of a communicator enqueue: collectives and messages, by NCCL's functions.

use std::ffi::c_void;

use flow_kernels::cuda::{DeviceBuffer, Stream};
use flow_kernels::{DType, ReduceOp};

use super::communicator::{Communicator, CommunicatorError};
use super::result::NcclError;
use super::sys::{ncclDataType_t, ncclRedOp_t};

impl Communicator {
    /// # Safety
    ///
    /// As for all operations: until what it enqueues on `stream` is over, nobody else uses the
    /// buffers, and they are not freed.
    pub unsafe fn all_reduce(
        &self,
        buffer: &mut dyn DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let _lock = self.lock_calls()?;
        let (data, count, dtype) = parts(buffer);
        // SAFETY: the memory holds `count` elements; the caller's promise.
        unsafe {
            self.library.all_reduce(
                data,
                data,
                count,
                dtype,
                operator(op),
                self.work.0,
                stream.handle(),
            )?
        };
        Ok(())
    }

    /// # Safety
    ///
    /// See [`Communicator::all_reduce`].
    pub unsafe fn reduce(
        &self,
        buffer: &mut dyn DeviceBuffer,
        op: ReduceOp,
        root: usize,
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let _lock = self.lock_calls()?;
        let (data, count, dtype) = parts(buffer);
        // SAFETY: the memory holds `count` elements; NCCL writes to the root's only.
        unsafe {
            self.library.reduce(
                data,
                data,
                count,
                dtype,
                operator(op),
                root,
                self.work.0,
                stream.handle(),
            )?
        };
        Ok(())
    }

    /// Broadcasts all buffers as one operation.
    ///
    /// # Safety
    ///
    /// See [`Communicator::all_reduce`].
    pub unsafe fn broadcast<B: DeviceBuffer>(
        &self,
        buffers: &mut [B],
        root: usize,
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        self.grouped(|| {
            buffers.iter_mut().try_for_each(|buffer| {
                let (data, count, dtype) = parts(buffer);
                // SAFETY: the memory holds `count` elements; the caller's promise.
                unsafe {
                    self.library.broadcast(
                        data,
                        data,
                        count,
                        dtype,
                        root,
                        self.work.0,
                        stream.handle(),
                    )
                }
            })
        })
    }

    /// `output` holds one block like `input` for each rank.
    ///
    /// # Safety
    ///
    /// See [`Communicator::all_reduce`].
    pub unsafe fn all_gather(
        &self,
        input: &dyn DeviceBuffer,
        output: &mut dyn DeviceBuffer,
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let _lock = self.lock_calls()?;
        let (from, count, dtype) = parts(input);
        // SAFETY: `output` holds `count` elements for each rank; the caller's promise.
        unsafe {
            self.library.all_gather(
                from,
                parts(output).0,
                count,
                dtype,
                self.work.0,
                stream.handle(),
            )?
        };
        Ok(())
    }

    /// `input` holds one block like `output` for each rank.
    ///
    /// # Safety
    ///
    /// See [`Communicator::all_reduce`].
    pub unsafe fn reduce_scatter(
        &self,
        input: &dyn DeviceBuffer,
        output: &mut dyn DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let _lock = self.lock_calls()?;
        let (to, count, dtype) = parts(output);
        // SAFETY: `input` holds `count` elements for each rank; the caller's promise.
        unsafe {
            self.library.reduce_scatter(
                parts(input).0,
                to,
                count,
                dtype,
                operator(op),
                self.work.0,
                stream.handle(),
            )?;
        }
        Ok(())
    }

    /// Broadcasts each of `blocks`, one of `input` for each rank that has any, from its rank, as
    /// one operation: NCCL has no gather of uneven blocks.
    ///
    /// # Safety
    ///
    /// See [`Communicator::all_reduce`]; blocks lie within their buffers, and this rank's is as
    /// long as `input`.
    pub unsafe fn grouped_broadcasts(
        &self,
        input: &dyn DeviceBuffer,
        blocks: &[P2pBlock<'_>],
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let (comm, stream) = (self.work.0, stream.handle());
        self.grouped(|| {
            blocks.iter().try_for_each(|block| {
                let (to, count, dtype) = block.parts();
                let from = if block.peer == self.rank { parts(input).0 } else { to };
                // SAFETY: both hold `count` elements, and NCCL reads the root's only; the caller's
                // promise.
                unsafe { self.library.broadcast(from, to, count, dtype, block.peer, comm, stream) }
            })
        })
    }

    /// Reduces each of `blocks`, one for each rank that has any, to its rank's `output`, as one
    /// operation: NCCL has no reduce-scatter of uneven blocks.
    ///
    /// # Safety
    ///
    /// See [`Communicator::all_reduce`]; blocks lie within their buffers, and this rank's is as
    /// long as `output`.
    pub unsafe fn grouped_reduces(
        &self,
        blocks: &[P2pBlock<'_>],
        output: &mut dyn DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let (comm, stream, to) = (self.work.0, stream.handle(), parts(output).0);
        self.grouped(|| {
            blocks.iter().try_for_each(|block| {
                let (from, count, dtype) = block.parts();
                let to = if block.peer == self.rank { to } else { std::ptr::null_mut() };
                let op = operator(op);
                // SAFETY: `from` holds `count` elements, and so does `to` of the root, the only one
                // that NCCL writes to; the caller's promise.
                unsafe { self.library.reduce(from, to, count, dtype, op, block.peer, comm, stream) }
            })
        })
    }

    /// Sends and receives blocks as one operation: NCCL has no other way to let them overlap. A
    /// block is a buffer, the number of its first byte, and how many bytes it has.
    ///
    /// # Safety
    ///
    /// See [`Communicator::all_reduce`]; blocks lie within their buffers.
    pub unsafe fn grouped_p2p(
        &self,
        sends: &[P2pBlock<'_>],
        receives: &[P2pBlock<'_>],
        stream: &Stream,
    ) -> Result<(), CommunicatorError> {
        let (comm, stream) = (self.work.0, stream.handle());
        self.grouped(|| {
            for block in sends {
                let (data, count, dtype) = block.parts();
                // SAFETY: the memory holds `count` elements; the caller's promise.
                unsafe { self.library.send(data, count, dtype, block.peer, comm, stream)? };
            }
            for block in receives {
                let (data, count, dtype) = block.parts();
                // SAFETY: as above.
                unsafe { self.library.recv(data, count, dtype, block.peer, comm, stream)? };
            }
            Ok(())
        })
    }

    /// Makes one operation of those that `body` enqueues.
    fn grouped(
        &self,
        body: impl FnOnce() -> Result<(), NcclError>,
    ) -> Result<(), CommunicatorError> {
        let _lock = self.lock_calls()?;
        self.library.group_start()?;
        let result = body();
        let end = self.library.group_end(); // in any case
        Ok(result.and(end)?)
    }
}

/// A part of a buffer, to or from `peer`.
pub struct P2pBlock<'a> {
    pub buffer: &'a dyn DeviceBuffer,
    pub start: usize,
    pub bytes: usize,
    pub peer: usize,
}

impl P2pBlock<'_> {
    fn parts(&self) -> (*mut c_void, usize, ncclDataType_t) {
        let dtype = self.buffer.dtype();
        (
            (self.buffer.address() as usize + self.start) as *mut _,
            self.bytes / dtype.size(),
            data_type(dtype),
        )
    }
}

/// Address, number of elements and type.
fn parts<B: DeviceBuffer + ?Sized>(buffer: &B) -> (*mut c_void, usize, ncclDataType_t) {
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

fn operator(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
        ReduceOp::Product => ncclRedOp_t::ncclProd,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
    }
}
