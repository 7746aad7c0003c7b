//! What one stream of a worker is copied to: the console, a file, and the file for lines that are looked for.

use std::fs::{File, OpenOptions};
use std::io;

use crate::logs::{Filter, LogFile};
use crate::output::{Assembler, Queue, StreamId};
use crate::route::{Route, Which};

/// A stream on its way.
pub struct Copies {
    id: StreamId,
    which: Which,
    route: Route,
    file: Option<LogFile>,
    assembler: Assembler,
}

impl Copies {
    pub fn new(id: StreamId, which: Which, route: Route, file: Option<LogFile>) -> Copies {
        Copies { id, which, route, file, assembler: Assembler::new() }
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

    /// Nobody looks at the console any more. False if the stream was shown there and goes nowhere else.
    pub fn leave_console(&mut self) -> bool {
        let was_shown = self.route.console.take().is_some();
        !was_shown || self.route.file || self.route.filtered.is_some()
    }

    /// Copies what was read. The error is for the user; what can be copied is.
    pub fn put(&mut self, bytes: &[u8], queue: &mut Queue, filter: Option<&mut Filter>) -> Result<(), String> {
        let written = self.file.as_mut().map_or(Ok(()), |file| file.write(bytes));
        written.and(self.segments(Some(bytes), queue, filter))
    }

    /// The stream has ended: what is left of it is a line too.
    pub fn finish(&mut self, queue: &mut Queue, filter: Option<&mut Filter>) -> Result<(), String> {
        self.segments(None, queue, filter)
    }

    fn segments(
        &mut self,
        bytes: Option<&[u8]>,
        queue: &mut Queue,
        mut filter: Option<&mut Filter>,
    ) -> Result<(), String> {
        let mut result = Ok(());
        let Copies { id, route, assembler, .. } = self;
        let put = |previous, segment: &[u8]| {
            if let Some(prefix) = &route.console {
                queue.put(*id, prefix.as_bytes(), previous, segment);
            }
            if let Some((prefix, filter)) = route.filtered.as_ref().zip(filter.as_deref_mut()) {
                if let Err(error) = filter.put(prefix, segment) {
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
