//! A parameter of a model.

use tch::{Kind, Tensor};

use crate::grad_layout::GradLayout;

/// A parameter of a model.
pub(crate) struct Parameter {
    /// Its place among all parameters of the model.
    pub position: usize,
    pub name: String,
    pub tensor: Tensor,
    /// The shape of its gradients. Complex ones are reduced as real ones that have one dimension
    /// more: `view_as_real`.
    pub shape: Vec<i64>,
    pub kind: Kind,
    /// The layout of its gradients, the same on all ranks.
    pub layout: GradLayout,
    /// Its gradients are sparse, and reduced as such.
    pub is_sparse: bool,
    /// Sparse gradients of it become dense before they are reduced.
    pub as_dense: bool,
}

impl Parameter {
    /// Returns the parameter of this name and place.
    pub fn new(position: usize, name: String, tensor: Tensor) -> Self {
        let real = as_real(tensor.detach());
        Self {
            position,
            name,
            shape: real.size(),
            kind: real.kind(),
            layout: GradLayout::of(&real),
            is_sparse: false,
            as_dense: false,
            tensor,
        }
    }

    /// Returns `.grad`, which may be undefined, once [`Parameter::resolved`] has seen it.
    pub fn grad(&self) -> Tensor {
        as_real(self.tensor.grad())
    }

    /// Makes a tensor of [`Parameter::shape`] `.grad`.
    pub fn set_grad(&self, gradient: &Tensor) -> Result<(), flow_autograd::Error> {
        if is_complex(&self.tensor) {
            return flow_autograd::set_grad(&self.tensor, Some(&gradient.view_as_complex()));
        }
        flow_autograd::set_grad(&self.tensor, Some(gradient))
    }

    /// Returns `.grad` as it is reduced, and whether that is the memory of `gradient`, which `.grad`
    /// is. A gradient that is computed when it is read is computed, and becomes `.grad`; so does the
    /// dense form of a sparse one. The error says why it cannot be reduced, and what would be right.
    pub fn resolved(&self, gradient: &Tensor) -> Result<(Tensor, bool), String> {
        if let Some(reason) = self.unfit(gradient) {
            return Err(format!("the gradient of {} {reason}", self.name));
        }
        let gradient = gradient.detach();
        let own = if self.as_dense && gradient.is_sparse() {
            Some(gradient.to_dense(None, false))
        } else {
            flow_autograd::resolved(&gradient)
        };
        let Some(own) = own else { return Ok((as_real(gradient), true)) };
        flow_autograd::set_grad(&self.tensor, Some(&own)).map_err(|error| error.to_string())?;
        Ok((as_real(own), false))
    }

    fn unfit(&self, gradient: &Tensor) -> Option<String> {
        if gradient.defined() && gradient.is_sparse() {
            return (!self.is_sparse && !self.as_dense).then(|| {
                "is sparse: name it in sparse_gradients, or set sparse_as_dense(true)".into()
            });
        }
        if self.is_sparse {
            return Some(
                "is not sparse: do not name it in sparse_gradients, or let all that it gets be \
                 sparse"
                    .into(),
            );
        }
        flow_autograd::unsendable(gradient)
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }
}

fn is_complex(tensor: &Tensor) -> bool {
    matches!(tensor.kind(), Kind::ComplexFloat | Kind::ComplexDouble)
}

/// Returns the real view of a complex tensor, and another tensor as it is.
fn as_real(tensor: Tensor) -> Tensor {
    if tensor.defined() && is_complex(&tensor) {
        tensor.resolve_conj().view_as_real()
    } else {
        tensor
    }
}

/// Makes parameters of named tensors.
pub(crate) fn numbered(named: Vec<(String, Tensor)>) -> Vec<Parameter> {
    let parameters = named.into_iter().enumerate();
    parameters.map(|(position, (name, tensor))| Parameter::new(position, name, tensor)).collect()
}

/// Returns the parameters that require gradients, and the others, each in the order of the model.
pub(crate) fn by_training(mut parameters: Vec<Parameter>) -> (Vec<Parameter>, Vec<Parameter>) {
    parameters.sort_by_key(|parameter| parameter.position);
    parameters.into_iter().partition(|parameter| parameter.tensor.requires_grad())
}

/// Names parameters in an error, at most 20 of them.
pub(crate) fn names_of(parameters: &[Parameter], indices: &[usize]) -> String {
    let mut names = Vec::new();
    for &index in indices.iter().take(20) {
        let parameter = &parameters[index];
        if parameter.tensor.requires_grad() {
            names.push(parameter.name.clone());
        } else {
            names.push(format!("{} (frozen after wrapping)", parameter.name));
        }
    }
    let mut text = names.join(", ");
    if indices.len() > 20 {
        text += &format!(" and {} more", indices.len() - 20);
    }
    text
}
