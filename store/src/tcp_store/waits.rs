//! The clients of a TCPStore that wait, and the keys that they wait for.

use std::collections::{BTreeSet, HashMap, HashSet};

/// Clients go by the ids of their connections. Each has one wait at most.
#[derive(Default)]
pub struct PendingWaits {
    waits: HashMap<usize, Wait>,
    /// The clients that wait for a key, by their turns.
    by_key: HashMap<Vec<u8>, BTreeSet<(u64, usize)>>,
    next_turn: u64,
    size: usize,
}

/// The memory that waiting for a key takes beside twice its bytes.
const OVERHEAD: usize = 256;

fn size(key: &[u8]) -> usize {
    2 * key.len() + OVERHEAD
}

struct Wait {
    turn: u64,
    missing: HashSet<Vec<u8>>,
}

impl PendingWaits {
    /// Returns the bytes of memory that all of it takes, about.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Makes a client wait for all of `keys`, and for no others any more.
    pub fn add(&mut self, id: usize, keys: HashSet<Vec<u8>>) {
        self.cancel(id);
        let turn = self.next_turn;
        self.next_turn += 1;
        for key in &keys {
            self.size += size(key);
            self.by_key.entry(key.clone()).or_default().insert((turn, id));
        }
        self.waits.insert(id, Wait { turn, missing: keys });
    }

    /// Ends the wait of a client.
    pub fn cancel(&mut self, id: usize) {
        let Some(wait) = self.waits.remove(&id) else { return };
        for key in wait.missing {
            self.size -= size(&key);
            if let Some(waiting) = self.by_key.get_mut(&key) {
                waiting.remove(&(wait.turn, id));
                if waiting.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        }
    }

    /// Returns the clients whose wait is over now that `key` is there.
    pub fn wake_all(&mut self, key: &[u8]) -> Vec<usize> {
        let waiting = self.by_key.remove(key).unwrap_or_default();
        waiting.into_iter().map(|(_, id)| id).filter(|id| self.arrived(*id, key)).collect()
    }

    /// Returns the first whose wait is over now that there is one entry in the queue `key`.
    pub fn wake_one(&mut self, key: &[u8]) -> Option<usize> {
        let mut waiting = self.by_key.remove(key)?;
        let mut woken = None;
        while let Some((_, id)) = waiting.pop_first() {
            if self.arrived(id, key) {
                woken = Some(id);
                break;
            }
        }
        if !waiting.is_empty() {
            self.by_key.insert(key.to_vec(), waiting);
        }
        woken
    }

    /// Whether that was the last key that a client waits for.
    fn arrived(&mut self, id: usize, key: &[u8]) -> bool {
        let Some(wait) = self.waits.get_mut(&id) else { return false };
        if wait.missing.remove(key) {
            self.size -= size(key);
        }
        let is_last = wait.missing.is_empty();
        if is_last {
            self.waits.remove(&id);
        }
        is_last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: &[&str]) -> HashSet<Vec<u8>> {
        keys.iter().map(|key| key.as_bytes().to_vec()).collect()
    }

    fn assert_empty(waits: &PendingWaits) {
        assert_eq!((waits.waits.len(), waits.by_key.len(), waits.size), (0, 0, 0));
    }

    #[test]
    fn a_wait_is_over_with_its_last_key() {
        let mut waits = PendingWaits::default();
        waits.add(1, keys(&["a", "b"]));
        waits.add(2, keys(&["a"]));
        assert_eq!(waits.wake_all(b"a"), [2]);
        assert!(waits.wake_all(b"a").is_empty());
        assert_eq!(waits.wake_all(b"b"), [1]);
        assert_empty(&waits);
    }

    #[test]
    fn a_queue_wakes_one_after_the_other() {
        let mut waits = PendingWaits::default();
        for id in [7, 5, 6] {
            waits.add(id, keys(&["q"]));
        }
        waits.cancel(5);
        assert_eq!(
            [waits.wake_one(b"q"), waits.wake_one(b"q"), waits.wake_one(b"q")],
            [Some(7), Some(6), None]
        );
        assert_empty(&waits);
    }

    #[test]
    fn a_new_wait_replaces_the_last() {
        let mut waits = PendingWaits::default();
        waits.add(1, keys(&["a", "b"]));
        waits.add(1, keys(&["c"]));
        assert_eq!(
            (waits.wake_all(b"a"), waits.wake_all(b"b"), waits.wake_all(b"c")),
            (vec![], vec![], vec![1])
        );
        waits.add(1, keys(&["a"]));
        waits.cancel(1);
        assert_empty(&waits);
    }
}
