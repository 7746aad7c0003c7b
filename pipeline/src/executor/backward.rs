//! Backwards: whole, and in halves.

use flow_autograd::Graph;
use flow_plan::schedule::Action;
use tch::Tensor;

use super::{Activation, Kept, Outcome, Place, Step, taken};
use crate::message::Described;
use crate::micro_batch::MicroBatch;

/// The graph and the gradients that a backward begins with.
struct Beginning {
    micro_batch: MicroBatch,
    /// Leaves.
    inputs: Vec<Tensor>,
    graph: Graph,
    /// The gradients of the outputs, or of the loss.
    gradients: Vec<Option<Tensor>>,
}

impl Step<'_, '_> {
    pub(super) fn backward(&mut self, place: Place, is_last: bool) -> Outcome<()> {
        let Beginning { micro_batch, inputs, graph, gradients } = self.begin_backward(place)?;
        self.sync_if(is_last, place);
        graph.backward(&gradients)?;
        let of_inputs = inputs.iter().map(|input| Some(input.grad()).filter(Tensor::defined));
        self.give_gradients(place, micro_batch, of_inputs.collect())
    }

    pub(super) fn backward_input(&mut self, place: Place) -> Outcome<()> {
        let Beginning { micro_batch, inputs, graph, gradients } = self.begin_backward(place)?;
        let leaves: Vec<&Tensor> = inputs.iter().filter(|input| input.requires_grad()).collect();
        let (of_leaves, weights) = graph.backward_inputs(&gradients, &leaves)?;
        self.weights.insert(place, weights);
        let mut of_leaves = of_leaves.into_iter();
        let mut of_inputs = Vec::new();
        for input in &inputs {
            let gradient = if input.requires_grad() { of_leaves.next().flatten() } else { None };
            of_inputs.push(gradient);
        }
        self.give_gradients(place, micro_batch, of_inputs)
    }

    pub(super) fn backward_weight(&mut self, place: Place, is_last: bool) -> Outcome<()> {
        let weights = taken(self.weights.remove(&place))?;
        self.sync_if(is_last, place);
        Ok(weights.backward()?)
    }

    /// Takes the activation. If only the inputs were kept, runs the stage again.
    fn begin_backward(&mut self, place: Place) -> Outcome<Beginning> {
        let Activation { micro_batch, inputs, graph } = taken(self.activations.remove(&place))?;
        let (graph, seed) = match graph {
            Kept::Graph(graph, seed) => (graph, seed),
            Kept::Random(random) => {
                let ran = self.run_counting_bytes(place.0, &inputs, |step| {
                    random.replay(|| {
                        tch::with_grad(|| step.run_stage(place.0, &inputs, micro_batch))
                    })?
                });
                let (computed, allocated) = ran?;
                self.hold(place, allocated);
                computed.graph()?
            }
        };
        let gradients = match seed {
            Some(seed) => vec![Some(seed)],
            None => taken(self.gradients.remove(&place))?,
        };
        Ok(Beginning { micro_batch, inputs, graph, gradients })
    }

    /// Makes the next backward reduce gradients, if it is the last one of its stage.
    fn sync_if(&mut self, is_last: bool, (stage, _): Place) {
        if is_last {
            self.no_sync.remove(&stage);
        }
    }

    /// Gives gradients of inputs to the stage before.
    fn give_gradients(
        &mut self,
        (stage, index): Place,
        micro_batch: MicroBatch,
        gradients: Vec<Option<Tensor>>,
    ) -> Outcome<()> {
        let schedule = self.executor.schedule;
        let Some(before) = stage.checked_sub(1) else {
            self.results.input_gradients.insert(index, (micro_batch, gradients));
            return Ok(());
        };
        if schedule.rank_of(before) == schedule.rank_of(stage) {
            self.gradients.insert((before, index), gradients);
        } else {
            let described = gradients
                .into_iter()
                .map(|gradient| gradient.map(Described::of).transpose())
                .collect::<Outcome<_>>()?;
            let send = Action::SendGradient { stage, micro_batch: index };
            self.to_send.insert(send, (micro_batch, described));
        }
        Ok(())
    }
}
