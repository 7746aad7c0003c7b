//! Lines at the foot of a terminal, while output scrolls above them. Pure.
//!
//! The terminal is told to scroll its upper rows only (DECSTBM of the VT100). The cursor stays there, so nobody
//! who writes to the terminal needs to know of the footer.

use std::collections::VecDeque;

/// Saves the cursor and its colours, and brings them back.
const SAVE: &str = "\x1b7";
const RESTORE: &str = "\x1b8";

/// What is too wide for a row, as some characters are for one column, is cut off there; or it goes on in the next
/// row, as at first.
const CUT_OFF: &str = "\x1b[?7l";
const WRAP: &str = "\x1b[?7h";

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
    /// The terminal's rows and columns.
    size: (usize, usize),
    /// The footer's rows. They become no fewer, or the workers' terminals would change with each line.
    height: usize,
}

impl Footer {
    /// Returns how many rows the footer has.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Returns the most lines on a terminal with so many rows.
    pub fn most_lines(rows: usize) -> usize {
        rows.saturating_sub(OUTPUT_ROWS).min(rows / 2)
    }

    /// Draws lines on a terminal of so many rows and columns, and none where it has no room for them.
    pub fn draw(&mut self, lines: &[String], size: (usize, usize), out: &mut VecDeque<u8>) {
        if size != self.size {
            self.erase(out);
            self.size = size;
        }
        let (rows, columns) = size;
        let lines = &lines[..lines.len().min(Footer::most_lines(rows))];
        let more = lines.len().saturating_sub(self.height);
        if more > 0 {
            // The output moves up as far as it must: at the last row this scrolls.
            let text = DOWN.repeat(more) + &format!("\x1b[{more}A");
            out.extend(text.as_bytes());
        }
        self.height += more;
        if self.height == 0 {
            return;
        }
        // The size is as it was, or there was no footer.
        let above = rows - self.height;
        // Each time: a program may have set other rows, and terminals forget them when their size changes.
        let mut text = format!("{SAVE}\x1b[1;{above}r{CUT_OFF}");
        for number in 0..self.height {
            // The first line divides the footer from the output.
            let look = if number == 0 { REVERSE } else { "" };
            let line = lines.get(number).map_or("", String::as_str);
            let line: String = line.chars().take(columns).collect();
            text += &format!("\x1b[{};1H{PLAIN}{look}{END_OF_ROW}{line}", above + number + 1);
        }
        text += WRAP;
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
        /// Something makes all rows scroll.
        Lose,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (0usize..6, any::<bool>()).prop_map(|(count, is_open)| Event::Output(count, is_open)),
            4 => (0usize..9).prop_map(Event::Draw),
            1 => Just(Event::Erase),
            1 => (1u16..14).prop_map(Event::Resize),
            1 => Just(Event::Lose),
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

        fn with_footer(
            &mut self,
            act: impl FnOnce(&mut Footer, (usize, usize), &mut VecDeque<u8>),
        ) {
            let mut out = VecDeque::new();
            let size = (self.rows(), COLUMNS.get().into());
            act(&mut self.footer, size, &mut out);
            self.parser.process(out.make_contiguous());
        }

        fn draw(&mut self, count: usize) {
            let mut lines: Vec<String> =
                (0..count).map(|line| format!("foot {line} of {count}")).collect();
            if let Some(last) = lines.last_mut() {
                *last += ", which is too wide";
            }
            self.with_footer(|footer, size, out| footer.draw(&lines, size, out));
            lines.truncate(Footer::most_lines(self.rows()));
            lines.resize(self.footer.height(), String::new());
            for line in &mut lines {
                line.truncate(COLUMNS.get().into());
            }
            self.shown = lines;
        }

        fn erase(&mut self) {
            self.shown.clear();
            self.with_footer(|footer, _, out| footer.erase(out));
        }

        fn check(&self) {
            let rows: Vec<String> = self.parser.screen().rows(0, COLUMNS.get()).collect();
            let (above, foot) = rows.split_at(rows.len() - self.shown.len());
            assert_eq!(foot, self.shown);
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
                    Event::Lose => {
                        terminal.parser.process(b"\x1b7\x1b[r\x1b8");
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
            footer.draw(&["foot".into()], (rows, 80), &mut out);
            assert_eq!(footer.height(), Footer::most_lines(rows), "{rows}");
        }
        assert_eq!([0, 4, 5, 7, 24].map(Footer::most_lines), [0, 0, 1, 3, 12]);
    }
}
