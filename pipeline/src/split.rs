//! Dividing layers into stages.

use std::ops::Range;
use std::time::Instant;

use flow_autograd::{BoxError, RngState, set_grad, with_rng_state};
use flow_comm::ProcessGroup;
use flow_plan::split;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Tensor};

use crate::caught::caught;
use crate::error::{Error, Outcome, Result, job_rank};
use crate::stage::Layers;

/// Divides layers by their parameters: [`split`].
pub fn split_by_parameters(layers: &Layers, stages: usize) -> Vec<Range<usize>> {
    let costs: Vec<f64> = layers.0.iter().map(|layer| layer.parameters as f64).collect();
    split(&costs, stages)
}

/// Divides layers by the time of each, forward and backward, on a micro-batch like `input`: [`split`].
/// The time of a layer is the shortest of three runs.
///
/// Rank 0 of `group` measures. All ranks of `group` call this with the same layers, and get the same
/// division. If there are replicas, `group` has all ranks of the mesh, so that replicas have the same
/// stages. `vs` has the layers' variables. Their gradients and buffers are the same afterwards, and so
/// are libtorch's random numbers.
///
/// # Errors
/// A layer fails or panics on rank 0 on the output of the one before; libtorch fails on a variable in
/// `vs`; a collective fails.
pub fn split_by_time(
    layers: &Layers,
    vs: &VarStore,
    input: &Tensor,
    stages: usize,
    group: &ProcessGroup,
) -> Result<Vec<Range<usize>>> {
    let mut costs = vec![f64::NAN; layers.0.len()];
    let mut measured = Ok(());
    if group.rank() == 0 {
        measured = measure_all(layers, vs, input).map(|found| costs = found);
    }
    // The other ranks learn of an error too.
    let sent = group.broadcast(&mut costs[..], 0);
    measured?;
    sent?;
    if costs.iter().any(|cost| cost.is_nan()) {
        let first = group.ranks()[0];
        let reason = format!("the layers cannot be measured: see the error of rank {first}");
        return Err(Error::Argument { rank: job_rank(group), reason });
    }
    Ok(split(&costs, stages))
}

/// Measures the seconds of each layer.
fn measure_all(layers: &Layers, vs: &VarStore, input: &Tensor) -> Result<Vec<f64>> {
    let random = RngState::of(input.device()).map_err(|error| Error::State(error.into()))?;
    let state = ModelState::take(vs).map_err(Error::State)?;
    let costs = measure_in_turn(layers, input, &random);
    state.restore().map_err(Error::State)?;
    costs
}

/// Measures each layer on the output of the one before. All begin with the same random numbers.
fn measure_in_turn(layers: &Layers, input: &Tensor, random: &RngState) -> Result<Vec<f64>> {
    let mut input = input.detach();
    let mut costs = Vec::new();
    for (number, layer) in layers.0.iter().enumerate() {
        let measured = with_rng_state(random, || caught(|| measure(layer.module.as_ref(), &input)));
        let (seconds, output) = measured
            .map_err(BoxError::from)
            .flatten()
            .map_err(|cause| Error::Layer { layer: number, cause })?;
        costs.push(seconds);
        input = output;
    }
    Ok(costs)
}

/// Returns the shortest time of a layer, and its output.
fn measure(layer: &dyn ModuleT, input: &Tensor) -> Outcome<(f64, Tensor)> {
    let mut seconds = f64::INFINITY;
    let mut last = Tensor::new();
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

/// Waits until a GPU has computed what has been enqueued.
fn synchronize(device: Device) {
    if let Device::Cuda(number) = device {
        tch::Cuda::synchronize(number as i64);
    }
}

/// The parts of a model that forwards and backwards change.
struct ModelState {
    /// Weights, each with its gradient.
    gradients: Vec<(Tensor, Tensor)>,
    /// Variables that require no gradient, each with a copy.
    buffers: Vec<(Tensor, Tensor)>,
}

impl ModelState {
    /// Takes the gradients away, and copies the buffers.
    fn take(vs: &VarStore) -> Outcome<Self> {
        let mut state = Self { gradients: Vec::new(), buffers: Vec::new() };
        for variable in vs.variables().into_values() {
            if variable.requires_grad() {
                let gradient = variable.grad();
                set_grad(&variable, None)?;
                state.gradients.push((variable, gradient));
            } else {
                let copy = variable.copy();
                state.buffers.push((variable, copy));
            }
        }
        Ok(state)
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
