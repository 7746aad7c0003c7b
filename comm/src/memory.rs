//! Memory of callers, as the operations of a group get it.

/// Memory of a caller, valid for the length of the call, or none.
#[derive(Clone, Copy)]
pub struct BufferView {
    pub data: *mut u8,
    pub bytes: usize,
}

impl BufferView {
    /// No memory, of ranks that contribute nothing, or receive nothing.
    pub const NONE: BufferView = BufferView { data: std::ptr::null_mut(), bytes: 0 };
}

/// A rank's memory in a collective.
#[derive(Clone, Copy)]
pub struct Buffers<'a> {
    /// The data that the rank contributes.
    pub input: BufferView,
    /// The memory of the result; in all_reduce, reduce and broadcast it is the input as well.
    pub output: BufferView,
    /// Elements of each rank's block of the input, where blocks differ in length.
    pub input_counts: &'a [usize],
    /// Elements of each rank's block of the output, where blocks differ in length.
    pub output_counts: &'a [usize],
}

impl Buffers<'static> {
    /// Returns input and output without counts.
    pub fn new(input: BufferView, output: BufferView) -> Self {
        Self { input, output, input_counts: &[], output_counts: &[] }
    }

    /// Makes buffers in which the result replaces the input.
    pub fn in_place(data: BufferView) -> Self {
        Self::new(BufferView::NONE, data)
    }
}
