//! Operations on global tensors: each is planned by its rule, its inputs are boxed, and it runs on
//! the locals.
//!
//! | file | subject |
//! |---|---|
//! | here | carries out an operation |
//! | `op` | the operation as rules see it |
//! | `plan` | what an operation on tensors of these sizes and specs needs |
//! | `planning` | decides that, once |
//! | `logical` | whether the logical sizes fit, as libtorch says |
//! | `known` | operations that run on the locals as they are |
//! | `outside` | ranks that have nothing of the tensors |
//! | `moved` | inputs on different placements |
//! | `written` | `out` tensors of other sizes, and plain tensors that are written |
//! | `agreed` | what all ranks must agree on in an operation |
//! | `noted` | operations that are recorded |

mod agreed;
mod known;
mod logical;
mod moved;
mod noted;
mod op;
mod outside;
mod plan;
mod planning;
mod written;

use std::sync::Arc;

use flow_autograd::BoxError;
use flow_autograd::global::{Call, Dispatcher, FastCall, LeafGradient, LocalResult};
use flow_comm::digest;
use flow_tensor::TensorCollectives;
use tch::Tensor;

use crate::cache::Cache;
use crate::code::{Code, Context};
use crate::compare;
use crate::convert::{convert, moved};
use crate::deferred;
use crate::error::{Error, Result};
use crate::gradients;
use crate::handle::{boxed, find_spec, globals, local_of, spec_of};
use crate::local::distribute_tensor;
use crate::placement::Placement;
use crate::record;
use crate::replicas;
use crate::runtime::Runtime;
use crate::sbp::reduced;
use crate::sequence;
use crate::spec::Spec;
use noted::Noted;
use plan::{ExecutionPlan, InputSource, OutputLayout};

/// Carries out the operations on global tensors.
pub struct GlobalDispatcher;

impl Dispatcher for GlobalDispatcher {
    type Spec = Spec;

    fn spec_id(spec: &Spec) -> u64 {
        spec.id()
    }

    fn run_known(call: &mut FastCall<'_, Spec>) -> std::result::Result<bool, BoxError> {
        Ok(!record::is_on() && known::run(call)?)
    }

    fn dispatch(call: &mut Call<'_, Spec>) -> std::result::Result<(), BoxError> {
        let noted = record::is_on().then(|| Noted::new(call));
        // A guard, which is dropped if this panics as well.
        let _no_grad = tch::no_grad_guard();
        match carry_out(call, noted) {
            Err(Error::Placements { .. }) if moved::may_move(call) => Ok(moved::run(call)?),
            result => Ok(result?),
        }
    }

    fn gradient(
        leaf: &Tensor,
        gradient: &Tensor,
        may_take: bool,
        exclusive: bool,
    ) -> std::result::Result<LeafGradient, BoxError> {
        let own = spec_of(leaf)?;
        let Some(now) = find_spec(gradient) else {
            // Zeros, from a formula that makes them without a look at the tensors.
            let sbp = reduced(own.sbp());
            let boxed = distribute_tensor(&gradient.copy(), own.placement(), &sbp)?;
            return Ok(LeafGradient::Boxed(boxed));
        };
        // Not in a backward that is itself differentiated.
        let deferred = if gradient.requires_grad() {
            None
        } else {
            deferred::spec_of_gradient(leaf, &own, &now)?
        };
        if let Some(kept) = deferred {
            let kept = tch::no_grad(|| deferred::own(gradient, &kept, exclusive))?;
            record::gradient(leaf, gradient, Some(&kept))?;
            return Ok(LeafGradient::Boxed(kept));
        }
        let is_same = own.id() == now.id();
        if is_same && !record::is_on() && !replicas::has_buckets(own.placement().runtime()?) {
            return Ok(LeafGradient::Same);
        }
        if own.sbp().iter().any(|sbp| sbp.is_partial()) {
            if own.placement() == now.placement() {
                return Ok(LeafGradient::Same);
            }
            let moved = moved(Some(gradient), &own)?;
            return Ok(moved.map_or(LeafGradient::Same, LeafGradient::Boxed));
        }
        if gradient.requires_grad() {
            // Of a backward that is itself differentiated.
            return Ok(LeafGradient::Boxed(convert(gradient, own.placement(), own.sbp())?));
        }
        if may_take && replicas::take(leaf, gradient, exclusive)? {
            record::gradient(leaf, gradient, None)?;
            return Ok(LeafGradient::Taken);
        }
        if is_same {
            record::gradient(leaf, gradient, Some(gradient))?;
            return Ok(LeafGradient::Same);
        }
        let own = tch::no_grad(|| boxed(gradient, &own))?;
        record::gradient(leaf, gradient, Some(&own))?;
        Ok(LeafGradient::Boxed(own))
    }

