//! The executor of a schedule: one step of this rank.

mod backward;
mod forward;
mod memory;
mod results;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use flow_autograd::{BoxError, Graph, WeightGraph};
use flow_comm::trace;
use flow_ddp::NoSync;
use flow_global::Placement;
use flow_plan::schedule::{Action, Schedule};
use tch::{Device, Tensor};

use crate::caught::caught;
use crate::error::Outcome;
use crate::message::{Described, FirstOutputs};
use crate::messages::Messages;
use crate::micro_batch::MicroBatch;
use crate::random::Random;
use crate::report::Measured;
use crate::stage::Stage;

pub use memory::Allocated;
pub use results::Results;

/// A stage, and a micro-batch in it.
type Place = (usize, usize);

/// The parts of a pipeline that a step needs.
pub struct Executor<'a> {
    pub schedule: &'a Schedule,
    pub stages: &'a BTreeMap<usize, Box<dyn Stage>>,
    pub placement: Option<&'a Placement>,
    pub device: Device,
    pub recomputes: bool,
    /// The bytes that have been measured so far.
    pub allocated: &'a RefCell<Allocated>,
    /// The number of the step.
    pub number: u64,
}

/// The use of the last stage's outputs.
pub enum Last<'a> {
    /// Trains on this loss.
    Loss(&'a mut dyn FnMut(&[Tensor], MicroBatch) -> Tensor),
    /// Keeps them.
    Outputs,
}

/// A step under way.
pub struct Step<'a, 'l> {
    executor: &'a Executor<'a>,
    messages: Messages<'a>,
    batch: Vec<Tensor>,
    last: Last<'l>,
    /// Inputs that wait for the forward.
    inputs: HashMap<Place, (MicroBatch, Vec<Tensor>)>,
    /// Activations, from the forward to the backward.
    activations: HashMap<Place, Activation>,
    /// Gradients of outputs that wait for the backward.
    gradients: HashMap<Place, Vec<Option<Tensor>>>,
    /// Graphs of weights, from the first half of a backward to the second.
    weights: HashMap<Place, WeightGraph>,
    /// Outputs and gradients of inputs that wait for this send, without their graphs.
    to_send: HashMap<Action, (MicroBatch, Vec<Option<Described>>)>,
    first_outputs: FirstOutputs,
    /// Stages that are computed anew in backward.
    recomputed: BTreeSet<usize>,
    /// Bytes that are held from the forward to the end of the backward.
    held: HashMap<Place, usize>,
    /// Guards of stages whose last backward has yet to come.
    no_sync: HashMap<usize, NoSync>,
    results: Results,
    measured: Measured,
}

/// The tensors that a forward keeps for its backward.
struct Activation {
    micro_batch: MicroBatch,
    /// Leaves.
    inputs: Vec<Tensor>,
    graph: Kept,
}

enum Kept {
    /// The graph that computed the outputs, and for a loss also its gradient.
    Graph(Graph, Option<Tensor>),
    /// No graph, but the state of the random generators at the begin of the forward.
    Random(Random),
}

impl<'a, 'l> Step<'a, 'l> {
    /// Begins a step on this rank's part of the batch.
    pub fn new(
        executor: &'a Executor<'a>,
        messages: Messages<'a>,
        batch: &[Tensor],
        last: Last<'l>,
    ) -> Outcome<Self> {
        let mut no_sync = HashMap::new();
        if matches!(last, Last::Loss(_)) {
            for (&stage, of) in executor.stages {
                no_sync.extend(caught(|| of.begin_step())?.map(|guard| (stage, guard)));
            }
        }
        Ok(Self {
            executor,
            messages,
            batch: batch.iter().map(Tensor::shallow_clone).collect(),
            last,
            inputs: HashMap::new(),
            activations: HashMap::new(),
            gradients: HashMap::new(),
            weights: HashMap::new(),
            to_send: HashMap::new(),
            first_outputs: FirstOutputs::default(),
            recomputed: BTreeSet::new(),
            held: HashMap::new(),
            no_sync,
            results: Results::default(),
            measured: Measured::default(),
        })
    }

