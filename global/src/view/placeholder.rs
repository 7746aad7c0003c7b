//! A job declares its inputs by placeholders.

use tch::{Kind, Tensor};

use super::{Array, View};
use crate::error::{Error, Result};

/// An input's name, shape and kind.
#[derive(Debug)]
pub struct Placeholder {
    pub name: String,
    pub shape: Vec<i64>,
    pub kind: Kind,
}

impl Placeholder {
    /// Checks an input. The logical array has just this shape; each array of a list may be shorter
    /// in dimension 0.
    ///
    /// # Errors
    /// What the input is, and what is declared.
    pub fn check(&self, view: View, array: &Array, ranks: usize) -> Result<()> {
        match (view, array) {
            (View::Consistent, Array::Whole(tensor)) => self.check_tensor(tensor, "", true),
            (View::Mirrored, Array::List(list)) if list.len() == ranks => {
                list.iter().enumerate().try_for_each(|(index, tensor)| {
                    self.check_tensor(tensor, &format!("array {index} "), false)
                })
            }
            (View::Mirrored, Array::List(list)) => Err(self.error(format!(
                "the list has {} arrays, but the job has {ranks} ranks: give each an array",
                list.len()
            ))),
            (View::Mirrored, Array::Whole(_)) => Err(self.error(
                "a mirrored job takes a list with an array for each rank, but got one array".into(),
            )),
            (View::Consistent, Array::List(_)) => {
                Err(self.error("a consistent job takes one array, but got a list".into()))
            }
        }
    }

    fn check_tensor(&self, tensor: &Tensor, which: &str, is_exact: bool) -> Result<()> {
        let shape = tensor.size();
        let kind = tensor.kind();
        let is_shorter = match (shape.split_first(), self.shape.split_first()) {
            (Some((rows, row)), Some((most, declared))) => rows <= most && row == declared,
            _ => false,
        };
        if kind == self.kind && (shape == self.shape || (!is_exact && is_shorter)) {
            return Ok(());
        }
        Err(self.error(format!(
            "{which}is {shape:?} of {kind:?}, but the job declares {:?} of {:?}",
            self.shape, self.kind
        )))
    }

    fn error(&self, reason: String) -> Error {
        Error::Input { name: self.name.clone(), reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn error(view: View, array: impl Into<Array>) -> String {
        let images = Placeholder { name: "images".into(), shape: vec![4, 3], kind: Kind::Float };
        let result = images.check(view, &array.into(), 2);
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    fn zeros(shape: &[i64]) -> Tensor {
        Tensor::zeros(shape, (Kind::Float, Device::Cpu))
    }

    #[test]
    fn what_is_declared_is_taken() {
        assert_eq!(error(View::Consistent, zeros(&[4, 3])), "");
        assert_eq!(error(View::Mirrored, vec![zeros(&[4, 3]), zeros(&[4, 3])]), "");
        assert_eq!(error(View::Mirrored, vec![zeros(&[3, 3]), zeros(&[0, 3])]), "");
    }

    #[test]
    fn another_shape_or_kind_is_an_error_with_both() {
        let expected = "the input images: is [3, 3] of Float, but the job declares [4, 3] of Float";
        assert_eq!(error(View::Consistent, zeros(&[3, 3])), expected);
        let doubles = zeros(&[4, 3]).to_kind(Kind::Double);
        let expected =
            "the input images: is [4, 3] of Double, but the job declares [4, 3] of Float";
        assert_eq!(error(View::Consistent, doubles), expected);
        for shape in [&[5, 3][..], &[4, 2], &[3], &[]] {
            let expected = format!(
                "the input images: array 1 is {shape:?} of Float, but the job declares [4, 3] of \
                 Float"
            );
            assert_eq!(error(View::Mirrored, vec![zeros(&[4, 3]), zeros(shape)]), expected);
        }
    }

    #[test]
    fn the_other_views_arrays_are_an_error() {
        let expected = "the input images: the list has 3 arrays, but the job has 2 ranks: give \
                        each an array";
        let list = |count| (0..count).map(|_| zeros(&[4, 3])).collect::<Vec<_>>();
        assert_eq!(error(View::Mirrored, list(3)), expected);
        let expected = "the input images: a mirrored job takes a list with an array for each rank, \
                        but got one array";
        assert_eq!(error(View::Mirrored, zeros(&[4, 3])), expected);
        let expected = "the input images: a consistent job takes one array, but got a list";
        assert_eq!(error(View::Consistent, list(2)), expected);
    }
}
