//! What a TCPStore holds: values and queues, each with keys of its own, and how much memory they take.

use std::collections::{HashMap, VecDeque};
use std::ops::AddAssign;

use super::wire::Value;

/// What a key or an entry of a queue takes beside its bytes.
const OVERHEAD: usize = 128;

#[derive(Default)]
pub struct Values {
    values: HashMap<Vec<u8>, Value>,
    queues: HashMap<Vec<u8>, VecDeque<Value>>,
    size: usize,
}

impl Values {
    /// The bytes of memory that all of it takes, about.
    pub fn size(&self) -> usize {
        self.size
    }

    pub fn get(&self, key: &[u8]) -> Option<&Value> {
        self.values.get(key)
    }

    /// Whether a wait for `key` is over: a value, or a queue that is not empty.
    pub fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    pub fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    pub fn set(&mut self, key: &[u8], value: Value) {
        self.size += value.0.len();
        match self.values.get_mut(key) {
            Some(present) => {
                self.size -= present.0.len();
                *present = value;
            }
            None => {
                self.size += key.len() + OVERHEAD;
                self.values.insert(key.to_vec(), value);
            }
        }
    }

    pub fn append(&mut self, key: &[u8], value: Value) {
        match self.values.get_mut(key) {
            Some(present) => {
                self.size += value.bytes().len();
                present.append(&value);
            }
            None => self.set(key, value),
        }
    }

    /// Adds to the number under `key`, 0 if there is none, and returns the sum, which is kept as decimal text; `None`
    /// if it is no number.
    pub fn add(&mut self, key: &[u8], amount: i64) -> Option<i64> {
        let mut sum = self.get(key).map_or(Some(0), |value| number(value.bytes()))?;
        sum = sum.wrapping_add(amount);
        self.set(key, Value::new(sum.to_string().as_bytes()));
        Some(sum)
    }

    /// Whether there was such a value.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let removed = self.values.remove(key);
        self.size -= removed.as_ref().map_or(0, |value| key.len() + OVERHEAD + value.0.len());
        removed.is_some()
    }

    pub fn push(&mut self, key: &[u8], value: Value) {
        self.size += value.0.len() + OVERHEAD;
        let size = &mut self.size;
        let queue = self.queues.entry(key.to_vec()).or_insert_with(|| {
            size.add_assign(key.len() + OVERHEAD);
            VecDeque::new()
        });
        queue.push_back(value);
    }

    /// The oldest entry of a queue.
    pub fn pop(&mut self, key: &[u8]) -> Option<Value> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front()?;
        self.size -= value.0.len() + OVERHEAD;
        if queue.is_empty() {
            self.queues.remove(key);
            self.size -= key.len() + OVERHEAD;
        }
        Some(value)
    }

    pub fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// Removes all values and queues whose keys begin with `prefix`.
    pub fn remove_prefix(&mut self, prefix: &[u8]) {
        let size = &mut self.size;
        self.values.retain(|key, value| {
            let stays = !key.starts_with(prefix);
            *size -= if stays { 0 } else { key.len() + OVERHEAD + value.0.len() };
            stays
        });
        self.queues.retain(|key, queue| {
            let stays = !key.starts_with(prefix);
            let entries: usize = queue.iter().map(|value| value.0.len() + OVERHEAD).sum();
            *size -= if stays { 0 } else { key.len() + OVERHEAD + entries };
            stays
        });
    }
}

/// A number as C's `strtoll` reads it: after white space, up to what is no digit.
fn number(text: &[u8]) -> Option<i64> {
    let blanks = text.iter().take_while(|byte| b" \t\n\x0b\x0c\r".contains(byte)).count();
    let text = &text[blanks..];
    let (sign, digits) = match text.split_first()? {
        (b'-', digits) => (-1, digits),
        (b'+', digits) => (1, digits),
        _ => (1, text),
    };
    let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let digits = std::str::from_utf8(&digits[..count]).ok()?;
    i64::try_from(sign * digits.parse::<i128>().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_read_as_c_does() {
        for (text, expected) in [
            ("12", Some(12)),
            (" \t\n-7 apples", Some(-7)),
            ("+3", Some(3)),
            ("12abc", Some(12)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("", None),
            ("-", None),
            ("--1", None),
            ("abc", None),
            ("\u{b}5", Some(5)),
        ] {
            assert_eq!(number(text.as_bytes()), expected, "{text:?}");
        }
        assert_eq!(number("9".repeat(100).as_bytes()), None);
    }

    proptest! {
        /// Whatever was done: once all is removed, nothing is left, also by the count of bytes.
        #[test]
        fn the_size_is_that_of_what_is_there(steps in vec((0..6u8, 0..4u8, vec(any::<u8>(), 0..9)), 0..60)) {
            let mut values = Values::default();
            for (step, key, bytes) in steps {
                let (key, value) = ([b'k', key], Value::new(&bytes));
                match step {
                    0 => values.set(&key, value),
                    1 => values.append(&key, value),
                    2 => drop(values.add(&key, 1)),
                    3 => drop(values.remove(&key)),
                    4 => values.push(&key, value),
                    _ => drop(values.pop(&key)),
                }
                prop_assert!(values.size() >= values.len() * (OVERHEAD + 10));
            }
            for key in 0..2 {
                values.remove(&[b'k', key]);
                while values.pop(&[b'k', key]).is_some() {}
            }
            values.remove_prefix(b"k");
            prop_assert_eq!((values.size(), values.len(), values.queues.len()), (0, 0, 0));
        }
    }
}
