//! Two pseudo-random permutations of `0..n`: PyTorch's, kept as a vector, and a keyed one that
//! needs no memory.

use rand_mt::Mt;

/// An index as a permutation stores it: `u32` wherever `n` allows, for half the memory.
pub(crate) trait Index: Copy + Send + Sync + 'static {
    fn new(index: usize) -> Self;
    fn get(self) -> usize;
}

impl Index for u32 {
    fn new(index: usize) -> Self {
        index as u32
    }
    fn get(self) -> usize {
        self as usize
    }
}

impl Index for usize {
    fn new(index: usize) -> Self {
        index
    }
    fn get(self) -> usize {
        self
    }
}

/// The number of elements from which on PyTorch takes 64-bit draws and the inside-out form of the
/// shuffle.
const LARGE: usize = u32::MAX as usize / 20;

/// Returns `torch.randperm(n, generator=torch.Generator().manual_seed(seed))` on CPU, element for
/// element: a Fisher-Yates shuffle driven by the 32-bit Mersenne Twister, of whose seed PyTorch
/// uses the low 32 bits. Every index must fit `I`.
pub(crate) fn randperm<I: Index>(n: usize, seed: u64) -> Vec<I> {
    let mut random = Mt::new(seed as u32);
    let mut order: Vec<I> = (0..n).map(I::new).collect();
    if n < LARGE {
        for i in 0..n.saturating_sub(1) {
            order.swap(i, i + random.next_u32() as usize % (n - i));
        }
    } else {
        for i in 0..n {
            let draw = draw_64(&mut random);
            // order[i] is still i, so that the inside-out step is a swap.
            order.swap(i, (draw % (i as u64 + 1)) as usize);
        }
    }
    order
}

/// Draws 64 bits as PyTorch does, of two draws of 32.
pub(crate) fn draw_64(random: &mut Mt) -> u64 {
    let high = u64::from(random.next_u32());
    let low = u64::from(random.next_u32());
    high << 32 | low
}

/// A keyed permutation of `0..n`, computed for one index at a time.
///
/// A balanced Feistel network (Luby and Rackoff 1988) permutes the numbers of an even count of
/// bits. The count is the smallest that holds `n`, and at least eight. A result of `n` or more is
/// permuted again until it falls below `n`. That makes it a permutation of `0..n` (cycle walking,
/// Black and Rogaway 2002). That takes at most four passes on average where `n` is 64 or more. The
/// round function is the output mixer of SplitMix64 (Steele, Lea and Flood 2014). After eight
/// rounds the tests below find every place, and every step between neighbours, equally likely; it
/// is for shuffling, not for secrets.
#[derive(Clone, Debug)]
pub(crate) struct KeyedPermutation {
    n: u64,
    half_bits: u32,
    keys: [u64; 8],
}

/// Below 256 numbers a network has too few distinct round functions for all orders to be equally
/// likely.
const MIN_HALF_BITS: u32 = 4;

