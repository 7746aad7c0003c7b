//! What collectives must give, computed plainly from what all ranks give.

use flow_comm::{DType, Element, ReduceOp, bf16, f16};

/// Data up to this many bytes is reduced in rank order over all nodes; more of it by node.
const SMALL: usize = 4096;
/// More ranks are of no use to these checks.
pub const MAX_RANKS: usize = 16;

/// What ranks give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// All kinds of numbers; reductions are rounded in rank order.
    Any,
    /// Small whole numbers, which are reduced without rounding in any order, but for averages.
    Small,
}

/// A type whose reductions are known.
pub trait Number: Element + Default + PartialEq + std::fmt::Debug {
    fn value(seed: u64) -> Self;
    fn small(number: u8) -> Self;
    fn to_f64(self) -> f64;
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
    /// The average of `ranks` values, of which `sums` are parts.
    fn average(sums: &[Self], ranks: usize) -> Self;
    fn bits(self) -> u64;
}

macro_rules! float_reference {
    ($($float:ty as $wide:ty: $lift:expr, $lower:expr;)*) => {$(
        impl Number for $float {
            fn value(seed: u64) -> Self {
                $lower((seed % 4001) as $wide / 1000.0 - 2.0)
            }

            fn small(number: u8) -> Self {
                $lower(number as $wide)
            }

            fn to_f64(self) -> f64 {
                $lift(self) as f64
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = values.iter().map(|&value| $lift(value));
                let both = |combine: fn($wide, $wide) -> $wide| wide.reduce(combine).unwrap();
                $lower(match op {
                    ReduceOp::Sum => both(|a, b| a + b),
                    ReduceOp::Avg => both(|a, b| a + b) / values.len() as $wide,
                    ReduceOp::Product => both(|a, b| a * b),
                    ReduceOp::Min => both(<$wide>::min),
                    ReduceOp::Max => both(<$wide>::max),
                })
            }

            fn average(sums: &[Self], ranks: usize) -> Self {
                let sum = sums.iter().map(|&sum| $lift(sum)).reduce(|a, b| a + b).unwrap();
                $lower(sum / ranks as $wide)
            }

            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    )*};
}

float_reference! {
    f32 as f32: |value: f32| value, |value: f32| value;
    f64 as f64: |value: f64| value, |value: f64| value;
    f16 as f32: f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32;
}

macro_rules! integer_reference {
    ($($integer:ty),*) => {$(
        impl Number for $integer {
            fn value(seed: u64) -> Self {
                seed as $integer
            }

            fn small(number: u8) -> Self {
                number as $integer
            }

            fn to_f64(self) -> f64 {
                self as f64
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = || values.iter().map(|&value| i128::from(value));
                match op {
                    ReduceOp::Sum => wide().sum::<i128>() as $integer,
                    ReduceOp::Avg => (wide().sum::<i128>() / values.len() as i128) as $integer,
                    ReduceOp::Product => {
                        values.iter().fold(1, |product, &value| product.wrapping_mul(value))
                    }
                    ReduceOp::Min => *values.iter().min().unwrap(),
                    ReduceOp::Max => *values.iter().max().unwrap(),
                }
            }

            fn average(_: &[Self], _: usize) -> Self {
                unreachable!("averages of integers are exact")
            }

            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}

integer_reference!(i32, i64, u8);

impl Values {
    /// Element `index` of what rank `rank` gives, the same in every process (the finaliser of
    /// MurmurHash3).
    pub fn of<T: Number>(self, rank: usize, index: usize) -> T {
        if self == Self::Small {
            return T::small(((rank + index) % 3) as u8);
        }
        let mut seed = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index as u64;
        seed = (seed ^ seed >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        seed = (seed ^ seed >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        T::value(seed ^ seed >> 33)
    }

    /// What all `size` ranks' elements `index` are reduced to.
    pub fn reduced<T: Number>(self, op: ReduceOp, size: usize, index: usize) -> T {
        let mut values = [T::small(0); MAX_RANKS];
        values[..size].iter_mut().enumerate().for_each(|(rank, to)| *to = self.of(rank, index));
        T::reduce(op, &values[..size])
    }

    /// The same as all_reduce does it for `count` elements of ranks on these nodes: in each node
    /// first where they are many.
    pub fn all_reduced<T: Number>(
        self,
        op: ReduceOp,
        nodes: &[u32],
        count: usize,
        index: usize,
    ) -> T {
        let size = nodes.len();
        let exact = op == ReduceOp::Avg && matches!(T::DTYPE, DType::I32 | DType::I64 | DType::U8);
        if count * T::DTYPE.size() <= SMALL || exact || nodes.iter().all(|node| *node == nodes[0]) {
            return self.reduced(op, size, index);
        }
        let divided_first = matches!(T::DTYPE, DType::F16 | DType::BF16);
        let mut sums = [T::small(0); MAX_RANKS];
        let mut firsts = 0;
        for (rank, node) in nodes.iter().enumerate() {
            if nodes[..rank].contains(node) {
                continue;
            }
            let mut values = [T::small(0); MAX_RANKS];
            let mut members = 0;
            for member in (rank..size).filter(|&other| nodes[other] == *node) {
                values[members] = self.of(member, index);
                members += 1;
            }
            sums[firsts] = match op {
                ReduceOp::Avg if divided_first => T::average(&values[..members], size),
                ReduceOp::Avg => T::reduce(ReduceOp::Sum, &values[..members]),
                _ => T::reduce(op, &values[..members]),
            };
            firsts += 1;
        }
        match op {
            ReduceOp::Avg if divided_first => T::reduce(ReduceOp::Sum, &sums[..firsts]),
            ReduceOp::Avg => T::average(&sums[..firsts], size),
            _ => T::reduce(op, &sums[..firsts]),
        }
    }

    /// Whether `got` is what is expected: the same bits, but for averages of small numbers, which
    /// may be computed in another way.
    pub fn is<T: Number>(self, got: T, expected: T) -> bool {
        let close = || {
            let [got, expected] = [got, expected].map(T::to_f64);
            (got - expected).abs() <= 0.005 * expected.abs()
        };
        got.bits() == expected.bits() || self == Self::Small && close()
    }
}
