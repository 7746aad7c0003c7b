//! Lines at the foot of a terminal, while output scrolls above them. Pure.
//!
//! The terminal is told to scroll its upper rows only (DECSTBM of the VT100). The cursor stays there, so nobody
//! who writes to the terminal needs to know of the footer.

use std::collections::VecDeque;

/// Saves the cursor and its colours, and brings them back.
const SAVE: &str = "\x1b7";
const RESTORE: &str = "\x1b8";

/// All rows scroll, as at first. Setting the rows moves the cursor.
const ALL_ROWS: &str = "\x1b[r";

/// Erases from the cursor to the end of the row, and of the screen.
const END_OF_ROW: &str = "\x1b[K";
const END_OF_SCREEN: &str = "\x1b[J";

/// Goes down in the column, as a line feed does to which the terminal's modes add no return.
const DOWN: &str = "\x0b";

const PLAIN: &str = "\x1b[m";
const REVERSE: &str = "\x1b[7m";

/// The fewest rows that are left to the output.
const OUTPUT_ROWS: usize = 4;

/// The footer, as far as it is on the terminal.
#[derive(Default)]
pub struct Footer {
    /// The terminal's rows.
    rows: usize,
    /// Those of the footer.
    height: usize,
}

impl Footer {
    /// Returns how many rows the footer has.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Returns how many lines there may be on a terminal with so many rows.
    pub fn most_lines(rows: usize) -> usize {
        rows.saturating_sub(OUTPUT_ROWS).min(rows / 2)
    }

    /// Draws lines on a terminal with so many rows, and none where it has no room for them. The terminal
    /// cuts off what is too wide.
    pub fn draw(&mut self, lines: &[String], rows: usize, out: &mut VecDeque<u8>) {
        if rows != self.rows {
            self.erase(out);
            self.rows = rows;
        }
        let lines = &lines[..lines.len().min(Footer::most_lines(rows))];
        let before = self.height;
        self.height = lines.len();
        if let more @ 1.. = self.height.saturating_sub(before) {
            // The output moves up as far as it must: at the last row this scrolls.
            let text = DOWN.repeat(more) + &format!("\x1b[{more}A");
            out.extend(text.as_bytes());
        }
        let mut text = SAVE.to_string();
        if self.height != before {
            text += &format!("\x1b[1;{}r", rows - self.height);
        }
        for row in rows - before.max(self.height)..rows - self.height {
            text += &format!("\x1b[{};1H{PLAIN}{END_OF_ROW}", row + 1);
        }
        for (number, line) in lines.iter().enumerate() {
            let row = rows - self.height + number + 1;
            // The first line divides the footer from the output.
            let look = if number == 0 { REVERSE } else { "" };
            text += &format!("\x1b[{row};1H{PLAIN}{look}{line}{END_OF_ROW}");
        }
        text += RESTORE;
        out.extend(text.as_bytes());
    }

    /// Leaves the terminal as it is without a footer.
    pub fn erase(&mut self, out: &mut VecDeque<u8>) {
        if self.height > 0 {
            out.extend(Footer::erasure().as_bytes());
        }
        *self = Footer::default();
    }

    /// Returns what erases a footer of any height.
    pub fn erasure() -> String {
        [SAVE, ALL_ROWS, RESTORE, PLAIN, END_OF_SCREEN, RESTORE].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZero;

    use proptest::prelude::*;

    const COLUMNS: NonZero<u16> = NonZero::new(20).unwrap();

    #[derive(Clone, Debug)]
    enum Event {
        /// Lines of output: this many, and whether the last one is incomplete.
        Output(usize, bool),
        Draw(usize),
        Erase,
        Resize(u16),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (0usize..6, any::<bool>()).prop_map(|(count, is_open)| Event::Output(count, is_open)),
            4 => (0usize..9).prop_map(Event::Draw),
            1 => Just(Event::Erase),
            1 => (1u16..14).prop_map(Event::Resize),
        ]
    }

    /// A terminal, and what was written to it.
    struct Terminal {
        parser: vt100::Parser,
        footer: Footer,
        shown: Vec<String>,
        has_grown: bool,
        /// All output; the last line is incomplete, or empty.
        output: Vec<String>,
    }

