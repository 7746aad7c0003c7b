//! The contents of a TCPStore: values and queues, each with keys of its own, and how much memory
//! they take.

use std::collections::{HashMap, VecDeque};
use std::ops::AddAssign;
use std::sync::{Arc, Weak};

use super::wire::{self, TcpValue};

/// The memory that a key or an entry of a queue takes beside its bytes.
const OVERHEAD: usize = 128;
/// So many replies at least are under way before it is looked which have been sent.
const MIN_LENT: usize = 64;

/// Values and queues of a TCPStore, with the memory that they take.
#[derive(Default)]
pub struct TcpValues {
    values: HashMap<Vec<u8>, TcpValue>,
    queues: HashMap<Vec<u8>, VecDeque<TcpValue>>,
    /// The values that are not kept here, but may be on their way to a client still, with their
    /// sizes.
    lent: Vec<(Weak<Vec<u8>>, usize)>,
    /// The keys of all values as they are sent, from when somebody asks until one comes or goes.
    list: Option<Arc<Vec<u8>>>,
    /// The size of such a list, but for the number in front.
    list_size: usize,
    /// The number of lent values at which it is time to look which have been sent.
    sweep_at: usize,
    size: usize,
}

impl TcpValues {
    /// Returns the bytes of memory that all of it takes, about.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the value under `key`.
    pub fn get(&self, key: &[u8]) -> Option<&TcpValue> {
        self.values.get(key)
    }

    /// Whether a wait for `key` is over: a value, or a queue that is not empty.
    pub fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns how much memory `list` takes that is not taken yet.
    pub fn list_cost(&self) -> usize {
        if self.list.is_some() { 0 } else { 8 + self.list_size }
    }

    /// Returns the keys of all values, with their number in front.
    pub fn list(&mut self) -> Arc<Vec<u8>> {
        if let Some(list) = &self.list {
            return Arc::clone(list);
        }
        let mut list = Vec::with_capacity(self.list_cost());
        list.extend((self.values.len() as u64).to_le_bytes());
        self.values.keys().for_each(|key| wire::put(&mut list, key));
        self.size += list.len();
        Arc::clone(self.list.insert(Arc::new(list)))
    }

    /// Does not keep the list.
    pub fn forget_list(&mut self) {
        if let Some(list) = self.list.take() {
            self.release(list);
        }
    }

    /// Sets `key`.
    pub fn set(&mut self, key: &[u8], value: TcpValue) {
        self.size += value.0.len();
        match self.values.get_mut(key) {
            Some(present) => {
                let before = std::mem::replace(present, value);
                self.release(before.0);
            }
            None => {
                self.forget_list();
                self.size += key.len() + OVERHEAD;
                self.list_size += 8 + key.len();
                self.values.insert(key.to_vec(), value);
            }
        }
    }

    /// Appends to the value under `key`, or sets it.
    pub fn append(&mut self, key: &[u8], value: TcpValue) {
        match self.values.get_mut(key) {
            Some(present) => {
                self.size += value.bytes().len();
                // Those who are being sent it keep what it was.
                let shared = (Arc::strong_count(&present.0) > 1).then(|| Arc::clone(&present.0));
                present.append(&value);
                if let Some(shared) = shared {
                    self.lend(&shared);
                }
            }
            None => self.set(key, value),
        }
    }

    /// Adds to the number under `key`, 0 if there is none, and returns the sum, which is kept as
    /// decimal text; `None` if it is no number.
    pub fn add(&mut self, key: &[u8], amount: i64) -> Option<i64> {
        let mut sum = self.get(key).map_or(Some(0), |value| number(value.bytes()))?;
        sum = sum.wrapping_add(amount);
        self.set(key, TcpValue::new(sum.to_string().as_bytes()));
        Some(sum)
    }

