//! Ranks outside a placement: they have nothing of the tensors on it, know their shapes, and may call
//! everything.
//!
//! Such a rank finds out once what an operation gives. It runs the operation on tensors of the
//! sizes that the first rank of the placement has. If the sizes are arguments as well, it runs it
//! on tensors of the whole sizes. Where it depends on values, that rank sends it.

use flow_autograd::global::{Call, LocalResult, Scalar};
use flow_tensor::TensorCollectives;
use tch::{Device, Kind, Tensor};

use super::agreed;
use super::plan::{ExecutionPlan, InputSource, Meta, OutputLayout, Outside};
use super::written;
use crate::code::{draws, takes_sizes};
use crate::error::{Error, Result};
use crate::handle::globals;
use crate::kinds::{is_float, kind_of, number_of};
use crate::placement::Placement;
use crate::random;
use crate::region::{regions, shape};
use crate::runtime::Runtime;
use crate::spec::Spec;

/// Returns what the operation would, without a local.
pub fn run(
    call: &mut Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    runtime: &Runtime,
) -> Result<()> {
    if plan.code.is_some() && draws(&plan.name) {
        // All ranks draw the same tensors.
        random::generator(runtime).draw();
    }
    let received;
    let outside = &plan.outside[usize::from(call.grad_mode)];
    let known = match outside.get() {
        _ if plan.is_sent => {
            received = receive(plan, placement, runtime)?;
            &received
        }
        Some(known) => known,
        None => {
            let known = find_out(call, plan, placement)?;
            outside.get_or_init(|| known)
        }
    };
    let device = runtime.world().device();
    for (index, (known, output)) in known.iter().zip(&plan.outputs).enumerate() {
        if output.is_written {
            if let Outside::Tensor(meta) = known {
                let like = Tensor::empty([0], (meta.kind, device));
                written::resize_out(call, plan, placement, index, (&meta.sizes, &like))?;
                if call.reshapes
                    && let Some(argument) = call.written(index)
                {
                    let now = without_local(meta, output, placement, device)?;
                    if let Some(tensor) = call.tensor(argument) {
                        globals()?.assign(&tensor, &now)?;
                    }
                }
            }
            call.output_written(index)?;
            continue;
        }
        match known {
            Outside::Tensor(meta) => {
                let tensor = without_local(meta, output, placement, device)?;
                call.output_tensor(Some(&tensor))?;
            }
            Outside::Tensors(all) => {
                let mut tensors = Vec::new();
                for meta in all {
                    tensors.push(without_local(meta, output, placement, device)?);
                }
                call.output_tensors(&tensors)?;
            }
            Outside::Undefined => call.output_tensor(None)?,
            Outside::Scalar => {
                let scalar = share_scalar(placement, runtime, None);
                let scalar = scalar.map_err(|source| unshared(call, source))?;
                call.output_scalar(scalar)?;
            }
        }
    }
    Ok(())
}

/// Returns a result as this rank has it.
fn without_local(
    meta: &Meta,
    output: &OutputLayout,
    placement: &Placement,
    device: Device,
) -> Result<Tensor> {
    let spec = output.spec(placement);
    let like = with_bits(Tensor::empty([0], (meta.kind, device)), meta.is_conj, meta.is_neg);
    Ok(globals()?.outside(&like, &meta.sizes, &output.of(&spec))?)
}

fn find_out(
    call: &mut Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
) -> Result<Vec<Outside>> {
    // Some operations, as the solution of equations, run on no zeros.
    try_out(call, plan, placement, |sizes, options| Tensor::f_zeros(sizes, options)).or_else(|_| {
        try_out(call, plan, placement, |sizes, (kind, device)| {
            let ones = Tensor::f_ones(sizes, (kind, device))?;
            match *sizes {
                [.., rows, columns] if is_float(kind) => {
                    Tensor::f_eye_m(rows, columns, (kind, device))?.f_add(&(ones * 0.1))
                }
                _ => Ok(ones),
            }
        })
    })
}