    impl Terminal {
        fn new() -> Terminal {
            let parser = vt100::Parser::new(NonZero::new(10).unwrap(), COLUMNS, 0);
            Terminal {
                parser,
                footer: Footer::default(),
                shown: vec![],
                has_grown: false,
                output: vec![String::new()],
            }
        }

        fn rows(&self) -> usize {
            self.parser.screen().size().0.get().into()
        }

        fn write(&mut self, text: &str) {
            self.output.last_mut().unwrap().push_str(text);
            self.parser.process(text.as_bytes());
        }

        fn end_line(&mut self) {
            self.output.push(String::new());
            self.parser.process(b"\r\n");
        }

        fn with_footer(&mut self, act: impl FnOnce(&mut Footer, usize, &mut VecDeque<u8>)) {
            let mut out = VecDeque::new();
            let rows = self.rows();
            act(&mut self.footer, rows, &mut out);
            self.parser.process(out.make_contiguous());
        }

        fn draw(&mut self, count: usize) {
            self.shown = (0..count).map(|line| format!("foot {line} of {count}")).collect();
            let lines = self.shown.clone();
            self.with_footer(|footer, rows, out| footer.draw(&lines, rows, out));
        }

        fn erase(&mut self) {
            self.shown.clear();
            self.with_footer(|footer, _, out| footer.erase(out));
        }

        fn check(&self) {
            let rows: Vec<String> = self.parser.screen().rows(0, COLUMNS.get()).collect();
            let count = self.shown.len().min(Footer::most_lines(self.rows()));
            let (above, foot) = rows.split_at(rows.len() - count);
            assert_eq!(foot, &self.shown[..count]);
            // The cursor is at the end of the output, and above it is the rest of that.
            let (row, column) = self.parser.screen().cursor_position();
            let (output, below) = above.split_at(usize::from(row) + 1);
            let (last, full) = output.split_last().unwrap();
            let mut first = 0;
            if self.has_grown {
                // There may be empty rows at its top.
                first = full.iter().position(|row| !row.is_empty()).unwrap_or(full.len());
            }
            let mut expected = self.output[..self.output.len() - 1].to_vec();
            expected.drain(..expected.len() - (full.len() - first));
            assert_eq!(full[first..], expected);
            assert_eq!(last, self.output.last().unwrap());
            assert!(below.iter().all(String::is_empty), "{rows:?}");
            assert_eq!(usize::from(column), self.output.last().unwrap().len());
        }
    }

    proptest! {
        /// Whatever is written, and however the footer changes: it is at the foot, and the output is above,
        /// with no line lost or doubled.
        #[test]
        fn output_scrolls_above(events in prop::collection::vec(event(), 0..40)) {
            let mut terminal = Terminal::new();
            let mut number = 0;
            for event in events {
                match event {
                    Event::Output(count, is_open) => {
                        for _ in 0..count {
                            number += 1;
                            terminal.write(&format!("l{number}"));
                            terminal.end_line();
                        }
                        if is_open && terminal.output.last().unwrap().len() < 15 {
                            terminal.write("..");
                        }
                    }
                    Event::Draw(count) => terminal.draw(count),
                    Event::Erase => terminal.erase(),
                    Event::Resize(more) => {
                        // What a terminal does with its rows then is its own affair, so it grows.
                        let rows = NonZero::new(terminal.rows() as u16 + more).unwrap();
                        terminal.parser.screen_mut().set_size(rows, COLUMNS);
                        terminal.has_grown = true;
                        let count = terminal.shown.len();
                        terminal.draw(count);
                    }
                }
                terminal.check();
            }
            terminal.erase();
            terminal.check();
        }
    }

    #[test]
    fn a_terminal_without_room_has_no_footer() {
        let mut out = VecDeque::new();
        let mut footer = Footer::default();
        for rows in 0..5 {
            footer.draw(&["foot".into()], rows, &mut out);
            assert_eq!(footer.height(), Footer::most_lines(rows), "{rows}");
        }
        assert_eq!([0, 4, 5, 7, 24].map(Footer::most_lines), [0, 0, 1, 3, 12]);
    }
}
