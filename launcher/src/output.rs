//! Lines of output from many streams into one, never mixed within a line.
//!
//! A *segment* ends with `\n`, or with `\r`, so that progress bars pass through as they are drawn. A segment is passed
//! on when it is complete. A line of more than [`LONGEST`] bytes is passed on in pieces, between which another stream
//! may come (on a line of its own).

use std::collections::VecDeque;

/// Bytes of an incomplete line that are kept back, per stream.
pub const LONGEST: usize = 1 << 20;

/// Who writes: each stream of each worker has a number.
pub type StreamId = usize;

/// The launcher's own messages.
pub const LAUNCHER: StreamId = StreamId::MAX;

/// How a segment ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    Newline,
    Return,
    /// Cut off: by the end of the stream, or because the line is too long.
    Open,
}

impl Ending {
    fn of(segment: &[u8]) -> Ending {
        match segment.last() {
            Some(b'\n') => Ending::Newline,
            Some(b'\r') => Ending::Return,
            _ => Ending::Open,
        }
    }
}

/// Cuts one stream into segments.
pub struct Assembler {
    partial: Vec<u8>,
    previous: Ending,
}

impl Assembler {
    pub fn new() -> Assembler {
        Assembler { partial: Vec::new(), previous: Ending::Newline }
    }

    /// Takes what was read and calls `put` with each segment it completes and the ending of the segment before.
    pub fn feed(&mut self, bytes: &[u8], mut put: impl FnMut(Ending, &[u8])) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            if Ending::of(piece) == Ending::Open && self.partial.len() + piece.len() < LONGEST {
                self.partial.extend_from_slice(piece);
            } else {
                self.complete(piece, &mut put);
            }
        }
    }

    /// The stream has ended: what is left is a segment too.
    pub fn finish(&mut self, mut put: impl FnMut(Ending, &[u8])) {
        if !self.partial.is_empty() {
            self.complete(&[], &mut put);
        }
    }

    fn complete(&mut self, last: &[u8], put: &mut impl FnMut(Ending, &[u8])) {
        let segment = if self.partial.is_empty() {
            last
        } else {
            self.partial.extend_from_slice(last);
            &self.partial
        };
        let ending = Ending::of(segment);
        put(self.previous, segment);
        self.previous = ending;
        self.partial.clear();
        self.partial.shrink_to(1 << 16);
    }
}

/// What waits to be written to one of the launcher's own outputs.
#[derive(Default)]
pub struct Queue {
    bytes: VecDeque<u8>,
    /// Whose segment, not ended by a newline, is the last thing in the output.
    unfinished: Option<StreamId>,
}

impl Queue {
    /// Appends a segment; `prefix` goes before it where it starts a line.
    pub fn put(&mut self, stream: StreamId, prefix: &[u8], previous: Ending, segment: &[u8]) {
        let mine = self.unfinished == Some(stream);
        if segment == b"\n" && previous == Ending::Return {
            // The second half of `\r\n`. If another stream came between, it has ended the line already.
            if mine {
                self.bytes.push_back(b'\n');
                self.unfinished = None;
            }
            return;
        }
        if self.unfinished.is_some() && !mine {
            self.bytes.push_back(b'\n');
        }
        if !(mine && previous == Ending::Open) {
            self.bytes.extend(prefix);
        }
        self.bytes.extend(segment);
        self.unfinished = (Ending::of(segment) != Ending::Newline).then_some(stream);
    }

