//! What a global tensor can do beyond any other tensor.

use std::sync::Arc;

use flow_autograd::global::Globals;
use flow_autograd::{custom_function, BoxError, Forward};
use tch::Tensor;

use crate::boxing::plan::Layout;
use crate::dispatch::{shape, Operations};
use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::region::check;
use crate::sbp::{NdSbp, Sbp, B, P};
use crate::spec::Spec;

/// Global tensors, which are ordinary `tch` tensors: how they lie, and how they get another placement
/// or SBP. All ranks of the group call the same functions in the same order.
pub trait GlobalTensor {
    /// Whether this is a global tensor.
    fn is_global(&self) -> bool;

    /// The ranks that it lies on.
    ///
    /// # Errors
    /// The tensor is plain.
    fn placement(&self) -> Result<Placement>;

    /// How it lies on them.
    ///
    /// # Errors
    /// The tensor is plain.
    fn sbp(&self) -> Result<NdSbp>;

    /// The tensor with this placement and SBP. Of a plain tensor, which is this rank's local: ranks
    /// that are not in the placement may pass any tensor of that kind. Differentiable.
    ///
    /// # Errors
    /// SBPs that do not fit the placement or the shape, locals that do not fit each other, or a
    /// collective that fails.
    fn to_global(&self, placement: &Placement, sbp: impl AsRef<[Sbp]>) -> Result<Tensor>;

    /// The same tensor. The gradient that comes back to it gets this SBP.
    ///
    /// # Errors
    /// The tensor is plain, or the SBP does not fit.
    fn grad_sbp(&self, sbp: impl AsRef<[Sbp]>) -> Result<Tensor>;

    /// This rank's part of it, with the memory that it has; an empty tensor on ranks outside the
    /// placement. Differentiable: gradients of all ranks' locals are the gradient of the tensor.
    ///
    /// # Errors
    /// The tensor is plain.
    fn to_local(&self) -> Result<Tensor>;

    /// All of it, as a plain tensor, on every rank of the job. A plain tensor is itself.
    ///
    /// # Errors
    /// A collective fails.
    fn full(&self) -> Result<Tensor>;
}

impl GlobalTensor for Tensor {
    fn is_global(&self) -> bool {
        find_spec(self).is_some()
    }

    fn placement(&self) -> Result<Placement> {
        Ok(spec_of(self)?.placement().clone())
    }

    fn sbp(&self) -> Result<NdSbp> {
        Ok(spec_of(self)?.sbp().to_vec())
    }

    fn to_global(&self, placement: &Placement, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
        let sbp = sbp.as_ref();
        let runtime = placement.runtime()?;
        match find_spec(self) {
            Some(now) => {
                check(placement, sbp, &shape(&self.size()))?;
                let spec = runtime.spec(placement, sbp);
                if spec.id() == now.id() {
                    return Ok(self.shallow_clone());
                }
                if !self.requires_grad() {
                    return tch::no_grad(|| asked(self, &spec));
                }
                let forward = spec.clone();
                one(custom_function(
                    &[self],
                    move |inputs| outputs(asked(&inputs[0], &forward)),
                    // The gradient goes to the old placement, as what it has become.
                    move |_, gradients| Ok(vec![moved(gradients[0].as_ref(), &now)?]),
                ))
            }
            None => {
                let spec = runtime.spec(placement, sbp);
                crate::from_local::from_locals(self, &spec)
            }
        }
    }

    fn grad_sbp(&self, sbp: impl AsRef<[Sbp]>) -> Result<Tensor> {
        let sbp = sbp.as_ref();
        let now = spec_of(self)?;
        check(now.placement(), sbp, &shape(&self.size()))?;
        let spec = now.placement().runtime()?.spec(now.placement(), sbp);
        one(custom_function(
            &[self],
            |inputs| outputs(Ok(inputs[0].alias())),
            move |_, gradients| {
                let boxed = gradients[0].as_ref().map(|gradient| converted(gradient, &spec));
                Ok(vec![boxed.transpose()?])
            },
        ))
    }

    fn to_local(&self) -> Result<Tensor> {
        let spec = spec_of(self)?;
        let sizes = self.size();
        let dual = dual(spec.sbp());
        one(custom_function(
            &[self],
            |inputs| {
                let local = local_of(&inputs[0]);
                outputs(Ok(local.unwrap_or_else(|| empty_like(&inputs[0]))))
            },
            move |_, gradients| {
                let Some(gradient) = &gradients[0] else { return Ok(vec![None]) };
                let placement = spec.placement();
                let runtime = placement.runtime()?;
                let is_inside = placement.position(runtime.rank()).is_some();
                if is_inside && gradient.requires_grad() {
                    // Of a backward that is itself differentiated.
                    let global = crate::from_local(gradient, &sizes, placement, &dual)?;
                    return Ok(vec![Some(global)]);
                }
                let local = is_inside.then_some(gradient);
                let spec = runtime.spec(placement, &dual);
                Ok(vec![Some(wrap(local, gradient, spec, &sizes)?)])
            },
        ))
    }

