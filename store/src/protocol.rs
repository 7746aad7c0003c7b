//! The store's wire protocol.
//!
//! Both directions carry frames: the length of the rest (u32), an operation (u8), its fields.
//! Numbers are little-endian. A byte string is its length (u32) and its bytes. An optional one is
//! preceded by 0 or 1 (u8), a list by its length (u32).
//!
//! | request | fields | replies |
//! |---|---|---|
//! | 0 hello | `FLOW`, version (u8) | challenge, refused |
//! | 1 set | key, value | done |
//! | 2 get | key, timeout in us (u64) | value, missing |
//! | 3 wait | keys, timeout in us (u64) | done, missing |
//! | 4 add | key, increment (i64) | number, refused |
//! | 5 compare and set | key, expected (optional), new value | done, differs |
//! | 6 send | message | done, refused |
//! | 7 will | message, silence in us (u64) | done, refused |
//! | 8 proof | HMAC-SHA256 of the challenge with the token as key | done, refused |
//! | 9 delete | keys | number |
//! | 10 once | client (u64), number (u64), request | that request's |
//! | 11 changes | replica (u64), number (u64), timeout in us (u64) | changes |
//!
//! | reply | fields |
//! |---|---|
//! | 0 done | |
//! | 1 value | value |
//! | 2 number | i64 |
//! | 3 missing (after the timeout) | keys |
//! | 4 differs | present value (optional) |
//! | 5 refused | reason |
//! | 6 challenge | random bytes |
//! | 7 elsewhere | address, empty if it is not known |
//! | 8 changes | number (u64), whether there are more (u8), requests (list) |
//!
//! A client sends *once* what may not be done twice, if it can be that it sends it again: after its
//! server is lost, to the one that has the replica. A number counts a client's requests of this kind.
//!
//! A replica, which has a number itself, asks for *changes* beyond those up to a number. [`ALL_CHANGES`] asks for all that there
//! ever were. They are set and delete, and 12 answered: the client (u64), the number (u64), and the
//! reply to that request.
//!
//! The first request is hello, the second proof, and each follows the reply to the last: whoever
//! sends anything else is cut off. The token itself is never sent. All else is, in clear. Who can
//! read or change what is on the wire between two machines can also read or change the store.

use std::io::{self, ErrorKind};
use std::time::Duration;

/// The version in hello; both sides must have the same.
pub const VERSION: u8 = 4;
/// The largest frame before a client is admitted, without its length.
pub const MAX_HELLO: usize = 64;
/// The largest frame thereafter, without its length.
pub const MAX_FRAME: usize = 64 << 20;
/// The largest reply, without its length: the change that a largest request has made.
pub const MAX_REPLY: usize = MAX_FRAME + 64;
/// The longest message of a will: every client may leave one.
pub const MAX_WILL: usize = 64 << 10;
/// No wait is longer: it keeps sums of times from overflowing.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// In place of a number, what a new replica asks with.
pub const ALL_CHANGES: u64 = u64::MAX;

const MAGIC: &[u8] = b"FLOW";

/// The bytes of a challenge.
pub type Nonce = [u8; 16];

