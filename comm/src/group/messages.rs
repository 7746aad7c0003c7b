//! Messages between two ranks.

use super::ProcessGroup;
use super::lane::Lane;
use crate::buffer::Buffer;
use crate::error::Result;
use crate::kind::Kind;

impl ProcessGroup {
    /// Sends `data` to rank `to`, which calls [`ProcessGroup::recv`] with the same size and type.
    /// May return before it does. Messages between two ranks keep their order. The message has tag
    /// 0.
    pub fn send<B: Buffer + ?Sized>(&self, data: &B, to: usize) -> Result<()> {
        self.send_with_tag(data, to, 0)
    }

    /// Receives the next message with tag 0 of rank `from`.
    pub fn recv<B: Buffer + ?Sized>(&self, buffer: &mut B, from: usize) -> Result<()> {
        self.recv_with_tag(buffer, from, 0)
    }

    /// Sends as [`ProcessGroup::send`] does, to be received by [`ProcessGroup::recv_with_tag`] or
    /// [`ProcessGroup::recv_any`] with the same tag.
    pub fn send_with_tag<B: Buffer + ?Sized>(&self, data: &B, to: usize, tag: u32) -> Result<()> {
        self.caller().check_peer("send", to)?;
        let (data, dtype) = self.caller().view("send", data)?;
        let message = self.core().message(Kind::Send, Some(to), (data, dtype), tag, self.label);
        self.run_in_order(Lane::To(to), |group| {
            group.begin_message(&message)?;
            group.host.sender.send(data, &message, to)
        })
    }

    /// Receives the next message of rank `from` with this tag, as MPI matches them. Messages with
    /// the same tag keep their order. Those with other tags that come before are kept, in ordinary
    /// memory, until they are asked for. There is no limit to how much is kept but the memory of
    /// the machine.
    ///
    /// Several threads may receive from the same rank at once, with different tags.
    pub fn recv_with_tag<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        from: usize,
        tag: u32,
    ) -> Result<()> {
        self.caller().check_peer("recv", from)?;
        let (data, dtype) = self.caller().view_mut("recv", buffer)?;
        let message = self.core().message(Kind::Recv, Some(from), (data, dtype), tag, self.label);
        self.run_in_order(Lane::From(from, tag), |group| {
            group.begin_message(&message)?;
            group.host.receiver.recv(data, &message, from)
        })
    }

    /// Receives as [`ProcessGroup::recv_with_tag`] does, from whichever rank has a message with
    /// this tag first. Returns that rank. If several have one, they are served in turn.
    ///
    /// A message that also fits a `recv_with_tag` of another thread, or an asynchronous one, goes
    /// to either of the two.
    ///
    /// # Errors
    ///
    /// Beside those of every receive: a rank has died, or all others have left the group, and none
    /// has left such a message behind. Over several nodes without flow-launch, only the first ranks
    /// of nodes see each other die. Otherwise a rank on another node may have died, or left, and
    /// have never sent this one anything. It is then missed when the time is over.
    pub fn recv_any<B: Buffer + ?Sized>(&self, buffer: &mut B, tag: u32) -> Result<usize> {
        if self.world_size() == 1 {
            return Err(self
                .caller()
                .argument("recv_any", "there is no other rank in the group".into()));
        }
        let (data, dtype) = self.caller().view_mut("recv_any", buffer)?;
        let message = self.core().message(Kind::Recv, None, (data, dtype), tag, self.label);
        self.run_in_order(Lane::FromAny(tag), |group| {
            group.begin_message(&message)?;
            group.host.any_receiver.recv(data, &message)
        })
    }
}
