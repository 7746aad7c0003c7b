//! Cuts a stream into segments.
//!
//! A *segment* ends with `\n` or `\r`: progress bars pass through as they are drawn. A segment is
//! passed on when it is complete. The start of an incomplete one, such as a prompt, is passed on
//! when [`Assembler::pass`] is called. A line longer than [`MAX_LINE_BYTES`] is passed on in
//! pieces; lines of other streams may come between the pieces.

/// Bytes of an incomplete line that are held back, per stream.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Number of a stream: each stream of each worker has one.
pub type StreamId = usize;

/// A stream, as the output queue sees it.
pub struct Source<'a> {
    pub id: StreamId,
    /// Written before each line.
    pub prefix: &'a [u8],
    /// Its output is passed on at once, complete lines or not.
    pub is_live: bool,
}

/// The end of a segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    Newline,
    Return,
    /// Cut off: by the end of the stream, or because the line is too long.
    Open,
}

impl Ending {
    /// Returns the ending of these bytes.
    pub fn of(segment: &[u8]) -> Ending {
        match segment.last() {
            Some(b'\n') => Ending::Newline,
            Some(b'\r') => Ending::Return,
            _ => Ending::Open,
        }
    }
}

/// A segment of a stream.
pub struct Segment<'a> {
    pub bytes: &'a [u8],
    /// Bytes that were passed on before the segment was complete.
    passed: usize,
    /// The end of the segment before it.
    previous: Ending,
}

impl<'a> Segment<'a> {
    /// Returns the bytes not passed on yet, and how the bytes before them ended.
    pub fn rest(&self) -> (Ending, &'a [u8]) {
        (if self.passed == 0 { self.previous } else { Ending::Open }, &self.bytes[self.passed..])
    }
}

/// Cuts one stream into segments.
pub struct Assembler {
    partial: Vec<u8>,
    passed: usize,
    previous: Ending,
}

impl Assembler {
    /// Makes an assembler at the beginning of a stream.
    pub fn new() -> Assembler {
        Assembler { partial: Vec::new(), passed: 0, previous: Ending::Newline }
    }

    /// Takes bytes that were read and calls `put` with each segment they complete.
    pub fn feed(&mut self, bytes: &[u8], mut put: impl FnMut(Segment)) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            if Ending::of(piece) == Ending::Open
                && self.partial.len() + piece.len() < MAX_LINE_BYTES
            {
                self.partial.extend_from_slice(piece);
            } else {
                self.complete(piece, &mut put);
            }
        }
    }

    /// Notes that the stream has ended: the rest is a segment too.
    pub fn finish(&mut self, mut put: impl FnMut(Segment)) {
        if !self.partial.is_empty() {
            self.complete(&[], &mut put);
        }
    }

    /// Takes the part of an incomplete segment that was not passed on yet. From now on it counts as
    /// passed on.
    pub fn pass(&mut self) -> Option<Segment<'_>> {
        let passed = std::mem::replace(&mut self.passed, self.partial.len());
        (passed < self.passed).then_some(Segment {
            bytes: &self.partial,
            passed,
            previous: self.previous,
        })
    }

    /// Whether [`Assembler::pass`] would return something.
    pub fn holds(&self) -> bool {
        self.passed < self.partial.len()
    }

    fn complete(&mut self, last: &[u8], put: &mut impl FnMut(Segment)) {
        let segment = if self.partial.is_empty() {
            last
        } else {
            self.partial.extend_from_slice(last);
            &self.partial
        };
        let ending = Ending::of(segment);
        put(Segment { bytes: segment, passed: self.passed, previous: self.previous });
        (self.previous, self.passed) = (ending, 0);
        self.partial.clear();
        self.partial.shrink_to(1 << 16);
    }
}