    /// Appends a message of the launcher, which may have several lines.
    pub fn say(&mut self, message: &str) {
        for line in message.lines() {
            self.put(LAUNCHER, b"flow-launch: ", Ending::Newline, format!("{line}\n").as_bytes());
        }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The next bytes to write, at most `limit`.
    pub fn front(&self, limit: usize) -> &[u8] {
        let front = self.bytes.as_slices().0;
        &front[..front.len().min(limit)]
    }

    /// The first `count` bytes have been written.
    pub fn written(&mut self, count: usize) {
        self.bytes.drain(..count);
    }

    pub fn clear(&mut self) {
        self.bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Streams writing chunks in the given order into one output.
    fn output(chunks: &[(StreamId, &[u8])], prefixes: bool) -> String {
        let mut assemblers: Vec<_> = (0..3).map(|_| Assembler::new()).collect();
        let mut queue = Queue::default();
        let prefix = |id: StreamId| if prefixes { format!("{id}: ") } else { String::new() };
        for (id, chunk) in chunks {
            assemblers[*id].feed(chunk, |previous, segment| queue.put(*id, prefix(*id).as_bytes(), previous, segment));
        }
        for (id, assembler) in assemblers.iter_mut().enumerate() {
            assembler.finish(|previous, segment| queue.put(id, prefix(id).as_bytes(), previous, segment));
        }
        let mut text = Vec::new();
        while queue.len() > 0 {
            let front = queue.front(3).to_vec();
            queue.written(front.len());
            text.extend(front);
        }
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn lines_are_kept_whole() {
        assert_eq!(output(&[(0, b"he"), (1, b"wor"), (0, b"llo\n"), (1, b"ld\n")], false), "hello\nworld\n");
        assert_eq!(output(&[(0, b"a\nb"), (1, b"c\n")], true), "0: a\n1: c\n0: b");
    }

    #[test]
    fn progress_bars_pass_and_are_not_overwritten_by_others() {
        assert_eq!(output(&[(0, b"10%\r20%\r"), (0, b"30%\n")], true), "0: 10%\r0: 20%\r0: 30%\n");
        assert_eq!(output(&[(0, b"10%\r"), (1, b"hi\n"), (0, b"20%\r")], false), "10%\r\nhi\n20%\r");
    }

    #[test]
    fn carriage_return_and_newline_are_one_ending() {
        assert_eq!(output(&[(0, b"a\r\nb\r"), (0, b"\nc\r\n")], true), "0: a\r\n0: b\r\n0: c\r\n");
        assert_eq!(output(&[(0, b"a\r"), (1, b"x\n"), (0, b"\nb\n")], true), "0: a\r\n1: x\n0: b\n");
    }

    #[test]
    fn too_long_a_line_goes_on_in_pieces_without_a_second_prefix() {
        let long = vec![b'x'; LONGEST + 5];
        let text = output(&[(0, &long), (0, b"y\n"), (1, b"z\n")], true);
        assert_eq!(text, format!("0: {}y\n1: z\n", String::from_utf8(long.clone()).unwrap()));
        let broken = output(&[(0, &long), (1, b"z\n"), (0, b"y\n")], true);
        assert_eq!(broken, format!("0: {}\n1: z\n0: y\n", String::from_utf8(long).unwrap()));
    }

    #[test]
    fn the_launcher_speaks_on_lines_of_its_own() {
        let mut queue = Queue::default();
        queue.put(0, b"", Ending::Newline, b"50%\r");
        queue.say("one\ntwo");
        assert_eq!(queue.front(100), b"50%\r\nflow-launch: one\nflow-launch: two\n");
    }

    proptest! {
        /// However streams are cut into chunks and interleaved, each one's lines come out whole and in order.
        #[test]
        fn any_interleaving_keeps_lines(
            chunks in prop::collection::vec((0usize..3, "[a-z\n]{0,6}"), 0..40),
        ) {
            let mut sent = vec![String::new(); 3];
            let mut labelled = Vec::new();
            for (id, chunk) in &chunks {
                // Each stream writes in letters of its own, so that a mixed line would show.
                let own: String = chunk.chars().map(|c| if c == '\n' { c } else { (b'a' + *id as u8) as char }).collect();
                sent[*id].push_str(&own);
                labelled.push((*id, own));
            }
            let borrowed: Vec<_> = labelled.iter().map(|(id, chunk)| (*id, chunk.as_bytes())).collect();
            let text = output(&borrowed, true);
            for (id, sent) in sent.iter().enumerate() {
                let prefix = format!("{id}: ");
                let received: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
                prop_assert_eq!(received, sent.lines().collect::<Vec<_>>());
            }
        }

        /// A single stream comes out byte for byte.
        #[test]
        fn one_stream_is_untouched(chunks in prop::collection::vec("[ab\r\n]{0,6}", 0..20)) {
            let pieces: Vec<_> = chunks.iter().map(|chunk| (0, chunk.as_bytes())).collect();
            prop_assert_eq!(output(&pieces, false), chunks.concat());
        }
    }
}
