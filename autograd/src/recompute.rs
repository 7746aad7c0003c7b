//! Activations that backward computes anew instead of keeping them.

use tch::{Device, Kind, Tensor};

use crate::error::{BoxError, Error};
use crate::function::{custom_function, Forward};
use crate::graph::Graph;
use crate::random::{with_rng_state, RngState};

/// Runs `compute` on the inputs, and keeps the inputs only: backward runs `compute` again to have
/// what it needs, with the same random numbers of libtorch: `torch.utils.checkpoint`, reentrant
/// (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
///
/// Gradients of the inputs come back as from `compute` itself, and those of other leaves that
/// `compute` uses are accumulated. `compute` gives the same each time it runs.
///
/// # Errors
///
/// Those of `compute`, or libtorch's; in backward with their text.
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
    let device = inputs.first().map_or(Device::Cpu, |input| input.device());
    let state = RngState::of(device)?;
    let outputs = tch::no_grad(|| {
        let inputs: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
        compute(&inputs)
    });
    let requires_grad: Vec<bool> = inputs.iter().map(|input| input.requires_grad()).collect();
    // Of no use but to require a gradient: leaves that `compute` uses may do so where no input does.
    let any = Tensor::zeros([0], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let with_any: Vec<&Tensor> = inputs.iter().copied().chain([&any]).collect();
    custom_function(
        &with_any,
        |inputs| {
            let saved = inputs[..inputs.len() - 1].iter().map(Tensor::shallow_clone).collect();
            Ok(Forward { outputs: outputs?, saved })
        },
        move |saved, gradients| {
            let leaf = |(saved, &requires_grad): (&Tensor, &bool)| {
                saved.detach().set_requires_grad(requires_grad)
            };
            let inputs: Vec<Tensor> = saved.iter().zip(&requires_grad).map(leaf).collect();
            let outputs = tch::with_grad(|| with_rng_state(&state, || compute(&inputs)))??;
            Graph::of(&outputs)?.backward(gradients)?;
            let gradient = |input: &Tensor| Some(input.grad()).filter(Tensor::defined);
            Ok(inputs.iter().map(gradient).chain([None]).collect())
        },
    )
}
