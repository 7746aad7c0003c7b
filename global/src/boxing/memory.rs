//! Regions of tensors as memory.

use flow_comm::Buffer;
use flow_tensor::HostTensor;
use tch::{Device, Kind, Tensor};

use crate::region::Region;

/// A contiguous tensor, and where it is in the logical one.
pub struct Part {
    pub tensor: Tensor,
    pub region: Region,
}

impl Part {
    /// Makes a part of a rank's local, in memory without gaps.
    pub fn new(local: &Tensor, region: &Region) -> Self {
        Self { tensor: local.contiguous(), region: region.clone() }
    }

    /// Makes a part whose elements are still to come.
    pub fn empty(region: &Region, options: (Kind, Device)) -> Self {
        Self { tensor: Tensor::empty(sizes(region), options), region: region.clone() }
    }

    /// Returns another handle of it.
    pub fn share(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), region: self.region.clone() }
    }

    /// Returns a region of the tensor, which this part has, as a view.
    pub fn view(&self, region: &Region) -> Tensor {
        view(&self.tensor, &self.region, region)
    }

    /// Copies a region that both have.
    pub fn copy(&self, region: &Region, to: &Self) {
        if self.tensor.device() != Device::Cpu {
            to.view(region).copy_(&self.view(region));
            return;
        }
        let from = self.memory();
        let mut memory = to.memory();
        copy(
            region,
            (from.bytes(), &self.region),
            (memory.bytes_mut(), &to.region),
            self.element_size(),
        );
    }

    /// Returns the size of an element in bytes.
    pub fn element_size(&self) -> usize {
        self.tensor.kind().elt_size_in_bytes()
    }

    /// Returns its memory, if it is on the CPU.
    pub fn memory(&self) -> HostTensor {
        HostTensor::new(&self.tensor)
    }
}

/// Returns the sizes of a region.
pub fn sizes(region: &Region) -> Vec<i64> {
    region.0.iter().map(|range| range.len() as i64).collect()
}

/// Returns a region of a tensor that has region `whole`.
pub fn view(tensor: &Tensor, whole: &Region, region: &Region) -> Tensor {
    let dims = region.0.iter().zip(&whole.0).enumerate();
    dims.filter(|(_, (range, whole))| range != whole).fold(
        tensor.shallow_clone(),
        |view, (dim, (range, whole))| {
            view.narrow(dim as i64, (range.start - whole.start) as i64, range.len() as i64)
        },
    )
}

/// Returns the tensor, or a copy of it if its elements are not in memory as they are.
pub fn in_memory(tensor: &Tensor) -> Tensor {
    flow_autograd::resolved(tensor).unwrap_or_else(|| tensor.shallow_clone())
}

/// Copies a region between the memories of two regions that have it, of elements of `size` bytes.
pub fn copy(
    region: &Region,
    (from, held): (&[u8], &Region),
    (to, whole): (&mut [u8], &Region),
    size: usize,
) {
    runs(region, held, whole, |start, at, length| {
        let from = &from[start * size..(start + length) * size];
        to[at * size..(at + length) * size].copy_from_slice(from);
    });
}

/// Calls `run(in_from, in_to, length)` for each run of elements of `region` that lie side by side
/// in both of two contiguous tensors. These have the regions `from` and `to`.
pub fn runs(region: &Region, from: &Region, to: &Region, mut run: impl FnMut(usize, usize, usize)) {
    if region.elements() == 0 {
        return;
    }
    // Up to `cut`, dimensions are walked through; after it, both have them whole.
    let dims = region.0.len();
    let cut = (0..dims)
        .rfind(|&dim| {
            let length = region.0[dim].len();
            length != from.0[dim].len() || length != to.0[dim].len()
        })
        .unwrap_or(0);
    let length: usize = region.0[cut..].iter().map(ExactSizeIterator::len).product();
    let from_steps = steps(from);
    let to_steps = steps(to);
    let mut one = offset(region, from, &from_steps);
    let mut other = offset(region, to, &to_steps);
    let mut at = vec![0; cut];
    loop {
        run(one, other, length);
        let mut dim = cut;
        loop {
            if dim == 0 {
                return;
            }
            dim -= 1;
            at[dim] += 1;
            one += from_steps[dim];
            other += to_steps[dim];
            if at[dim] < region.0[dim].len() {
                break;
            }
            one -= from_steps[dim] * at[dim];
            other -= to_steps[dim] * at[dim];
            at[dim] = 0;
        }
    }
}

/// Returns how many elements lie between neighbours along each dimension of a contiguous tensor
/// that has this region.
fn steps(region: &Region) -> Vec<usize> {
    let dims = region.0.len();
    let mut steps = vec![1; dims];
    for dim in (1..dims).rev() {
        steps[dim - 1] = steps[dim] * region.0[dim].len();
    }
    steps
}

/// Returns where a region begins in a contiguous tensor that has region `whole`.
fn offset(region: &Region, whole: &Region, steps: &[usize]) -> usize {
    let starts = region.0.iter().zip(&whole.0).zip(steps);
    starts.map(|((range, whole), step)| (range.start - whole.start) * step).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_as_long_as_both_allow() {
        let all = |region: [std::ops::Range<usize>; 3], from: [_; 3], to: [_; 3]| {
            let mut found = Vec::new();
            let [region, from, to] = [region, from, to].map(|ranges| Region(ranges.to_vec()));
            runs(&region, &from, &to, |one, other, length| found.push((one, other, length)));
            found
        };
        let whole = [0..2, 0..3, 0..4];
        assert_eq!(all(whole.clone(), whole.clone(), whole.clone()), [(0, 0, 24)]);
        assert_eq!(all([1..2, 0..3, 0..4], [1..2, 0..3, 0..4], whole.clone()), [(0, 12, 12)]);
        let columns = [0..2, 0..3, 1..3];
        let found = all(columns.clone(), columns.clone(), whole.clone());
        let expected = [(0, 1, 2), (2, 5, 2), (4, 9, 2), (6, 13, 2), (8, 17, 2), (10, 21, 2)];
        assert_eq!(found, expected);
        let rows = [0..2, 1..3, 0..4];
        assert_eq!(all(rows.clone(), whole.clone(), rows), [(4, 0, 8), (16, 8, 8)]);
        assert_eq!(all([0..2, 0..0, 0..4], whole.clone(), whole), []);
        let mut scalars = 0;
        let none = Region(Vec::new());
        runs(&none, &none, &none, |one, other, length| {
            assert_eq!((one, other, length), (0, 0, 1));
            scalars += 1;
        });
        assert_eq!(scalars, 1);
    }
}
