//! The element types and reduction operations that collectives understand.

use std::fmt;

use half::{bf16, f16};

/// Declares an enum whose `#[repr(u8)]` codes count from 0, with a name for each.
macro_rules! coded_enum {
    ($(#[$doc:meta])* $name:ident, $kind:literal {
        $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// Every value, in the order of their codes.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// Returns the name used in messages.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl TryFrom<u8> for $name {
            type Error = UnknownCode;

            fn try_from(code: u8) -> Result<Self, UnknownCode> {
                let unknown = UnknownCode { kind: $kind, code, count: Self::ALL.len() };
                Self::ALL.get(usize::from(code)).copied().ok_or(unknown)
            }
        }
    };
}

coded_enum! {
    /// The type of one element.
    DType, "dtype" {
        /// IEEE 754 single precision.
        F32 = "f32",
        /// IEEE 754 double precision.
        F64 = "f64",
        /// IEEE 754 half precision.
        F16 = "f16",
        /// The upper half of an `f32`.
        BF16 = "bf16",
        /// Signed 32-bit integer.
        I32 = "i32",
        /// Signed 64-bit integer.
        I64 = "i64",
        /// Unsigned 8-bit integer.
        U8 = "u8",
    }
}

impl DType {
    /// Returns the number of bytes of one element, which is also its alignment.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }
}

coded_enum! {
    /// The way in which the ranks' elements become one. The function `reduce` documents each for
    /// every type.
    ReduceOp, "reduce operation" {
        /// The sum.
        Sum = "sum",
        /// The sum divided by the number of ranks.
        Avg = "avg",
        /// The product.
        Product = "product",
        /// The smallest.
        Min = "min",
        /// The largest.
        Max = "max",
    }
}

/// A byte that stands for no [`DType`] or [`ReduceOp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownCode {
    kind: &'static str,
    code: u8,
    count: usize,
}

impl fmt::Display for UnknownCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is not the code of a {} (they are 0 to {})",
            self.code,
            self.kind,
            self.count - 1
        )
    }
}

impl std::error::Error for UnknownCode {}

mod sealed {
    /// Keeps the trait from being implemented elsewhere.
    pub trait Sealed {}
}

/// A Rust type that is the element of some [`DType`].
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The dtype of `Self`.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($element:ty = $dtype:ident),*) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements!(f32 = F32, f64 = F64, f16 = F16, bf16 = BF16, i32 = I32, i64 = I64, u8 = U8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for &dtype in DType::ALL {
            assert_eq!(DType::try_from(dtype as u8), Ok(dtype));
        }
        for &op in ReduceOp::ALL {
            assert_eq!(ReduceOp::try_from(op as u8), Ok(op));
        }
    }

    #[test]
    fn an_unknown_code_says_what_would_be_right() {
        assert_eq!(
            DType::try_from(7).unwrap_err().to_string(),
            "7 is not the code of a dtype (they are 0 to 6)"
        );
        assert!(ReduceOp::try_from(5).is_err());
    }

    #[test]
    fn sizes_are_those_of_the_elements() {
        fn check<T: Element>() {
            assert_eq!((T::DTYPE.size(), T::DTYPE.size()), (size_of::<T>(), align_of::<T>()));
        }
        check::<f32>();
        check::<f64>();
        check::<f16>();
        check::<bf16>();
        check::<i32>();
        check::<i64>();
        check::<u8>();
    }

    #[test]
    fn display_pads() {
        assert_eq!(format!("{:>5}|{:<5}", DType::BF16, ReduceOp::Avg), " bf16|avg  ");
    }
}
