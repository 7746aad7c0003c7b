//! Kinds of elements: their numbers in libtorch, and what they are.

use tch::Kind;

/// Returns the kind that an argument asks for: libtorch's number of it.
pub fn kind_of(number: i64) -> Option<Kind> {
    Some(match number {
        0 => Kind::Uint8,
        1 => Kind::Int8,
        2 => Kind::Int16,
        3 => Kind::Int,
        4 => Kind::Int64,
        5 => Kind::Half,
        6 => Kind::Float,
        7 => Kind::Double,
        8 => Kind::ComplexHalf,
        9 => Kind::ComplexFloat,
        10 => Kind::ComplexDouble,
        11 => Kind::Bool,
        15 => Kind::BFloat16,
        _ => return None,
    })
}

/// Returns libtorch's number of a kind; -1 for kinds that `kind_of` does not know.
pub fn number_of(kind: Kind) -> i64 {
    (0..=15).find(|&number| kind_of(number) == Some(kind)).unwrap_or(-1)
}

/// Returns the kind in which sums of a kind are computed: half precision is not enough.
pub fn wide(kind: Kind) -> Kind {
    if is_half(kind) { Kind::Float } else { kind }
}

/// Returns whether a kind is one of half precision.
pub fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

/// Returns the kind of a complex number's magnitude; of a real number itself.
pub fn real(kind: Kind) -> Kind {
    match kind {
        Kind::ComplexHalf => Kind::Half,
        Kind::ComplexFloat => Kind::Float,
        Kind::ComplexDouble => Kind::Double,
        other => other,
    }
}

/// Returns the kind of complex numbers whose parts are of a kind; of complex numbers itself.
pub fn complex(kind: Kind) -> Kind {
    match kind {
        Kind::Half => Kind::ComplexHalf,
        Kind::Double => Kind::ComplexDouble,
        _ if is_complex(kind) => kind,
        _ => Kind::ComplexFloat,
    }
}

/// Returns whether a kind is one of complex numbers.
pub fn is_complex(kind: Kind) -> bool {
    matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble)
}

/// Returns whether a kind is one of floating point, complex ones too.
pub fn is_float(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Half
            | Kind::Float
            | Kind::Double
            | Kind::ComplexHalf
            | Kind::ComplexFloat
            | Kind::ComplexDouble
            | Kind::BFloat16
            | Kind::Float8e5m2
            | Kind::Float8e4m3fn
            | Kind::Float8e5m2fnuz
            | Kind::Float8e4m3fnuz
    )
}
