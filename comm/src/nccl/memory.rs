//! Device memory that NCCL knows, so that it moves it best.

use std::sync::Arc;

use flow_kernels::cuda::{Device, DeviceBuffer, DeviceMemory};

use super::communicator::{Communicator, CommunicatorError, bind};
use super::library::Library;
use super::result::NcclError;

impl Communicator {
    /// Allocates `bytes` bytes of the kind that NCCL moves best.
    pub fn allocate(&self, bytes: usize) -> Result<FlatMemory, CommunicatorError> {
        let bytes = bytes.max(1); // so that it has an address
        if self.library.has_registration() {
            bind(&self.device)?;
            let mut data = std::ptr::null_mut();
            // SAFETY: `data` is writable.
            unsafe { self.library.mem_alloc(&mut data, bytes)? };
            let owner = Allocation::Nccl { library: self.library, data: data as u64 };
            return Ok(FlatMemory { device: Arc::clone(&self.device), bytes, owner });
        }
        let memory = DeviceMemory::allocate(&self.device, bytes)
            .map_err(|e| NcclError::missing(e.to_string()))?;
        Ok(FlatMemory {
            device: Arc::clone(&self.device),
            bytes,
            owner: Allocation::Driver(memory),
        })
    }

    /// Tells NCCL of memory that will be used again and again. None where this NCCL cannot use
    /// that.
    pub fn register(
        self: &Arc<Self>,
        memory: &Arc<FlatMemory>,
    ) -> Result<Option<MemoryRegistration>, CommunicatorError> {
        if !self.library.has_registration() {
            return Ok(None);
        }
        let _lock = self.lock_calls()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the memory stays as long as the registration, which keeps it.
        unsafe {
            self.library.comm_register(
                self.work.0,
                memory.address() as *mut _,
                memory.bytes,
                &mut handle,
            )?;
        }
        Ok(Some(MemoryRegistration {
            communicator: Arc::clone(self),
            _memory: Arc::clone(memory),
            handle: handle as usize,
        }))
    }
}

/// Device memory for many reductions.
pub struct FlatMemory {
    device: Arc<Device>,
    bytes: usize,
    owner: Allocation,
}

enum Allocation {
    Nccl { library: &'static Library, data: u64 },
    Driver(DeviceMemory),
}

impl FlatMemory {
    /// Returns where the memory begins.
    pub fn address(&self) -> u64 {
        match &self.owner {
            Allocation::Nccl { data, .. } => *data,
            Allocation::Driver(memory) => memory.address(),
        }
    }
}

impl Drop for FlatMemory {
    /// Waits for whatever was enqueued before, as `cuMemFree` does.
    fn drop(&mut self) {
        let Allocation::Nccl { library, data } = self.owner else { return };
        let done = self.device.synchronize().map_err(|error| error.to_string());
        let freed = done.and_then(|()| {
            // SAFETY: the memory is NCCL's, and nothing uses it any more.
            unsafe { library.mem_free(data as *mut _) }.map_err(|error| error.to_string())
        });
        if let Err(error) = freed {
            log::debug!("device memory stays allocated: {error}");
        }
    }
}

/// NCCL knows the memory as long as this lives.
pub struct MemoryRegistration {
    communicator: Arc<Communicator>,
    _memory: Arc<FlatMemory>,
    handle: usize,
}

impl Drop for MemoryRegistration {
    fn drop(&mut self) {
        let communicator = &self.communicator;
        // Unmapping does not wait for what uses the memory; and NCCL comes back to the thread's
        // device.
        let done = communicator.device.synchronize();
        let (Ok(()), Ok(_lock)) = (done, communicator.lock_calls()) else { return };
        // SAFETY: the handle is this registration's.
        if let Err(error) = unsafe {
            communicator.library.comm_deregister(communicator.work.0, self.handle as *mut _)
        } {
            log::debug!("{error}");
        }
    }
}
