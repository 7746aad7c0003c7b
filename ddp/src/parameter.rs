//! A parameter of a model.

use tch::{Kind, Tensor};

use crate::grad_layout::GradLayout;

/// A parameter of a model.
pub(crate) struct Parameter {
    /// Its place among all parameters of the model.
    pub position: usize,
    pub name: String,
    pub tensor: Tensor,
    pub shape: Vec<i64>,
    pub kind: Kind,
    /// The layout of its gradients, the same on all ranks.
    pub layout: GradLayout,
}

impl Parameter {
    /// Returns the parameter of this name and place.
    pub fn new(position: usize, name: String, tensor: Tensor) -> Self {
        Self {
            position,
            name,
            shape: tensor.size(),
            kind: tensor.kind(),
            layout: GradLayout::of(&tensor),
            tensor,
        }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
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