    fn are_finite(tensors: &[Tensor]) -> std::result::Result<bool, BoxError> {
        gradients::are_finite(tensors).map_err(Error::passed_on)
    }
}

fn carry_out(call: &mut Call<'_, Spec>, noted: Option<Noted>) -> Result<()> {
    let Some(noted) = noted else { return run(call) };
    let placement = placement_of(call)?;
    let plan = plan_of(call, &placement, placement.runtime()?)?;
    run(call)?;
    noted.record(call, &plan, &placement)
}

fn run(call: &mut Call<'_, Spec>) -> Result<()> {
    let placement = placement_of(call)?;
    let runtime = placement.runtime()?;
    let plan = plan_of(call, &placement, runtime)?;
    run_plan(call, &plan, &placement, runtime)?;
    written::share_plain(call, &plan, &placement, runtime)
}

fn run_plan(
    call: &mut Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    runtime: &Runtime,
) -> Result<()> {
    let position = placement.position(runtime.rank());
    if let Some(operation) = &plan.operation {
        let is_counted = sequence::note(&runtime.groups, operation);
        if is_counted && compare::is_on() && position.is_some() {
            agreed::compare(call, placement, runtime)?;
        }
    }
    if position.is_none() && !plan.needs_shapes_only {
        return outside::run(call, plan, placement, runtime);
    }
    if let Some(code) = plan.code {
        return run_code(code, call, plan, placement, position.unwrap_or(0));
    }
    for (index, input) in plan.inputs.iter().enumerate() {
        prepare(call, runtime, index, input)?;
    }
    for (argument, values) in &plan.ints {
        call.set_ints(*argument, values)?;
    }
    let ran = call.run();
    if plan.is_sent {
        outside::send(call, plan, placement, runtime, ran.is_ok())?;
    }
    ran?;
    if plan.is_drawn_apart {
        for index in 0..call.returns {
            if let LocalResult::Tensor(Some(mut drawn)) = call.result(index)? {
                let ranks = placement.ranks();
                let group = runtime.groups.group(ranks)?;
                group.broadcast_tensor(&mut drawn, 0).map_err(|error| {
                    let of = digest(placement);
                    sequence::explained(error.into(), &runtime.groups, Some((&group, ranks)), of)
                })?;
            }
        }
    }
    let resized = written::resize_outs(call, plan, placement, runtime)?;
    for &(index, result) in &plan.write_backs {
        if !resized.contains(&index) {
            write_back(call, plan, runtime, index, result)?;
        }
    }
    for (index, output) in plan.outputs.iter().enumerate() {
        give(call, placement, runtime, index, output)?;
    }
    if resized.is_empty() && plan.is_local(call, placement, runtime) && !compare::is_on() {
        known::keep(call.key(), plan);
    }
    Ok(())
}

fn run_code(
    code: Code,
    call: &mut Call<'_, Spec>,
    plan: &ExecutionPlan,
    placement: &Placement,
    position: usize,
) -> Result<()> {
    code(&mut Context { call, choice: &plan.choice, ints: &plan.ints, placement, position })
}

/// Returns the placement of the inputs: one for all of them.
fn placement_of(call: &Call<'_, Spec>) -> Result<Placement> {
    let mut specs = (0..call.tensors()).filter_map(|tensor| call.spec(tensor));
    let Some(first) = specs.next() else {
        return Err(Error::Plain);
    };
    match specs.find(|spec| spec.placement() != first.placement()) {
        None => Ok(first.placement().clone()),
        Some(other) => Err(moved::placements_differ(call, first.placement(), other.placement())),
    }
}

fn plan_of(
    call: &Call<'_, Spec>,
    placement: &Placement,
    runtime: &Runtime,
) -> Result<Arc<ExecutionPlan>> {
    let plans = runtime.part::<Cache<ExecutionPlan>>();
    if let Some(plan) = plans.get(call.key()) {
        return Ok(plan);
    }
    let plan = Arc::new(planning::plan(call, placement, runtime)?);
    plans.insert(call.key(), &plan);
    Ok(plan)
}

