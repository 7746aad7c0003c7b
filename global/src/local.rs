//! Global tensors of what each rank has, and back.

use std::sync::Arc;

use flow_autograd::custom_function;
use flow_comm::digest;
use flow_tensor::TensorCollectives;
use tch::Tensor;

use crate::boxing::plan::groups;
use crate::compare;
use crate::convert::{convert, one, outputs};
use crate::error::{Error, Result};
use crate::handle::{boxed, empty_like, local_of, spec_of, wrap};
use crate::placement::Placement;
use crate::region::{check, regions, shape};
use crate::runtime::Runtime;
use crate::sbp::{B, P, Sbp, dual, filler, text};
use crate::sequence;
use crate::spec::Spec;

/// A dimension more than any tensor has.
const MAX_DIMS: usize = 64;

/// Returns the global tensor whose part, copy or partial sum `local` is on this rank. What should
/// be copies becomes what the first rank has.
pub fn from_locals(local: &Tensor, spec: &Arc<Spec>) -> Result<Tensor> {
    let given = GivenLocal::of_all_ranks(local, spec.placement())?;
    let shape = logical_shape(&given, spec.placement(), spec.sbp())?;
    let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    let to = spec.clone();
    let mut local = local.shallow_clone();
    if given.iter().any(|given| given.requires_grad) && !local.requires_grad() {
        // All ranks take part in backward.
        local = local.detach().set_requires_grad(true);
    }
    differentiable(&local, spec, move |local| first_copies(local, to, &sizes))
}

/// Returns the global tensor of these sizes whose part, copy or partial sum `local` is on this
/// rank. As [`to_global`](crate::GlobalTensor::to_global), but nothing is communicated: the caller
/// knows the sizes, and that copies are equal (`FLOW_GLOBAL_DEBUG=1` has ranks compare them). It
/// has the local's memory. Ranks outside the placement may pass any tensor of that kind.
/// Differentiable.
///
/// # Errors
/// The SBP does not fit the placement or the shape, or the local is not this rank's part.
pub fn from_local(
    local: &Tensor,
    sizes: impl AsRef<[i64]>,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    let sizes = sizes.as_ref().to_vec();
    let sbp = sbp.as_ref();
    let logical = shape(&sizes);
    check(placement, sbp, &logical)?;
    let runtime = placement.runtime()?;
    let position = placement.position(runtime.rank());
    if let Some(position) = position {
        let own = shape(&local.size());
        let rank = runtime.rank();
        let part = regions(placement, sbp, &logical).swap_remove(position).shape();
        let is_part = own == part;
        if compare::is_on() {
            compare_locals(local, is_part, &logical, (placement, sbp), runtime)?;
        }
        if !is_part {
            return Err(no_part("from_local", rank, &own, &logical, (placement, sbp), &part));
        }
    }
    let spec = Spec::of(placement, sbp)?;
    let to = spec.clone();
    differentiable(local, &spec, move |local| {
        let own = position.map(|_| local.detach().contiguous());
        wrap(own.as_ref(), local, to, &sizes)
    })
}

/// Compares what the ranks give to `from_local`: all do if one's local is not its part.
fn compare_locals(
    local: &Tensor,
    is_part: bool,
    shape: &[usize],
    (placement, sbp): (&Placement, &[Sbp]),
    runtime: &Runtime,
) -> Result<()> {
    let all: Vec<usize> = (0..placement.ranks().len()).collect();
    let sizes = format!(
        "the local {:?} {:?} of a tensor {shape:?} {}",
        local.size(),
        local.kind(),
        text(sbp)
    );
    let asked = digest(&(shape, placement, sbp, local.kind() as i64, is_part));
    let sizes = [(sizes, asked)];
    let remedy = "each rank gives its part of the same tensor";
    compare::values("from_local", (placement, &[all]), runtime, &sizes, remedy)?;
    let copied: Vec<usize> = (0..placement.axes()).filter(|&axis| sbp[axis] == B).collect();
    let copies = groups(placement, &copied);
    let what = format!("the local {:?} of {}", local.size(), text(sbp));
    let remedy = "what is B is the same on all ranks (to_global gives all of them the first one's)";
    let given = [(what, compare::digest_of_tensor(local)?)];
    compare::values("from_local", (placement, &copies), runtime, &given, remedy)
}