impl KeyedPermutation {
    /// Makes the permutation of `0..n` that belongs to `seed` and `epoch`; other seeds and epochs
    /// give unrelated ones.
    pub(crate) fn new(n: usize, seed: u64, epoch: u64) -> Self {
        let n = n as u64;
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let mut state = mix(mix(seed).wrapping_add(epoch));
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        });
        Self { n, half_bits: bits.div_ceil(2).max(MIN_HALF_BITS), keys }
    }

    /// Maps `index`, which is below `n`.
    pub(crate) fn get(&self, index: usize) -> usize {
        let mut value = self.network(index as u64);
        while value >= self.n {
            value = self.network(value);
        }
        value as usize
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let mut left = value >> self.half_bits;
        let mut right = value & mask;
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// Applies the output function of SplitMix64, a bijection of 64-bit words in which every input bit
/// flips half of the output.
fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn randperm_gives_the_known_orders() {
        assert_eq!(randperm::<u32>(10, 0), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
        assert_eq!(randperm::<usize>(10, 42), [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]);
        assert_eq!(randperm::<u32>(1000, 123)[..8], [382, 974, 946, 31, 512, 42, 918, 564]);
    }

    /// Either side of the length from which PyTorch takes 64-bit draws; first, middle and last
    /// elements for seed 42.
    #[test]
    #[ignore = "takes 860 MB and half a minute, run with `cargo test --release -- --ignored`"]
    fn randperm_of_a_large_n_is_pytorchs() {
        let parts = |n: usize| {
            let order = randperm::<u32>(n, 42);
            [order[0], order[1], order[n / 2], order[n - 2], order[n - 1]]
        };
        assert_eq!(parts(LARGE - 1), [105399001, 199900638, 32775912, 213603358, 104620125]);
        assert_eq!(parts(LARGE), [85514504, 93417259, 61781871, 57301355, 144026194]);
    }

    fn is_bijection(n: usize, seed: u64, epoch: u64) -> bool {
        let permutation = KeyedPermutation::new(n, seed, epoch);
        let mut seen = vec![false; n];
        (0..n).for_each(|i| seen[permutation.get(i)] = true);
        seen.into_iter().all(|seen| seen)
    }

    #[test]
    fn keyed_is_a_bijection_for_every_small_n_and_around_powers_of_two() {
        assert!((0..600).all(|n| is_bijection(n, 7, 3)));
        assert!(
            (10..18)
                .flat_map(|bits| [(1 << bits) - 1, 1 << bits, (1 << bits) + 1])
                .all(|n| is_bijection(n, 1, 0))
        );
    }

    #[test]
    fn keyed_stays_in_range_for_the_largest_n() {
        for n in [usize::MAX, 1 << 63, (1 << 62) + 1] {
            let permutation = KeyedPermutation::new(n, 5, 0);
            assert!([0, 1, n / 2, n - 1].into_iter().all(|i| permutation.get(i) < n));
        }
    }

    proptest! {
        #[test]
        fn keyed_is_a_bijection(n in 0usize..20_000, seed: u64, epoch: u64) {
            prop_assert!(is_bijection(n, seed, epoch));
        }
    }

    /// Chi-squared of counts that should all be equal, as standard deviations from its mean.
    fn excess(counts: &[u64]) -> f64 {
        let expected = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
        let freedom = counts.len() as f64 - 1.0;
        let chi2: f64 =
            counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
        (chi2 - freedom) / (2.0 * freedom).sqrt()
    }

    #[test]
    fn keyed_orders_of_four_are_equally_likely() {
        let mut counts = [0; 256];
        for seed in 0..24_000 {
            let permutation = KeyedPermutation::new(4, seed, 0);
            counts[(0..4).fold(0, |code, i| code * 4 + permutation.get(i))] += 1;
        }
        let counts: Vec<u64> = counts.into_iter().filter(|&count| count > 0).collect();
        assert_eq!(counts.len(), 24);
        assert!(excess(&counts).abs() < 5.0, "{counts:?}");
    }

    #[test]
    fn keyed_places_and_neighbours_are_uniform() {
        const N: usize = 100;
        for by_epoch in [false, true] {
            let mut places = vec![0; N * N];
            let mut steps = vec![0; N];
            for round in 0..2000 {
                let (seed, epoch) = if by_epoch { (0, round) } else { (round, 0) };
                let permutation = KeyedPermutation::new(N, seed, epoch);
                for i in 0..N {
                    let place = permutation.get(i);
                    places[i * N + place] += 1;
                    steps[(permutation.get((i + 1) % N) + N - place) % N] += 1;
                }
            }
            assert_eq!(steps.remove(0), 0);
            assert!(excess(&places).abs() < 5.0, "places {}", excess(&places));
            assert!(excess(&steps).abs() < 5.0, "steps {}", excess(&steps));
        }
    }
}
