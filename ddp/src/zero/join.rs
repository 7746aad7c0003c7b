//! Uneven inputs: a rank that has ended early still steps its parts, with the gradients of one that
//! has not.

use flow_autograd::BoxError;
use flow_comm::ProcessGroup;
use tch::{Device, Tensor};

use super::ZeroRedundancyOptimizer;
use super::scaled::{ENDED, TELLS};
use super::setting::{JoinedSteps, NUMBERS, Setting};
use crate::error::{Error, Result, job_rank};
use crate::join::joining::root_of;
use crate::join::{JoinContext, JoinHook, Joinable};
use crate::optimizer_choice::one_line;

impl ZeroRedundancyOptimizer {
    /// Before a step in a join: gives the ranks that have ended what they need for it.
    pub(super) fn with_ended_ranks(&self) -> Result<()> {
        let mut joined = self.joined.borrow_mut();
        let Some(JoinedSteps { context, settings }) = &mut *joined else { return Ok(()) };
        let settings = std::mem::take(settings);
        let active = context.notify(settings.len() as i64)?;
        if self.parts.group.rank() != root_of(&active) {
            return Ok(());
        }
        let ended = (0..self.parts.group.world_size()).filter(|rank| !active.contains(rank));
        let sent = ended.into_iter().try_for_each(|rank| self.send_step(rank, &settings));
        sent.inspect_err(|error| self.parts.group.abort(&error.to_string()))
    }

    /// Sends a rank what was set, and the gradients of its parts.
    fn send_step(&self, to: usize, settings: &[Setting]) -> Result<()> {
        let settings: Vec<i64> = settings.iter().flat_map(|setting| setting.encode()).collect();
        if !settings.is_empty() {
            self.parts.group.send(&settings[..], to)?;
        }
        let mut are_there = Vec::new();
        let mut bytes = Vec::new();
        for parameter in &self.parts.shards().parameters {
            for shard in parameter.shards.iter().filter(|shard| shard.rank == to) {
                let gradient = parameter.gradient(&shard.elements);
                let gradient = gradient.map_err(|reason| self.parts.failed(reason))?;
                are_there.push(u8::from(gradient.is_some()));
                if let Some(gradient) = gradient {
                    let gradient = gradient.to_device(Device::Cpu).contiguous();
                    let own = flow_autograd::bytes(&gradient)
                        .map_err(|error| self.parts.failed(error))?;
                    bytes.extend_from_slice(own);
                }
            }
        }
        for message in [are_there, bytes] {
            if !message.is_empty() {
                self.parts.group.send(&message[..], to)?;
            }
        }
        Ok(())
    }

    /// Takes the step of the ranks in `active` on this one, which has ended.
    fn shadow_step(&self, settings: usize, active: &[usize]) -> Result<()> {
        let from = root_of(active);
        let mut numbers = vec![0; settings * NUMBERS];
        if !numbers.is_empty() {
            self.parts.group.recv(&mut numbers[..], from)?;
        }
        for setting in numbers.chunks_exact(NUMBERS).map(Setting::decode) {
            setting.apply(&mut self.parts.shards()).map_err(|reason| self.parts.failed(reason))?;
        }
        let gradients = self.receive_gradients(from)?;
        self.take_step(|shards| {
            for (parameter, gradient) in shards.parameters.iter_mut().zip(gradients) {
                if let Some(gradient) = gradient {
                    parameter.step(&gradient)?;
                }
            }
            Ok(())
        })
    }

    /// Receives the gradients of this rank's parts, one for each parameter that has one.
    fn receive_gradients(&self, from: usize) -> Result<Vec<Option<Tensor>>> {
        let shards = self.parts.shards();
        let own = shards.parameters.iter().filter(|parameter| parameter.own.is_some());
        let mut are_there = vec![0u8; own.count()];
        if !are_there.is_empty() {
            self.parts.group.recv(&mut are_there[..], from)?;
        }
        let mut are_there = are_there.into_iter().map(|is_there| is_there != 0);
        let mut lengths = Vec::with_capacity(shards.parameters.len());
        for parameter in &shards.parameters {
            let own = parameter.own.as_ref().filter(|_| are_there.next() == Some(true));
            lengths.push(own.map(|own| own.elements.len() * parameter.kind().elt_size_in_bytes()));
        }
        let mut bytes = vec![0u8; lengths.iter().flatten().sum()];
        if !bytes.is_empty() {
            self.parts.group.recv(&mut bytes[..], from)?;
        }
        let mut rest = &bytes[..];
        let mut gradients = Vec::with_capacity(lengths.len());
        for (parameter, length) in shards.parameters.iter().zip(lengths) {
            let Some(length) = length else {
                gradients.push(None);
                continue;
            };
            let (own, others) = rest.split_at(length);
            rest = others;
            let shape = [(length / parameter.kind().elt_size_in_bytes()) as i64];
            let gradient = Tensor::f_from_data_size(own, &shape, parameter.kind());
            let gradient = gradient.and_then(|own| own.f_to_device(parameter.tensor.device()));
            gradients.push(Some(gradient.map_err(|error| self.parts.failed(one_line(error)))?));
        }
        Ok(gradients)
    }
}

impl Joinable for ZeroRedundancyOptimizer {
    fn join_group(&self) -> &ProcessGroup {
        &self.parts.group
    }

    fn join_hook(&self, context: JoinContext) -> Result<Box<dyn JoinHook + '_>, BoxError> {
        if self.parts.is_in_backward() {
            let reason =
                "build the Ddp without hook_with_zero_step: the optimizer steps in its backward, \
                          which a rank that has ended does not run"
                    .to_owned();
            return Err(Error::Join { rank: job_rank(&self.parts.group), reason }.into());
        }
        if self.parts.keeps_gradients() {
            let reason =
                "the optimizer of a sharded model cannot join: give all ranks as many inputs"
                    .to_owned();
            return Err(Error::Join { rank: job_rank(&self.parts.group), reason }.into());
        }
        let mut joined = self.joined.borrow_mut();
        if joined.is_some() {
            let reason = "the optimizer is in a join already: give it to one, once".to_owned();
            return Err(Error::Join { rank: job_rank(&self.parts.group), reason }.into());
        }
        *joined = Some(JoinedSteps { context, settings: Vec::new() });
        Ok(Box::new(OptimizerHook(self)))
    }
}

struct OptimizerHook<'a>(&'a ZeroRedundancyOptimizer);

impl JoinHook for OptimizerHook<'_> {
    fn main_hook(&mut self, code: i64, active: &[usize]) -> Result<(), BoxError> {
        if code == TELLS {
            self.0.gather_found(ENDED)?;
            return Ok(());
        }
        Ok(self.0.shadow_step(code as usize, active)?)
    }
}

impl Drop for OptimizerHook<'_> {
    fn drop(&mut self) {
        self.0.joined.take();
    }
}
