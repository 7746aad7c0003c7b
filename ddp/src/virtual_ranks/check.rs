//! What virtual ranks cannot be combined with.

use flow_autograd::torch_device;
use flow_comm::VirtualRanks;
use tch::{Kind, Tensor};

use crate::bucket::comm_hook::CommHook;
use crate::builder::DdpBuilder;
use crate::comm_hooks::AllReduce;
use crate::mixed_precision::MixedPrecision;

impl DdpBuilder {
    /// Returns what is wrong with virtual ranks for this model.
    pub(crate) fn check_virtual_ranks(
        &self,
        parameters: &[(String, Tensor)],
        buffers: &[(String, Tensor)],
    ) -> Result<(), String> {
        let Some(count) = self.options.virtual_ranks else { return Ok(()) };
        VirtualRanks::new(count, self.group.world_size())?;
        let options = &self.options;
        let excluded = [
            ("find_unused_parameters", options.find_unused),
            ("static_graph", options.static_graph),
            ("delay_all_reduce_named_params", !options.delayed.names.is_empty()),
            ("sparse_gradients", !options.sparse.is_empty()),
            ("sparse_as_dense", options.sparse_as_dense),
            ("broadcast_buffers(false)", !self.broadcast_buffers),
            ("forward_sync_buffers(false)", !self.forward_sync_buffers),
            ("buffer_comm_hook", self.buffer_comm_hook.is_some()),
            ("comm_hook", self.comm_hook.name() != AllReduce.name()),
            ("optimizer_in_backward", self.optimizer.is_some()),
            ("hook_with_zero_step", self.zero.is_some()),
            ("mixed_precision", self.mixed_precision != MixedPrecision::default()),
            (
                "convert_sync_batchnorm",
                buffers.iter().any(|(_, buffer)| flow_autograd::replaces_batch_norm(buffer)),
            ),
        ];
        if let Some((option, _)) = excluded.iter().find(|(_, is_set)| *is_set) {
            return Err(format!("virtual_ranks({count}) excludes {option}: leave one of them out"));
        }
        for (name, parameter) in parameters {
            let kind = parameter.kind();
            let real = [Kind::Float, Kind::Double, Kind::ComplexFloat, Kind::ComplexDouble];
            if parameter.requires_grad() && !real.contains(&kind) {
                return Err(format!(
                    "virtual_ranks({count}): parameter {name} is {kind:?}, in which sums are not exact enough: make \
                     it Float"
                ));
            }
            let chosen = self.group.cuda_device();
            let device = parameter.device();
            if device.is_cuda() || chosen.is_some_and(|chosen| torch_device(&chosen) == device) {
                return Err(format!(
                    "virtual_ranks({count}): the model is on a GPU, where no order of sums is fixed: train it \
                     on CPUs, or without them"
                ));
            }
        }
        Ok(())
    }
}
