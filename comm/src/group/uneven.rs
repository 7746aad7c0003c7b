//! Collectives over blocks of different lengths, blocking and beside the caller.

use flow_kernels::{DType, ReduceOp};

use super::lane::Lane;
use super::ProcessGroup;
use crate::backend::{BufferView, Buffers};
use crate::buffer::Buffer;
use crate::descriptor::OpDescriptor;
use crate::error::Result;
use crate::kind::Kind;
use crate::work::Work;

impl ProcessGroup {
    /// As [`ProcessGroup::all_gather`], with blocks of different lengths: `counts[r]` is the number
    /// of elements of rank r's `input`, the same list on all ranks, and `output` holds their sum.
    ///
    /// ```
    /// # use flow_comm::ProcessGroup;
    /// let group = ProcessGroup::from_env()?; // alone: a group of one
    /// let mut all = [0_i64; 2];
    /// group.all_gather_v(&[3_i64, 4], &mut all, &[2])?;
    /// assert_eq!(all, [3, 4]);
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    pub fn all_gather_v<I, O>(&self, input: &I, output: &mut O, counts: &[usize]) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let name = "all_gather_v";
        let (input, output, dtype) = self.uneven_pair(name, input, output)?;
        self.caller().check_counts(name, "counts", counts)?;
        self.check_length(name, "input", input, dtype, counts[self.rank()])?;
        self.check_length(name, "output", output, dtype, counts.iter().sum())?;
        let operation = OpDescriptor::new(Kind::AllGatherV, dtype, counts.iter().sum());
        self.collective(operation, Buffers { output_counts: counts, ..Buffers::new(input, output) })
    }

    /// As [`ProcessGroup::reduce_scatter`], with blocks of different lengths: rank r gets block r,
    /// of `counts[r]` elements. All ranks give the same list, and `input` holds its sum.
    pub fn reduce_scatter_v<I, O>(
        &self,
        input: &I,
        output: &mut O,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let name = "reduce_scatter_v";
        let (input, output, dtype) = self.uneven_pair(name, input, output)?;
        self.caller().check_counts(name, "counts", counts)?;
        self.check_length(name, "input", input, dtype, counts.iter().sum())?;
        self.check_length(name, "output", output, dtype, counts[self.rank()])?;
        let operation = OpDescriptor::new(Kind::ReduceScatterV, dtype, counts.iter().sum());
        let buffers = Buffers { input_counts: counts, ..Buffers::new(input, output) };
        self.collective(operation.reduce(op), buffers)
    }

    /// As [`ProcessGroup::all_to_all`], with blocks of different lengths: this rank sends
    /// `input_counts[s]` elements to rank s, and gets `output_counts[r]` from rank r, which are
    /// rank r's `input_counts` for this rank. A rank that sends another number than its receiver
    /// expects is an error.
    pub fn all_to_all_v<I, O>(
        &self,
        input: &I,
        input_counts: &[usize],
        output: &mut O,
        output_counts: &[usize],
    ) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let name = "all_to_all_v";
        let (input, output, dtype) = self.uneven_pair(name, input, output)?;
        self.caller().check_counts(name, "input_counts", input_counts)?;
        self.caller().check_counts(name, "output_counts", output_counts)?;
        self.check_length(name, "input", input, dtype, input_counts.iter().sum())?;
        self.check_length(name, "output", output, dtype, output_counts.iter().sum())?;
        let operation = OpDescriptor::new(Kind::AllToAllV, dtype, input_counts.iter().sum());
        self.collective(operation, Buffers { input, output, input_counts, output_counts })
    }

    /// Starts [`ProcessGroup::all_gather_v`]; both buffers come back.
    pub fn all_gather_v_async<I, O>(
        &self,
        input: I,
        mut output: O,
        counts: Vec<usize>,
    ) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "all_gather_v", move |group| {
            group.all_gather_v(&input, &mut output, &counts).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::reduce_scatter_v`]; both buffers come back.
    pub fn reduce_scatter_v_async<I, O>(
        &self,
        input: I,
        mut output: O,
        counts: Vec<usize>,
        op: ReduceOp,
    ) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "reduce_scatter_v", move |group| {
            group.reduce_scatter_v(&input, &mut output, &counts, op).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::all_to_all_v`]; both buffers come back.
    pub fn all_to_all_v_async<I, O>(
        &self,
        input: I,
        input_counts: Vec<usize>,
        mut output: O,
        output_counts: Vec<usize>,
    ) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "all_to_all_v", move |group| {
            group
                .all_to_all_v(&input, &input_counts, &mut output, &output_counts)
                .map(|()| (input, output))
        })
    }

    fn uneven_pair<I, O>(
        &self,
        operation: &str,
        input: &I,
        output: &mut O,
    ) -> Result<(BufferView, BufferView, DType)>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, from) = self.raw(operation, input)?;
        let (output, to) = self.raw_mut(operation, output)?;
        self.caller().check_types(operation, from, to)?;
        Ok((input, output, from))
    }

    fn check_length(
        &self,
        operation: &str,
        what: &str,
        buffer: BufferView,
        dtype: DType,
        expected: usize,
    ) -> Result<()> {
        self.caller().check_length(operation, what, buffer.bytes / dtype.size(), expected)
    }
}
