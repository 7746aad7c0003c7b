//! The operation of a rank: published beside the data in every round, and compared by every rank.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use flow_kernels::{DType, ReduceOp};

use crate::bucket_name::bucket_name;
use crate::kind::Kind;
use crate::label::Label;
use crate::trace::Start;

/// An operation as all ranks must agree on it. `count` is the number of elements a rank
/// contributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpDescriptor {
    pub sequence: u64,
    pub kind: Kind,
    pub dtype: DType,
    pub reduce: ReduceOp,
    pub count: u64,
    /// The root of a collective that has one, else 0.
    pub root: u32,
    /// The other side of a message, and its tag; 0 in a collective.
    pub peer: u32,
    pub tag: u32,
    /// The bucket that is reduced, and the step in which it is (0: none).
    pub bucket: Option<u32>,
    pub step: u32,
    /// A digest of what else ranks must agree on in a collective: counts, a bucket's pieces, what
    /// the caller gives.
    pub digest: u64,
    /// The program's name of the operation, if it called another one.
    pub label: Option<Label>,
}

/// The place of a rank's data of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// At this offset of the arena.
    Shared(usize),
    /// The rank's payload or staging buffer.
    Staged,
}

const STAGED: u64 = u64::MAX;
/// The same, of a rank that finds the other one far away.
const STAGED_FAR: u64 = u64::MAX - 1;
/// The word of a descriptor that has the location.
const LOCATION: usize = 3;

/// The error of a peer's descriptor.
const UNREADABLE: &str = "an operation this version does not know";

/// Words that every descriptor has.
const WORDS: usize = 6;
/// Words of a label, which follow where there is one.
const LABEL_WORDS: usize = 2;

/// A descriptor in shared memory.
#[repr(C, align(64))]
#[derive(Default)]
pub struct DescriptorWords(pub [AtomicU64; WORDS + LABEL_WORDS]);

impl DescriptorWords {
    /// Size in bytes of a descriptor in shared memory.
    pub const BYTES: usize = std::mem::size_of::<Self>();

    /// Notes, before the rank arrives, that it finds the other one far away. Its data is staged.
    pub fn note_far(&self) {
        self.0[LOCATION].store(STAGED_FAR, Ordering::Relaxed);
    }

    /// Whether the rank has noted that.
    pub fn is_far(&self) -> bool {
        self.0[LOCATION].load(Ordering::Relaxed) == STAGED_FAR
    }
}

impl OpDescriptor {
    /// Describes an operation without root or reduction. It gets its sequence number when it
    /// begins.
    #[inline]
    pub fn new(kind: Kind, dtype: DType, count: usize) -> Self {
        Self {
            sequence: 0,
            kind,
            dtype,
            reduce: ReduceOp::Sum,
            count: count as u64,
            root: 0,
            peer: 0,
            tag: 0,
            bucket: None,
            step: 0,
            digest: 0,
            label: None,
        }
    }

    /// Sets the reduction.
    #[inline]
    pub fn reduce(self, reduce: ReduceOp) -> Self {
        Self { reduce, ..self }
    }

    /// Sets the root.
    #[inline]
    pub fn root(self, root: usize) -> Self {
        Self { root: root as u32, ..self }
    }

    /// Makes it a message to or from this member, with this tag.
    #[inline]
    pub fn peer(self, peer: usize, tag: u32) -> Self {
        Self { peer: peer as u32, tag, ..self }
    }

    /// Whether two ranks published the same operation. Sequence numbers only name operations; the
    /// rounds keep ranks in step.
    pub fn agrees(&self, other: &OpDescriptor) -> bool {
        let count = if self.kind.has_own_counts() { other.count } else { self.count };
        OpDescriptor { sequence: other.sequence, count, ..*self } == *other
    }

    /// Returns the operation as it is recorded; `queued` is when the program asked for it, if that
    /// was earlier.
    #[inline]
    pub fn record(&self, queued: Option<u64>) -> Start {
        Start {
            kind: self.kind,
            sequence: self.sequence,
            bytes: self.bytes(),
            bucket: self.bucket,
            is_cuda: false,
            queued,
        }
    }

