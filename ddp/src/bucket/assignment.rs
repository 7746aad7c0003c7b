//! Which parameters are reduced together, and in which order: pure functions over sizes.

const MIB: f64 = 1024.0 * 1024.0;

/// Byte caps of the buckets of a class. The last one holds for all further buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caps(Vec<usize>);

impl Caps {
    /// Returns caps given in MiB.
    pub fn mib(caps: &[f64]) -> Self {
        Self(caps.iter().map(|cap| (cap * MIB) as usize).collect())
    }

    /// Returns the caps in MiB.
    pub fn in_mib(&self) -> Vec<f64> {
        self.0.iter().map(|&cap| cap as f64 / MIB).collect()
    }

    /// Returns whether there are caps, and none is 0.
    pub fn are_positive(&self) -> bool {
        !self.0.is_empty() && !self.0.contains(&0)
    }

    /// Returns the largest cap, in bytes.
    pub fn largest(&self) -> usize {
        self.0.iter().copied().max().unwrap_or(usize::MAX / 2)
    }

    /// Returns the cap of a bucket, given the number of buckets before it.
    fn of(&self, before: usize) -> usize {
        self.0.get(before).or(self.0.last()).copied().unwrap_or(usize::MAX)
    }
}

impl Default for Caps {
    /// Returns PyTorch's. The first bucket is small, so that communication begins early.
    fn default() -> Self {
        Self::mib(&[1.0, 25.0])
    }
}

/// A parameter, for bucketing: its size in bytes as communicated, and a class
/// (type and device); only parameters of one class share a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    pub bytes: usize,
    pub class: u8,
}

/// Assigns `items`, visited in `order`, to buckets. A bucket is closed as soon as it holds its cap
/// or more, as in PyTorch's `compute_bucket_assignment_by_size`. Buckets come in the order in which
/// they are full when gradients arrive in `order`.
pub fn assign(items: &[Item], order: &[usize], caps: &Caps) -> Vec<Vec<usize>> {
    struct Open {
        class: u8,
        bytes: usize,
        closed: usize,
        members: Vec<usize>,
    }
    let mut open: Vec<Open> = Vec::new();
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    for &index in order {
        let Item { bytes, class } = items[index];
        let at = open.iter().position(|o| o.class == class).unwrap_or_else(|| {
            open.push(Open { class, bytes: 0, closed: 0, members: Vec::new() });
            open.len() - 1
        });
        let bucket = &mut open[at];
        bucket.members.push(index);
        bucket.bytes += bytes;
        if bucket.bytes >= caps.of(bucket.closed) {
            buckets.push(std::mem::take(&mut bucket.members));
            bucket.bytes = 0;
            bucket.closed += 1;
        }
    }
    // What is left is complete only when its last member has come.
    let mut position = vec![0; items.len()];
    for (at, &index) in order.iter().enumerate() {
        position[index] = at;
    }
    buckets.extend(open.into_iter().map(|o| o.members).filter(|m| !m.is_empty()));
    buckets.sort_by_key(|members| members.iter().map(|&m| position[m]).max());
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn floats(counts: &[usize]) -> Vec<Item> {
        counts.iter().map(|n| Item { bytes: n * 4, class: 0 }).collect()
    }

    #[test]
    fn caps_close_buckets_as_pytorch_does() {
        let order = [0, 1, 2, 3];
        assert_eq!(
            assign(&floats(&[100, 200, 100, 50]), &order, &Caps(vec![400])),
            [vec![0], vec![1], vec![2], vec![3]]
        );
        assert_eq!(
            assign(&floats(&[10, 10, 10, 10]), &order, &Caps(vec![40, 80])),
            [vec![0], vec![1, 2], vec![3]]
        );
        assert_eq!(
            assign(&floats(&[10; 7]), &[0, 1, 2, 3, 4, 5, 6], &Caps(vec![40, 120, 80])),
            [vec![0], vec![1, 2, 3], vec![4, 5], vec![6]]
        );
    }

    #[test]
    fn classes_do_not_mix_and_buckets_come_as_they_fill() {
        let items =
            [(4, 0), (4, 1), (4, 0), (4, 1), (4, 0)].map(|(bytes, class)| Item { bytes, class });
        let caps = Caps(vec![8]);
        assert_eq!(assign(&items, &[4, 3, 2, 1, 0], &caps), [vec![4, 2], vec![3, 1], vec![0]]);
        let never_full = Caps(vec![100]);
        assert_eq!(assign(&items, &[4, 3, 2, 1, 0], &never_full), [vec![3, 1], vec![4, 2, 0]]);
    }

    #[test]
    fn nothing_gives_nothing() {
        assert!(assign(&[], &[], &Caps(vec![1])).is_empty());
    }

    proptest! {
        #[test]
        fn every_parameter_is_in_one_bucket_of_its_class(
            sizes in prop::collection::vec((0usize..5000, 0u8..3), 0..60),
            caps in prop::collection::vec(1usize..9000, 1..4),
        ) {
            let items: Vec<Item> =
                sizes.iter().map(|&(bytes, class)| Item { bytes, class }).collect();
            let order: Vec<usize> = (0..items.len()).rev().collect();
            let buckets = assign(&items, &order, &Caps(caps.clone()));
            let mut seen: Vec<usize> = buckets.concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..items.len()).collect::<Vec<_>>());
            for bucket in &buckets {
                prop_assert!(bucket.iter().all(|&m| items[m].class == items[bucket[0]].class));
                // Without its last member no bucket would have been closed.
                let early: usize = bucket[..bucket.len() - 1].iter().map(|&m| items[m].bytes).sum();
                prop_assert!(early < *caps.iter().max().unwrap());
            }
        }
    }
}
