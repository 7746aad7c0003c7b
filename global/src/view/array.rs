//! The arrays that go into a job and come out of it.

use tch::Tensor;

use crate::error::Result;

/// An input or a result of a job.
#[derive(Debug)]
pub enum Array {
    /// The logical array, of a consistent job.
    Whole(Tensor),
    /// An array for each rank, of a mirrored job, in the placement's order.
    List(Vec<Tensor>),
}

impl Array {
    /// Returns the logical array: a list's arrays one after the other, along dimension 0. Arrays
    /// without dimensions become an array of as many elements.
    ///
    /// # Errors
    /// Arrays of a list that do not fit each other.
    pub fn whole(self) -> Result<Tensor> {
        match self {
            Array::Whole(tensor) => Ok(tensor),
            Array::List(list) if list.iter().all(|tensor| tensor.dim() == 0) => {
                Ok(Tensor::f_stack(&list, 0)?)
            }
            Array::List(list) => Ok(Tensor::f_cat(&list, 0)?),
        }
    }

    /// Returns an array for each rank; the logical array alone.
    pub fn list(self) -> Vec<Tensor> {
        match self {
            Array::Whole(tensor) => vec![tensor],
            Array::List(list) => list,
        }
    }
}

impl From<Tensor> for Array {
    fn from(tensor: Tensor) -> Self {
        Array::Whole(tensor)
    }
}

impl From<Vec<Tensor>> for Array {
    fn from(list: Vec<Tensor>) -> Self {
        Array::List(list)
    }
}