/// Runs `forward`. The gradient of a local is that of its part; of a copy, a partial gradient; of a
/// partial sum, all of it.
fn differentiable(
    local: &Tensor,
    spec: &Arc<Spec>,
    forward: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let other = spec.sbp().iter().find(|&&sbp| sbp.is_partial() && sbp != P);
    if let (Some(other), true) = (other, local.requires_grad()) {
        return Err(Error::Unsupported {
            operation: "to_global".to_owned(),
            reason: format!("a local of {other} gets no gradient: use P, or detach() the local"),
        });
    }
    let dual = Spec::of(spec.placement(), &dual(spec.sbp()))?;
    let own_sizes = local.size();
    let options = (local.kind(), local.device());
    one(custom_function(
        &[local],
        |inputs| outputs(forward(&inputs[0])),
        move |_, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None]) };
            if gradient.requires_grad() {
                // Of a backward that is itself differentiated.
                let boxed = convert(gradient, dual.placement(), dual.sbp())?;
                return Ok(vec![Some(to_local(&boxed)?)]);
            }
            let own = local_of(&boxed(gradient, &dual)?);
            Ok(vec![Some(own.unwrap_or_else(|| Tensor::zeros(&own_sizes[..], options)))])
        },
    ))
}

/// Returns this rank's part, with the memory that it has. Differentiable.
pub fn to_local(tensor: &Tensor) -> Result<Tensor> {
    let spec = spec_of(tensor)?;
    let sizes = tensor.size();
    let dual = dual(spec.sbp());
    one(custom_function(
        &[tensor],
        |inputs| {
            let local = local_of(&inputs[0]);
            outputs(Ok(local.unwrap_or_else(|| empty_like(&inputs[0]))))
        },
        move |_, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None]) };
            let placement = spec.placement();
            if gradient.requires_grad() {
                // Of a backward that is itself differentiated, on ranks outside the placement too.
                let global = from_local(gradient, &sizes, placement, &dual)?;
                return Ok(vec![Some(global)]);
            }
            let is_inside = placement.position(placement.runtime()?.rank()).is_some();
            let local = is_inside.then_some(gradient);
            let spec = Spec::of(placement, &dual)?;
            Ok(vec![Some(wrap(local, gradient, spec, &sizes)?)])
        },
    ))
}

/// Returns the tensor, after the first ranks of the axes that are B have given theirs to the
/// others.
fn first_copies(local: &Tensor, spec: Arc<Spec>, sizes: &[i64]) -> Result<Tensor> {
    let placement = spec.placement();
    let runtime = placement.runtime()?;
    let Some(position) = placement.position(runtime.rank()) else {
        return wrap(None, local, spec, sizes);
    };
    let mut own = local.contiguous().alias_copy();
    let copied: Vec<usize> = (0..placement.axes()).filter(|&axis| spec.sbp()[axis] == B).collect();
    if !copied.is_empty() && own.numel() > 0 {
        let groups = groups(placement, &copied);
        let group = groups.iter().find(|group| group.contains(&position));
        if let Some(group) = group.filter(|group| group.len() > 1) {
            let ranks: Vec<usize> = group.iter().map(|&at| placement.ranks()[at]).collect();
            let group = runtime.groups.group(&ranks)?;
            group.broadcast_tensor(&mut own, 0).map_err(|error| {
                let group = Some((&group, &ranks[..]));
                sequence::explained(error.into(), &runtime.groups, group, digest(placement))
            })?;
        }
    }
    wrap(Some(&own), local, spec, sizes)
}

/// The tensor that a rank gives to `to_global`, in numbers.
struct GivenLocal {
    kind: i64,
    requires_grad: bool,
    shape: Vec<usize>,
}

impl GivenLocal {
    /// Gathers those of all ranks of the job.
    fn of_all_ranks(local: &Tensor, placement: &Placement) -> Result<Vec<Self>> {
        let runtime = placement.runtime()?;
        let own = local.size();
        let mut words =
            vec![local.kind() as i64, i64::from(local.requires_grad()), own.len() as i64];
        words.extend(own);
        words.resize(3 + MAX_DIMS, 0);
        let all =
            runtime.world().all_gather_tensor(&Tensor::from_slice(&words)).map_err(|error| {
                sequence::explained(error.into(), &runtime.groups, None, digest(placement))
            })?;
        let all = Vec::<Vec<i64>>::try_from(all)?;
        Ok(all.iter().map(|words| Self::from_words(words)).collect())
    }

