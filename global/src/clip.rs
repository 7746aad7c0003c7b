//! Gradients are clipped where they are.

use flow_comm::ReduceOp;
use flow_tensor::TensorCollectives;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::gradients::{gradients, is_partial, own, reduced};
use crate::handle::find_spec;
use crate::region::is_first;
use crate::tensor::GlobalTensor;

/// Scales the gradients of these tensors so that the norm of all of them together is at most
/// `max_norm`, and returns the norm before: `torch.nn.utils.clip_grad_norm_`. `norm_type` is the order
/// of the norm: 2 for the usual one, `f64::INFINITY` for the greatest element. Of a model:
/// `clip_grad_norm(&vs.trainable_variables(), 1.0, 2.0, true)`.
///
/// Tensors may be global, on any placements, or plain ones, which are the same on all ranks. Nothing
/// is gathered: each rank adds up its own elements, and one number is reduced over all ranks of the
/// job, which all call this. Tied weights that are tensors of their own on several placements count
/// as often as there are copies.
///
/// # Errors
/// The order is 0 or not a number, or a collective fails. Also if the norm is infinite or not a
/// number and `error_if_nonfinite` is set, which leaves the gradients alone.
pub fn clip_grad_norm(
    tensors: &[Tensor],
    max_norm: f64,
    norm_type: f64,
    error_if_nonfinite: bool,
) -> Result<f64> {
    if norm_type == 0.0 || norm_type.is_nan() {
        return Err(fail("the order of the norm is 0 or not a number; the usual one is 2"));
    }
    tch::no_grad(|| {
        let gradients: Vec<Tensor> = gradients(tensors).collect();
        let norm = norm(&gradients, norm_type)?;
        if error_if_nonfinite && !norm.is_finite() {
            return Err(fail(&format!(
                "the norm of order {norm_type} of the gradients is {norm}; without \
                 error_if_nonfinite they are scaled all the same"
            )));
        }
        let coefficient = max_norm / (norm + 1e-6);
        // Not so if the norm is not a number: nor are the gradients then.
        let fits = coefficient >= 1.0;
        if !fits {
            for gradient in &gradients {
                if let Some(mut own) = own(gradient) {
                    let _ = own.f_mul_scalar_(coefficient)?;
                }
            }
        }
        Ok(norm)
    })
}

/// Limits each element of the gradients of these tensors to `-value..=value`:
/// `torch.nn.utils.clip_grad_value_`.
///
/// # Errors
/// A collective fails, where the gradient of a partial tensor is reduced.
pub fn clip_grad_value(tensors: &[Tensor], value: f64) -> Result<()> {
    tch::no_grad(|| {
        for mut gradient in gradients(tensors) {
            let whole = reduced(&gradient)?;
            if let Some(mut own) = own(&whole) {
                let _ = own.f_clamp_(-value, value)?;
            }
            if is_partial(&gradient) {
                gradient.set_data(&whole);
            }
        }
        Ok(())
    })
}

/// Returns the norm of all elements of these tensors, on every rank.
fn norm(gradients: &[Tensor], order: f64) -> Result<f64> {
    let mut world = None;
    // Those that this rank answers for, and those that are no rank's own.
    let mut own_norms = Vec::new();
    let mut plain_norms = Vec::new();
    for gradient in gradients {
        let Some(spec) = find_spec(gradient) else {
            if gradient.numel() > 0 {
                plain_norms.push(gradient.f_norm_scalaropt_dtype(order, Kind::Double)?);
            }
            continue;
        };
        let placement = spec.placement();
        let runtime = placement.runtime()?;
        world.get_or_insert_with(|| runtime.world().clone());
        let whole = reduced(gradient)?;
        let Some(position) = placement.position(runtime.rank()) else { continue };
        // Of copies, the first one counts.
        let counts = is_first(placement, &whole.sbp()?, position);
        if let Some(own) = own(&whole).filter(|own| counts && own.numel() > 0) {
            own_norms.push(own.f_norm_scalaropt_dtype(order, Kind::Double)?);
        }
    }
    let op = match order {
        f64::INFINITY => ReduceOp::Max,
        f64::NEG_INFINITY => ReduceOp::Min,
        _ => ReduceOp::Sum,
    };
    let mut sum = total(&own_norms, order)?;
    if let Some(world) = world {
        let mut number = Tensor::from(sum).to_device(world.device());
        world.all_reduce_tensor(&mut number, op)?;
        sum = number.f_double_value(&[])?;
    }
    let plain = total(&plain_norms, order)?;
    Ok(match op {
        ReduceOp::Max => sum.max(plain),
        ReduceOp::Min => sum.min(plain),
        _ => (sum + plain).powf(1.0 / order),
    })
}

/// Norms as one number that can be added up with that of others, which for a finite order is a power
/// of their norm.
fn total(norms: &[Tensor], order: f64) -> Result<f64> {
    if norms.is_empty() {
        return Ok(if order == f64::NEG_INFINITY { f64::INFINITY } else { 0.0 });
    }
    let norm = Tensor::f_stack(norms, 0)?;
    let norm = norm.f_norm_scalaropt_dtype(order, Kind::Double)?;
    let norm = norm.f_double_value(&[])?;
    Ok(if order.is_infinite() { norm } else { norm.powf(order) })
}

fn fail(reason: &str) -> Error {
    Error::Unsupported { operation: "clip_grad_norm".to_owned(), reason: reason.to_owned() }
}
