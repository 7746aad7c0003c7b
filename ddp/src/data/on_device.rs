//! Batches that workers bring to the device ahead of time.

use tch::{Device, TchError, Tensor};

/// A data set whose batches are on a device: [`Dataset::to_device`](crate::Dataset::to_device) and
/// [`IterableDataset::to_device`](crate::IterableDataset::to_device) make it. What the loader's workers make ahead of time takes memory
/// there.
#[derive(Debug)]
pub struct OnDevice<D> {
    pub(super) dataset: D,
    pub(super) device: Device,
}

impl<D> OnDevice<D> {
    pub(super) fn new(dataset: D, device: Device) -> Self {
        Self { dataset, device }
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