/// Returns what the operation gives for tensors of these values.
fn try_out(
    call: &mut Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    values: impl Fn(&[i64], (Kind, Device)) -> std::result::Result<Tensor, tch::TchError>,
) -> Result<Vec<Outside>> {
    for index in 0..call.tensors() {
        let Some(tensor) = call.tensor(index) else { continue };
        let sizes = match plan.inputs[index] {
            InputSource::Empty => vec![0],
            _ if takes_sizes(&plan.name) => call.sizes(index).to_vec(),
            _ => {
                let all = regions(placement, &plan.choice.inputs[index], &shape(call.sizes(index)));
                all[0].shape().iter().map(|&size| size as i64).collect()
            }
        };
        let mut local = values(&sizes, (tensor.kind(), tensor.device()))?;
        if matches!(plan.inputs[index], InputSource::Own | InputSource::Handle) {
            local = with_bits(local, tensor.is_conj(), tensor.is_neg());
        }
        call.set_local(index, Some(&local))?;
    }
    for (argument, values) in &plan.ints {
        call.set_ints(*argument, values)?;
    }
    call.run()?;
    results(call, plan)
}

/// Returns the tensor with these bits set.
fn with_bits(mut tensor: Tensor, is_conj: bool, is_neg: bool) -> Tensor {
    if is_conj {
        tensor = tensor.internal_conj();
    }
    if is_neg {
        tensor = tensor.internal_neg_view();
    }
    tensor
}

/// Returns what is to be known of the results of a call that has run.
fn results(call: &Call<'_, Spec>, plan: &ExecutionPlan) -> Result<Vec<Outside>> {
    let mut known = Vec::new();
    for (index, output) in plan.outputs.iter().enumerate() {
        known.push(match call.result(index)? {
            LocalResult::Tensor(Some(tensor)) => Outside::Tensor(meta(&tensor, output, plan)),
            LocalResult::Tensor(None) => Outside::Undefined,
            LocalResult::Tensors(all) => {
                Outside::Tensors(all.iter().map(|tensor| meta(tensor, output, plan)).collect())
            }
            LocalResult::Scalar(_) => Outside::Scalar,
        });
    }
    Ok(known)
}

/// Returns what is to be known of a tensor that the operation has given.
fn meta(tensor: &Tensor, output: &OutputLayout, plan: &ExecutionPlan) -> Meta {
    let is_whole = takes_sizes(&plan.name);
    Meta {
        sizes: if is_whole { tensor.size() } else { output.logical(tensor) },
        kind: tensor.kind(),
        is_conj: tensor.is_conj(),
        is_neg: tensor.is_neg(),
    }
}

/// Sent instead of the number of words.
const FAILED: i64 = -1;

/// Sends what is to be known of the results: ranks of the placement call this, and the first one
/// sends.
pub fn send(
    call: &Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    runtime: &Runtime,
    has_run: bool,
) -> Result<()> {
    let known = has_run.then(|| results(call, plan)).transpose()?;
    let words = known.as_ref().map(|known| known.iter().flat_map(words_of).collect::<Vec<_>>());
    let world = runtime.world();
    let root = placement.ranks()[0];
    let count = words.as_ref().map_or(FAILED, |words| words.len() as i64);
    world.broadcast_tensor(&mut Tensor::from(count), root)?;
    if let Some(words) = words {
        world.broadcast_tensor(&mut Tensor::from_slice(&words), root)?;
    }
    Ok(())
}

