//! How a tensor's elements lie in memory.

use std::cmp::Reverse;
use std::fmt;

use tch::Tensor;

/// The order in which a gradient's elements lie in memory.
#[derive(Clone)]
pub(crate) struct GradLayout {
    shape: Vec<i64>,
    /// Strides, and the dimensions as they come in memory; None for those of a contiguous tensor.
    strided: Option<(Vec<i64>, Vec<i64>)>,
}

impl GradLayout {
    /// Returns the layout of the gradients of `parameter`: the parameter's own strides if it lies
    /// without gaps, otherwise those of a contiguous tensor. This is libtorch's "gradient layout
    /// contract" (torch/csrc/autograd/functions/accumulate_grad.h), which a gradient keeps as a
    /// rule.
    pub fn of(parameter: &Tensor) -> Self {
        let shape = parameter.size();
        let strides = parameter.stride();
        // Strictly: strides of dimensions of length 1 are kept, too.
        let contiguous = (0..shape.len())
            .map(|axis| shape[axis + 1..].iter().product::<i64>())
            .eq(strides.iter().copied());
        let order = memory_order(&shape, &strides).filter(|_| !contiguous);
        Self { shape, strided: order.map(|order| (strides, order)) }
    }

    /// Returns whether it is that of a contiguous tensor.
    pub fn is_row_major(&self) -> bool {
        self.strided.is_none()
    }

    /// Returns the tensor with its dimensions as they come in memory: contiguous if it has this
    /// layout.
    pub fn in_memory_order(&self, tensor: &Tensor) -> Tensor {
        match &self.strided {
            Some((_, order)) => tensor.detach().permute(order),
            None => tensor.shallow_clone(),
        }
    }

    /// Returns the contiguous tensor that [`GradLayout::in_memory_order`] gave, with its dimensions
    /// in their own order again.
    pub fn in_own_order(&self, tensor: &Tensor) -> Tensor {
        match &self.strided {
            // Not as a view for autograd, as gradients are detached in place.
            Some((strides, _)) => tensor.as_strided(&self.shape, strides, None).detach(),
            None => tensor.shallow_clone(),
        }
    }

    /// Returns the shape of a contiguous tensor for [`GradLayout::in_own_order`].
    pub fn memory_shape(&self) -> Vec<i64> {
        match &self.strided {
            Some((_, order)) => {
                order.iter().map(|&dimension| self.shape[dimension as usize]).collect()
            }
            None => self.shape.clone(),
        }
    }
}

impl fmt::Display for GradLayout {
    /// How elements come in memory, if not by their indices.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((_, order)) = &self.strided else { return Ok(()) };
        let order: Vec<i64> =
            order.iter().copied().filter(|&axis| self.shape[axis as usize] != 1).collect();
        if order.is_sorted() { Ok(()) } else { write!(f, " memory order {order:?}") }
    }
}

/// Returns the dimensions by falling strides, if elements lie without gaps or overlaps. Dimensions
/// of length 1, which no step is taken along, come first.
fn memory_order(shape: &[i64], strides: &[i64]) -> Option<Vec<i64>> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    order.sort_by_key(|&dimension| (shape[dimension] != 1).then_some(Reverse(strides[dimension])));
    let mut step = 1;
    let mut falling = order.iter().rev().filter(|&&dimension| shape[dimension] != 1);
    let dense = falling.all(|&dimension| {
        let expected = step;
        step *= shape[dimension];
        strides[dimension] == expected
    });
    if !dense || shape.contains(&0) {
        return None;
    }
    Some(order.into_iter().map(|dimension| dimension as i64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_come_in_the_order_of_memory() {
        type Case = (&'static [i64], &'static [i64], Option<&'static [i64]>);
        let cases: [Case; 11] = [
            (&[], &[], Some(&[])),
            (&[2, 3], &[3, 1], Some(&[0, 1])),
            (&[2, 3], &[1, 2], Some(&[1, 0])),
            (&[8, 3, 5, 4], &[60, 1, 12, 3], Some(&[0, 2, 3, 1])), // channels last
            // The same, of a pointwise convolution.
            (&[8, 3, 1, 1], &[3, 1, 3, 3], Some(&[2, 3, 0, 1])),
            (&[2, 3, 4], &[4, 8, 1], Some(&[1, 0, 2])),
            (&[3, 1, 2], &[1, 7, 3], Some(&[1, 2, 0])),
            (&[2, 3], &[1, 4], None), // with gaps
            (&[2, 3], &[0, 1], None), // expanded
            (&[2, 2], &[1, 1], None), // overlapping
            (&[0, 3], &[1, 1], None),
        ];
        for (shape, strides, expected) in cases {
            assert_eq!(memory_order(shape, strides).as_deref(), expected, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn a_gradient_of_the_layout_is_contiguous_in_memory_order() {
        let rows = Tensor::arange(120, (tch::Kind::Float, tch::Device::Cpu)).view([2, 3, 4, 5]);
        for (parameter, shown) in [
            (rows.permute([3, 0, 2, 1]), " memory order [1, 3, 2, 0]"),
            (rows.reshape([6, 1, 1, 20]).permute([0, 3, 1, 2]), ""),
            (rows.shallow_clone(), ""),
        ] {
            let layout = GradLayout::of(&parameter);
            let flat = layout.in_memory_order(&parameter);
            assert!(flat.is_contiguous() && flat.size() == layout.memory_shape());
            let again = layout.in_own_order(&flat);
            assert_eq!((again.size(), again.stride()), (parameter.size(), parameter.stride()));
            assert_eq!(again, parameter);
            assert_eq!(layout.to_string(), shown);
        }
        let columns = rows.view([6, 20]).tr();
        assert!(!GradLayout::of(&columns).in_memory_order(&columns.contiguous()).is_contiguous());
        let gaps = rows.slice(3, 0, 2, 1);
        assert_eq!(GradLayout::of(&gaps).in_own_order(&gaps.contiguous()).stride(), [24, 8, 2, 1]);
    }
}
