//! Activations that backward computes anew instead of keeping them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Kind, Tensor};

use crate::error::{BoxError, Error};
use crate::ffi::panic_text;
use crate::function::{Forward, custom_function_of_needed};
use crate::graph::Graph;
use crate::random::{RngState, with_rng_state};
use crate::replace::Replacements;

/// Runs `compute` on the inputs, and keeps the inputs only. Backward runs `compute` again to have
/// what it needs, with the same random numbers of libtorch: `torch.utils.checkpoint`, reentrant
/// (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
///
/// Gradients of the inputs come back as from `compute` itself, and those of other leaves that
/// `compute` uses are accumulated. `compute` gives the same each time it runs, and changes no input
/// in place. In the halves of [`Graph::backward_inputs`] it runs in each.
///
/// # Errors
///
/// Those of `compute` and its panics, or libtorch's; in backward with their text. An input that was
/// changed in place.
///
/// ```
/// use flow_autograd::recompute;
/// use tch::Tensor;
///
/// let weight = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let factor = weight.shallow_clone();
/// let x = Tensor::from_slice(&[2.0]);
/// let y = recompute(&[&x], move |inputs| Ok(vec![(&inputs[0] * &factor).square()]))?;
/// y[0].f_backward()?;
/// assert_eq!(weight.grad().double_value(&[0]), 24.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn recompute<F>(inputs: &[&Tensor], compute: F) -> Result<Vec<Tensor>, Error>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>, BoxError> + Send + 'static,
{
    let replacements = Replacements::current();
    let compute = move |inputs: &[Tensor]| match &replacements {
        Some(replacements) => replacements.during(|| compute(inputs)),
        None => compute(inputs),
    };
    let device = inputs.first().map_or(Device::Cpu, |input| input.device());
    let state = RngState::of(device)?;
    let outputs: Result<_, BoxError> = tch::no_grad(|| {
        let inputs: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
        let before = versions(&inputs);
        let outputs = run(&compute, &inputs)?;
        if versions(&inputs) == before {
            Ok(outputs)
        } else {
            Err("recompute: an input was changed in place, so that it cannot be computed \
                          from anew: change a copy"
                .into())
        }
    });
    let requires_grad: Vec<bool> = inputs.iter().map(|input| input.requires_grad()).collect();
    // Of no use but to require a gradient: leaves that `compute` uses may do so where no input does.
    let any = Tensor::zeros([0], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let with_any: Vec<&Tensor> = inputs.iter().copied().chain([&any]).collect();
    custom_function_of_needed(
        &with_any,
        |inputs| {
            let saved = inputs[..inputs.len() - 1].iter().map(Tensor::shallow_clone).collect();
            Ok(Forward { outputs: outputs?, saved })
        },
        move |saved, gradients, needed| {
            // In a backward in halves, `any` stands for the leaves that are not inputs.
            let of_leaves = needed[saved.len()];
            let needed = &needed[..saved.len()];
            let mut inputs = Vec::new();
            for ((saved, &requires_grad), &needed) in saved.iter().zip(&requires_grad).zip(needed) {
                inputs.push(saved.detach().set_requires_grad(requires_grad && needed));
            }
            let outputs = tch::with_grad(|| with_rng_state(&state, || run(&compute, &inputs)))??;
            let graph = Graph::of(&outputs)?;
            let mut results = Vec::new();
            if of_leaves {
                graph.backward(gradients)?;
                results
                    .extend(inputs.iter().map(|input| Some(input.grad()).filter(Tensor::defined)));
            } else {
                let leaves: Vec<&Tensor> =
                    inputs.iter().filter(|leaf| leaf.requires_grad()).collect();
                let mut of_leaves = graph.backward_inputs(gradients, &leaves)?.0.into_iter();
                for input in &inputs {
                    let gradient = if input.requires_grad() { of_leaves.next() } else { None };
                    results.push(gradient.flatten());
                }
            }
            // Nothing for `any`.
            results.push(None);
            Ok(results)
        },
    )
}

/// Runs `compute`, and makes its panic an error: it would leave libtorch's grad mode, and its
/// generators, as they are in there.
fn run<F>(compute: &F, inputs: &[Tensor]) -> Result<Vec<Tensor>, BoxError>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>, BoxError>,
{
    match catch_unwind(AssertUnwindSafe(|| compute(inputs))) {
        Ok(outputs) => outputs,
        Err(panic) => Err(format!("recompute panicked: {}", panic_text(panic.as_ref())).into()),
    }
}

/// Returns how often tensors have been changed in place; None for those of which libtorch does not
/// count it, such as global tensors.
pub fn versions(tensors: &[Tensor]) -> Vec<Option<i64>> {
    tensors.iter().map(|tensor| tensor.f_internal_version().ok()).collect()
}
