//! Merges lines of many streams into one output, never mixed within a line.

use std::collections::VecDeque;

use crate::output::footer::Footer;
use crate::output::lines::{Ending, Source, StreamId};
use crate::output::screen::Screen;

/// The launcher's own messages.
const LAUNCHER: StreamId = StreamId::MAX;

/// A stream that has ended.
const NOBODY: StreamId = StreamId::MAX - 1;

/// Bytes waiting to be written to one of the launcher's own outputs.
#[derive(Default)]
pub struct OutputQueue {
    bytes: VecDeque<u8>,
    /// If the output is a terminal that can erase: the state of its last line.
    screen: Option<Screen>,
    footer: Footer,
    /// Otherwise: if the output does not end with a newline, the stream that wrote last and how
    /// its segment ends.
    unfinished: Option<(StreamId, Ending)>,
}

impl OutputQueue {
    /// Returns the queue of a terminal that can erase.
    pub fn for_screen() -> OutputQueue {
        OutputQueue { screen: Some(Screen::default()), ..OutputQueue::default() }
    }

    /// Appends a segment or the rest of one, with the prefix where a line starts.
    pub fn put(&mut self, source: &Source, (previous, segment): (Ending, &[u8])) {
        if segment.is_empty() {
            return;
        }
        if let Some(screen) = &mut self.screen {
            return screen.put(source, segment, &mut self.bytes);
        }
        let mine = self.unfinished.is_some_and(|(stream, _)| stream == source.id);
        if segment == b"\n" && previous != Ending::Newline {
            // The second half of `\r\n`, or the end of a prompt. If another stream wrote in
            // between, the line has already been ended.
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
            self.bytes.extend(source.prefix);
        }
        self.bytes.extend(segment);
        let ending = Ending::of(segment);
        self.unfinished = (ending != Ending::Newline).then_some((source.id, ending));
    }

    /// Notes that the stream has ended: other streams need not wait for the rest of its last line.
    pub fn end(&mut self, stream: StreamId) {
        match (&mut self.screen, &mut self.unfinished) {
            (Some(screen), _) => screen.end(stream, &mut self.bytes),
            (None, Some((last, _))) if *last == stream => *last = NOBODY,
            _ => {}
        }
    }

    /// Whether no other stream is in the middle of a line.
    pub fn is_free(&self, stream: StreamId) -> bool {
        match (&self.screen, self.unfinished) {
            (Some(screen), _) => screen.is_free(stream),
            (None, Some((last, ending))) => {
                last == stream || last == NOBODY || ending == Ending::Return
            }
            (None, None) => true,
        }
    }

    /// Notes that the worker has written a line to its other stream: a prompt here has been
    /// answered.
    pub fn leave(&mut self, stream: StreamId) {
        if let Some(screen) = &mut self.screen {
            screen.leave(stream, &mut self.bytes);
        }
    }

    /// Ends incomplete lines, so that no stream waits for them any longer.
    pub fn interrupt(&mut self) {
        match &mut self.screen {
            Some(screen) => screen.interrupt(&mut self.bytes),
            None if self.unfinished.take().is_some() => self.bytes.push_back(b'\n'),
            None => {}
        }
    }

    /// Call before writing, with the width of the terminal: draws again the prompt or progress bar
    /// that queued lines have erased.
    pub fn refresh(&mut self, columns: Option<u16>) {
        if let Some(screen) = &mut self.screen {
            screen.columns = columns.map_or(0, usize::from);
            screen.refresh(&mut self.bytes);
        }
    }

    /// Draws the last line again: another program has written to the terminal.
    pub fn redraw(&mut self) {
        if let Some(screen) = &mut self.screen {
            screen.redraw(&mut self.bytes);
        }
    }

    /// Whether the output is a terminal that can erase.
    pub fn is_screen(&self) -> bool {
        self.screen.is_some()
    }

    /// Draws lines at the foot of the terminal, which has so many rows and columns.
    pub fn draw_footer(&mut self, lines: &[String], size: (usize, usize)) {
        self.footer.draw(lines, size, &mut self.bytes);
    }

    /// Erases the lines at the foot of the terminal.
    pub fn erase_footer(&mut self) {
        self.footer.erase(&mut self.bytes);
    }

    /// Returns how many lines are at the foot of the terminal.
    pub fn footer_height(&self) -> usize {
        self.footer.height()
    }

    /// Appends a message of the launcher, which may have several lines.
    pub fn say(&mut self, message: &str) {
        let launcher = Source { id: LAUNCHER, prefix: b"flow-launch: ", is_live: false };
        for line in message.lines() {
            self.put(&launcher, (Ending::Newline, format!("{line}\n").as_bytes()));
        }
    }

    /// Returns the number of bytes that are queued.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the next bytes to write, at most `limit`.
    pub fn front(&self, limit: usize) -> &[u8] {
        let front = self.bytes.as_slices().0;
        &front[..front.len().min(limit)]
    }

    /// Notes that the first `count` bytes have been written.
    pub fn written(&mut self, count: usize) {
        self.bytes.drain(..count);
    }

    /// Forgets all that is queued.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::lines::{Assembler, MAX_LINE_BYTES, Segment};
    use proptest::prelude::*;

