//! The values of a store, and the clients that wait for others.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::protocol::Reply;

/// Values by key, and the clients that wait, by the ids of their connections.
#[derive(Default)]
pub struct Values {
    values: HashMap<String, Value>,
    watchers: HashMap<String, BTreeSet<usize>>,
}

/// A value, kept as the reply that carries it: all who ask for it share one copy.
pub struct Value(Arc<Vec<u8>>);

impl Value {
    /// The bytes before the value in its reply: the frame's length, the operation, the value's
    /// length.
    const HEADER: usize = 9;

    /// Returns the value's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0[Value::HEADER..]
    }

    /// Returns the reply that carries the value.
    pub fn reply(&self) -> Arc<Vec<u8>> {
        Arc::clone(&self.0)
    }
}

impl Values {
    /// Returns the value under `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Returns all values with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Sets `key` and returns who watched it. They no longer do.
    pub fn set(&mut self, key: &str, value: &[u8]) -> BTreeSet<usize> {
        self.values.insert(key.to_string(), Value(Arc::new(Reply::Value(value).encode())));
        self.watchers.remove(key).unwrap_or_default()
    }

    /// Whether there was such a key.
    pub fn remove(&mut self, key: &str) -> bool {
        self.values.remove(key).is_some()
    }

    /// Returns the number under `key`, 0 if there is none, plus `increment`; or why that is
    /// impossible.
    pub fn sum(&self, key: &str, increment: i64) -> Result<i64, &'static str> {
        let Some(value) = self.get(key) else { return Ok(increment) };
        let number =
            std::str::from_utf8(value.bytes()).ok().and_then(|text| text.parse::<i64>().ok());
        number
            .ok_or("the value is no number")?
            .checked_add(increment)
            .ok_or("the sum does not fit 64 bits")
    }

    /// Makes the connection `id` one that waits for `key`.
    pub fn watch(&mut self, key: &str, id: usize) {
        self.watchers.entry(key.to_string()).or_default().insert(id);
    }

    /// Ends the wait of the connection `id` for `key`.
    pub fn unwatch(&mut self, key: &str, id: usize) {
        if let Some(watchers) = self.watchers.get_mut(key) {
            watchers.remove(&id);
            if watchers.is_empty() {
                self.watchers.remove(key);
            }
        }
    }
}
