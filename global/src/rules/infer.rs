//! Chooses an operation's signature: the one whose inputs need the fewest bytes of boxing.
//!
//! Axes of the placement are decided one after the other, each for itself, as OneFlow does. What is
//! broadcast is read off the logical shapes; whether a dimension is long enough to be split, off what
//! the axes before have left of it in the last and so smallest part.

use super::op::{Op, Signature};
use super::{bears_empty, rule};
use crate::placement::Placement;
use crate::region::part;
use crate::sbp::{B, NdSbp, Sbp};

/// The SBPs that were chosen for an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The SBPs that each input is to have before the operation runs on the locals.
    pub inputs: Vec<NdSbp>,
    /// The SBPs of the results.
    pub outputs: Vec<NdSbp>,
    /// Arguments that are logical shapes, with the SBP that cuts them.
    pub shapes: Vec<(usize, NdSbp)>,
    /// A rule's code runs instead of the operation.
    pub has_code: bool,
}

impl Choice {
    /// Makes all tensors B: what every operation can run on.
    pub fn all_broadcast(op: &Op, placement: &Placement) -> Self {
        let sbp = vec![B; placement.axes()];
        Self {
            inputs: vec![sbp.clone(); op.inputs.len()],
            outputs: vec![sbp; op.outputs],
            shapes: Vec::new(),
            has_code: false,
        }
    }
}

/// Chooses for inputs that have these SBPs. An in-place operation does not box the tensor that it
/// writes. None if the operation has no rule: then all inputs are made B.
pub fn infer(op: &Op, placement: &Placement, have: &[NdSbp]) -> Option<Choice> {
    let rule = rule(op.name)?;
    let mut choice = Choice::all_broadcast(op, placement);
    let mut op = op.clone();
    for (axis, &ranks) in placement.shape().iter().enumerate() {
        op.ranks = ranks;
        let have: Vec<Sbp> = have.iter().map(|sbp| sbp[axis]).collect();
        let signature = cheapest(&op, (rule.signatures)(&op), &have)?;
        for (all, &sbp) in choice.inputs.iter_mut().zip(&signature.inputs) {
            all[axis] = sbp;
        }
        for (all, &sbp) in choice.outputs.iter_mut().zip(&signature.outputs) {
            all[axis] = sbp;
        }
        for &(arg, sbp) in &signature.shapes {
            let index = choice.shapes.iter().position(|(other, _)| *other == arg);
            let index = index.unwrap_or_else(|| {
                choice.shapes.push((arg, vec![B; placement.axes()]));
                choice.shapes.len() - 1
            });
            choice.shapes[index].1[axis] = sbp;
        }
        choice.has_code |= signature.has_code;
        for (left, sbp) in op.left.iter_mut().zip(&signature.inputs) {
            if let Some(size) = sbp.dim().and_then(|dim| left.get_mut(dim)) {
                *size = part(*size, ranks, ranks - 1).len();
            }
        }
    }
    Some(choice)
}

/// Returns the first of the cheapest of a rule's signatures and of all tensors B.
fn cheapest(op: &Op, mut signatures: Vec<Signature>, have: &[Sbp]) -> Option<Signature> {
    signatures.push(Signature::all(op, B));
    let costs = signatures.into_iter().filter_map(|one| Some((cost(op, &one, have)?, one)));
    let (_, signature) = costs.min_by(|(one, _), (other, _)| one.total_cmp(other))?;
    Some(signature)
}

/// Returns bytes that each rank receives on average to give the inputs these SBPs; None if it
/// cannot be: there is no such dimension, it is shorter than the axis (but where tensors are split
/// so already, and the operation bears empty parts), or an in-place operation would box what it
/// writes.
fn cost(op: &Op, signature: &Signature, have: &[Sbp]) -> Option<f64> {
    let mut bytes = 0.0;
    let bears_empty = bears_empty(op.name);
    for (index, (input, &want)) in op.inputs.iter().zip(&signature.inputs).enumerate() {
        if !input.is_defined() {
            continue;
        }
        let left = &op.left[index];
        if let Some(dim) = want.dim() {
            let may_be_empty = bears_empty && want == have[index];
            if *left.get(dim)? < op.ranks && !may_be_empty {
                return None;
            }
        }
        if op.is_fixed(index) && want != have[index] {
            return None;
        }
        // To leave an empty part as it is is cheapest as well.
        let size = (left.iter().product::<usize>() * input.bytes()).max(1) as f64;
        bytes += size * share(have[index], want, op.ranks as f64);
    }
    Some(bytes)
}

