//! Batches of messages on the host.

use super::ProcessGroup;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::p2p::P2pOp;

impl ProcessGroup {
    /// Sends and receives all messages of `ops`, and returns when all have been. None waits for
    /// another: two ranks that both send and receive may list that in any order. Messages from one
    /// rank to another keep the order of the list. They have tag 0.
    ///
    /// Messages to different ranks, and from different ranks, move on threads of their own.
    ///
    /// # Errors
    ///
    /// Those of [`ProcessGroup::send`] and [`ProcessGroup::recv`]; the first, if there are several.
    ///
    /// ```
    /// use flow_comm::{P2pOp, ProcessGroup};
    ///
    /// let group = ProcessGroup::from_env()?;
    /// let rank = group.rank();
    /// let size = group.world_size();
    /// let mut own = [rank as i64];
    /// let mut received = [rank as i64];
    /// if size > 1 {
    ///     // Around the ring: all ranks send and receive at the same time.
    ///     let send = P2pOp::Send { data: &mut own, to: (rank + 1) % size };
    ///     let recv = P2pOp::Recv { buffer: &mut received, from: (rank + size - 1) % size };
    ///     group.batch_send_recv(&mut [send, recv])?;
    /// }
    /// assert_eq!(received, [((rank + size - 1) % size) as i64]);
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    pub fn batch_send_recv<B>(&self, ops: &mut [P2pOp<&mut B>]) -> Result<()>
    where
        B: Buffer + Send + ?Sized,
    {
        for op in ops.iter() {
            self.caller().check_peer("batch_send_recv", op.peer())?;
        }
        // Messages between the same ranks in the same direction follow each other.
        let mut queues: Vec<Vec<&mut P2pOp<&mut B>>> = Vec::new();
        for op in ops {
            let queue = queues.iter_mut().find(|queue| {
                let first = &queue[0];
                first.peer() == op.peer() && first.is_send() == op.is_send()
            });
            match queue {
                Some(queue) => queue.push(op),
                None => queues.push(vec![op]),
            }
        }
        let Some(own) = queues.pop() else { return Ok(()) };
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            let mut result = Ok(());
            for queue in queues {
                let thread = std::thread::Builder::new().name("flow-p2p".into());
                match thread.spawn_scoped(scope, || run_messages(self, queue)) {
                    Ok(thread) => threads.push(thread),
                    // The peers wait for messages that do not come.
                    Err(error) => result = Err(cannot_start(self, &error)),
                }
            }
            result = result.and_then(|()| run_messages(self, own));
            for thread in threads {
                let ended = thread.join().unwrap_or_else(|_| Err(panicked(self)));
                result = result.and(ended);
            }
            result
        })
    }
}

/// Sends and receives messages one after the other.
fn run_messages<B>(group: &ProcessGroup, ops: Vec<&mut P2pOp<&mut B>>) -> Result<()>
where
    B: Buffer + Send + ?Sized,
{
    for op in ops {
        match op {
            P2pOp::Send { data, to } => group.send(&**data, *to)?,
            P2pOp::Recv { buffer, from } => group.recv(&mut **buffer, *from)?,
        }
    }
    Ok(())
}

fn cannot_start(group: &ProcessGroup, error: &std::io::Error) -> Error {
    let reason = format!("cannot start a thread: {error}");
    group.failure().fail(group.system("batch_send_recv", reason))
}

fn panicked(group: &ProcessGroup) -> Error {
    group.system("batch_send_recv", "a thread of it panicked".into())
}
