//! What one stream of a worker is copied to: the console, a file, and the file for lines that are
//! looked for.

use std::fs::{File, OpenOptions};
use std::io;

use crate::output::lines::{Assembler, Queue, Segment, Source, StreamId};
use crate::output::log_file::{Filter, LogFile};
use crate::output::routing::{Route, StreamKind};

/// When a line that is not complete is shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Partial {
    /// When it is.
    Never,
    /// When the worker, who may have asked something, has written nothing more for a while.
    AfterQuiet,
    AtOnce,
}

/// A stream on its way.
pub struct StreamTee {
    pub id: StreamId,
    which: StreamKind,
    pub partial: Partial,
    route: Route,
    file: Option<LogFile>,
    assembler: Assembler,
}

impl StreamTee {
    pub fn new(id: StreamId, which: StreamKind, route: Route, file: Option<LogFile>) -> StreamTee {
        StreamTee { id, which, partial: Partial::Never, route, file, assembler: Assembler::new() }
    }

    /// What the worker is to write to itself; none where flow-launch must read what it writes.
    pub fn direct(&mut self) -> io::Result<Option<File>> {
        match &mut self.file {
            _ if !self.route.is_direct(self.which) => Ok(None),
            Some(file) => Ok(file.take()),
            None => OpenOptions::new().write(true).open("/dev/null").map(Some),
        }
    }

    /// Its own file, which the worker may be writing itself.
    pub fn file(&self) -> Option<&LogFile> {
        self.file.as_ref()
    }

    pub fn is_shown(&self) -> bool {
        self.route.console.is_some()
    }

    /// How many columns are not for the worker.
    pub fn prefix_width(&self) -> usize {
        self.route.console.as_ref().map_or(0, |prefix| prefix.chars().count())
    }

    /// There is a line that is not complete, to be shown after a while.
    pub fn is_due(&self) -> bool {
        self.partial == Partial::AfterQuiet && self.is_shown() && self.assembler.holds()
    }

    /// It would not come in the middle of another stream's line.
    pub fn may_show(&self, queue: &Queue) -> bool {
        queue.is_free(self.id)
    }

    /// Shows what there is of a line that is not complete.
    pub fn show_partial(&mut self, queue: &mut Queue) {
        if let (Some(prefix), Some(segment)) = (&self.route.console, self.assembler.pass()) {
            let source = Source {
                id: self.id,
                prefix: prefix.as_bytes(),
                is_live: self.partial == Partial::AtOnce,
            };
            queue.put(&source, segment.rest());
        }
    }

    /// Nobody looks at the console any more. False if the stream was shown there and goes nowhere
    /// else.
    pub fn leave_console(&mut self) -> bool {
        let was_shown = self.route.console.take().is_some();
        !was_shown || self.route.file || self.route.filtered.is_some()
    }

    /// Copies what was read. The error is for the user; what can be copied is.
    pub fn put(
        &mut self,
        bytes: &[u8],
        queue: &mut Queue,
        filter: Option<&mut Filter>,
    ) -> Result<(), String> {
        let written = self.file.as_mut().map_or(Ok(()), |file| file.write(bytes));
        let result = written.and(self.segments(Some(bytes), queue, filter));
        if self.partial == Partial::AtOnce {
            self.show_partial(queue);
        }
        result
    }

    /// The stream has ended: what is left of it is a line too.
    pub fn finish(&mut self, queue: &mut Queue, filter: Option<&mut Filter>) -> Result<(), String> {
        let result = self.segments(None, queue, filter);
        queue.end(self.id);
        result
    }

    fn segments(
        &mut self,
        bytes: Option<&[u8]>,
        queue: &mut Queue,
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
            if let Some((prefix, filter)) = route.filtered.as_ref().zip(filter.as_deref_mut()) {
                if let Err(error) = filter.put(prefix, segment.bytes) {
                    result = Err(error);
                }
            }
        };
        match bytes {
            Some(bytes) => assembler.feed(bytes, put),
            None => assembler.finish(put),
        }
        result
    }
}
