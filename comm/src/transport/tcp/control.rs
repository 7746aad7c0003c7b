//! The two sockets between processes, and the notices that go over the second.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;

use crate::transport::DisconnectReason;

/// A socket that is idle for so long is probed, at such an interval. It is broken when so many
/// probes were not answered. It is also broken when a notice was not acknowledged for as long as
/// that takes.
const PROBE_AFTER: Duration = Duration::from_secs(4);
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
const PROBES: u32 = 3;

/// A channel's number, and a group's: a hash of its name.
pub type ChannelId = u64;
/// The digest of a group's name.
pub type GroupId = u64;

/// The two sockets of a connection.
#[derive(Clone)]
pub struct Sockets {
    pub data: Arc<TcpStream>,
    pub control: Arc<TcpStream>,
}

impl Sockets {
    /// Sockets that do not block and send at once.
    pub fn new(data: TcpStream, control: TcpStream) -> io::Result<Self> {
        data.set_nodelay(true)?;
        control.set_nodelay(true)?;
        watch(&control)?;
        data.set_nonblocking(true)?;
        control.set_nonblocking(true)?;
        Ok(Self { data: Arc::new(data), control: Arc::new(control) })
    }
}

/// Makes the kernel report within ten seconds that the other machine cannot be reached any more.
pub fn watch(control: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(control, true)?;
    sockopt::set_tcp_keepidle(control, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(control, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(control, PROBES)?;
    let longest = PROBE_AFTER + PROBE_INTERVAL * PROBES;
    Ok(sockopt::set_tcp_user_timeout(control, longest.as_millis() as u32)?)
}

/// Returns how the other process has gone, if this is what its socket says.
pub fn reason(error: &io::Error) -> DisconnectReason {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => DisconnectReason::Ended,
        _ => DisconnectReason::OutOfReach(error.to_string()),
    }
}

/// A message of one process to the other about a channel.
pub enum Notice {
    /// It uses the channel, which is one of this group: it wants to know if the other is not, or no
    /// longer, in the group.
    Open(GroupId),
    /// The number of bytes that the other may send in all.
    Limit(u64),
    /// The way in which it has left the channel, in which it has sent so many bytes.
    End(DisconnectReason, u64),
}

/// Bytes before the text: the channel, a number, the kind and the length of the text (u32),
/// little-endian.
const HEAD: usize = 21;
const LIMIT: u8 = 0;
const LEFT: u8 = 1;
const FAILED: u8 = 2;
const OPEN: u8 = 3;

impl Notice {
    /// Appends the notice about a channel to `out`.
    pub fn encode(&self, channel: ChannelId, out: &mut Vec<u8>) {
        let (kind, number, text) = match self {
            Self::Open(group) => (OPEN, group, ""),
            Self::Limit(limit) => (LIMIT, limit, ""),
            Self::End(DisconnectReason::Left, sent) => (LEFT, sent, ""),
            Self::End(DisconnectReason::Ended, sent) => (FAILED, sent, ""),
            Self::End(
                DisconnectReason::Failed(why)
                | DisconnectReason::OutOfReach(why)
                | DisconnectReason::Refused(why),
                sent,
            ) => (FAILED, sent, &why[..]),
        };
        out.extend(channel.to_le_bytes());
        out.extend(number.to_le_bytes());
        out.push(kind);
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
    }

    /// Takes the next notice, once all of it is there.
    pub fn decode(bytes: &mut Vec<u8>) -> Option<(ChannelId, Self)> {
        let (channel, rest) = bytes.split_first_chunk()?;
        let (number, rest) = rest.split_first_chunk()?;
        let (&[kind], rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        let text = String::from_utf8_lossy(rest.get(..length)?).into_owned();
        let channel = u64::from_le_bytes(*channel);
        let number = u64::from_le_bytes(*number);
        bytes.drain(..HEAD + length);
        let notice = match kind {
            OPEN => Self::Open(number),
            LIMIT => Self::Limit(number),
            LEFT => Self::End(DisconnectReason::Left, number),
            _ if text.is_empty() => Self::End(DisconnectReason::Ended, number),
            _ => Self::End(DisconnectReason::Failed(text), number),
        };
        Some((channel, notice))
    }
}