/// Gives the operation this input: the local, or what boxing makes of it.
fn prepare(
    call: &mut Call<'_, Spec>,
    runtime: &Runtime,
    index: usize,
    input: &InputSource,
) -> Result<()> {
    match input {
        InputSource::Own => Ok(()),
        // The operation gives the handle other sizes.
        InputSource::Handle => {
            let local = input_local(call, index)?.map(|local| local.alias());
            Ok(call.set_local(index, local.as_ref())?)
        }
        InputSource::Empty => {
            let like = input_local(call, index)?;
            let empty = like.map(|like| Tensor::empty([0], (like.kind(), like.device())));
            Ok(call.set_local(index, empty.as_ref())?)
        }
        InputSource::Boxed { boxing, from, to, is_written, is_contiguous } => {
            let local = input_local(call, index)?;
            let Some(tensor) = &local else { return Ok(()) };
            let options = (tensor.kind(), tensor.device());
            let boxed = boxing.run(&runtime.groups, options, local.as_ref());
            let boxed = boxed.map_err(|source| agreed::unboxed(call, index, from, to, source))?;
            let boxed = boxed.map(|boxed| {
                if *is_written && boxing.is_view() {
                    boxed.alias_copy()
                } else if *is_contiguous {
                    boxed.contiguous()
                } else {
                    boxed
                }
            });
            Ok(call.set_local(index, boxed.as_ref())?)
        }
    }
}

/// Returns a tensor's local; of a plain tensor itself.
fn input_local(call: &Call<'_, Spec>, index: usize) -> Result<Option<Tensor>> {
    let Some(tensor) = call.tensor(index) else { return Ok(None) };
    Ok(match call.spec(index) {
        Some(_) => local_of(&tensor),
        None => Some(tensor),
    })
}

/// Puts what the operation has written to another layout of an input into the input itself.
fn write_back(
    call: &Call<'_, Spec>,
    plan: &ExecutionPlan,
    runtime: &Runtime,
    index: usize,
    result: Option<usize>,
) -> Result<()> {
    let written = match result {
        Some(result) => match call.result(result)? {
            LocalResult::Tensor(Some(tensor)) => Some(tensor),
            _ => None,
        },
        None => call.local(index),
    };
    let (Some(written), Some(mut local)) = (written, input_local(call, index)?) else {
        return Ok(());
    };
    let Some(boxing) = plan.backs.get(&index) else { return Ok(()) };
    let options = (written.kind(), written.device());
    let back = boxing.run(&runtime.groups, options, Some(&written))?;
    if let Some(back) = back {
        local.f_copy_(&back)?;
    }
    Ok(())
}

/// Returns a result to the caller.
fn give(
    call: &mut Call<'_, Spec>,
    placement: &Placement,
    runtime: &Runtime,
    index: usize,
    output: &OutputLayout,
) -> Result<()> {
    if output.is_written {
        if let Some(argument) = call.written(index).filter(|_| call.reshapes) {
            reshape(call, placement, index, argument, output)?;
        }
        return Ok(call.output_written(index)?);
    }
    if placement.ranks().len() < runtime.world().world_size()
        && let LocalResult::Scalar(scalar) = call.result(index)?
    {
        let shared = outside::share_scalar(placement, runtime, Some(scalar));
        let scalar = shared.map_err(|source| outside::unshared(call, source))?;
        return Ok(call.output_scalar(scalar)?);
    }
    let spec = output.spec(placement);
    Ok(call.output(index, &output.of(&spec))?)
}

/// Gives the tensor that an operation as `transpose_` has written the sizes and the spec of the
/// result.
fn reshape(
    call: &Call<'_, Spec>,
    placement: &Placement,
    index: usize,
    argument: usize,
    output: &OutputLayout,
) -> Result<()> {
    let LocalResult::Tensor(Some(local)) = call.result(index)? else { return Ok(()) };
    let sizes = output.logical(&local);
    let spec = output.spec(placement);
    let now = globals()?.wrap(Some(&local), &local, spec, &sizes, output.shares)?;
    if let Some(tensor) = call.tensor(argument) {
        globals()?.assign(&tensor, &now)?;
    }
    Ok(())
}
