//! The last line of a terminal, which shows incomplete lines: prompts and progress bars. Pure.
//!
//! One incomplete line is on the screen at a time. Before anything else is written it is erased;
//! afterwards it is drawn again below. A *live* stream draws whenever it writes. Other streams
//! write complete lines and progress bars; their bars are drawn only while no live stream has an
//! incomplete line.

use std::collections::VecDeque;

use crate::output::lines::{Ending, MAX_LINE_BYTES, Source, StreamId};

/// Moves to the start of the line and erases it; turns colours off.
const ERASE: &[u8] = b"\x1b[m\r\x1b[K";

/// An incomplete line.
struct Row {
    stream: StreamId,
    is_live: bool,
    /// The text with its prefix.
    text: Vec<u8>,
    /// The next segment is drawn over it.
    is_returned: bool,
    /// It has been drawn over before: a progress bar.
    is_bar: bool,
}

impl Row {
    /// Returns an empty row.
    fn of(source: &Source) -> Row {
        Row {
            stream: source.id,
            is_live: source.is_live,
            text: Vec::new(),
            is_returned: false,
            is_bar: false,
        }
    }
}

/// The last line of a terminal, as far as it is known here.
#[derive(Default)]
pub struct Screen {
    /// The rows in the order of their last change.
    rows: Vec<Row>,
    /// The stream that owns the row on the screen.
    shown: Option<StreamId>,
    /// The screen shows the last, incomplete line of a stream that has ended.
    is_dangling: bool,
    /// The width of the terminal, or 0.
    pub columns: usize,
}

impl Screen {
    /// Draws a segment, or a part of one.
    pub fn put(&mut self, source: &Source, segment: &[u8], out: &mut VecDeque<u8>) {
        let ending = Ending::of(segment);
        let text = if ending == Ending::Open { segment } else { &segment[..segment.len() - 1] };
        let known = self.rows.iter().position(|row| row.stream == source.id);
        let mut row = match known {
            Some(index) => self.rows.remove(index),
            None => Row::of(source),
        };
        let is_shown = self.shown == Some(source.id);
        // The prefix goes right before the text: after sequences that move the cursor or clear the
        // line.
        let moves = if row.text.is_empty() || row.is_returned { moves(text) } else { 0 };
        let (moves, text) = text.split_at(moves);
        let is_fresh = row.text.is_empty() || row.is_returned && !text.is_empty();
        if is_fresh || row.text.len() > MAX_LINE_BYTES {
            row.text = source.prefix.to_vec();
        }
        row.text.extend(text);
        row.is_returned = ending == Ending::Return || row.is_returned && text.is_empty();
        row.is_bar |= ending == Ending::Return;
        if text.is_empty() && ending == Ending::Open {
            // For example, hiding the cursor: this neither begins nor changes a line.
            self.make_room(out);
            out.extend(moves);
            self.shown = None;
            if known.is_some() {
                self.rows.push(row);
            }
            return;
        }
        let must_yield = !row.is_live && self.rows.iter().any(|other| other.is_live);
        if ending == Ending::Newline || !must_yield {
            if is_shown && !is_fresh {
                out.extend(text);
            } else {
                if is_shown {
                    out.push_back(b'\r');
                } else {
                    self.make_room(out);
                }
                out.extend(moves);
                out.extend(&row.text);
            }
            self.shown = Some(source.id);
        }
        if ending == Ending::Newline {
            out.push_back(b'\n');
            self.shown = None;
        } else {
            self.rows.push(row);
        }
    }

    /// Notes that the stream has ended; its line stays on the screen.
    pub fn end(&mut self, stream: StreamId, out: &mut VecDeque<u8>) {
        let Some(index) = self.rows.iter().position(|row| row.stream == stream) else { return };
        let row = self.rows.remove(index);
        if self.shown == Some(stream) {
            (self.shown, self.is_dangling) = (None, true);
        } else {
            self.make_room(out);
            out.extend(row.text);
            out.push_back(b'\n');
            self.shown = None;
        }
    }

    /// Notes that the worker has gone on: its line stays on the screen, unless it is a progress
    /// bar.
    pub fn leave(&mut self, stream: StreamId, out: &mut VecDeque<u8>) {
        if self.rows.iter().any(|row| row.stream == stream && !row.is_bar) {
            self.finish(stream, out);
        }
    }

    /// Ends every line that other streams would have to wait for.
    pub fn interrupt(&mut self, out: &mut VecDeque<u8>) {
        let rows = self.rows.iter().filter(|row| row.is_live || Some(row.stream) == self.shown);
        let streams: Vec<_> = rows.map(|row| row.stream).collect();
        streams.into_iter().for_each(|stream| self.finish(stream, out));
    }

    /// Ends the line of a stream and begins a new row.
    fn finish(&mut self, stream: StreamId, out: &mut VecDeque<u8>) {
        self.end(stream, out);
        if std::mem::take(&mut self.is_dangling) {
            self.begin_row(out);
        }
    }

