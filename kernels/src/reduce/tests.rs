//! Every operation, dtype and instruction set against a plain reference written without the crate's
//! arithmetic.

use proptest::prelude::*;

use super::*;
use crate::types::Element;

/// The instruction sets that this machine can run.
fn instruction_sets() -> Vec<InstructionSet> {
    let sets = [
        Some(InstructionSet::Baseline),
        #[cfg(target_arch = "x86_64")]
        is_x86_feature_detected!("avx2").then_some(InstructionSet::Avx2),
        #[cfg(target_arch = "x86_64")]
        (InstructionSet::detect() == InstructionSet::Avx512).then_some(InstructionSet::Avx512),
    ];
    sets.into_iter().flatten().collect()
}

/// An element whose reduction is known, and whose bits can be compared (all NaNs are equal).
trait Reference: Element + std::fmt::Debug {
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
    fn bits(self) -> u64;
    fn from_seed(seed: u64) -> Self;
}

macro_rules! float_reference {
    ($float:ty, in $wide:ty, $lift:expr, $lower:expr) => {
        impl Reference for $float {
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let lifted: Vec<$wide> = values.iter().map(|&value| $lift(value)).collect();
                let nan = lifted.iter().any(|value| value.is_nan());
                let rest = lifted[1..].iter().copied();
                $lower(match op {
                    ReduceOp::Sum => rest.fold(lifted[0], |total, value| total + value),
                    ReduceOp::Avg => {
                        rest.fold(lifted[0], |total, value| total + value) / values.len() as $wide
                    }
                    ReduceOp::Product => rest.fold(lifted[0], |total, value| total * value),
                    ReduceOp::Min | ReduceOp::Max if nan => <$wide>::NAN,
                    ReduceOp::Min => rest
                        .fold(lifted[0], |least, value| if value < least { value } else { least }),
                    ReduceOp::Max => {
                        rest.fold(lifted[0], |most, value| if value > most { value } else { most })
                    }
                })
            }

            fn bits(self) -> u64 {
                if self.is_nan() { u64::MAX } else { self.to_bits().into() }
            }

            /// Mostly numbers of like size, now and then anything at all.
            fn from_seed(seed: u64) -> Self {
                if seed % 16 == 0 {
                    <$float>::from_bits((seed >> 8) as _)
                } else {
                    $lower((seed as i16) as $wide / 1024.0)
                }
            }
        }
    };
}

float_reference!(f32, in f32, |value| value, |value| value);
float_reference!(f64, in f64, |value| value, |value| value);
float_reference!(f16, in f32, f16::to_f32, f16::from_f32);
float_reference!(bf16, in f32, bf16::to_f32, bf16::from_f32);

macro_rules! integer_reference {
    ($integer:ty) => {
        impl Reference for $integer {
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let exact: i128 = values.iter().map(|&value| i128::from(value)).sum();
                match op {
                    ReduceOp::Sum => exact as $integer,
                    ReduceOp::Avg => (exact / values.len() as i128) as $integer,
                    ReduceOp::Product => {
                        values.iter().fold(1, |total: $integer, &value| total.wrapping_mul(value))
                    }
                    ReduceOp::Min => *values.iter().min().unwrap(),
                    ReduceOp::Max => *values.iter().max().unwrap(),
                }
            }

            fn bits(self) -> u64 {
                self as u64
            }

            fn from_seed(seed: u64) -> Self {
                if seed % 4 == 0 { seed as $integer } else { (seed % 100) as $integer }
            }
        }
    };
}

integer_reference!(i32);
integer_reference!(i64);
integer_reference!(u8);

/// Calls `$check::<T>($arguments)` for every element type.
macro_rules! for_every_element {
    ($check:ident $arguments:tt) => {
        $check::<f32> $arguments;
        $check::<f64> $arguments;
        $check::<f16> $arguments;
        $check::<bf16> $arguments;
        $check::<i32> $arguments;
        $check::<i64> $arguments;
        $check::<u8> $arguments;
    };
}