    fn full(&self) -> Result<Tensor> {
        let Some(spec) = find_spec(self) else { return Ok(self.shallow_clone()) };
        tch::no_grad(|| {
            let runtime = spec.placement().runtime()?;
            let all = Placement::all(runtime.world())?;
            let full = asked(self, &runtime.spec(&all, &[B]))?;
            let local = local_of(&full).unwrap_or_else(|| empty_like(&full));
            // What is B already is the tensor's own memory.
            Ok(if spec.id() == spec_of(&full)?.id() { local.copy() } else { local })
        })
    }
}

/// Global tensors of this process.
pub(crate) fn globals() -> Result<Globals<Spec>> {
    Ok(Globals::register::<Operations>()?)
}

/// The spec of a tensor, if it is global.
pub(crate) fn find_spec(tensor: &Tensor) -> Option<Arc<Spec>> {
    globals().ok().filter(|_| tensor.defined())?.spec(tensor)
}

/// The spec of a global tensor.
pub(crate) fn spec_of(tensor: &Tensor) -> Result<Arc<Spec>> {
    find_spec(tensor).ok_or(Error::Plain)
}

/// The local of a global tensor; None outside its placement.
pub(crate) fn local_of(tensor: &Tensor) -> Option<Tensor> {
    globals().ok()?.local(tensor)
}

/// A global tensor of a local; `like` has its kind and device.
pub(crate) fn wrap(
    local: Option<&Tensor>,
    like: &Tensor,
    spec: Arc<Spec>,
    sizes: &[i64],
) -> Result<Tensor> {
    let shares = spec.sbp().iter().all(|&sbp| sbp == B);
    Ok(globals()?.wrap(local, like, spec, sizes, shares)?)
}

/// A plain tensor of the kind of a global one, without elements.
fn empty_like(tensor: &Tensor) -> Tensor {
    Tensor::empty([0], (tensor.kind(), tensor.device()))
}

/// A global tensor that has this spec, outside autograd.
pub(crate) fn boxed(tensor: &Tensor, to: &Arc<Spec>) -> Result<Tensor> {
    let from = spec_of(tensor)?;
    if from.id() == to.id() {
        return Ok(tensor.shallow_clone());
    }
    let sizes = tensor.size();
    let shape = shape(&sizes);
    let (old, new) = (
        Layout { placement: from.placement(), sbp: from.sbp() },
        Layout { placement: to.placement(), sbp: to.sbp() },
    );
    let runtime = to.placement().runtime()?;
    let boxing = runtime.boxing(&shape, old, new);
    let local = local_of(tensor);
    let options = (tensor.kind(), tensor.device());
    let result = boxing.run(&runtime.groups, options, local.as_ref())?;
    // A view is still the old tensor's memory.
    let result = result.map(|result| match boxing.is_view() && result.is_contiguous() {
        true => result.copy(),
        // All ranks' strides are alike.
        false => result.contiguous(),
    });
    let like = empty_like(tensor);
    wrap(result.as_ref(), &like, to.clone(), &sizes)
}

/// As [`asked`], and differentiable if the tensor is part of a graph: a gradient, in a backward that
/// is itself differentiated.
fn converted(tensor: &Tensor, to: &Arc<Spec>) -> Result<Tensor> {
    match tensor.requires_grad() {
        true => tensor.to_global(to.placement(), to.sbp()),
        false => asked(tensor, to),
    }
}

/// As [`boxed`], because the program asks for it.
fn asked(tensor: &Tensor, to: &Arc<Spec>) -> Result<Tensor> {
    let result = boxed(tensor, to)?;
    crate::record::conversion(tensor, &result)?;
    Ok(result)
}

/// A gradient on the placement of `to`: with its own SBP if it lies there already.
fn moved(gradient: Option<&Tensor>, to: &Arc<Spec>) -> Result<Option<Tensor>> {
    let Some(gradient) = gradient else { return Ok(None) };
    let now = spec_of(gradient)?;
    if now.placement() == to.placement() {
        return Ok(Some(gradient.shallow_clone()));
    }
    // Terms are not made of a gradient: its tensor may be partial, the gradient need not.
    let sbp = to.sbp().iter().map(|&sbp| if sbp.is_partial() { B } else { sbp });
    let sbp: NdSbp = sbp.collect();
    Ok(Some(converted(gradient, &to.placement().runtime()?.spec(to.placement(), &sbp))?))
}

/// The SBP of the gradient of locals: each copy has a term of it, each term all of it.
pub(crate) fn dual(sbp: &[Sbp]) -> NdSbp {
    let one = |&sbp: &Sbp| match sbp {
        Sbp::Broadcast => P,
        Sbp::Partial(_) => B,
        split => split,
    };
    sbp.iter().map(one).collect()
}

/// What a forward gives that saves nothing.
pub(crate) fn outputs(output: Result<Tensor>) -> std::result::Result<Forward, BoxError> {
    Ok(Forward { outputs: vec![output?], saved: Vec::new() })
}

/// The only output.
pub(crate) fn one(
    outputs: std::result::Result<Vec<Tensor>, flow_autograd::Error>,
) -> Result<Tensor> {
    Ok(outputs?.pop().unwrap_or_default())
}