    /// Returns how many bytes a rank contributes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.count * self.dtype.size() as u64
    }

    /// Publishes the operation, and where this rank's data lies.
    #[inline]
    pub fn write(&self, location: Location, words: &DescriptorWords) {
        for (word, value) in words.0.iter().zip(self.words(location)) {
            word.store(value, Ordering::Relaxed);
        }
        if let Some(label) = self.label {
            for (word, value) in words.0[WORDS..].iter().zip(label.words()) {
                word.store(value, Ordering::Relaxed);
            }
        }
    }

    /// Whether the words are those of an operation that [agrees](OpDescriptor::agrees), wherever
    /// its data lies.
    #[inline]
    pub fn is_in(&self, words: &DescriptorWords) -> bool {
        let [_, packed, count, _, bucket, tag_or_digest] = self.words(Location::Staged);
        let published = [1, 2, 4, 5].map(|index| words.0[index].load(Ordering::Relaxed));
        let count = if self.kind.has_own_counts() { published[1] } else { count };
        if published != [packed, count, bucket, tag_or_digest] {
            return false;
        }
        match self.label {
            Some(label) => label.words() == label_words(words),
            None => true,
        }
    }

    /// Returns the words of a descriptor before its label. A message has its peer and its tag where
    /// a collective has its root and its digest.
    #[inline]
    fn words(&self, location: Location) -> [u64; WORDS] {
        let is_message = self.kind.is_message();
        let rank = if is_message { self.peer } else { self.root };
        let tag_or_digest = if is_message { u64::from(self.tag) } else { self.digest };
        let labelled = self.label.map_or(0, |label| label.kind() as u8);
        let packed = u64::from(self.kind as u8)
            | u64::from(self.dtype as u8) << 8
            | u64::from(self.reduce as u8) << 16
            | u64::from(labelled) << 24
            | u64::from(rank) << 32;
        let offset = match location {
            Location::Shared(offset) => offset as u64,
            Location::Staged => STAGED,
        };
        let bucket = self.bucket.map_or(0, |b| u64::from(b) + 1) | u64::from(self.step) << 32;
        [self.sequence, packed, self.count, offset, bucket, tag_or_digest]
    }

    /// Reads what a rank has published.
    pub fn read(words: &DescriptorWords) -> Result<(Self, Location), &'static str> {
        let [sequence, packed, count, offset, bucket, tag_or_digest]: [u64; WORDS] =
            std::array::from_fn(|i| words.0[i].load(Ordering::Relaxed));
        let kind = Kind::from_code(packed as u8).ok_or(UNREADABLE)?;
        let label = match (packed >> 24) as u8 {
            0 => None,
            labelled => {
                let labelled = Kind::from_code(labelled).ok_or(UNREADABLE)?;
                Some(Label::from_words(labelled, label_words(words)))
            }
        };
        let mut operation = Self {
            sequence,
            kind,
            dtype: DType::try_from((packed >> 8) as u8).map_err(|_| UNREADABLE)?,
            reduce: ReduceOp::try_from((packed >> 16) as u8).map_err(|_| UNREADABLE)?,
            count,
            root: 0,
            peer: 0,
            tag: 0,
            bucket: (bucket as u32).checked_sub(1),
            step: (bucket >> 32) as u32,
            digest: 0,
            label,
        };
        let rank = (packed >> 32) as u32;
        if kind.is_message() {
            operation.peer = rank;
            operation.tag = tag_or_digest as u32;
        } else {
            operation.root = rank;
            operation.digest = tag_or_digest;
        }
        let location = match offset {
            STAGED | STAGED_FAR => Location::Staged,
            offset => Location::Shared(offset as usize),
        };
        Ok((operation, location))
    }
}

/// Returns the words of the label that a rank has published.
fn label_words(words: &DescriptorWords) -> [u64; LABEL_WORDS] {
    std::array::from_fn(|i| words.0[WORDS + i].load(Ordering::Relaxed))
}

impl fmt::Display for OpDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.label.map_or(self.kind, Label::kind);
        write!(f, "{} #{}", kind.name(), self.sequence)?;
        if matches!(kind, Kind::Barrier | Kind::BarrierOnMachine | Kind::NewGroup) {
            return Ok(());
        }
        write!(f, " ({}", Elements(self.count, self.dtype, self.label))?;
        if self.kind.reduces() && !self.label.is_some_and(Label::names_elements) {
            write!(f, ", {}", self.reduce)?;
        }
        if kind.has_root() {
            write!(f, ", root {}", self.root)?;
        }
        if let Some(bucket) = self.bucket {
            write!(f, ", {}", bucket_name(bucket))?;
        }
        if self.step > 0 {
            write!(f, ", step {}", self.step)?;
        }
        write!(f, ")")
    }
}

