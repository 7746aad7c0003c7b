//! A parameter that is trained.

use tch::{Kind, Tensor};

use crate::grad_layout::GradLayout;

/// A parameter that is trained.
pub(crate) struct Parameter {
    pub name: String,
    pub tensor: Tensor,
    pub shape: Vec<i64>,
    pub kind: Kind,
    /// The layout of its gradients, the same on all ranks.
    pub layout: GradLayout,
}

impl Parameter {
    /// Returns the parameter of this name.
    pub fn new(name: String, tensor: Tensor) -> Self {
        Self {
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
