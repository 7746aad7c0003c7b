//! Which layers make up a stage.

use std::ops::Range;
use std::time::Instant;

use flow_autograd::{set_grad, with_rng_state, BoxError, RngState};
use flow_comm::ProcessGroup;
use flow_plan::split;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Tensor};

use crate::caught::caught;
use crate::error::{Error, Result};
use crate::stage::Layers;

type Outcome<T> = std::result::Result<T, BoxError>;

/// Divides layers by their parameters: [`split`].
pub fn split_by_parameters(layers: &Layers, stages: usize) -> Vec<Range<usize>> {
    let costs: Vec<f64> = layers.0.iter().map(|layer| layer.parameters as f64).collect();
    split(&costs, stages)
}

/// Divides layers by the time that each takes forward and backward on a micro-batch like `input`,
/// the shortest of three runs: [`split`]. Rank 0 of `group` measures, and all its ranks, which call
/// this with the same layers, get what it has found. With replicas these are all ranks of the mesh, so
/// that replicas have the same stages. Gradients and buffers in `vs`, the layers' variables, are the
/// same afterwards, and so are libtorch's random numbers.
///
/// # Errors
/// A layer fails on rank 0, or panics, on what the one before it gives; libtorch's, of what is in
/// `vs`; a collective that fails.
pub fn split_by_time(
    layers: &Layers,
    vs: &VarStore,
    input: &Tensor,
    stages: usize,
    group: &ProcessGroup,
) -> Result<Vec<Range<usize>>> {
    let mut costs = vec![f64::NAN; layers.0.len()];
    let measured = match group.rank() {
        0 => measure_all(layers, vs, input).map(|found| costs = found),
        _ => Ok(()),
    };
    let sent = group.broadcast(&mut costs[..], 0);
    measured?;
    sent?;
    if costs.iter().any(|cost| cost.is_nan()) {
        let ranks = group.ranks();
        let reason = format!("the layers cannot be measured: see the error of rank {}", ranks[0]);
        return Err(Error::Argument { rank: ranks[group.rank()], reason });
    }
    Ok(split(&costs, stages))
}

/// The seconds of each layer.
fn measure_all(layers: &Layers, vs: &VarStore, input: &Tensor) -> Result<Vec<f64>> {
    let random = RngState::of(input.device()).map_err(|error| Error::State(error.into()))?;
    let kept = Kept::of(vs).map_err(Error::State)?;
    let mut input = input.detach();
    let mut costs = Vec::new();
    let measured = layers.0.iter().enumerate().try_for_each(|(number, layer)| {
        let run = || caught(|| measure(layer.module.as_ref(), &input));
        let measured = with_rng_state(&random, run);
        let measured = measured.map_err(BoxError::from).and_then(|measured| measured);
        let (seconds, output) = measured.map_err(|cause| Error::Layer { layer: number, cause })?;
        costs.push(seconds);
        input = output;
        Ok(())
    });
    kept.restore().map_err(Error::State)?;
    measured.map(|()| costs)
}

/// The shortest time of a layer, and its output.
fn measure(layer: &dyn ModuleT, input: &Tensor) -> Outcome<(f64, Tensor)> {
    let (mut seconds, mut last) = (f64::INFINITY, Tensor::new());
    for _ in 0..3 {
        let leaf = input.detach().set_requires_grad(input.is_floating_point());
        synchronize(input.device());
        let began = Instant::now();
        let output = layer.forward_t(&leaf, true);
        if output.requires_grad() {
            output.f_sum(output.kind())?.f_backward()?;
        }
        synchronize(input.device());
        seconds = seconds.min(began.elapsed().as_secs_f64());
        last = output.detach();
    }
    Ok((seconds, last))
}

/// Waits for what a GPU has been given.
fn synchronize(device: Device) {
    if let Device::Cuda(number) = device {
        tch::Cuda::synchronize(number as i64);
    }
}

/// What forwards and backwards change of a model.
struct Kept {
    gradients: Vec<(Tensor, Tensor)>,
    /// What requires no gradient, with a copy.
    buffers: Vec<(Tensor, Tensor)>,
}

impl Kept {
    /// Takes the gradients away.
    fn of(vs: &VarStore) -> Outcome<Self> {
        let (weights, buffers): (Vec<_>, Vec<_>) =
            vs.variables().into_values().partition(Tensor::requires_grad);
        let gradients = weights.into_iter().map(|weight| {
            let gradient = weight.grad();
            set_grad(&weight, None)?;
            Ok((weight, gradient))
        });
        let gradients = gradients.collect::<Outcome<_>>()?;
        let copied = |buffer: Tensor| {
            let copy = buffer.copy();
            (buffer, copy)
        };
        Ok(Self { gradients, buffers: buffers.into_iter().map(copied).collect() })
    }

    fn restore(self) -> Outcome<()> {
        for (weight, gradient) in self.gradients {
            set_grad(&weight, Some(&gradient).filter(|gradient| gradient.defined()))?;
        }
        let _no_grad = tch::no_grad_guard();
        for (mut buffer, copy) in self.buffers {
            buffer.f_copy_(&copy)?;
        }
        Ok(())
    }
}