/// Receives what [`send`] sends, on ranks outside the placement.
fn receive(plan: &ExecutionPlan, placement: &Placement, runtime: &Runtime) -> Result<Vec<Outside>> {
    let world = runtime.world();
    let root = placement.ranks()[0];
    let mut count = Tensor::from(0i64);
    world.broadcast_tensor(&mut count, root)?;
    let count = count.int64_value(&[]);
    if count == FAILED {
        return Err(Error::Unsupported {
            operation: plan.name.clone(),
            reason: format!("it failed on the ranks of the placement {placement}: see their error"),
        });
    }
    let mut words = Tensor::zeros([count], (Kind::Int64, Device::Cpu));
    world.broadcast_tensor(&mut words, root)?;
    let mut words = Vec::<i64>::try_from(words)?.into_iter();
    let known = plan.outputs.iter().map(|_| outside_of(&mut words));
    known.collect::<Option<_>>().ok_or_else(|| Error::Unsupported {
        operation: plan.name.clone(),
        reason: "ranks run different versions of Flow".to_owned(),
    })
}

/// Returns what is known as numbers: a tag, and for lists how many tensors they have. Each tensor
/// has its kind, its bits, its number of dimensions, and its sizes.
fn words_of(known: &Outside) -> Vec<i64> {
    match known {
        Outside::Tensor(meta) => [vec![0], words_of_tensor(meta)].concat(),
        Outside::Tensors(all) => {
            let tensors = all.iter().flat_map(words_of_tensor);
            [1, all.len() as i64].into_iter().chain(tensors).collect()
        }
        Outside::Undefined => vec![2],
        Outside::Scalar => vec![3],
    }
}

fn words_of_tensor(meta: &Meta) -> Vec<i64> {
    let bits = [meta.is_conj, meta.is_neg].map(i64::from);
    [&[number_of(meta.kind)], &bits[..], &[meta.sizes.len() as i64], &meta.sizes].concat()
}

fn meta_of(words: &mut impl Iterator<Item = i64>) -> Option<Meta> {
    let kind = kind_of(words.next()?)?;
    let is_conj = words.next()? != 0;
    let is_neg = words.next()? != 0;
    let dims = words.next()?;
    let sizes = (0..dims).map(|_| words.next()).collect::<Option<_>>()?;
    Some(Meta { sizes, kind, is_conj, is_neg })
}

fn outside_of(words: &mut impl Iterator<Item = i64>) -> Option<Outside> {
    Some(match words.next()? {
        0 => Outside::Tensor(meta_of(words)?),
        1 => {
            let count = words.next()?;
            Outside::Tensors((0..count).map(|_| meta_of(words)).collect::<Option<_>>()?)
        }
        2 => Outside::Undefined,
        _ => Outside::Scalar,
    })
}

/// Returns the number that the ranks of a placement have, on all ranks of the job.
pub fn share_scalar(
    placement: &Placement,
    runtime: &Runtime,
    own: Option<Scalar>,
) -> Result<Scalar> {
    let bits = own.map_or([0, 0], scalar_bits);
    let mut shared = Tensor::from_slice(&bits);
    runtime.world().broadcast_tensor(&mut shared, placement.ranks()[0])?;
    Ok(scalar_of([shared.int64_value(&[0]), shared.int64_value(&[1])]))
}

/// Returns a number from its bits, and back: what ranks outside a placement get.
fn scalar_bits(scalar: Scalar) -> [i64; 2] {
    match scalar {
        Scalar::Int(value) => [0, value],
        Scalar::Float(value) => [1, value.to_bits() as i64],
        Scalar::Bool(value) => [2, i64::from(value)],
    }
}

fn scalar_of([tag, bits]: [i64; 2]) -> Scalar {
    match tag {
        0 => Scalar::Int(bits),
        1 => Scalar::Float(f64::from_bits(bits as u64)),
        _ => Scalar::Bool(bits != 0),
    }
}

/// Returns the error of ranks that wait for a value, or give it to ranks outside the placement.
pub fn unshared(call: &Call<'_, Spec>, source: Error) -> Error {
    Error::Boxing {
        operation: call.name.to_owned(),
        what: "a value, for ranks outside the placement".to_owned(),
        source: Box::new(source),
        advice: agreed::advice(call.name),
    }
}
