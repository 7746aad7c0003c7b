//! Messages of threads to the event loop, which waits for them in `poll`.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{self, Receiver, Sender};

/// The event loop's side.
pub struct Mailbox<T> {
    messages: Receiver<T>,
    /// Holds bytes while there are messages.
    wake_pipe: PipeReader,
}

/// A thread's side.
pub struct MailSender<T> {
    messages: Sender<T>,
    wake_pipe: PipeWriter,
}

/// Makes both sides.
pub fn mailbox<T>() -> io::Result<(MailSender<T>, Mailbox<T>)> {
    let (sender, messages) = mpsc::channel();
    let (wake_pipe, wake_writer) = io::pipe()?;
    rustix::io::ioctl_fionbio(&wake_pipe, true)?;
    Ok((MailSender { messages: sender, wake_pipe: wake_writer }, Mailbox { messages, wake_pipe }))
}

impl<T> Mailbox<T> {
    /// Returns the next message, if one has come.
    pub fn poll(&mut self) -> Option<T> {
        if let Ok(message) = self.messages.try_recv() {
            return Some(message);
        }
        // The byte comes after its message, so none is lost with the bytes of those before it.
        while matches!(self.wake_pipe.read(&mut [0; 64]), Ok(1..)) {}
        self.messages.try_recv().ok()
    }

    /// Returns the descriptor that is readable when a message has come.
    pub fn watch(&self) -> BorrowedFd<'_> {
        self.wake_pipe.as_fd()
    }
}

impl<T> MailSender<T> {
    pub fn try_clone(&self) -> io::Result<MailSender<T>> {
        Ok(MailSender { messages: self.messages.clone(), wake_pipe: self.wake_pipe.try_clone()? })
    }

    /// False if the event loop has gone.
    pub fn send(&self, message: T) -> bool {
        self.messages.send(message).is_ok() && (&self.wake_pipe).write_all(b"!").is_ok()
    }
}
