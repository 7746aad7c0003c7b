//! The program's name for an operation that is done by another one.

use std::fmt;

use flow_store::fork::Once;

use crate::kind::Kind;

/// Names an operation on elements of a type that is none of [`DType`](crate::DType), or a reduction
/// that is none of [`ReduceOp`](crate::ReduceOp). Bytes, or parts of the elements, are moved for it,
/// perhaps by another operation. Or it names only what another operation is done for. All ranks must
/// give the same label, and errors show it.
///
/// A label is a pointer: every operation carries one. Its text lasts as long as the process, once
/// for all labels that are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label(&'static Text);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Text {
    kind: Kind,
    /// The type and the reduction, with zeros behind; only zeros where they are as they seem.
    elements: [u8; Label::LENGTH],
}

/// The texts of all labels of this process: a list.
static TEXTS: Once<Entry> = Once::empty();

struct Entry {
    text: Text,
    next: Once<Entry>,
}

impl Label {
    /// The bytes that the text of the elements has at most.
    pub const LENGTH: usize = 16;

    /// Returns the label of an operation, by its name in errors: `all_reduce`, say. `elements` is
    /// the type, with the reduction: `int16, max`. It is empty where these are those of the
    /// operation. None if there is no such operation, or the text is longer than
    /// [`Label::LENGTH`].
    pub fn new(operation: &str, elements: &str) -> Option<Self> {
        if elements.len() > Self::LENGTH {
            return None;
        }
        let mut text = [0; Self::LENGTH];
        text[..elements.len()].copy_from_slice(elements.as_bytes());
        Some(Self::of(Text { kind: Kind::from_name(operation)?, elements: text }))
    }

    /// Returns the label with this text.
    fn of(text: Text) -> Self {
        let mut place = &TEXTS;
        loop {
            let entry = place.get_or_make(|| Entry { text, next: Once::empty() });
            if entry.text == text {
                return Self(&entry.text);
            }
            place = &entry.next;
        }
    }

    /// Returns the operation that the program calls.
    pub(crate) fn kind(self) -> Kind {
        self.0.kind
    }

    /// Whether it has a name for the elements, and not only for the operation.
    pub(crate) fn names_elements(self) -> bool {
        self.words() != [0, 0]
    }

    /// Whether both are for elements of the same type, with the same reduction.
    pub(crate) fn has_same_elements(a: Option<Self>, b: Option<Self>) -> bool {
        a.map_or([0, 0], Self::words) == b.map_or([0, 0], Self::words)
    }

    /// Reads a label from the words of a descriptor.
    pub(crate) fn from_words(kind: Kind, words: [u64; 2]) -> Self {
        let mut elements = [0; Self::LENGTH];
        elements[..8].copy_from_slice(&words[0].to_le_bytes());
        elements[8..].copy_from_slice(&words[1].to_le_bytes());
        Self::of(Text { kind, elements })
    }

    /// Returns the label's words for a descriptor.
    pub(crate) fn words(self) -> [u64; 2] {
        let value = u128::from_le_bytes(self.0.elements);
        [value as u64, (value >> 64) as u64]
    }
}

/// The text of the elements.
impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(String::from_utf8_lossy(&self.0.elements).trim_end_matches('\0'))
    }
}
