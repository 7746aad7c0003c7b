//! Operations that are recorded.

use flow_autograd::global::{Call, Node};

use super::op::{Written, op_of};
use super::plan::ExecutionPlan;
use crate::error::Result;
use crate::placement::Placement;
use crate::record;
use crate::rules::op::{Input, Op};
use crate::spec::Spec;
use crate::trace::TracedArgument;

/// An operation that is to be recorded, as it was before it ran.
pub struct Noted {
    name: String,
    overload: String,
    args: Vec<TracedArgument>,
    inputs: Vec<Input>,
    in_place: bool,
    node: Node,
}

impl Noted {
    /// Notes a call.
    pub fn new(call: &Call<'_, Spec>) -> Self {
        let arguments = call.arguments();
        let written = Written::of(call, &arguments);
        let op = op_of(call, written.rule_name(call), &arguments, &written);
        Self {
            name: op.name.to_owned(),
            overload: op.overload.to_owned(),
            args: op.args.iter().map(Into::into).collect(),
            inputs: op.inputs,
            in_place: op.in_place,
            node: call.node(),
        }
    }

    /// Records it, after it has run.
    pub fn record(
        self,
        call: &Call<'_, Spec>,
        plan: &ExecutionPlan,
        placement: &Placement,
    ) -> Result<()> {
        let inputs: Vec<_> = (0..self.inputs.len()).map(|tensor| call.tensor(tensor)).collect();
        let returned: Vec<_> = (0..call.returns).flat_map(|index| call.returned(index)).collect();
        let args = self.args.iter().map(TracedArgument::borrow).collect();
        let outputs = returned.len();
        let op = Op::new(&self.name, &self.overload, args, self.inputs, outputs, self.in_place);
        let wanted = &plan.choice.inputs[..inputs.len()];
        record::operation(&op, placement, &inputs, wanted, &returned, self.node)
    }
}
