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
