//! Messages: send and recv.
//!
//! | file | subject |
//! |---|---|
//! | `ops` | a batch of messages, as programs list them |
//! | `message` | a message on its way between nodes |
//! | `send` | sending: into the receiver's mailbox, or over a connection |
//! | `matching` | how messages find their receivers, by sender and tag |
//! | `queue` | one sender's messages, with those that came before anybody asked for them |
//! | `recv` | receiving from one rank |
//! | `recv_any` | receiving from whichever rank sends first |

mod matching;
mod message;
mod ops;
mod queue;
mod recv;
mod recv_any;
mod send;

pub use matching::Matcher;
pub use ops::P2pOp;
pub use recv::Receiver;
pub use recv_any::AnyReceiver;
pub use send::Sender;