    /// Streams writing chunks in the given order into one output.
    fn output(chunks: &[(StreamId, &[u8])], prefixes: bool) -> String {
        let mut assemblers: Vec<_> = (0..3).map(|_| Assembler::new()).collect();
        let mut queue = OutputQueue::default();
        let prefix = |id: StreamId| if prefixes { format!("{id}: ") } else { String::new() };
        let put = |queue: &mut OutputQueue, id: StreamId, segment: Segment| {
            queue
                .put(&Source { id, prefix: prefix(id).as_bytes(), is_live: false }, segment.rest());
        };
        for (id, chunk) in chunks {
            assemblers[*id].feed(chunk, |segment| put(&mut queue, *id, segment));
            // Stream 0 is one that asks: what it writes is passed on where nobody else is in the
            // middle of a line.
            if *id == 0 && queue.is_free(0) {
                assemblers[0].pass().into_iter().for_each(|segment| put(&mut queue, 0, segment));
            }
        }
        for (id, assembler) in assemblers.iter_mut().enumerate() {
            assembler.finish(|segment| put(&mut queue, id, segment));
            queue.end(id);
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
        assert_eq!(
            output(&[(2, b"he"), (1, b"wor"), (2, b"llo\n"), (1, b"ld\n")], false),
            "hello\nworld\n"
        );
        assert_eq!(output(&[(2, b"a\nb"), (1, b"c\n")], true), "2: a\n1: c\n2: b");
    }

    #[test]
    fn a_prompt_is_passed_on_and_ended_by_whoever_comes_next() {
        assert_eq!(output(&[(0, b"name? "), (0, b"Ann\n")], true), "0: name? Ann\n");
        assert_eq!(
            output(&[(0, b"name? "), (1, b"x\n"), (0, b"Ann\n")], true),
            "0: name? \n1: x\n0: Ann\n"
        );
        assert_eq!(output(&[(0, b"a line"), (1, b"x\n"), (0, b"\n")], true), "0: a line\n1: x\n");
    }

    #[test]
    fn a_prompt_waits_for_the_end_of_anothers_line() {
        let mut queue = OutputQueue::default();
        let source = |id| Source { id, prefix: b"", is_live: false };
        queue.put(&source(1), (Ending::Newline, b"Name: "));
        assert!(queue.is_free(1) && !queue.is_free(0));
        queue.end(1);
        assert!(queue.is_free(0));
        queue.put(&source(1), (Ending::Newline, b"10%\r"));
        assert!(queue.is_free(0));
    }

    #[test]
    fn progress_bars_pass_and_are_not_overwritten_by_others() {
        assert_eq!(output(&[(0, b"10%\r20%\r"), (0, b"30%\n")], true), "0: 10%\r0: 20%\r0: 30%\n");
        assert_eq!(
            output(&[(0, b"10%\r"), (1, b"hi\n"), (0, b"20%\r")], false),
            "10%\r\nhi\n20%\r"
        );
    }

    #[test]
    fn carriage_return_and_newline_are_one_ending() {
        assert_eq!(output(&[(0, b"a\r\nb\r"), (0, b"\nc\r\n")], true), "0: a\r\n0: b\r\n0: c\r\n");
        assert_eq!(
            output(&[(0, b"a\r"), (1, b"x\n"), (0, b"\nb\n")], true),
            "0: a\r\n1: x\n0: b\n"
        );
    }

    #[test]
    fn too_long_a_line_goes_on_in_pieces_without_a_second_prefix() {
        let long = vec![b'x'; MAX_LINE_BYTES + 5];
        let text = output(&[(0, &long), (0, b"y\n"), (1, b"z\n")], true);
        assert_eq!(text, format!("0: {}y\n1: z\n", String::from_utf8(long.clone()).unwrap()));
        let broken = output(&[(0, &long), (1, b"z\n"), (0, b"y\n")], true);
        assert_eq!(broken, format!("0: {}\n1: z\n0: y\n", String::from_utf8(long).unwrap()));
    }

    #[test]
    fn the_launcher_speaks_on_lines_of_its_own() {
        let mut queue = OutputQueue::default();
        queue.put(&Source { id: 0, prefix: b"", is_live: false }, (Ending::Newline, b"50%\r"));
        queue.say("one\ntwo");
        assert_eq!(queue.front(100), b"50%\r\nflow-launch: one\nflow-launch: two\n");
    }

    proptest! {
        /// However streams are cut into chunks and interleaved, each one's lines come out whole and
        /// in order.
        #[test]
        fn any_interleaving_keeps_lines(
            chunks in prop::collection::vec((0usize..3, "[a-z\n]{0,6}"), 0..40),
        ) {
            let mut sent = vec![String::new(); 3];
            let mut labelled = Vec::new();
            for (id, chunk) in &chunks {
                // Each stream writes in letters of its own, so that a mixed line would show.
                let letter = (b'a' + *id as u8) as char;
                let own: String =
                    chunk.chars().map(|c| if c == '\n' { c } else { letter }).collect();
                sent[*id].push_str(&own);
                labelled.push((*id, own));
            }
            let borrowed: Vec<_> =
                labelled.iter().map(|(id, chunk)| (*id, chunk.as_bytes())).collect();
            let text = output(&borrowed, true);
            for (id, sent) in sent.iter().enumerate() {
                let prefix = format!("{id}: ");
                let received: Vec<_> =
                    text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
                if id == 0 {
                    // Others may have come between a prompt and the rest of its line.
                    prop_assert_eq!(received.concat(), sent.replace('\n', ""));
                } else {
                    prop_assert_eq!(received, sent.lines().collect::<Vec<_>>());
                }
            }
            for line in text.lines() {
                let (id, rest) = line.split_once(": ").expect(line);
                let number = id.as_bytes()[0] - b'0';
                prop_assert!(rest.bytes().all(|letter| letter - b'a' == number), "{}", line);
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
