//! The collectives of a group on GPUs: argument checks, and what NCCL is called with.

use flow_kernels::cuda::{DeviceBuffer, Stream};
use flow_kernels::{DType, ReduceOp};

use super::group::CudaGroup;
use super::operations::P2pBlock;
use crate::error::Result;
use crate::kind::Kind;

impl CudaGroup {
    /// Reduces `buffer` element by element over all ranks; all get the result.
    pub fn all_reduce(
        &self,
        buffer: &mut impl DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let operation = self.operation(Kind::AllReduce, buffer.dtype(), count(buffer), op, 0);
        // SAFETY: `in_order` has the buffer used in the order of the caller's stream.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.all_reduce(buffer, op, own)
        })
    }

    /// As [`CudaGroup::all_reduce`]; only rank `root` gets the result, the other buffers stay as
    /// they are.
    pub fn reduce(
        &self,
        buffer: &mut impl DeviceBuffer,
        op: ReduceOp,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("reduce", "root", root)?;
        let operation = self.operation(Kind::Reduce, buffer.dtype(), count(buffer), op, root);
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.reduce(buffer, op, root, own)
        })
    }

    /// Copies rank `root`'s buffers to all ranks', as one operation.
    pub fn broadcast<B: DeviceBuffer>(
        &self,
        buffers: &mut [B],
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("broadcast", "root", root)?;
        let bytes = buffers.iter().map(B::bytes).sum();
        let operation = self.operation(Kind::Broadcast, DType::U8, bytes, ReduceOp::Sum, root);
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.broadcast(buffers, root, own)
        })
    }

    /// All ranks' `input`, in rank order, to every rank's `output`, which is group size times as
    /// long.
    pub fn all_gather(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        stream: &Stream,
    ) -> Result<()> {
        self.check_pair("all_gather", input, output, (1, self.size()))?;
        let operation =
            self.operation(Kind::AllGather, input.dtype(), count(input), ReduceOp::Sum, 0);
        // SAFETY: as above; the output is long enough.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.all_gather(input, output, own)
        })
    }

    /// Reduces `input` (group size blocks, each as long as `output`) over all ranks; rank r gets
    /// block r.
    pub fn reduce_scatter(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.check_pair("reduce_scatter", input, output, (self.size(), 1))?;
        let operation = self.operation(Kind::ReduceScatter, input.dtype(), count(input), op, 0);
        // SAFETY: as above; the input is long enough.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.reduce_scatter(input, output, op, own)
        })
    }

    /// Block s of rank r's `output` becomes block r of rank s' `input`. Both buffers consist of
    /// equal blocks, one for each rank.
    pub fn all_to_all(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        stream: &Stream,
    ) -> Result<()> {
        self.check_pair("all_to_all", input, output, (1, 1))?;
        self.caller().check_blocks("all_to_all", count(input))?;
        let operation =
            self.operation(Kind::AllToAll, input.dtype(), count(input), ReduceOp::Sum, 0);
        let (sends, receives) = (blocks(input, self.size()), blocks(&*output, self.size()));
        // SAFETY: as above; the blocks are parts of the buffers.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.grouped_p2p(&sends, &receives, own)
        })
    }

    /// As [`CudaGroup::all_gather`], to rank `root` only, which gives `Some` output; the others
    /// give `None`.
    pub fn gather<B: DeviceBuffer>(
        &self,
        input: &B,
        output: Option<&mut B>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("gather", "root", root)?;
        self.caller().check_root_side("gather", "output", output.is_some(), root)?;
        let output = match output {
            Some(output) => {
                self.check_pair("gather", input, output, (1, self.size()))?;
                Some(output)
            }
            None => None,
        };
        let operation =
            self.operation(Kind::Gather, input.dtype(), count(input), ReduceOp::Sum, root);
        let send = P2pBlock { buffer: input, start: 0, bytes: input.bytes(), peer: root };
        let receives = output.map_or(Vec::new(), |output| blocks(&*output, self.size()));
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.grouped_p2p(&[send], &receives, own)
        })
    }

    /// Gives block r of rank `root`'s `input` (group size blocks, each as long as `output`) to rank
    /// r. The root gives `Some` input, the others `None`.
    pub fn scatter<B: DeviceBuffer>(
        &self,
        input: Option<&B>,
        output: &mut B,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.caller().check_rank("scatter", "root", root)?;
        self.caller().check_root_side("scatter", "input", input.is_some(), root)?;
        if let Some(input) = input {
            self.check_pair("scatter", input, output, (self.size(), 1))?;
        }
        let operation =
            self.operation(Kind::Scatter, output.dtype(), count(output), ReduceOp::Sum, root);
        let receive = P2pBlock { buffer: &*output, start: 0, bytes: output.bytes(), peer: root };
        let sends = input.map_or(Vec::new(), |input| blocks(input, self.size()));
        // SAFETY: as above.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.grouped_p2p(&sends, &[receive], own)
        })
    }

    /// All ranks' `input`, in rank order, to every rank's `output`: `counts[r]` elements of rank r.
    pub fn all_gather_v(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        counts: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let name = "all_gather_v";
        let caller = self.caller();
        caller.check_types(name, input.dtype(), output.dtype())?;
        caller.check_counts(name, "counts", counts)?;
        caller.check_length(name, "input", count(input), counts[self.rank()])?;
        caller.check_length(name, "output", count(output), counts.iter().sum())?;
        let operation =
            self.operation(Kind::AllGatherV, output.dtype(), count(output), ReduceOp::Sum, 0);
        let blocks = blocks_of(&*output, counts);
        // SAFETY: as above; the blocks are parts of the buffers.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.grouped_broadcasts(input, &blocks, own)
        })
    }

    /// Reduces `input`, `counts[r]` elements for each rank r, over all ranks. Each gets its block.
    pub fn reduce_scatter_v(
        &self,
        input: &impl DeviceBuffer,
        output: &mut impl DeviceBuffer,
        counts: &[usize],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let name = "reduce_scatter_v";
        let caller = self.caller();
        caller.check_types(name, input.dtype(), output.dtype())?;
        caller.check_counts(name, "counts", counts)?;
        caller.check_length(name, "input", count(input), counts.iter().sum())?;
        caller.check_length(name, "output", count(output), counts[self.rank()])?;
        let operation = self.operation(Kind::ReduceScatterV, input.dtype(), count(input), op, 0);
        let blocks = blocks_of(input, counts);
        // SAFETY: as above; the blocks are parts of the buffers.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.grouped_reduces(&blocks, output, op, own)
        })
    }

    /// `input` is one block for each rank, of `input_counts[r]` elements for rank r; `output` one
    /// block from each, of `output_counts[r]` elements from rank r. What a rank sends is what its
    /// peer expects: each rank sees its own counts only, and if they do not fit those of a peer the
    /// operation does not end.
    pub fn all_to_all_v(
        &self,
        input: &impl DeviceBuffer,
        input_counts: &[usize],
        output: &mut impl DeviceBuffer,
        output_counts: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let name = "all_to_all_v";
        let caller = self.caller();
        caller.check_types(name, input.dtype(), output.dtype())?;
        caller.check_counts(name, "input_counts", input_counts)?;
        caller.check_counts(name, "output_counts", output_counts)?;
        caller.check_own_count(name, input_counts, output_counts)?;
        caller.check_length(name, "input", count(input), input_counts.iter().sum())?;
        caller.check_length(name, "output", count(output), output_counts.iter().sum())?;
        let operation =
            self.operation(Kind::AllToAllV, input.dtype(), count(input), ReduceOp::Sum, 0);
        let (sends, receives) =
            (blocks_of(input, input_counts), blocks_of(&*output, output_counts));
        // SAFETY: as above; the blocks are parts of the buffers.
        self.in_order(operation, stream, |communicator, own| unsafe {
            communicator.grouped_p2p(&sends, &receives, own)
        })
    }

    /// Checks that the lengths are in the ratio `(input, output)`, and the types equal.
    fn check_pair(
        &self,
        operation: &str,
        input: &impl DeviceBuffer,
        output: &impl DeviceBuffer,
        ratio: (usize, usize),
    ) -> Result<()> {
        let [input, output] = [(input.bytes(), input.dtype()), (output.bytes(), output.dtype())];
        self.caller().check_pair(operation, input, output, ratio)
    }
}

pub(super) fn count(buffer: &impl DeviceBuffer) -> usize {
    buffer.bytes() / buffer.dtype().size()
}

/// A buffer's equal blocks, one for each of `peers`.
fn blocks(buffer: &impl DeviceBuffer, peers: usize) -> Vec<P2pBlock<'_>> {
    let bytes = buffer.bytes() / peers;
    (0..peers).map(|peer| P2pBlock { buffer, start: peer * bytes, bytes, peer }).collect()
}

/// A buffer's blocks, of `counts[peer]` elements each; those that are empty are left out.
fn blocks_of<'a>(buffer: &'a impl DeviceBuffer, counts: &[usize]) -> Vec<P2pBlock<'a>> {
    let size = buffer.dtype().size();
    let mut start = 0;
    let mut blocks = Vec::new();
    for (peer, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let bytes = count * size;
        blocks.push(P2pBlock { buffer, start, bytes, peer });
        start += bytes;
    }
    blocks
}