/// Takes the frame that `input` consists of, without its length; `None` if it is not complete.
///
/// # Errors
/// It is longer than `limit`, or more follows.
pub fn unframe(input: &[u8], limit: usize) -> io::Result<Option<&[u8]>> {
    let Some((length, frame)) = input.split_first_chunk() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > limit || frame.len() > length {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok((frame.len() == length).then_some(frame))
}

/// A request of a client.
pub enum Request<'a> {
    Hello { version: u8 },
    Set { key: &'a str, value: &'a [u8] },
    Get { key: &'a str, timeout: Duration },
    Wait { keys: Vec<&'a str>, timeout: Duration },
    Add { key: &'a str, increment: i64 },
    CompareAndSet { key: &'a str, expected: Option<&'a [u8]>, new: &'a [u8] },
    Send { message: &'a [u8] },
    Will { message: &'a [u8], silence: Duration },
    Proof { proof: &'a [u8] },
    Delete { keys: Vec<&'a str> },
    Once { client: u64, number: u64, request: &'a [u8] },
    Changes { replica: u64, after: u64, timeout: Duration },
    Answered { client: u64, number: u64, reply: &'a [u8] },
}

/// A reply of the server.
pub enum Reply<'a> {
    Done,
    Value(&'a [u8]),
    Number(i64),
    Missing(Vec<&'a str>),
    Differs(Option<&'a [u8]>),
    Refused(&'a str),
    Challenge(Nonce),
    Elsewhere(&'a str),
    Changes { number: u64, more: bool, changes: Vec<&'a [u8]> },
}

impl<'a> Request<'a> {
    /// Writes the request as a frame, with its length in front.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Request::Hello { version } => Frame::new(0).raw(MAGIC).raw(&[*version]),
            Request::Set { key, value } => Frame::new(1).bytes(key.as_bytes()).bytes(value),
            Request::Get { key, timeout } => Frame::new(2).bytes(key.as_bytes()).timeout(*timeout),
            Request::Wait { keys, timeout } => Frame::new(3).list(keys).timeout(*timeout),
            Request::Add { key, increment } => {
                Frame::new(4).bytes(key.as_bytes()).raw(&increment.to_le_bytes())
            }
            Request::CompareAndSet { key, expected, new } => {
                Frame::new(5).bytes(key.as_bytes()).optional(*expected).bytes(new)
            }
            Request::Send { message } => Frame::new(6).bytes(message),
            Request::Will { message, silence } => Frame::new(7).bytes(message).timeout(*silence),
            Request::Proof { proof } => Frame::new(8).bytes(proof),
            Request::Delete { keys } => Frame::new(9).list(keys),
            Request::Once { client, number, request } => {
                Frame::new(10).number(*client).number(*number).bytes(request)
            }
            Request::Changes { replica, after, timeout } => {
                Frame::new(11).number(*replica).number(*after).timeout(*timeout)
            }
            Request::Answered { client, number, reply } => {
                Frame::new(12).number(*client).number(*number).bytes(reply)
            }
        }
        .finish()
    }

    /// Reads the request in a frame (without its length), `None` if it is none.
    pub fn decode(frame: &'a [u8]) -> Option<Request<'a>> {
        let mut fields = Fields(frame);
        let request = match fields.byte()? {
            0 => {
                fields.raw(MAGIC.len()).filter(|magic| *magic == MAGIC)?;
                let version = fields.byte()?;
                // Another version may have more to say.
                fields.0 = &[];
                Request::Hello { version }
            }
            1 => Request::Set { key: fields.text()?, value: fields.bytes()? },
            2 => Request::Get { key: fields.text()?, timeout: fields.timeout()? },
            3 => Request::Wait { keys: fields.list()?, timeout: fields.timeout()? },
            4 => Request::Add { key: fields.text()?, increment: fields.i64()? },
            5 => Request::CompareAndSet {
                key: fields.text()?,
                expected: fields.optional()?,
                new: fields.bytes()?,
            },
            6 => Request::Send { message: fields.bytes()? },
            7 => Request::Will { message: fields.bytes()?, silence: fields.timeout()? },
            8 => Request::Proof { proof: fields.bytes()? },
            9 => Request::Delete { keys: fields.list()? },
            10 => Request::Once {
                client: fields.u64()?,
                number: fields.u64()?,
                request: fields.bytes()?,
            },
            11 => Request::Changes {
                replica: fields.u64()?,
                after: fields.u64()?,
                timeout: fields.timeout()?,
            },
            12 => Request::Answered {
                client: fields.u64()?,
                number: fields.u64()?,
                reply: fields.bytes()?,
            },
            _ => return None,
        };
        fields.0.is_empty().then_some(request)
    }
}

impl<'a> Reply<'a> {
    /// Writes the reply as a frame, with its length in front.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Reply::Done => Frame::new(0),
            Reply::Value(value) => Frame::new(1).bytes(value),
            Reply::Number(number) => Frame::new(2).raw(&number.to_le_bytes()),
            Reply::Missing(keys) => Frame::new(3).list(keys),
            Reply::Differs(present) => Frame::new(4).optional(*present),
            Reply::Refused(reason) => Frame::new(5).bytes(reason.as_bytes()),
            Reply::Challenge(nonce) => Frame::new(6).raw(nonce),
            Reply::Elsewhere(address) => Frame::new(7).bytes(address.as_bytes()),
            Reply::Changes { number, more, changes } => {
                let frame = Frame::new(8).number(*number).raw(&[*more as u8]);
                let frame = frame.length(changes.len());
                changes.iter().fold(frame, |frame, change| frame.bytes(change))
            }
        }
        .finish()
    }

    /// Reads the reply in a frame (without its length), `None` if it is none.
    pub fn decode(frame: &'a [u8]) -> Option<Reply<'a>> {
        let mut fields = Fields(frame);
        let reply = match fields.byte()? {
            0 => Reply::Done,
            1 => Reply::Value(fields.bytes()?),
            2 => Reply::Number(fields.i64()?),
            3 => Reply::Missing(fields.list()?),
            4 => Reply::Differs(fields.optional()?),
            5 => Reply::Refused(fields.text()?),
            6 => Reply::Challenge(fields.array()?),
            7 => Reply::Elsewhere(fields.text()?),
            8 => Reply::Changes {
                number: fields.u64()?,
                more: fields.byte()? != 0,
                changes: (0..fields.length()?).map(|_| fields.bytes()).collect::<Option<_>>()?,
            },
            _ => return None,
        };
        fields.0.is_empty().then_some(reply)
    }
}

/// A frame being written.
struct Frame(Vec<u8>);

impl Frame {
    fn new(operation: u8) -> Frame {
        Frame(vec![0, 0, 0, 0, operation])
    }

    fn raw(mut self, bytes: &[u8]) -> Frame {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Lengths beyond u32 are in frames beyond [`MAX_FRAME`], which are never sent.
    fn length(self, length: usize) -> Frame {
        self.raw(&(length as u32).to_le_bytes())
    }

    fn bytes(self, bytes: &[u8]) -> Frame {
        self.length(bytes.len()).raw(bytes)
    }

    fn optional(self, bytes: Option<&[u8]>) -> Frame {
        match bytes {
            None => self.raw(&[0]),
            Some(bytes) => self.raw(&[1]).bytes(bytes),
        }
    }

    fn number(self, number: u64) -> Frame {
        self.raw(&number.to_le_bytes())
    }

    fn list(self, texts: &[&str]) -> Frame {
        texts.iter().fold(self.length(texts.len()), |frame, text| frame.bytes(text.as_bytes()))
    }

    fn timeout(self, timeout: Duration) -> Frame {
        let micros = timeout.min(MAX_TIMEOUT).as_micros() as u64;
        self.raw(&micros.to_le_bytes())
    }

    fn finish(mut self) -> Vec<u8> {
        let length = (self.0.len() - 4) as u32;
        self.0[..4].copy_from_slice(&length.to_le_bytes());
        self.0
    }
}

/// The unread rest of a frame. Every reader returns `None` where the frame ends too early.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn raw(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.raw(N)?.try_into().ok()
    }

    fn byte(&mut self) -> Option<u8> {
        Some(self.array::<1>()?[0])
    }

    fn i64(&mut self) -> Option<i64> {
        Some(i64::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.array()?))
    }

    fn length(&mut self) -> Option<usize> {
        Some(u32::from_le_bytes(self.array()?) as usize)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.length()?;
        self.raw(length)
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    fn optional(&mut self) -> Option<Option<&'a [u8]>> {
        match self.byte()? {
            0 => Some(None),
            1 => Some(Some(self.bytes()?)),
            _ => None,
        }
    }

    fn list(&mut self) -> Option<Vec<&'a str>> {
        let length = self.length()?;
        (0..length).map(|_| self.text()).collect()
    }

    fn timeout(&mut self) -> Option<Duration> {
        Some(Duration::from_micros(self.u64()?).min(MAX_TIMEOUT))
    }
}
