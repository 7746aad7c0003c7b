//! Forward and backward in half precision, with parameters that stay in single precision.

use tch::{Kind, Tensor};

use crate::model_check::can_be_averaged;

/// The types of [`DdpBuilder::mixed_precision`](crate::DdpBuilder::mixed_precision): PyTorch's
/// `_MixedPrecision`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MixedPrecision {
    /// The type that forward and backward compute in: `BFloat16` or `Half` (default: that of the
    /// parameters). Inputs of a floating-point type are cast to it.
    pub param: Option<Kind>,
    /// The type in which gradients are sent and averaged (default: `param`).
    pub reduce: Option<Kind>,
    /// The type of floating-point buffers from then on, such as running statistics (default: their own).
    /// On the CPU, a batch norm with a `param` needs the same type here.
    pub buffer: Option<Kind>,
}

impl MixedPrecision {
    /// Returns the type in which gradients are sent; None: their own.
    pub(crate) fn communication(&self) -> Option<Kind> {
        self.reduce.or(self.param)
    }

    /// Checks the types for a model, without other ranks. `hook` is the type of the communication hook.
    /// The error says what is wrong.
    pub(crate) fn check(
        &self,
        parameters: &[(String, Tensor)],
        hook: Option<Kind>,
    ) -> Result<(), String> {
        if let Some(param) = self.param {
            if !matches!(param, Kind::BFloat16 | Kind::Half) {
                return Err(format!(
                    "mixed_precision cannot compute in {param:?}: param must be BFloat16 or Half"
                ));
            }
            if let Some((name, other)) =
                parameters.iter().find(|(_, tensor)| tensor.kind() != Kind::Float)
            {
                return Err(format!(
                    "mixed_precision casts parameters from Float, and {name} is {:?}: make all \
                     parameters Float, or leave param out",
                    other.kind()
                ));
            }
        }
        for (name, kind) in [("reduce", self.reduce), ("buffer", self.buffer)] {
            if let Some(kind) = kind.filter(|&kind| !can_be_averaged(kind)) {
                return Err(format!(
                    "mixed_precision has {name} {kind:?}: it must be Float, Double, Half or BFloat16"
                ));
            }
        }
        match (self.reduce, hook) {
            (Some(reduce), Some(hook)) => Err(format!(
                "gradients cannot be sent as {reduce:?} by mixed_precision and as {hook:?} by the \
                 communication hook: leave reduce or the hook out"
            )),
            _ => Ok(()),
        }
    }

    /// Casts the floating-point buffers, which stay so.
    pub(crate) fn cast_buffers(&self, buffers: &mut [(String, Tensor)]) {
        let Some(kind) = self.buffer else { return };
        for (_, buffer) in buffers {
            if buffer.is_floating_point() && buffer.kind() != kind {
                let cast = tch::no_grad(|| buffer.to_kind(kind));
                buffer.set_data(&cast);
            }
        }
    }
}
