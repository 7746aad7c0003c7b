//! Batches that workers bring to the device ahead of time.

use tch::{Device, TchError, Tensor};

use super::iterable::{ItemStream, IterableDataset};
use super::loader::Dataset;
use crate::BoxError;

/// A data set whose batches are on a device: [`Dataset::to_device`] and
/// [`IterableDataset::to_device`] make it. What the loader's workers make ahead of time takes memory
/// there.
#[derive(Debug)]
pub struct OnDevice<D> {
    dataset: D,
    device: Device,
}

impl<D> OnDevice<D> {
    pub(super) fn new(dataset: D, device: Device) -> Self {
        Self { dataset, device }
    }
}

impl<D: Dataset<Batch: ToDevice>> Dataset for OnDevice<D> {
    type Batch = D::Batch;

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn batch(&self, indices: &[usize]) -> Result<D::Batch, BoxError> {
        Ok(self.dataset.batch(indices)?.to_device(self.device)?)
    }
}

impl<D: IterableDataset<Batch: ToDevice>> IterableDataset for OnDevice<D> {
    type Item = D::Item;
    type Batch = D::Batch;

    fn stream(&self, epoch: u64) -> Result<ItemStream<D::Item>, BoxError> {
        self.dataset.stream(epoch)
    }

    fn stream_from(&self, epoch: u64, skipped: usize) -> Result<ItemStream<D::Item>, BoxError> {
        self.dataset.stream_from(epoch, skipped)
    }

    fn batch(&self, items: Vec<D::Item>) -> Result<D::Batch, BoxError> {
        Ok(self.dataset.batch(items)?.to_device(self.device)?)
    }
}

/// A batch that can be brought to a device: a tensor, or some.
pub trait ToDevice: Sized {
    /// Returns the batch on a device. To a GPU it is copied from pinned memory, and nobody waits for
    /// the copy: it is in the order of the GPU's default stream, on which tch computes.
    ///
    /// # Errors
    /// When there is no such device, or its memory is used up.
    fn to_device(self, device: Device) -> Result<Self, TchError>;
}

impl ToDevice for Tensor {
    fn to_device(self, device: Device) -> Result<Self, TchError> {
        if !device.is_cuda() || self.device() != Device::Cpu {
            return self.f_to_device(device);
        }
        // pin_memory itself warns of its argument, which tch always gives, at each call.
        let pinned = self.f_internal_pin_memory(device)?;
        pinned.f_to_device_(device, pinned.kind(), true, false)
    }
}

impl<A: ToDevice, B: ToDevice> ToDevice for (A, B) {
    fn to_device(self, device: Device) -> Result<Self, TchError> {
        Ok((self.0.to_device(device)?, self.1.to_device(device)?))
    }
}

impl<A: ToDevice, B: ToDevice, C: ToDevice> ToDevice for (A, B, C) {
    fn to_device(self, device: Device) -> Result<Self, TchError> {
        Ok((self.0.to_device(device)?, self.1.to_device(device)?, self.2.to_device(device)?))
    }
}

impl<T: ToDevice> ToDevice for Vec<T> {
    fn to_device(self, device: Device) -> Result<Self, TchError> {
        self.into_iter().map(|part| part.to_device(device)).collect()
    }
}
