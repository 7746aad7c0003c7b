//! One digest for all that ranks compare or tell apart by a number.

use std::hash::{Hash, Hasher};

/// Returns a digest of a value: the same in all processes of one program, whatever the machine.
/// Not for values that an adversary chooses.
pub fn digest<T: Hash + ?Sized>(value: &T) -> u64 {
    let mut hasher = fnv::FnvHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}
