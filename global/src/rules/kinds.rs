//! Kinds of results: which partial sums stay partial sums when their kind changes.

use std::cmp::Ordering;

use tch::Kind;

use super::op::{Arg, Op};
use crate::kinds::{complex, is_complex, is_float, is_half, kind_of, real};

/// Returns whether converted terms add up to the converted sum. A wider kind of floating point
/// holds each term as it is; a narrower one rounds each of them. Integers are sums modulo a power
/// of two: these stay right in fewer bits, and not in more.
pub fn keeps_terms(from: Kind, to: Kind) -> bool {
    if from == to {
        return true;
    }
    if is_integer(from) && is_integer(to) {
        return to.elt_size_in_bytes() <= from.elt_size_in_bytes();
    }
    let is_wider = matches!(
        (real(from), real(to)),
        (Kind::Half | Kind::BFloat16, Kind::Float | Kind::Double) | (Kind::Float, Kind::Double)
    );
    (is_complex(to) || !is_complex(from)) && (is_wider || real(from) == real(to))
}

/// Returns the kind that libtorch's sum of a kind has.
pub fn of_sum(kind: Kind) -> Kind {
    if is_integer(kind) || kind == Kind::Bool { Kind::Int64 } else { kind }
}

impl Op<'_> {
    /// Returns the kind of a sum of the first input: argument `arg`, if it is there.
    fn kind_of_sum(&self, arg: usize) -> Option<Kind> {
        match self.int(arg) {
            Some(number) => kind_of(number),
            None => self.inputs[0].kind.map(of_sum),
        }
    }

    /// Returns whether partial sums of the first input stay partial sums in the result, whose kind
    /// argument `arg` is; without that argument, the kind of a sum.
    pub fn keeps_terms(&self, arg: usize) -> bool {
        let kinds = self.inputs[0].kind.zip(self.kind_of_sum(arg));
        kinds.is_some_and(|(from, to)| keeps_terms(from, to))
    }

    /// Returns whether terms of the result are to be added up before they get its kind, which argument
    /// `arg` is: half precision rounds them, and they may be greater than it holds.
    pub fn rounds_terms(&self, arg: usize) -> bool {
        self.kind_of_sum(arg).is_some_and(is_half)
    }
}

/// Returns the kind of a pointwise operation's result, as libtorch promotes the kinds of its
/// tensors and of a number: tensors without dimensions, and numbers after them, count only if they
/// are of a higher category.
pub fn promoted(op: &Op, number: Option<&Arg>) -> Option<Kind> {
    let mut with_dims = None;
    let mut without_dims = None;
    for input in &op.inputs {
        let Some(kind) = input.kind else { continue };
        let group = if input.shape.is_empty() { &mut without_dims } else { &mut with_dims };
        *group = Some(group.map_or(kind, |other| of_both(other, kind)));
    }
    let number = match number {
        Some(Arg::Int(_)) => Some(Kind::Int64),
        Some(Arg::Float(_)) => Some(Kind::Float),
        Some(Arg::Bool(_)) => Some(Kind::Bool),
        // A complex number, as far as rules know.
        Some(Arg::Other) => return None,
        _ => None,
    };
    raised(with_dims, raised(without_dims, number))
}

/// Returns a kind, or the other one if that is of a higher category.
fn raised(kind: Option<Kind>, other: Option<Kind>) -> Option<Kind> {
    match (kind, other) {
        (Some(kind), Some(other)) if category(other) > category(kind) => {
            Some(if is_float(kind) { complex(kind) } else { other })
        }
        (Some(kind), _) => Some(kind),
        (None, other) => other,
    }
}

/// Returns the kind that holds the values of two.
fn of_both(one: Kind, other: Kind) -> Kind {
    if is_complex(one) != is_complex(other) {
        return complex(of_both(real(one), real(other)));
    }
    match breadth(one).cmp(&breadth(other)) {
        Ordering::Greater => one,
        Ordering::Less => other,
        Ordering::Equal if one == other => one,
        Ordering::Equal if is_float(one) => Kind::Float,
        Ordering::Equal => Kind::Int16,
    }
}

/// Orders kinds: one with more holds the values of one with less.
fn breadth(kind: Kind) -> (usize, usize) {
    (category(kind), kind.elt_size_in_bytes())
}

/// Truth values, integers, numbers of floating point, complex ones.
fn category(kind: Kind) -> usize {
    match kind {
        Kind::Bool => 0,
        _ if is_complex(kind) => 3,
        _ if is_float(kind) => 2,
        _ => 1,
    }
}

fn is_integer(kind: Kind) -> bool {
    category(kind) == 1
}

#[cfg(test)]
mod tests {
    use super::super::op::Input;
    use super::*;
    use tch::{Device, Tensor};

    const KINDS: [Kind; 12] = [
        Kind::Bool,
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::BFloat16,
        Kind::Float,
        Kind::Double,
        Kind::ComplexFloat,
        Kind::ComplexDouble,
    ];

    fn op(inputs: &[(&[usize], Kind)]) -> Op<'static> {
        let input = |&(shape, kind): &(&[usize], Kind)| Input::new(shape, kind);
        Op::new("add", "", Vec::new(), inputs.iter().map(input).collect(), 1, false)
    }

    #[test]
    fn kinds_are_promoted_as_by_libtorch() {
        let shapes: [&[usize]; 2] = [&[], &[2]];
        for one in KINDS {
            for other in KINDS {
                for (shape, other_shape) in
                    shapes.iter().flat_map(|one| shapes.iter().map(move |other| (*one, *other)))
                {
                    let tensor = |shape: &[usize], kind| {
                        let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
                        Tensor::zeros(&sizes[..], (kind, Device::Cpu))
                    };
                    let expected = (tensor(shape, one) + tensor(other_shape, other)).kind();
                    let op = op(&[(shape, one), (other_shape, other)]);
                    let found = promoted(&op, None);
                    assert_eq!(found, Some(expected), "{one:?}{shape:?} {other:?}{other_shape:?}");
                }
            }
            let tensor = Tensor::zeros([2], (one, Device::Cpu));
            let of_number = |arg: Arg| promoted(&op(&[(&[2], one)]), Some(&arg));
            assert_eq!(of_number(Arg::Int(2)), Some((&tensor + 2).kind()), "{one:?}");
            assert_eq!(of_number(Arg::Float(0.5)), Some((&tensor + 0.5).kind()), "{one:?}");
        }
    }

    #[test]
    fn terms_are_kept_by_wider_kinds_only() {
        let kept = |from| KINDS.into_iter().filter(|&to| keeps_terms(from, to)).collect::<Vec<_>>();
        assert_eq!(kept(Kind::Double), [Kind::Double, Kind::ComplexDouble]);
        let wider = [Kind::Float, Kind::Double, Kind::ComplexFloat, Kind::ComplexDouble];
        assert_eq!(kept(Kind::Float), wider);
        assert_eq!(kept(Kind::Half), [&[Kind::Half][..], &wider].concat());
        assert_eq!(kept(Kind::BFloat16), [&[Kind::BFloat16][..], &wider].concat());
        assert_eq!(kept(Kind::ComplexDouble), [Kind::ComplexDouble]);
        let narrower = [Kind::Uint8, Kind::Int8, Kind::Int16, Kind::Int];
        assert_eq!(kept(Kind::Int), narrower);
        assert_eq!(kept(Kind::Bool), [Kind::Bool]);
    }
}