    /// Moves to the start of a row. If the user has typed an answer, which we do not see, the
    /// cursor is there already. So write as many blanks as there are columns: they reach the next
    /// row only if the cursor was not at the start of one.
    fn begin_row(&self, out: &mut VecDeque<u8>) {
        match self.columns {
            0 => out.push_back(b'\n'),
            columns => {
                out.extend(b"\x1b[m");
                out.extend(std::iter::repeat_n(b' ', columns));
                out.extend(ERASE);
            }
        }
    }

    /// Draws an incomplete line, if there is one and none is on the screen.
    pub fn refresh(&mut self, out: &mut VecDeque<u8>) {
        if self.shown.is_some() {
            return;
        }
        let live = self.rows.iter().rposition(|row| row.is_live);
        let Some(index) = live.or(self.rows.len().checked_sub(1)) else { return };
        self.make_room(out);
        out.extend(&self.rows[index].text);
        self.shown = Some(self.rows[index].stream);
    }

    /// Draws the last line again: another program may have written to the terminal.
    pub fn redraw(&mut self, out: &mut VecDeque<u8>) {
        self.shown = None;
        self.refresh(out);
    }

    /// Whether no other stream has a line on the screen that must stay, such as a prompt.
    pub fn is_free(&self, stream: StreamId) -> bool {
        let shown = self.rows.iter().find(|row| Some(row.stream) == self.shown);
        shown.is_none_or(|row| row.stream == stream || row.is_returned && !row.is_live)
    }

    fn is_too_wide(&self, row: &Row) -> bool {
        self.columns > 0 && width(&row.text) > self.columns
    }

    fn make_room(&mut self, out: &mut VecDeque<u8>) {
        if std::mem::take(&mut self.is_dangling) {
            out.push_back(b'\n');
        } else if let Some(shown) = self.shown {
            let row = self.rows.iter().position(|row| row.stream == shown);
            match row.filter(|index| self.is_too_wide(&self.rows[*index])) {
                // Only its end could be erased.
                Some(index) => {
                    self.rows.remove(index);
                    out.extend(b"\x1b[m\n");
                }
                None => out.extend(ERASE),
            }
        }
    }
}

/// Returns the columns that a text takes, if each character takes one.
fn width(mut text: &[u8]) -> usize {
    let mut columns = 0;
    while let Some((first, rest)) = text.split_first() {
        text = rest;
        if let (b'\x1b', Some(sequence)) = (*first, rest.strip_prefix(b"[")) {
            let end = sequence.iter().position(|byte| (b'@'..=b'~').contains(byte));
            text = end.map_or(&[], |end| &sequence[end + 1..]);
        } else {
            // Every byte of a UTF-8 character except the first begins with these bits.
            columns += usize::from(first & 0xc0 != 0x80);
        }
    }
    columns
}

