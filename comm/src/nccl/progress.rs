//! The last operation that each rank of a group has enqueued, as the other ranks read it in the
//! store.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::descriptor::OpDescriptor;
use crate::kind::Kind;
use crate::trace::RecordId;

/// An operation, as messages name it.
#[derive(Clone)]
pub struct CudaOp {
    pub descriptor: OpDescriptor,
    /// The messages that are sent and received together.
    pub batch: Option<Arc<Batch>>,
}

/// The messages that are sent and received together.
pub struct Batch {
    text: String,
    /// The other ranks, by their ranks in the group.
    peers: Vec<usize>,
}

/// The number of messages of a batch that are named.
const MAX_NAMED: usize = 8;

/// An enqueued operation.
#[derive(Clone)]
pub struct EnqueuedOp {
    pub op: CudaOp,
    /// Its number among all operations of this rank over NCCL, messages too.
    pub number: u64,
    /// The number of collectives over NCCL that this rank has begun, with this operation. Ranks
    /// take part in all collectives, so these numbers fit each other.
    pub collectives: u64,
    pub record: RecordId,
}

/// The last operation of a rank, as it publishes that.
#[derive(Serialize, Deserialize)]
pub struct LastOperation {
    number: u64,
    collectives: u64,
    /// The part of a collective that all ranks must agree on; None for a message.
    agreed: Option<String>,
    /// The operation, for people.
    pub text: String,
}

impl From<OpDescriptor> for CudaOp {
    fn from(descriptor: OpDescriptor) -> Self {
        Self { descriptor, batch: None }
    }
}

impl Batch {
    /// Returns a batch of verbs with peers, whose ranks in the job are in `ranks`.
    pub fn new(messages: &[(&str, usize)], ranks: &[usize]) -> Self {
        let mut texts: Vec<String> = Vec::new();
        for (verb, peer) in messages {
            let text = format!("{verb} {}", ranks[*peer]);
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        let rest = texts.len().saturating_sub(MAX_NAMED);
        texts.truncate(MAX_NAMED);
        let mut text = texts.join(", ");
        if rest > 0 {
            text += &format!(", and {rest} more");
        }
        Self { text, peers: messages.iter().map(|(_, peer)| *peer).collect() }
    }
}

impl fmt::Display for CudaOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpDescriptor { kind, sequence, .. } = self.descriptor;
        match &self.batch {
            Some(batch) => write!(f, "{} #{sequence} of {}", kind.name(), batch.text),
            None => self.descriptor.fmt(f),
        }
    }
}

impl EnqueuedOp {
    /// Returns the operation as this rank publishes it.
    pub fn published(&self) -> LastOperation {
        LastOperation {
            number: self.number,
            collectives: self.collectives,
            agreed: self.agreed(),
            text: self.to_string(),
        }
    }

    /// Returns the part of a collective that all ranks must agree on. The sequence number counts
    /// the collectives on the host too, which other threads may call. Each rank has its own count
    /// in an all-to-all of uneven blocks.
    fn agreed(&self) -> Option<String> {
        let mut common = OpDescriptor { sequence: 0, ..self.op.descriptor };
        if common.kind.has_own_counts() {
            common.count = 0;
        }
        (!common.kind.is_message()).then(|| common.to_string())
    }

    /// Whether the rank of `last` is in the same collective, but calls it with something else.
    pub fn disagrees(&self, last: &LastOperation) -> bool {
        self.collectives == last.collectives
            && matches!((self.agreed(), &last.agreed), (Some(a), Some(b)) if a != *b)
    }

    /// Whether a rank may take part in this operation.
    pub fn may_need(&self, rank: usize) -> bool {
        let descriptor = &self.op.descriptor;
        match (descriptor.kind, &self.op.batch) {
            (Kind::Send | Kind::Recv, _) => rank == descriptor.peer as usize,
            (_, Some(batch)) => batch.peers.contains(&rank),
            _ => true,
        }
    }