/// Compares with the reference in place, into one source, and into `extra` buffers beside the
/// sources, for every operation and instruction set. `inputs` are the ranks' buffers, all of one
/// length.
fn check_inputs<T: Reference>(inputs: &[Vec<T>], extra: usize) {
    let count = inputs[0].len();
    for &op in ReduceOp::ALL {
        let expected: Vec<u64> = (0..count)
            .map(|i| T::reduce(op, &inputs.iter().map(|input| input[i]).collect::<Vec<_>>()).bits())
            .collect();
        for set in instruction_sets() {
            let context = format!("{op} of {} x {count} {} with {set:?}", inputs.len(), T::DTYPE);
            for in_place in [0, 1, inputs.len()] {
                // One element more on each side shows what is written past the ends.
                let guard = T::from_seed(77);
                let guarded = |values: &[T]| [&[guard], values, &[guard]].concat();
                let mut sources: Vec<Vec<T>> = inputs.iter().map(|input| guarded(input)).collect();
                let mut beside =
                    vec![guarded(&vec![guard; count]); if in_place == 0 { extra } else { 0 }];
                let sources_at: Vec<*mut T> =
                    sources.iter_mut().map(|source| source[1..].as_mut_ptr()).collect();
                let beside_at = beside.iter_mut().map(|buffer| buffer[1..].as_mut_ptr());
                let destinations: Vec<*mut u8> = sources_at[..in_place]
                    .iter()
                    .copied()
                    .chain(beside_at)
                    .map(|pointer| pointer.cast())
                    .collect();
                let source_bytes: Vec<*const u8> =
                    sources_at.iter().map(|pointer| pointer.cast_const().cast()).collect();
                let buffers = Buffers {
                    sources: &source_bytes,
                    destinations: &destinations,
                    count,
                    ranks: inputs.len(),
                    sums: &[],
                };
                // SAFETY: the buffers have `count` elements after the guard, and this machine has
                // `set`.
                unsafe { reduce_with(set, T::DTYPE, op, buffers) };

                for result in sources[..in_place].iter().chain(&beside) {
                    let bits: Vec<u64> = result.iter().map(|value| value.bits()).collect();
                    assert_eq!(bits[1..=count], expected, "{context}, {in_place} in place");
                    assert_eq!(
                        (bits[0], bits[count + 1]),
                        (guard.bits(), guard.bits()),
                        "{context} wrote past an end"
                    );
                }
                for (source, input) in sources.iter().zip(inputs).skip(in_place) {
                    let same =
                        source[1..=count].iter().zip(input).all(|(a, b)| a.bits() == b.bits());
                    assert!(same, "{context} changed a source that is no destination");
                }
            }
        }
    }
}

fn check_sizes<T: Reference>() {
    let mut seed = 1u64;
    let mut next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        T::from_seed(seed >> 16)
    };
    for ranks in 1..=5 {
        for count in [0, 1, 3, 17, 1000, 5000] {
            let inputs: Vec<Vec<T>> =
                (0..ranks).map(|_| (0..count).map(|_| next()).collect()).collect();
            check_inputs(&inputs, ranks);
        }
    }
}

#[test]
fn every_dtype_op_rank_count_and_size_agrees_with_the_reference() {
    println!("instruction sets: {:?}", instruction_sets());
    for_every_element!(check_sizes());
}

fn check_seeds<T: Reference>(seeds: &[Vec<u64>], extra: usize) {
    let shortest = seeds.iter().map(Vec::len).min().unwrap();
    let inputs: Vec<Vec<T>> = seeds
        .iter()
        .map(|seeds| seeds[..shortest].iter().map(|&seed| T::from_seed(seed)).collect())
        .collect();
    check_inputs(&inputs, extra);
}

proptest! {
    #[test]
    fn any_input_agrees_with_the_reference(
        seeds in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..200), 1..7),
        extra in 0usize..3,
    ) {
        for_every_element!(check_seeds(&seeds, extra));
    }
}

/// `op` over one element a source.
fn single<T: Reference>(op: ReduceOp, values: &[T]) -> T {
    let sources: Vec<*const u8> = values.iter().map(|value| (value as *const T).cast()).collect();
    let mut result = values[0];
    // SAFETY: every pointer is to one element.
    unsafe { reduce(T::DTYPE, op, &sources, &[(&mut result as *mut T).cast()], 1) };
    result
}

#[test]
fn nan_wins_wherever_it_stands() {
    for &op in ReduceOp::ALL {
        for position in 0..3 {
            let mut values = [1.0f32, 2.0, 3.0];
            values[position] = f32::NAN;
            assert!(single(op, &values).is_nan(), "{op} at {position}");
            assert!(single(op, &values.map(f16::from_f32)).is_nan(), "{op} of f16 at {position}");
        }
    }
}

