//! A call as rules see it.

use flow_autograd::global::{Argument, Call};

use crate::region::shape;
use crate::rules::op::{Arg, Input, Op};
use crate::spec::Spec;

/// The tensors that an operation writes.
pub struct Written {
    /// Whether it writes some of its arguments, and rules know.
    pub is_in_place: bool,
    /// Arguments that only receive the result, as `out`.
    pub outs: Vec<usize>,
    /// Tensors of all arguments that are written.
    pub tensors: Vec<usize>,
}

impl Written {
    /// Returns the name that rules know.
    pub fn rule_name<'a>(&self, call: &'a Call<'_, Spec>) -> &'a str {
        let name = call.name;
        let name = name.strip_prefix("aten::").unwrap_or(name);
        if self.is_in_place || call.reshapes {
            name.strip_suffix('_').unwrap_or(name)
        } else {
            name
        }
    }

    /// Finds what a call with these arguments writes.
    pub fn of(call: &Call<'_, Spec>, arguments: &[Argument<'_>]) -> Self {
        let name = call.name;
        let is_in_place = name.ends_with('_') && !name.ends_with("__") && call.is_written(0);
        // Its schema does not say that it does.
        let writes_statistics =
            matches!(name, "aten::cudnn_batch_norm" | "aten::native_batch_norm")
                && matches!(arguments.get(5), Some(Argument::Bool(true)));
        let written = (0..arguments.len()).filter(|&argument| call.is_written(argument));
        let mut outs = Vec::new();
        let mut tensors = Vec::new();
        for argument in written {
            match arguments[argument] {
                Argument::Tensor(tensor) if call.is_out(argument) => {
                    outs.push(argument);
                    tensors.push(tensor);
                }
                Argument::Tensor(tensor) => tensors.push(tensor),
                Argument::Tensors(first, count) => tensors.extend(first..first + count),
                _ => {}
            }
        }
        if writes_statistics {
            tensors.extend((3..5).filter(|&tensor| call.is_defined(tensor)));
        }
        Self { is_in_place: is_in_place || writes_statistics, outs, tensors }
    }
}

/// Returns the operation of a call.
pub fn op_of<'a>(
    call: &'a Call<'_, Spec>,
    name: &'a str,
    arguments: &[Argument<'a>],
    written: &Written,
) -> Op<'a> {
    let mut args = Vec::new();
    for (index, argument) in arguments.iter().enumerate() {
        if !written.outs.contains(&index) {
            args.push(arg_of(argument));
        }
    }
    let mut inputs = Vec::new();
    // The tensors of `out` come last.
    for tensor in 0..call.tensors() - written.outs.len() {
        inputs.push(Input { shape: shape(call.sizes(tensor)), kind: call.kind(tensor) });
    }
    let in_place = written.is_in_place && !call.reshapes;
    Op::new(name, call.overload, args, inputs, call.returns, in_place)
}

fn arg_of<'a>(argument: &Argument<'a>) -> Arg<'a> {
    match *argument {
        Argument::None(_) => Arg::None,
        Argument::Tensor(tensor) => Arg::Tensor(tensor),
        Argument::Tensors(first, count) => Arg::Tensors(first..first + count),
        Argument::Int(value) => Arg::Int(value),
        Argument::Float(value) => Arg::Float(value),
        Argument::Bool(value) => Arg::Bool(value),
        Argument::Ints(values) => Arg::Ints(values.into()),
        Argument::Other => Arg::Other,
    }
}
