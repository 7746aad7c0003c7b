//! A group's collectives on GPUs, over NCCL.

use std::sync::Arc;

use flow_kernels::cuda::Device;

use super::ProcessGroup;
use crate::error::Result;
use crate::nccl::{CudaGroup, unique_tag};

/// Whether the ranks of a machine share its GPUs (feature `test-fakes` only). NCCL refuses two ranks
/// on one GPU of a host, so each rank is then started with a NCCL_HOSTID of its own.
fn shares_gpus() -> bool {
    cfg!(feature = "test-fakes")
        && std::env::var_os("FLOW_TEST_SHARE_GPUS").is_some_and(|value| value == "1")
}

/// A number that stands in place of a number of GPUs: the rank has no CUDA.
const NO_CUDA: i64 = -1;

impl ProcessGroup {
    /// Chooses the GPU for this rank: that of its number on the machine
    /// ([`Member::local_rank`](crate::Member::local_rank)), counted among those that CUDA_VISIBLE_DEVICES leaves. All
    /// ranks call this.
    ///
    /// # Errors
    ///
    /// On all ranks, if one of them has no GPU: how many ranks there are on its machine, and how
    /// many GPUs.
    pub fn use_cuda(&self) -> Result<Arc<Device>> {
        self.parts(&"use_cuda")?;
        let share = shares_gpus();
        let local_rank = self.local_rank();
        let counted = Device::count();
        let found = counted.as_ref().map_or(NO_CUDA, |&count| count as i64);
        let ordinal =
            if share && found > 0 { local_rank as i64 % found } else { local_rank as i64 };
        // If one rank cannot, none goes on, and all give the same reason.
        let mut all = vec![0; 2 * self.world_size()];
        self.all_gather(&[ordinal, found], &mut all)?;
        counted.map_err(|error| self.system("use_cuda", error.to_string()))?;
        if let Some(other) = all.chunks(2).position(|rank| rank[1] == NO_CUDA) {
            let reason = format!("rank {} cannot use CUDA: see its error", self.ranks()[other]);
            return Err(self.system("use_cuda", reason));
        }
        if let Some(short) = all.chunks(2).find(|rank| rank[0] >= rank[1]) {
            let reason = format!(
                "asked for {} ranks with a GPU each on this machine, found {} GPU{}: start at most \
                 as many ranks (--nproc_per_node gpu), or see what CUDA_VISIBLE_DEVICES leaves",
                self.core().world.locals.len(),
                short[1],
                if short[1] == 1 { "" } else { "s" }
            );
            return Err(self.system("use_cuda", reason));
        }
        let device = Device::open(ordinal as usize)
            .map_err(|error| self.failure().fail(self.system("use_cuda", error.to_string())))?;
        self.cuda().device = Some(Arc::clone(&device));
        Ok(device)
    }

    /// Returns the group's collectives on GPUs. At the first call, which all ranks make, they
    /// connect over NCCL, each with its GPU `ordinal`. A program that also uses libtorch has that
    /// load its CUDA part first, which brings NCCL.
    ///
    /// # Errors
    ///
    /// No usable driver, GPU or NCCL, ranks that do not come in time; another GPU than before.
    pub fn nccl(&self, ordinal: usize) -> Result<Arc<CudaGroup>> {
        self.parts(&"nccl")?;
        let mut cuda = self.cuda();
        if let Some(group) = &cuda.group {
            let used = group.device().ordinal();
            if used == ordinal {
                return Ok(Arc::clone(group));
            }
            let reason = format!("this group uses cuda:{used}, not cuda:{ordinal}: keep to one");
            return Err(self.caller().argument("nccl", reason));
        }
        let device = Device::open(ordinal)
            .map_err(|error| self.failure().fail(self.system("nccl", error.to_string())))?;
        let mut tag = unique_tag();
        self.broadcast(&mut tag, 0)?;
        // Processes of two containers may have one number.
        let tag = format!("{}-{}-{}", self.ranks()[0], tag[0], tag[1]);
        let failure = Arc::clone(self.failure());
        let group = Arc::new(CudaGroup::new(failure, Arc::clone(&device), &tag)?);
        cuda.device = Some(device);
        cuda.group = Some(Arc::clone(&group));
        Ok(group)
    }
}