#[test]
fn sums_wrap_and_averages_do_not() {
    assert_eq!(single(ReduceOp::Sum, &[200u8, 100]), 44);
    assert_eq!(single(ReduceOp::Avg, &[200u8, 100]), 150);
    assert_eq!(single(ReduceOp::Sum, &[i32::MAX, 1]), i32::MIN);
    assert_eq!(single(ReduceOp::Avg, &[i64::MAX, i64::MAX - 2, i64::MAX]), i64::MAX - 1);
    assert_eq!(single(ReduceOp::Avg, &[-3i32, 0]), -1); // toward zero
    assert_eq!(single(ReduceOp::Product, &[i64::MAX, 2]), -2);
}

#[test]
fn halves_round_once() {
    // 1 + 2^-11 + 2^-11: rounded after each step it stays 1.
    let small = f16::from_f32(2f32.powi(-11));
    assert_eq!(single(ReduceOp::Sum, &[f16::ONE, small, small]).to_f32(), 1.0 + 2f32.powi(-10));
    // 60000 + 60000 overflows f16, their average does not.
    let large = f16::from_f32(60000.0);
    assert_eq!(single(ReduceOp::Avg, &[large, large]), large);
}

#[test]
fn sources_are_taken_in_order() {
    assert_eq!(single(ReduceOp::Sum, &[1e8f32, -1e8, 1.0]), 1.0);
    assert_eq!(single(ReduceOp::Sum, &[1.0f32, 1e8, -1e8]), 0.0);
}

#[test]
fn without_sources_nothing_is_written() {
    let mut untouched = 5i32;
    // SAFETY: the destination is one element.
    unsafe { reduce(DType::I32, ReduceOp::Sum, &[], &[(&mut untouched as *mut i32).cast()], 1) };
    assert_eq!(untouched, 5);
}

/// Adds up `values[0..]` in a random tree. Appends the sums that follow each source to `sums`.
fn random_tree(
    values: &[Vec<f32>],
    sums: &mut Vec<usize>,
    cuts: &mut impl Iterator<Item = usize>,
) -> Vec<f32> {
    if let [value] = values {
        sums.push(0);
        return value.clone();
    }
    let cut = 1 + cuts.next().unwrap() % (values.len() - 1);
    let left = random_tree(&values[..cut], sums, cuts);
    let right = random_tree(&values[cut..], sums, cuts);
    *sums.last_mut().unwrap() += 1;
    left.iter().zip(right).map(|(left, right)| left + right).collect()
}

proptest! {
    /// Also into a source, and into memory that is not aligned to more than an element.
    #[test]
    fn a_tree_gives_the_bits_of_its_sums_one_by_one(
        sources in 1usize..17,
        count in prop_oneof![0usize..5, 60usize..200],
        seed in any::<u64>(),
        divides in any::<bool>(),
        cuts in prop::collection::vec(any::<usize>(), 16),
    ) {
        let number = |source: usize, at: usize| {
            let mixed = (seed ^ (source * 1000 + at) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed >> 40) as f32 - 8e6) * 2f32.powi((mixed % 21) as i32)
        };
        let mut values: Vec<Vec<f32>> =
            (0..sources).map(|source| (0..count).map(|at| number(source, at)).collect()).collect();
        let mut sums = Vec::new();
        let total = random_tree(&values, &mut sums, &mut cuts.into_iter());
        let ranks = divides.then_some(11);
        let expected: Vec<u32> =
            total.iter().map(|sum| (if divides { sum / 11.0 } else { *sum }).to_bits()).collect();
        for set in instruction_sets() {
            let mut result = vec![0f32; count];
            let from: Vec<*const u8> = values.iter().map(|value| value.as_ptr().cast()).collect();
            let op = if divides { ReduceOp::Avg } else { ReduceOp::Sum };
            let buffers = Buffers {
                sources: &from,
                destinations: &[result.as_mut_ptr().cast()],
                count,
                ranks: 11,
                sums: &sums,
            };
            // SAFETY: all have `count` elements, and this machine has `set`.
            unsafe { reduce_with(set, DType::F32, op, buffers) };
            let bits: Vec<u32> = result.iter().map(|number| number.to_bits()).collect();
            prop_assert_eq!(&bits, &expected, "{:?} {:?}", set, sums);
        }
        let places: Vec<*mut f32> = values.iter_mut().map(|value| value.as_mut_ptr()).collect();
        let from: Vec<*const u8> = places.iter().map(|place| place.cast_const().cast()).collect();
        let to: Vec<*mut u8> = places.iter().map(|place| place.cast()).collect();
        // SAFETY: all have `count` elements.
        unsafe { sum_in_tree(DType::F32, &sums, &from, &to, count, ranks) };
        for value in &values {
            let bits: Vec<u32> = value.iter().map(|number| number.to_bits()).collect();
            prop_assert_eq!(&bits, &expected);
        }
    }
}