    /// Whether the rank of `last` has begun this operation. Ranks count their messages alone,
    /// so for a message this is a guess.
    pub fn is_begun_by(&self, last: &LastOperation) -> bool {
        if self.op.descriptor.kind.is_message() {
            last.number >= self.number
        } else {
            last.collectives >= self.collectives
        }
    }
}

impl fmt::Display for EnqueuedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes, over NCCL", self.op, self.op.descriptor.bytes())
    }
}

#[cfg(test)]
mod tests {
    use flow_kernels::DType;

    use super::*;
    use crate::trace::{Recorder, Start};

    fn operation(kind: Kind, count: usize, sequence: u64, collectives: u64) -> EnqueuedOp {
        let descriptor = OpDescriptor { sequence, ..OpDescriptor::new(kind, DType::F32, count) };
        let recorder = Recorder::new("0".into(), "shm", false);
        let record = recorder.start(&Start { is_cuda: true, ..descriptor.record(None) });
        EnqueuedOp { op: descriptor.into(), number: 5, collectives, record }
    }

    fn disagree(one: &EnqueuedOp, other: &EnqueuedOp) -> bool {
        let both = [one.disagrees(&other.published()), other.disagrees(&one.published())];
        assert_eq!(both[0], both[1]);
        both[0]
    }

    #[test]
    fn ranks_disagree_on_what_all_give_alike() {
        let sum = operation(Kind::AllReduce, 10, 4, 2);
        assert!(!disagree(&sum, &sum));
        assert!(disagree(&sum, &operation(Kind::AllReduce, 11, 4, 2)));
        assert!(disagree(&sum, &operation(Kind::AllGather, 10, 4, 2)));
        let mut other = sum.clone();
        other.op.descriptor.dtype = DType::I32;
        assert!(disagree(&sum, &other));
    }

    #[test]
    fn ranks_may_differ_in_counts_and_numbers_of_their_own() {
        let sum = operation(Kind::AllReduce, 10, 4, 2);
        assert!(!disagree(&sum, &operation(Kind::AllReduce, 10, 5, 2)), "the shared sequence");
        assert!(!disagree(&sum, &operation(Kind::Broadcast, 10, 4, 3)), "another collective");
        let uneven = |count| operation(Kind::AllToAllV, count, 4, 2);
        assert!(!disagree(&uneven(10), &uneven(20)));
        let batch = |count| operation(Kind::BatchSendRecv, count, 0, 2);
        assert!(!disagree(&batch(10), &batch(20)));
        let send = operation(Kind::Send, 10, 0, 2);
        assert!(!disagree(&send, &operation(Kind::Recv, 10, 0, 2)));
        assert!(!disagree(&send, &sum));
    }

    #[test]
    fn a_batch_names_its_peers_by_their_ranks_in_the_job() {
        let messages = [("send to", 1), ("recv from", 0), ("send to", 1)];
        let mut operation = operation(Kind::BatchSendRecv, 10, 3, 0);
        operation.op.batch = Some(Batch::new(&messages, &[4, 5, 6]).into());
        assert_eq!(operation.op.to_string(), "batch_send_recv #3 of send to 5, recv from 4");
        assert_eq!([0, 1, 2].map(|rank| operation.may_need(rank)), [true, true, false]);
        let many: Vec<_> = (0..10).map(|peer| ("send to", peer)).collect();
        operation.op.batch = Some(Batch::new(&many, &[7; 10].map(|rank| rank)).into());
        assert_eq!(operation.op.to_string(), "batch_send_recv #3 of send to 7");
        let ranks: Vec<_> = (0..10).collect();
        operation.op.batch = Some(Batch::new(&many, &ranks).into());
        let text = operation.op.to_string();
        assert!(text.ends_with("send to 6, send to 7, and 2 more"), "{text}");
    }

    #[test]
    fn a_collective_is_begun_by_ranks_with_fewer_messages() {
        let mut sum = operation(Kind::AllReduce, 10, 4, 2);
        let last = sum.published();
        sum.number += 3; // this rank alone has sent messages
        assert!(sum.is_begun_by(&last));
        sum.collectives += 1;
        assert!(!sum.is_begun_by(&last));
    }
}
