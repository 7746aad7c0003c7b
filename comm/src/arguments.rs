//! Checks of what callers pass to collectives, wherever their memory is.

use flow_kernels::DType;
use flow_kernels::cuda::DeviceBuffer;

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::memory::BufferView;

/// The rank of a group that calls.
#[derive(Clone, Copy)]
pub struct Caller {
    /// The rank in the job, for messages.
    pub job_rank: usize,
    pub rank: usize,
    pub size: usize,
}

impl Caller {
    /// Returns the error of an argument that cannot work.
    pub fn argument(self, operation: &str, reason: String) -> Error {
        Error::Argument { rank: self.job_rank, operation: operation.into(), reason }
    }

    /// Returns the memory of a buffer that is read, and its type.
    pub fn view<B: Buffer + ?Sized>(
        self,
        operation: &str,
        buffer: &B,
    ) -> Result<(BufferView, DType)> {
        let bytes = buffer.bytes();
        // Collectives only read what they are given as input.
        let view = BufferView { data: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
        self.check_elements(operation, view, buffer.dtype())?;
        Ok((view, buffer.dtype()))
    }

    /// Returns the memory of a buffer that is written, and its type.
    pub fn view_mut<B: Buffer + ?Sized>(
        self,
        operation: &str,
        buffer: &mut B,
    ) -> Result<(BufferView, DType)> {
        let dtype = buffer.dtype();
        let bytes = buffer.bytes_mut();
        let view = BufferView { data: bytes.as_mut_ptr(), bytes: bytes.len() };
        self.check_elements(operation, view, dtype)?;
        Ok((view, dtype))
    }

    /// Returns the memory of input and output, whose lengths must be in the ratio `(input,
    /// output)`, and their type.
    pub fn pair<I, O>(
        self,
        operation: &str,
        input: &I,
        output: &mut O,
        ratio: (usize, usize),
    ) -> Result<(BufferView, BufferView, DType)>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, from) = self.view(operation, input)?;
        let (output, to) = self.view_mut(operation, output)?;
        self.check_pair(operation, (input.bytes, from), (output.bytes, to), ratio)?;
        Ok((input, output, from))
    }

    /// Returns the memory of input and output of any length, and their type.
    pub fn uneven_pair<I, O>(
        self,
        operation: &str,
        input: &I,
        output: &mut O,
    ) -> Result<(BufferView, BufferView, DType)>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, from) = self.view(operation, input)?;
        let (output, to) = self.view_mut(operation, output)?;
        self.check_types(operation, from, to)?;
        Ok((input, output, from))
    }

    /// Memory must consist of aligned elements. An empty buffer needs no valid address.
    fn check_elements(self, operation: &str, view: BufferView, dtype: DType) -> Result<()> {
        let is_aligned = view.bytes == 0 || (view.data as usize).is_multiple_of(dtype.size());
        if is_aligned && view.bytes.is_multiple_of(dtype.size()) {
            return Ok(());
        }
        let reason =
            format!("{} bytes at {:p} are not aligned elements of {dtype}", view.bytes, view.data);
        Err(self.argument(operation, reason))
    }

    /// Checks that a number that names a rank is one of the group.
    pub fn check_rank(self, operation: &str, what: &str, rank: usize) -> Result<()> {
        if rank < self.size {
            return Ok(());
        }
        Err(self.argument(
            operation,
            format!("{what} {rank} is not a rank: it must be 0 to {}", self.size - 1),
        ))
    }

    /// Checks that the other side of a message is another rank of the group.
    pub fn check_peer(self, operation: &str, peer: usize) -> Result<()> {
        self.check_rank(operation, "peer", peer)?;
        if peer == self.rank {
            return Err(self.argument(
                operation,
                format!("rank {peer} is this rank itself: a peer is another one"),
            ));
        }
        Ok(())
    }

    /// Checks that the root, and no other rank, gives the `what`.
    pub fn check_root_side(
        self,
        operation: &str,
        what: &str,
        given: bool,
        root: usize,
    ) -> Result<()> {
        if given == (self.rank == root) {
            return Ok(());
        }
        let reason = format!("the root (rank {root}), and no other rank, gives the {what}");
        Err(self.argument(operation, reason))
    }

    /// Checks input and output, by bytes and type, whose lengths must be in the ratio `(input,
    /// output)`.
    pub fn check_pair(
        self,
        operation: &str,
        (input, from): (usize, DType),
        (output, to): (usize, DType),
        ratio: (usize, usize),
    ) -> Result<()> {
        self.check_types(operation, from, to)?;
        if input * ratio.1 != output * ratio.0 {
            let reason = format!(
                "input of {} and output of {} elements do not fit: output must be {} elements",
                input / from.size(),
                output / from.size(),
                input / from.size() * ratio.1 / ratio.0,
            );
            return Err(self.argument(operation, reason));
        }
        Ok(())
    }

    /// Checks a pair of buffers on a GPU as [`Caller::check_pair`] does.
    pub fn check_device_pair(
        self,
        operation: &str,
        input: &impl DeviceBuffer,
        output: &impl DeviceBuffer,
        ratio: (usize, usize),
    ) -> Result<()> {
        let input = (input.bytes(), input.dtype());
        let output = (output.bytes(), output.dtype());
        self.check_pair(operation, input, output, ratio)
    }

    /// Checks that input and output are of one type.
    pub fn check_types(self, operation: &str, from: DType, to: DType) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let reason = format!("input is {from} but output is {to}: they must be alike");
        Err(self.argument(operation, reason))
    }

    /// Checks the lengths of input and output: one, the `block`, must have this rank's count of
    /// elements, and the other all ranks' counts. Each is given by its name and its length.
    pub fn check_block_and_whole(
        self,
        operation: &str,
        counts: &[usize],
        block: (&str, usize),
        whole: (&str, usize),
    ) -> Result<()> {
        self.check_counts(operation, "counts", counts)?;
        self.check_length(operation, block.0, block.1, counts[self.rank])?;
        self.check_length(operation, whole.0, whole.1, counts.iter().sum())
    }

    /// Checks that there is a count of elements for each rank.
    pub fn check_counts(self, operation: &str, what: &str, counts: &[usize]) -> Result<()> {
        if counts.len() != self.size {
            let reason = format!("{what} has {} entries for {} ranks", counts.len(), self.size);
            return Err(self.argument(operation, reason));
        }
        // The bytes of all ranks' elements must be a number.
        let sum = counts.iter().try_fold(0, |sum: usize, &count| sum.checked_add(count));
        if sum.is_none_or(|sum| sum > isize::MAX as usize / 16) {
            return Err(self.argument(operation, format!("{what} sum up to more than any memory")));
        }
        Ok(())
    }

    /// Checks that a rank sends itself as many elements as it receives from itself.
    pub fn check_own_count(
        self,
        operation: &str,
        input_counts: &[usize],
        output_counts: &[usize],
    ) -> Result<()> {
        let sent = input_counts[self.rank];
        let received = output_counts[self.rank];
        if sent == received {
            return Ok(());
        }
        let reason = format!(
            "input_counts[{0}] is {sent} but output_counts[{0}] is {received}: this rank sends \
             itself what it receives from itself",
            self.rank
        );
        Err(self.argument(operation, reason))
    }

    /// Checks that a buffer has as many elements as the counts say.
    pub fn check_length(
        self,
        operation: &str,
        what: &str,
        elements: usize,
        expected: usize,
    ) -> Result<()> {
        if elements == expected {
            return Ok(());
        }
        let reason = format!("{what} has {elements} elements, its counts say {expected}");
        Err(self.argument(operation, reason))
    }

    /// Checks that a buffer of so many elements consists of one block for each rank.
    pub fn check_blocks(self, operation: &str, elements: usize) -> Result<()> {
        if elements.is_multiple_of(self.size) {
            return Ok(());
        }
        let reason =
            format!("{elements} elements cannot be divided into {} equal blocks", self.size);
        Err(self.argument(operation, reason))
    }
}
