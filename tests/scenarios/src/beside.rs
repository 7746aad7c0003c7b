//! Operations that run beside the caller.

use flow_comm::{Buffer, Lane, ProcessGroup, ReduceOp, Result, Work};

/// Starts an all_reduce of `buffer`, which comes back.
pub fn all_reduce<B>(group: &ProcessGroup, mut buffer: B, op: ReduceOp) -> Result<Work<B>>
where
    B: Buffer + Send + 'static,
{
    group.start(Lane::Collectives, "all_reduce", move |group| {
        group.all_reduce(&mut buffer, op)?;
        Ok(buffer)
    })
}

/// Starts a barrier.
pub fn barrier(group: &ProcessGroup) -> Result<Work<()>> {
    group.start(Lane::Collectives, "barrier", |group| group.barrier())
}

/// Starts to send `data`, which comes back, to rank `to` with this tag.
pub fn send<B>(group: &ProcessGroup, data: B, to: usize, tag: u32) -> Result<Work<B>>
where
    B: Buffer + Send + 'static,
{
    group.start(Lane::To(to), "send", move |group| {
        group.send_with_tag(&data, to, tag)?;
        Ok(data)
    })
}

/// Starts to receive from rank `from` with this tag.
pub fn recv<B>(group: &ProcessGroup, mut buffer: B, from: usize, tag: u32) -> Result<Work<B>>
where
    B: Buffer + Send + 'static,
{
    group.start(Lane::From(from, tag), "recv", move |group| {
        group.recv_with_tag(&mut buffer, from, tag)?;
        Ok(buffer)
    })
}