/// Length of the control sequences at the start of a text that move the cursor or erase; colours
/// do not count.
fn moves(text: &[u8]) -> usize {
    let mut length = 0;
    while let Some(sequence) = text[length..].strip_prefix(b"\x1b[") {
        match sequence.iter().position(|byte| (b'@'..=b'~').contains(byte)) {
            Some(end) if sequence[end] != b'm' => length += 2 + end + 1,
            _ => break,
        }
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A terminal without end, on which streams 0 and 1 are live and 2 and 3 are not.
    #[derive(Default)]
    struct Terminal {
        screen: Screen,
        lines: Vec<String>,
        column: usize,
    }

    impl Terminal {
        fn put(&mut self, id: StreamId, text: &str) {
            let mut out = VecDeque::new();
            let prefix = format!("{id}: ");
            for segment in text.split_inclusive(['\r', '\n']) {
                self.screen.put(
                    &Source { id, prefix: prefix.as_bytes(), is_live: id < 2 },
                    segment.as_bytes(),
                    &mut out,
                );
            }
            self.screen.refresh(&mut out);
            self.write(out);
        }

        fn end(&mut self, id: StreamId) {
            let mut out = VecDeque::new();
            self.screen.end(id, &mut out);
            self.screen.refresh(&mut out);
            self.write(out);
        }

        fn write(&mut self, bytes: VecDeque<u8>) {
            let text = String::from_utf8(bytes.into())
                .unwrap()
                .replace("\x1b[m", "")
                .replace("\x1b[K", "\x1b");
            for character in text.chars() {
                if self.lines.is_empty() {
                    self.lines.push(String::new());
                }
                let line = self.lines.last_mut().unwrap();
                match character {
                    '\n' => {
                        self.lines.push(String::new());
                        self.column = 0;
                    }
                    '\r' => self.column = 0,
                    '\x1b' => line.truncate(self.column),
                    character => {
                        line.replace_range(
                            self.column..line.len().min(self.column + 1),
                            &character.to_string(),
                        );
                        self.column += 1;
                    }
                }
            }
        }

        fn shows(&self, lines: &[&str]) {
            assert_eq!(self.lines, lines);
        }
    }

    #[test]
    fn lines_of_others_come_above_a_prompt() {
        let mut terminal = Terminal::default();
        terminal.put(0, "name? ");
        terminal.shows(&["0: name? "]);
        terminal.put(2, "working\n");
        terminal.shows(&["2: working", "0: name? "]);
        terminal.put(0, "Ann\n");
        terminal.shows(&["2: working", "0: name? Ann", ""]);
    }

    #[test]
    fn a_line_that_is_drawn_anew_has_its_prefix_again() {
        let mut terminal = Terminal::default();
        terminal.put(1, "\r10%");
        terminal.put(1, "\r20%");
        terminal.put(0, "loss\n");
        terminal.shows(&["0: loss", "1: 20%"]);
        terminal.put(1, "\r30%\r");
        terminal.put(1, "\n");
        terminal.shows(&["0: loss", "1: 30%", ""]);
        terminal.put(0, "\n\r\nend\r\n");
        terminal.shows(&["0: loss", "1: 30%", "0: ", "0: ", "0: end", ""]);
    }

    #[test]
    fn bars_of_other_ranks_give_way_to_a_prompt() {
        let mut terminal = Terminal::default();
        terminal.put(2, "10%\r");
        terminal.put(3, "20%\r");
        terminal.shows(&["3: 20%"]);
        assert!(terminal.screen.is_free(2));
        terminal.put(0, "> ");
        terminal.put(2, "30%\r");
        terminal.shows(&["0: > "]);
        assert!(!terminal.screen.is_free(2) && terminal.screen.is_free(0));
        terminal.put(0, "\n");
        terminal.shows(&["0: > ", "2: 30%"]);
        terminal.end(3);
        terminal.shows(&["0: > ", "3: 20%", "2: 30%"]);
    }

    /// As rich does, which draws several lines.
    #[test]
    fn the_prefix_comes_after_what_moves_the_cursor() {
        let mut screen = Screen::default();
        let mut put = |text: &str| {
            let mut out = VecDeque::new();
            for segment in text.split_inclusive(['\r', '\n']) {
                screen.put(
                    &Source { id: 0, prefix: b"0: ", is_live: true },
                    segment.as_bytes(),
                    &mut out,
                );
            }
            screen.refresh(&mut out);
            String::from_utf8(out.into()).unwrap()
        };
        assert_eq!(put("\x1b[?25l"), "\x1b[?25l");
        assert_eq!(put("a\n\x1b[32mb"), "0: a\n0: \x1b[32mb");
        assert_eq!(put("\r\x1b[2K\x1b[1A\x1b[2Ka"), "\r\x1b[2K\x1b[1A\x1b[2K0: a");
        assert_eq!(put("\n\x1b[?25h"), "\n\x1b[?25h");
    }

    #[test]
    fn a_row_wider_than_the_terminal_is_not_drawn_again() {
        let mut terminal = Terminal::default();
        terminal.screen.columns = 10;
        terminal.put(0, "a line of 20 letters");
        terminal.put(2, "x\n");
        terminal.put(2, "y\n");
        terminal.put(0, "end\n");
        terminal.shows(&["0: a line of 20 letters", "2: x", "2: y", "0: end", ""]);
        assert_eq!(width("\x1b[31mä\x1b[0m€".as_bytes()), 2);
    }

    #[test]
    fn what_a_stream_leaves_unfinished_stays() {
        let mut terminal = Terminal::default();
        terminal.put(0, "end");
        terminal.end(0);
        terminal.shows(&["0: end"]);
        terminal.put(2, "more\n");
        terminal.shows(&["0: end", "2: more", ""]);
    }

    #[test]
    fn a_screen_on_which_others_have_written_is_drawn_anew() {
        let mut terminal = Terminal::default();
        terminal.put(0, "> ");
        terminal.write(b"\nstopped\n".iter().copied().collect());
        let mut out = VecDeque::new();
        terminal.screen.redraw(&mut out);
        terminal.write(out);
        terminal.shows(&["0: > ", "stopped", "0: > "]);
    }

    proptest! {
        /// However live streams write, and others between, each line comes out whole and in order.
        #[test]
        fn any_interleaving_keeps_lines(
            chunks in prop::collection::vec((0usize..4, "[a-z\n]{1,6}"), 0..40),
        ) {
            let mut terminal = Terminal::default();
            let mut sent = vec![String::new(); 4];
            for (id, chunk) in &chunks {
                // Those that are not live come in whole lines.
                let chunk = match *id {
                    0 | 1 => chunk.clone(),
                    _ => format!("{}\n", chunk.replace('\n', "")),
                };
                let letter = (b'a' + *id as u8) as char;
                let own: String =
                    chunk.chars().map(|c| if c == '\n' { c } else { letter }).collect();
                sent[*id].push_str(&own);
                terminal.put(*id, &own);
            }
            (0..4).for_each(|id| terminal.end(id));
            for (id, sent) in sent.iter().enumerate() {
                let prefix = format!("{id}: ");
                let lines = terminal.lines.iter();
                let shown: Vec<_> = lines.filter_map(|line| line.strip_prefix(&prefix)).collect();
                prop_assert_eq!(shown, sent.lines().collect::<Vec<_>>());
            }
            let mut lines = terminal.lines.iter();
            prop_assert!(lines.all(|line| line.is_empty() || line[1..].starts_with(": ")));
        }
    }
}