    /// Carries out the actions. An error comes with the action that failed.
    pub fn run(&mut self, actions: &[Action]) -> Result<(), (Action, BoxError)> {
        if self.executor.recomputes {
            self.recomputed = stages_that_wait(actions);
        }
        for (at, &action) in actions.iter().enumerate() {
            let left = &actions[at + 1..];
            caught(|| self.act(action, left)).map_err(|error| (action, error))?;
        }
        Ok(())
    }

    /// Waits until all has been sent.
    pub fn finish(mut self) -> Outcome<(Results, Measured)> {
        self.results.backward_of(&self.batch)?;
        self.messages.finish()?;
        Ok((self.results, self.measured))
    }

    fn act(&mut self, action: Action, left: &[Action]) -> Outcome<()> {
        let place = (action.stage(), action.micro_batch());
        match action {
            Action::RecvActivation { .. } => {
                let (micro_batch, tensors) = self.receive(action)?;
                let tensors = tensors.into_iter().flatten().collect();
                self.inputs.insert(place, (micro_batch, tensors));
            }
            Action::RecvGradient { .. } => {
                let (_, tensors) = self.receive(action)?;
                self.gradients.insert(place, tensors);
            }
            Action::SendActivation { .. } | Action::SendGradient { .. } => {
                let (micro_batch, tensors) = taken(self.to_send.remove(&action))?;
                let receive = taken(action.receive())?;
                let to = self.executor.schedule.rank_of(receive.stage());
                self.messages.send(to, receive, micro_batch, tensors)?;
            }
            computation => self.compute(computation, left)?,
        }
        Ok(())
    }

    fn receive(&mut self, action: Action) -> Outcome<(MicroBatch, Vec<Option<Tensor>>)> {
        let Executor { placement, device, .. } = *self.executor;
        let received = self.messages.receive(action)?;
        let mut locals = received.locals.iter();
        let mut tensors = Vec::new();
        for description in &received.header.tensors {
            let Some(description) = description else {
                tensors.push(None);
                continue;
            };
            let local = locals.next().ok_or("a tensor is missing in a message")?;
            tensors.push(Some(description.tensor(local, placement, device)?));
        }
        Ok((received.header.micro_batch, tensors))
    }

    /// Does a forward or a backward. The last backward of a stage reduces its gradients.
    fn compute(&mut self, action: Action, left: &[Action]) -> Outcome<()> {
        let place = (action.stage(), action.micro_batch());
        let mut others = left.iter().filter(|next| next.stage() == action.stage());
        let is_last =
            is_backward_of_weights(action) && !others.any(|next| is_backward_of_weights(*next));
        let phase = match action {
            Action::Forward { .. } => trace::Phase::Forward,
            _ => trace::Phase::Backward,
        };
        let span = trace::phase(phase, self.executor.number).of_stage(place.0, place.1);
        let measured = self.measured.begin(action);
        let result = match action {
            Action::Forward { .. } => self.forward(place),
            Action::Backward { .. } => self.backward(place, is_last),
            Action::BackwardInput { .. } => self.backward_input(place),
            _ => self.backward_weight(place, is_last),
        };
        drop(span);
        self.measured.end(measured);
        if is_backward_of_weights(action) {
            self.held.remove(&place);
        }
        result
    }
}

/// Returns the stages with a forward whose backward does not come right after it. Such a stage is
/// computed anew for all its micro-batches, so that their outputs are alike.
fn stages_that_wait(actions: &[Action]) -> BTreeSet<usize> {
    let mut stages = BTreeSet::new();
    let mut computations = actions.iter().filter(|action| action.is_computation()).peekable();
    while let Some(action) = computations.next() {
        let Action::Forward { stage, micro_batch } = *action else { continue };
        let Some(&&next) = computations.peek() else { continue };
        let is_forward = matches!(next, Action::Forward { .. });
        if is_forward || next.stage() != stage || next.micro_batch() != micro_batch {
            stages.insert(stage);
        }
    }
    stages
}

fn is_backward_of_weights(action: Action) -> bool {
    matches!(action, Action::Backward { .. } | Action::BackwardWeight { .. })
}

/// Unwraps what an earlier action has made for this one.
fn taken<T>(made: Option<T>) -> Outcome<T> {
    made.ok_or_else(|| "the schedule has not computed before what this needs".into())
}
