//! The arithmetic of accumulators, and how elements become accumulators and back.
//!
//! Everything here is branch-free and inlined. So loops over it become vector code for whatever
//! instruction set the caller is compiled for, with the same bits on all of them.

use half::{bf16, f16};

use crate::types::Element;

/// A type that reductions compute in.
pub(crate) trait Number: Copy {
    /// Returns `self + other`; integers wrap.
    fn add(self, other: Self) -> Self;

    /// Returns `self * other`; integers wrap.
    fn multiply(self, other: Self) -> Self;

    /// Returns the smaller; NaN if one is.
    fn minimum(self, other: Self) -> Self;

    /// Returns the larger; NaN if one is.
    fn maximum(self, other: Self) -> Self;

    /// Returns `self / other`; integers truncate toward zero.
    fn divide(self, other: Self) -> Self;

    /// Returns `n` in this type.
    fn from_count(n: usize) -> Self;

    /// Returns `1 / n` if multiplying by it has the same bits as dividing by `n`.
    fn exact_reciprocal(n: usize) -> Option<Self>;
}

macro_rules! float_number {
    ($($float:ty),*) => {$(
        impl Number for $float {

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }

            #[inline(always)]
            fn divide(self, other: Self) -> Self {
                self / other
            }

            fn from_count(n: usize) -> Self {
                n as $float
            }

            fn exact_reciprocal(n: usize) -> Option<Self> {
                n.is_power_of_two().then(|| 1.0 / n as $float)
            }
        }
    )*};
}

float_number!(f32, f64);

macro_rules! integer_number {
    ($($integer:ty),*) => {$(
        impl Number for $integer {

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            fn divide(self, other: Self) -> Self {
                self / other
            }

            fn from_count(n: usize) -> Self {
                n as $integer
            }

            fn exact_reciprocal(_: usize) -> Option<Self> {
                None
            }
        }
    )*};
}

integer_number!(i32, i64, i128, u8);

/// An element and the types it is accumulated in.
pub(crate) trait Arithmetic: Element + Widen<Self::Accumulator> + Widen<Self::Mean> {
    /// For every operation but the average.
    type Accumulator: Number;
    /// For the average: wide enough for any sum.
    type Mean: Number;
}

/// Conversion to an accumulator and, rounding or truncating, back.
pub(crate) trait Widen<A>: Copy {
    fn widen(self) -> A;
    fn narrow(accumulator: A) -> Self;
}

macro_rules! arithmetic {
    ($($element:ty: $accumulator:ty, $mean:ty;)*) => {$(
        impl Arithmetic for $element {
            type Accumulator = $accumulator;
            type Mean = $mean;
        }
    )*};
}

arithmetic! {
    f32: f32, f32;
    f64: f64, f64;
    f16: f32, f32;
    bf16: f32, f32;
    i32: i32, i64;
    i64: i64, i128;
    u8: u8, i64;
}

macro_rules! widen_by_cast {
    ($($element:ty => $accumulator:ty),*) => {$(
        impl Widen<$accumulator> for $element {
            #[inline(always)]
            fn widen(self) -> $accumulator {
                self as $accumulator
            }

            #[inline(always)]
            fn narrow(accumulator: $accumulator) -> Self {
                accumulator as $element
            }
        }
    )*};
}

widen_by_cast!(f32 => f32, f64 => f64);
widen_by_cast!(i32 => i32, i32 => i64, i64 => i64, i64 => i128, u8 => u8, u8 => i64);

/// `half`'s own conversions ask for the CPU's features at every element, which keeps loops from
/// becoming vector code.
impl Widen<f32> for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        const SMALLEST_NORMAL: f32 = f32::from_bits(113 << 23); // 2^-14
        let bits = u32::from(self.to_bits());
        let sign = (bits & 0x8000) << 16;
        let exponent = bits & 0x7c00;
        let shifted = (bits & 0x7fff) << 13;
        let normal = shifted + (112 << 23);
        let infinite_or_nan = shifted | 0x7f80_0000;
        // A subnormal is its mantissa after the smallest normal number's leading one, which is
        // taken off again.
        let subnormal = (f32::from_bits(shifted + (113 << 23)) - SMALLEST_NORMAL).to_bits();
        let magnitude = if exponent == 0x7c00 { infinite_or_nan } else { normal };
        let magnitude = if exponent == 0 { subnormal } else { magnitude };
        f32::from_bits(sign | magnitude)
    }

    #[inline(always)]
    fn narrow(accumulator: f32) -> Self {
        const INFINITE: u32 = 0x7f80_0000;
        const OVERFLOWS: u32 = 143 << 23; // 2^16
        const SMALLEST_NORMAL: u32 = 113 << 23; // 2^-14
        const HALF: f32 = 0.5; // one unit in its last place is the smallest subnormal f16, 2^-24
        let bits = accumulator.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // To nearest, ties to even; a carry out of the mantissa goes where it belongs, into the
        // exponent.
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let subnormal = (f32::from_bits(magnitude) + HALF).to_bits().wrapping_sub(HALF.to_bits());
        let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
        let result = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
        let result = if magnitude >= OVERFLOWS { 0x7c00 } else { result };
        let result = if magnitude > INFINITE { nan } else { result };
        f16::from_bits((sign | result) as u16)
    }
}

impl Widen<f32> for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(accumulator: f32) -> Self {
        let bits = accumulator.to_bits();
        let odd = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff + odd) >> 16;
        let result = if accumulator.is_nan() { bits >> 16 | 0x40 } else { rounded };
        bf16::from_bits(result as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16::from_bits(bits).widen(), f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "f16 {bits:#06x}"
            );
            let (ours, theirs) = (bf16::from_bits(bits).widen(), bf16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "bf16 {bits:#06x}"
            );
        }
    }

    #[test]
    fn floats_narrow_as_the_half_crate_does() {
        // The upper 20 bits in full; below them the values at, beside and between the ties of both
        // formats.
        for upper in 0..1u32 << 20 {
            for lower in [0x000, 0x001, 0x7ff, 0x800, 0xfff] {
                let value = f32::from_bits(upper << 12 | lower);
                assert_eq!(
                    f16::narrow(value).to_bits(),
                    f16::from_f32(value).to_bits(),
                    "{:#x}",
                    value.to_bits()
                );
                assert_eq!(
                    bf16::narrow(value).to_bits(),
                    bf16::from_f32(value).to_bits(),
                    "{:#x}",
                    value.to_bits()
                );
            }
        }
    }
}
