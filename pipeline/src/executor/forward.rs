//! Forwards.

use flow_autograd::{Graph, versions};
use flow_plan::schedule::Action;
use tch::Tensor;

use super::{Activation, Kept, Last, Outcome, Place, Step, taken};
use crate::caught::caught;
use crate::message::Described;
use crate::micro_batch::{MicroBatch, local_rows};
use crate::random::Random;

/// The result of a stage for a micro-batch.
pub(super) enum Computed {
    Outputs(Vec<Tensor>),
    /// The last stage's loss, and the gradient that its backward begins with.
    Loss(Tensor, Tensor),
}

impl Computed {
    /// Returns the graph that computed it, and for a loss the gradient that its backward begins with.
    pub fn graph(&self) -> Outcome<(Graph, Option<Tensor>)> {
        match self {
            Self::Outputs(outputs) => Ok((Graph::of(outputs)?, None)),
            Self::Loss(loss, seed) if loss.requires_grad() => {
                Ok((Graph::of(std::slice::from_ref(loss))?, Some(seed.shallow_clone())))
            }
            Self::Loss(..) => {
                Err("the loss requires no gradient: compute it of the outputs, with gradients on, \
                     and have some weight of the model require one"
                    .into())
            }
        }
    }

    /// Makes outputs without a graph require gradients, if their kind can have one. Some may need none,
    /// but only the graph would show which.
    fn floating(self) -> Self {
        let Self::Outputs(outputs) = self else { return self };
        let leaves = outputs.iter().map(|output| {
            output.detach().set_requires_grad(output.is_floating_point() || output.is_complex())
        });
        Self::Outputs(leaves.collect())
    }
}

impl Step<'_, '_> {
    pub(super) fn forward(&mut self, place: Place) -> Outcome<()> {
        let (stage, index) = place;
        let (micro_batch, inputs) = match stage {
            0 => self.part_of_batch(index)?,
            _ => taken(self.inputs.remove(&place))?,
        };
        if matches!(self.last, Last::Outputs) {
            let outputs = tch::no_grad(|| self.outputs_of(stage, &inputs))?;
            return self.give_outputs(place, micro_batch, outputs);
        }
        let mut bytes = self.bytes_of_inputs(stage, &inputs)?;
        let (computed, graph) = if self.recomputed.contains(&stage) {
            self.without_graph(stage, &inputs, micro_batch)?
        } else {
            let (computed, allocated) = self.run_counting_bytes(stage, &inputs, |step| {
                step.run_stage(stage, &inputs, micro_batch)
            })?;
            bytes += allocated;
            let (graph, seed) = computed.graph()?;
            (computed, Kept::Graph(graph, seed))
        };
        match computed {
            Computed::Outputs(outputs) => self.give_outputs(place, micro_batch, outputs)?,
            Computed::Loss(loss, _) => self.results.add_loss(&loss, micro_batch),
        }
        self.activations.insert(place, Activation { micro_batch, inputs, graph });
        self.hold(place, bytes);
        Ok(())
    }

    /// Runs a stage that is computed anew in backward.
    fn without_graph(
        &mut self,
        stage: usize,
        inputs: &[Tensor],
        micro_batch: MicroBatch,
    ) -> Outcome<(Computed, Kept)> {
        let random = Random::state(self.executor.device, self.executor.placement)?;
        let before = versions(inputs);
        let computed = tch::no_grad(|| self.run_stage(stage, inputs, micro_batch))?;
        if versions(inputs) != before {
            return Err("the stage changes its inputs in place, so that they cannot be used to \
                        compute it anew: change a copy"
                .into());
        }
        Ok((computed.floating(), Kept::Random(random)))
    }

    /// Returns the first stage's inputs. The batch has enough rows: the pipeline has checked them.
    fn part_of_batch(&self, index: usize) -> Outcome<(MicroBatch, Vec<Tensor>)> {
        let first =
            self.batch.first().ok_or("the first stage needs the batch: step(&[inputs], ..)")?;
        let rows = local_rows(first)?.unwrap_or(0);
        let micro_batch = MicroBatch::new(index, self.executor.schedule.micro_batches(), rows);
        let mut parts = Vec::new();
        for tensor in &self.batch {
            let part = micro_batch.try_of(tensor)?.detach();
            parts.push(part.set_requires_grad(tensor.requires_grad()));
        }
        Ok((micro_batch, parts))
    }

    fn outputs_of(&self, stage: usize, inputs: &[Tensor]) -> Outcome<Vec<Tensor>> {
        let stage = taken(self.executor.stages.get(&stage))?;
        let train = matches!(self.last, Last::Loss(_));
        caught(|| stage.forward_micro_batch(inputs, train))
    }

    /// Runs a stage in training, and after the last one the loss.
    pub(super) fn run_stage(
        &mut self,
        stage: usize,
        inputs: &[Tensor],
        micro_batch: MicroBatch,
    ) -> Outcome<Computed> {
        let outputs = self.outputs_of(stage, inputs)?;
        let is_last = stage + 1 == self.executor.schedule.stages();
        let loss = match &mut self.last {
            Last::Loss(loss) if is_last => caught(|| Ok(loss(&outputs, micro_batch)))?,
            _ => return Ok(Computed::Outputs(outputs)),
        };
        if loss.numel() != 1 {
            return Err(format!("a loss has one element, not the shape {:?}", loss.size()).into());
        }
        let weight = micro_batch.weight();
        let seed = tch::no_grad(|| loss.detach().ones_like() * weight);
        Ok(Computed::Loss(loss, seed))
    }

    /// Gives outputs to the next stage.
    fn give_outputs(
        &mut self,
        (stage, index): Place,
        micro_batch: MicroBatch,
        outputs: Vec<Tensor>,
    ) -> Outcome<()> {
        let schedule = self.executor.schedule;
        let outputs = outputs.into_iter().map(Described::of).collect::<Outcome<Vec<_>>>()?;
        self.first_outputs.check(stage, micro_batch, &outputs)?;
        let next = stage + 1;
        if next == schedule.stages() {
            let outputs = outputs.into_iter().map(|output| output.tensor).collect();
            self.results.outputs.insert(index, (micro_batch, outputs));
        } else if schedule.rank_of(next) == schedule.rank_of(stage) {
            let leaves = outputs.into_iter().map(Described::without_graph);
            let inputs = leaves.map(|leaf| leaf.tensor).collect();
            self.inputs.insert((next, index), (micro_batch, inputs));
        } else {
            let outputs = outputs.into_iter().map(|output| Some(output.without_graph()));
            let send = Action::SendActivation { stage, micro_batch: index };
            self.to_send.insert(send, (micro_batch, outputs.collect()));
        }
        Ok(())
    }
}