/// Returns the part of a tensor that a rank receives in boxing on one axis. Slicing costs next to
/// nothing, but is not free: equally good signatures that keep what is there come first. Partial
/// values are made only where nothing else will do, as what follows will have to reduce them.
pub(crate) fn share(from: Sbp, to: Sbp, ranks: f64) -> f64 {
    const SLICE: f64 = 1e-9;
    if from == to {
        return 0.0;
    }
    let moved = match (from, to) {
        (_, Sbp::Partial(_)) => 4.0 * ranks,
        (Sbp::Broadcast, _) => 0.0,
        (Sbp::Partial(_), Sbp::Broadcast) => 2.0 * (ranks - 1.0) / ranks,
        (Sbp::Partial(_), Sbp::Split(_)) | (Sbp::Split(_), Sbp::Broadcast) => (ranks - 1.0) / ranks,
        (Sbp::Split(_), Sbp::Split(_)) => (ranks - 1.0) / (ranks * ranks),
    };
    // Also on an axis of one rank, where nothing is moved.
    moved.max(SLICE)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::super::op::{Arg, Input};
    use super::*;
    use crate::sbp::{P, S};

    fn op<'a>(name: &'a str, shapes: &[&[usize]]) -> Op<'a> {
        let inputs = shapes.iter().map(|&shape| Input::new(shape, Kind::Float)).collect();
        Op::new(name, "", (0..shapes.len()).map(Arg::Tensor).collect(), inputs, 1, false)
    }

    fn chosen(op: &Op, placement: &Placement, have: &[&[Sbp]]) -> (Vec<NdSbp>, NdSbp) {
        let have: Vec<NdSbp> = have.iter().map(|sbp| sbp.to_vec()).collect();
        let choice = infer(op, placement, &have).unwrap();
        (choice.inputs, choice.outputs[0].clone())
    }

    /// As OneFlow's documents say.
    #[test]
    fn documented_choices() {
        let two = Placement::of([0, 1]).unwrap();
        let mesh = Placement::of([[0, 1], [2, 3]]).unwrap();
        let product = op("mm", &[&[4, 6], &[6, 8]]);
        let result = |have: &[&[Sbp]]| chosen(&product, &two, have).1;
        assert_eq!(result(&[&[S(0)], &[B]]), [S(0)]);
        assert_eq!(result(&[&[B], &[S(1)]]), [S(1)]);
        assert_eq!(result(&[&[S(1)], &[S(0)]]), [P]);
        assert_eq!(result(&[&[B], &[B]]), [B]);
        let result = |have: &[&[Sbp]]| chosen(&product, &mesh, have).1;
        assert_eq!(result(&[&[S(0), B], &[B, S(1)]]), [S(0), S(1)]);
        assert_eq!(result(&[&[B, S(0)], &[S(1), B]]), [S(1), S(0)]);
        // The smaller tensor is boxed: 20 elements, not 40.
        let product = op("mm", &[&[4, 5], &[5, 8]]);
        let (inputs, output) = chosen(&product, &two, &[&[S(0)], &[S(0)]]);
        assert_eq!((inputs, output), (vec![vec![S(1)], vec![S(0)]], vec![P]));
    }

    #[test]
    fn terms_stay_terms_where_an_operation_is_linear() {
        let two = Placement::of([0, 1]).unwrap();
        let result = |op: &Op, have: &[&[Sbp]]| chosen(op, &two, have).1;
        assert_eq!(result(&op("add", &[&[4, 5], &[4, 5]]), &[&[P], &[P]]), [P]);
        assert_eq!(result(&op("mul", &[&[4, 5], &[4, 5]]), &[&[P], &[B]]), [P]);
        assert_eq!(result(&op("neg", &[&[4, 5]]), &[&[P]]), [P]);
        assert_eq!(result(&op("relu", &[&[4, 5]]), &[&[P]]), [S(0)]);
        // A term of 0 would be no number.
        let of_number = |name, number| {
            let mut op = op(name, &[&[4, 5]]);
            op.args.push(number);
            result(&op, &[&[P]])
        };
        assert_eq!(of_number("mul", Arg::Float(0.0)), [P]);
        assert_eq!(of_number("mul", Arg::Float(f64::INFINITY)), [S(0)]);
        assert_eq!(of_number("div", Arg::Float(f64::INFINITY)), [P]);
        assert_eq!(of_number("div", Arg::Float(0.0)), [S(0)]);
        assert_eq!(of_number("div", Arg::Int(0)), [S(0)]);
        // A number would be added by each rank.
        let mut sum = op("add", &[&[4, 5]]);
        sum.args.push(Arg::Float(1.0));
        assert_eq!(result(&sum, &[&[P]]), [S(0)]);
        // In place nothing is boxed that is written: so all else is.
        let mut sum = op("add", &[&[4, 5], &[4, 5]]);
        sum.in_place = true;
        assert_eq!(chosen(&sum, &two, &[&[S(1)], &[S(0)]]).0, [[S(1)], [S(1)]]);
    }

    /// Nothing is moved on an axis of one rank, and yet what is there is kept: a view of it shares
    /// its memory then.
    #[test]
    fn on_one_rank_inputs_stay_as_they_are() {
        let one = Placement::of([0]).unwrap();
        for sbp in [S(0), S(1), P, B] {
            let detach = op("detach", &[&[4, 5]]);
            assert_eq!(chosen(&detach, &one, &[&[sbp]]), (vec![vec![sbp]], vec![sbp]));
        }
    }

    #[test]
    fn broadcast_and_short_dimensions_are_not_split() {
        let three = Placement::of([0, 1, 2]).unwrap();
        let result = |op: &Op, have: &[&[Sbp]]| chosen(op, &three, have);
        let sum = op("add", &[&[6, 5], &[5]]);
        assert_eq!(result(&sum, &[&[S(0)], &[B]]).1, [S(0)]);
        let (inputs, output) = result(&sum, &[&[S(1)], &[B]]);
        assert_eq!((inputs, output), (vec![vec![S(1)], vec![S(0)]], vec![S(1)]));
        let column = op("add", &[&[6, 5], &[6, 1]]);
        assert_eq!(result(&column, &[&[S(1)], &[B]]).0, [[S(1)], [B]]);
        assert_eq!(result(&op("_softmax", &[&[2, 2]]), &[&[S(0)]]).1, [B]);
        // What has that SBP already keeps it, if each element is by itself.
        assert_eq!(result(&op("relu", &[&[2, 2]]), &[&[S(0)]]).1, [S(0)]);
        assert_eq!(infer(&op("no_such_operation", &[&[2]]), &three, &[vec![B]]), None);
    }

    /// What an axis leaves of a dimension says nothing about broadcasting.
    #[test]
    fn what_is_left_of_a_dimension_is_not_broadcast() {
        let column = Placement::of([[0], [1]]).unwrap();
        let result = |op: &Op, have: &[&[Sbp]]| chosen(op, &column, have);
        // Of two rows each rank has one, as many as the row has.
        let product = op("mul", &[&[1, 3], &[2, 3]]);
        let (inputs, output) = result(&product, &[&[B, S(0)], &[S(0), S(0)]]);
        assert_eq!((inputs, output), (vec![vec![B, B], vec![S(0), S(0)]], vec![S(0), S(0)]));
        let sum = op("addmm", &[&[1, 3], &[2, 4], &[4, 3]]);
        let (inputs, output) = result(&sum, &[&[B, B], &[S(0), S(0)], &[B, B]]);
        assert_eq!((&inputs[0][..], &output[..]), (&[B, B][..], &[S(0), S(0)][..]));
        // The first dimension begins no group of the new shape, whatever is left of it.
        let mut view = op("view", &[&[2, 3]]);
        view.args.push(Arg::Ints(vec![2, 3].into()));
        assert_eq!(result(&view, &[&[S(0), S(0)]]).1, [S(0), S(0)]);
    }
}
