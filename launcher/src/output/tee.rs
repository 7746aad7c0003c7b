//! Copies one stream of a worker to the console, to its file, and to the file of filtered lines.

use std::fs::{File, OpenOptions};
use std::io;

use crate::output::lines::{Assembler, Segment, Source, StreamId};
use crate::output::log_file::{Filter, LogFile};
use crate::output::queue::OutputQueue;
use crate::output::routing::{Route, StreamKind};

/// The time at which an incomplete line is shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Partial {
    /// Once it is complete.
    Never,
    /// After the worker, which may have asked something, has been silent for a while.
    AfterQuiet,
    AtOnce,
}

/// One stream of a worker and where it goes.
pub struct StreamTee {
    pub id: StreamId,
    which: StreamKind,
    pub partial: Partial,
    route: Route,
    file: Option<LogFile>,
    assembler: Assembler,
}

impl StreamTee {
    /// Makes the tee of a worker's stream.
    pub fn new(id: StreamId, which: StreamKind, route: Route, file: Option<LogFile>) -> StreamTee {
        StreamTee { id, which, partial: Partial::Never, route, file, assembler: Assembler::new() }
    }

    /// Returns the file that the worker writes to itself; None if flow-launch must read the stream.
    pub fn direct(&mut self) -> io::Result<Option<File>> {
        match &mut self.file {
            _ if !self.route.is_direct(self.which) => Ok(None),
            Some(file) => Ok(file.take()),
            None => OpenOptions::new().write(true).open("/dev/null").map(Some),
        }
    }

    /// Returns the stream's own file, which the worker may be writing itself.
    pub fn file(&self) -> Option<&LogFile> {
        self.file.as_ref()
    }

    /// Takes what is left once the stream's worker has ended, for a process that reads on.
    pub fn take_rest(&mut self) -> (Option<String>, Option<File>) {
        let file = self.file.as_mut().and_then(LogFile::take);
        (self.route.console.take(), file)
    }

    /// Whether the console shows the stream.
    pub fn is_shown(&self) -> bool {
        self.route.console.is_some()
    }

    /// Returns the number of columns of the terminal that the prefix takes.
    pub fn prefix_width(&self) -> usize {
        self.route.console.as_ref().map_or(0, |prefix| prefix.chars().count())
    }

    /// Whether an incomplete line is to be shown after a while.
    pub fn is_due(&self) -> bool {
        self.partial == Partial::AfterQuiet && self.is_shown() && self.assembler.holds()
    }

    /// Whether no other stream is in the middle of a line.
    pub fn may_show(&self, queue: &OutputQueue) -> bool {
        queue.is_free(self.id)
    }

    /// Shows an incomplete line.
    pub fn show_partial(&mut self, queue: &mut OutputQueue) {
        if let (Some(prefix), Some(segment)) = (&self.route.console, self.assembler.pass()) {
            let source = Source {
                id: self.id,
                prefix: prefix.as_bytes(),
                is_live: self.partial == Partial::AtOnce,
            };
            queue.put(&source, segment.rest());
        }
    }

    /// Notes that the reader of the console has gone. False if the stream was shown there and goes
    /// nowhere else.
    pub fn leave_console(&mut self) -> bool {
        let was_shown = self.route.console.take().is_some();
        !was_shown || self.route.file || self.route.filtered.is_some()
    }

    /// Copies bytes that were read. On an error, which is for the user, the other copies are still
    /// made.
    pub fn put(
        &mut self,
        bytes: &[u8],
        queue: &mut OutputQueue,
        filter: Option<&mut Filter>,
    ) -> Result<(), String> {
        let written = self.file.as_mut().map_or(Ok(()), |file| file.write(bytes));
        let result = written.and(self.segments(Some(bytes), queue, filter));
        if self.partial == Partial::AtOnce {
            self.show_partial(queue);
        }
        result
    }

    /// Notes that the stream has ended: the rest of it is a line too.
    pub fn finish(
        &mut self,
        queue: &mut OutputQueue,
        filter: Option<&mut Filter>,
    ) -> Result<(), String> {
        let result = self.segments(None, queue, filter);
        queue.end(self.id);
        result
    }

    fn segments(
        &mut self,
        bytes: Option<&[u8]>,
        queue: &mut OutputQueue,
        mut filter: Option<&mut Filter>,
    ) -> Result<(), String> {
        let mut result = Ok(());
        let StreamTee { id, partial, route, assembler, .. } = self;
        let put = |segment: Segment| {
            if let Some(prefix) = &route.console {
                let source = Source {
                    id: *id,
                    prefix: prefix.as_bytes(),
                    is_live: *partial == Partial::AtOnce,
                };
                queue.put(&source, segment.rest());
            }
            if let Some((prefix, filter)) = route.filtered.as_ref().zip(filter.as_deref_mut())
                && let Err(error) = filter.put(prefix, segment.bytes)
            {
                result = Err(error);
            }
        };
        match bytes {
            Some(bytes) => assembler.feed(bytes, put),
            None => assembler.finish(put),
        }
        result
    }
}