/// So many elements of a type, or what a label calls them: for errors.
pub struct Elements(pub u64, pub DType, pub Option<Label>);

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, dtype, label) = self;
        match label {
            Some(label) if label.names_elements() => {
                write!(f, "{} bytes of {label}", count * dtype.size() as u64)
            }
            _ => write!(f, "{count} x {dtype}"),
        }
    }
}

/// One side of a message, for errors.
pub struct MessageDescriptor {
    /// A send or a receive.
    pub kind: Kind,
    /// The other side's rank in the job; None for any.
    pub peer: Option<usize>,
    pub count: usize,
    pub dtype: DType,
    pub tag: u32,
    /// The program's name of the elements, if these are bytes of another type.
    pub label: Option<Label>,
}

impl fmt::Display for MessageDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.kind == Kind::Send { "to" } else { "from" };
        write!(f, "{} {direction} ", self.kind.name())?;
        match self.peer {
            Some(peer) => write!(f, "rank {peer}")?,
            None => write!(f, "any rank")?,
        }
        write!(f, " ({}", Elements(self.count as u64, self.dtype, self.label))?;
        if self.tag != 0 {
            write!(f, ", tag {}", self.tag)?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket_name::JOIN_NOTICE;

    #[test]
    fn descriptors_are_read_as_they_were_written() {
        let collective = OpDescriptor {
            sequence: 7,
            bucket: Some(3),
            step: 2,
            digest: u64::MAX - 5,
            ..OpDescriptor::new(Kind::Reduce, DType::BF16, 1000).reduce(ReduceOp::Max).root(4)
        };
        let message = OpDescriptor::new(Kind::Send, DType::I64, 9).peer(3, u32::MAX);
        let label = Label::new("all_reduce", "int16, max");
        let labelled = OpDescriptor { label, ..OpDescriptor::new(Kind::AllGather, DType::U8, 20) };
        for operation in [collective, message, labelled] {
            for location in [Location::Staged, Location::Shared(4096)] {
                let words = DescriptorWords::default();
                operation.write(location, &words);
                assert_eq!(OpDescriptor::read(&words), Ok((operation, location)));
                assert!(operation.is_in(&words));
                assert!(!OpDescriptor { count: 8, ..operation }.is_in(&words));
            }
        }
        assert_eq!(OpDescriptor::read(&DescriptorWords::default()), Err(UNREADABLE));
    }

    /// In an all-to-all of uneven blocks each rank has a count of its own; its type is that of all.
    #[test]
    fn counts_may_differ_in_an_uneven_exchange() {
        let [few, more] = [3, 4].map(|count| OpDescriptor::new(Kind::AllToAllV, DType::F32, count));
        let words = DescriptorWords::default();
        more.write(Location::Staged, &words);
        assert!(few.agrees(&more) && few.is_in(&words));
        let other = OpDescriptor { dtype: DType::I32, ..few };
        assert!(!other.agrees(&more) && !other.is_in(&words));
    }

    /// A label without a text for the elements names only the operation.
    #[test]
    fn operations_are_named_by_their_labels() {
        let reduction = OpDescriptor::new(Kind::ReduceScatterV, DType::F32, 4);
        for (elements, expected) in [
            ("", "reduce_scatter #0 (4 x f32, sum)"),
            ("complex64, avg", "reduce_scatter #0 (16 bytes of complex64, avg)"),
        ] {
            let label = Label::new("reduce_scatter", elements);
            assert_eq!(OpDescriptor { label, ..reduction }.to_string(), expected);
        }
    }

    #[test]
    fn buckets_are_named() {
        let reduction = OpDescriptor::new(Kind::AllReduce, DType::I64, 4);
        let bucket = OpDescriptor { bucket: Some(3), step: 2, ..reduction };
        assert!(bucket.to_string().ends_with("sum, bucket 3, step 2)"), "{bucket}");
        let notice = OpDescriptor { bucket: Some(JOIN_NOTICE), ..reduction };
        assert!(notice.to_string().ends_with("sum, a notice in a join)"), "{notice}");
    }
}
