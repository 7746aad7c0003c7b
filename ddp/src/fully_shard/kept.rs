//! Where an optimizer finds this rank's chunks of gradients.

use std::ops::Range;

use flow_autograd::set_grad;
use flow_comm::ProcessGroup;
use tch::{Device, Kind, Tensor};

use super::place::Place;
use super::units::Units;
use crate::error::{Error, Result};
use crate::model_check::first_mismatch;
use crate::zero::kept::{KeptGradients, clip_grad_norm};
use crate::zero::sharded_parameter::ShardedParameter;

impl Units {
    fn place(&self, place: usize) -> Place {
        self.lock().places[place].clone()
    }
}

impl KeptGradients for Units {
    /// Those of a replica: each has a chunk of each module.
    fn sharers(&self, _: &ProcessGroup, rank: usize) -> Vec<usize> {
        self.ranks_of_replica(rank).collect()
    }

    fn part(&self, parameters: &mut [ShardedParameter]) -> Result<(), String> {
        let units = self.all();
        let mut places = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let Some(place) = Place::find(&units, &parameter.tensor) else {
                return Err(format!(
                    "{} has come to the VarStore since the model was wrapped: make it before",
                    parameter.name
                ));
            };
            parameter.shards = place.shards(self.replica().world_size());
            places.push(place);
        }
        self.lock().places = places;
        self.set_has_optimizer();
        Ok(())
    }

    fn own_part(
        &self,
        parameter: &ShardedParameter,
        place: usize,
        _: &Range<usize>,
    ) -> Result<Tensor, String> {
        let own = self.place(place).own();
        own.map(|(part, _)| part).ok_or_else(|| format!("{} has no part here", parameter.name))
    }

    fn memory(&self, place: usize) -> Option<Tensor> {
        self.place(place).own().and_then(|(_, gradient)| gradient)
    }

    fn is_there(&self, place: usize) -> bool {
        self.place(place).is_there()
    }

    fn parts(&self) -> Result<Vec<Tensor>> {
        self.finish_gradients()?;
        let mut parts = Vec::new();
        let places = self.lock().places.clone();
        for place in places.iter().filter(|place| place.is_there()) {
            // A rank without elements knows that there are gradients, too.
            let none = Tensor::zeros([0], (Kind::Float, Device::Cpu));
            let own = place.own().unwrap_or((none.shallow_clone(), Some(none)));
            let part = own.0.detach();
            let set = set_grad(&part, own.1.as_ref());
            set.map_err(|error| Error::fully_shard(self.group(), error))?;
            parts.push(part);
        }
        Ok(parts)
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn begin_step(&self, group: &ProcessGroup) -> Result<()> {
        self.finish_gradients()?;
        flow_comm::trace::end_step();
        self.free()?;
        let events = std::mem::take(&mut self.lock().events);
        if let Some(difference) = first_mismatch(group, &events.lines())? {
            let reason = format!(
                "ranks have gone through different modules since the last step: {difference}; let all \
                 ranks run the same forwards and backwards"
            );
            return Err(Error::fully_shard(group, reason));
        }
        Ok(())
    }

    fn has_stepped(&self) {}

    fn end_step(&self, group: &ProcessGroup) -> Result<()> {
        // The optimizer knows nothing of those in half precision.
        let places = self.lock().places.clone();
        let bumped =
            places.iter().filter(|place| place.is_there()).try_for_each(Place::bump_version);
        bumped.map_err(|error| Error::fully_shard(group, error))
    }

    fn clip_grad_norm(&self, group: &ProcessGroup, max: f64) -> Result<f64> {
        let gradients = self.parts()?.iter().map(Tensor::grad).collect();
        // All replicas take the same sum, so that they stay equal.
        let ranks = self.sharers(group, 0);
        clip_grad_norm(group, &ranks, gradients, max)
    }

    fn clear(&self) -> Result<(), flow_autograd::Error> {
        self.clear_gradients()
    }

    fn abort(&self, cause: &str) {
        self.fail(cause);
    }
}