    fn from_words(words: &[i64]) -> Self {
        let dims = (words[2] as usize).min(MAX_DIMS);
        Self { kind: words[0], requires_grad: words[1] != 0, shape: shape(&words[3..3 + dims]) }
    }
}

/// Returns the shape of the logical tensor, from those of all locals, which are checked. All ranks
/// find the same errors.
fn logical_shape(given: &[GivenLocal], placement: &Placement, sbp: &[Sbp]) -> Result<Vec<usize>> {
    let locals: Vec<&GivenLocal> = placement.ranks().iter().map(|&rank| &given[rank]).collect();
    let first = placement.ranks()[0];
    if let Some(rank) = given.iter().position(|other| other.kind != locals[0].kind) {
        return Err(Error::Unsupported {
            operation: "to_global".to_owned(),
            reason: format!(
                "the tensors of rank {first} and rank {rank} differ in kind; convert one by \
                 to_kind (a rank outside the placement passes any tensor of that kind)"
            ),
        });
    }
    check(placement, sbp, &locals[0].shape)?;
    let mut logical = locals[0].shape.clone();
    for (dim, size) in logical.iter_mut().enumerate() {
        let axes: Vec<usize> =
            (0..sbp.len()).filter(|&axis| sbp[axis] == Sbp::Split(dim)).collect();
        if !axes.is_empty() {
            *size = 0;
            for &position in &groups(placement, &axes)[0] {
                *size += locals[position].shape.get(dim).copied().unwrap_or(0);
            }
        }
    }
    for (position, region) in regions(placement, sbp, &logical).iter().enumerate() {
        let part = region.shape();
        let own = &locals[position].shape;
        if part != *own {
            let rank = placement.ranks()[position];
            return Err(no_part("to_global", rank, own, &logical, (placement, sbp), &part));
        }
    }
    Ok(logical)
}

/// Makes the error that a rank has not the part that it must have.
fn no_part(
    operation: &str,
    rank: usize,
    own: &[usize],
    logical: &[usize],
    (placement, sbp): (&Placement, &[Sbp]),
    part: &[usize],
) -> Error {
    Error::Unsupported {
        operation: operation.to_owned(),
        reason: format!(
            "rank {rank} has a tensor of shape {own:?}; as part of {logical:?} with the SBP {sbp:?} \
             on the placement {placement} it must have {part:?}: parts are equal, but the first \
             ones have one element more if the size is no multiple of their number"
        ),
    }
}

/// Returns the global tensor of a plain tensor that is the same on all ranks: each rank keeps its
/// part, in memory of its own. Nothing is communicated: unlike PyTorch's `distribute_tensor`, rank
/// 0's values are not sent to the others. If ranks may have different values, use `to_global` with
/// B; `FLOW_GLOBAL_DEBUG=1` has ranks compare them. Not differentiable.
///
/// # Errors
/// The SBP does not fit the placement or the shape.
pub fn distribute_tensor(
    tensor: &Tensor,
    placement: &Placement,
    sbp: impl AsRef<[Sbp]>,
) -> Result<Tensor> {
    let sbp = sbp.as_ref();
    let shape = shape(&tensor.size());
    check(placement, sbp, &shape)?;
    let runtime = placement.runtime()?;
    let spec = Spec::of(placement, sbp)?;
    if compare::is_on() && placement.position(runtime.rank()).is_some() {
        let all: Vec<usize> = (0..placement.ranks().len()).collect();
        let what = format!("the tensor {:?}", tensor.size());
        let given = [(what, compare::digest_of_tensor(tensor)?)];
        let remedy = "give all ranks the same tensor, or use to_global with B";
        compare::values("distribute_tensor", (placement, &[all]), runtime, &given, remedy)?;
    }
    tch::no_grad(|| {
        let Some(position) = placement.position(runtime.rank()) else {
            return wrap(None, tensor, spec.clone(), &tensor.size());
        };
        let region = regions(placement, sbp, &shape).swap_remove(position);
        let ranges = region.0.iter().enumerate();
        let part = ranges.fold(tensor.shallow_clone(), |part, (dim, range)| {
            part.narrow(dim as i64, range.start as i64, range.len() as i64)
        });
        let part = match filler(sbp, &placement.coordinates(position)) {
            None => part.contiguous().alias_copy(),
            Some(value) => part.full_like(value),
        };
        wrap(Some(&part), tensor, spec.clone(), &tensor.size())
    })
}