    /// Whether there was such a value.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.values.remove(key) else { return false };
        self.forget_list();
        self.size -= key.len() + OVERHEAD;
        self.list_size -= 8 + key.len();
        self.release(value.0);
        true
    }

    /// Adds a value to the end of the queue `key`.
    pub fn push(&mut self, key: &[u8], value: TcpValue) {
        self.size += value.0.len() + OVERHEAD;
        let size = &mut self.size;
        let queue = self.queues.entry(key.to_vec()).or_insert_with(|| {
            size.add_assign(key.len() + OVERHEAD);
            VecDeque::new()
        });
        queue.push_back(value);
    }

    /// Takes the oldest entry of a queue.
    pub fn pop(&mut self, key: &[u8]) -> Option<TcpValue> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front()?;
        self.size -= value.0.len() + OVERHEAD;
        if queue.is_empty() {
            self.queues.remove(key);
            self.size -= key.len() + OVERHEAD;
        }
        self.lend(&value.0);
        Some(value)
    }

    /// Returns the number of values in the queue `key`.
    pub fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// Counts a reply until it has been sent.
    fn lend(&mut self, reply: &Arc<Vec<u8>>) {
        self.size += reply.len();
        self.lent.push((Arc::downgrade(reply), reply.len()));
        if self.lent.len() >= self.sweep_at {
            self.sweep();
        }
    }

    /// Counts no more what has been sent.
    pub fn sweep(&mut self) {
        let size = &mut self.size;
        self.lent.retain(|(reply, length)| {
            let is_sent = reply.strong_count() == 0;
            *size -= if is_sent { *length } else { 0 };
            !is_sent
        });
        self.sweep_at = MIN_LENT.max(2 * self.lent.len());
    }

    /// Keeps a reply no more.
    fn release(&mut self, reply: Arc<Vec<u8>>) {
        self.size -= reply.len();
        if Arc::strong_count(&reply) > 1 {
            self.lend(&reply);
        }
    }
}

/// Reads a number as C's `strtoll` does: after white space, up to what is no digit.
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

    #[test]
    fn what_is_being_sent_counts_although_it_is_kept_no_more() {
        let mut values = TcpValues::default();
        values.set(b"key", TcpValue::new(&[0; 1000]));
        let kept = values.size();
        let mut sent: Vec<TcpValue> = Vec::new();
        for change in 0..4 {
            sent.extend(values.get(b"key").cloned());
            match change {
                0 => values.set(b"key", TcpValue::new(&[1; 1000])),
                1 => values.append(b"key", TcpValue::new(b"")),
                2 => drop(values.remove(b"key")),
                _ => {
                    values.push(b"q", TcpValue::new(&[0; 1000]));
                    sent.extend(values.pop(b"q"));
                }
            }
        }
        values.sweep();
        assert_eq!((values.size(), values.lent.len()), (4 * 1008, 4));
        sent.clear();
        for _ in 0..1000 {
            values.push(b"q", TcpValue::new(&[0; 1000]));
            drop(values.pop(b"q"));
        }
        assert!(values.size() < MIN_LENT * kept && values.lent.len() < MIN_LENT);
        values.sweep();
        assert_eq!((values.size(), values.lent.len()), (0, 0));
    }

    proptest! {
        /// Whatever was done: once all is removed, nothing is left, also by the count of bytes.
        #[test]
        fn the_size_is_that_of_what_is_there(
            steps in vec((0..7u8, 0..4u8, vec(any::<u8>(), 0..9)), 0..60),
        ) {
            let mut values = TcpValues::default();
            for (step, key, bytes) in steps {
                let (key, value) = ([b'k', key], TcpValue::new(&bytes));
                match step {
                    0 => values.set(&key, value),
                    1 => values.append(&key, value),
                    2 => drop(values.add(&key, 1)),
                    3 => drop(values.remove(&key)),
                    4 => values.push(&key, value),
                    5 => drop(values.pop(&key)),
                    _ => {
                        let cost = values.list_cost();
                        let list = values.list();
                        prop_assert!(cost == 0 || cost == list.len());
                        let expected = (8 + 10 * values.len(), values.len());
                        prop_assert_eq!((list.len(), list[0] as usize), expected);
                    }
                }
                prop_assert!(values.size() >= values.len() * (OVERHEAD + 10));
            }
            for key in 0..4 {
                values.remove(&[b'k', key]);
                while values.pop(&[b'k', key]).is_some() {}
            }
            values.forget_list();
            values.sweep();
            prop_assert_eq!((values.size(), values.len(), values.queues.len()), (0, 0, 0));
        }
    }
}
