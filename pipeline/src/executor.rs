//! Carries out a schedule: one step of this rank.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{catch_unwind, AssertUnwindSafe};

use flow_autograd::{allocated_by, versions, BoxError, Graph, WeightGraph};
use flow_comm::trace;
use flow_ddp::NoSync;
use flow_global::{GlobalTensor, Placement};
use flow_plan::schedule::{Action, Schedule};
use tch::{Device, Tensor};

use crate::message::{local_of, Firsts};
use crate::messages::Messages;
use crate::micro_batch::{join, MicroBatch};
use crate::random::Random;
use crate::report::Measured;
use crate::stage::Stage;

type Outcome<T> = Result<T, BoxError>;

/// A stage, and a micro-batch in it.
type Place = (usize, usize);

/// Bytes that a stage allocates in a forward and keeps, by the stage and the shapes of its inputs.
pub type Allocated = HashMap<(usize, Vec<Vec<i64>>), usize>;

/// What a rank has of a pipeline.
pub struct Executor<'a> {
    pub schedule: &'a Schedule,
    pub stages: &'a BTreeMap<usize, Box<dyn Stage>>,
    pub placement: Option<&'a Placement>,
    pub device: Device,
    pub recomputes: bool,
    /// What has been measured so far.
    pub allocated: &'a RefCell<Allocated>,
    /// The number of the step.
    pub number: u64,
}

/// What is done with the outputs of the last stage.
pub enum Last<'a> {
    /// Trains on this loss.
    Loss(&'a mut dyn FnMut(&[Tensor], MicroBatch) -> Tensor),
    /// Keeps them.
    Outputs,
}

/// What a step has at its end.
#[derive(Default)]
pub struct Results {
    /// Of the last stage: the mean loss of the batch.
    pub loss: Option<Tensor>,
    /// Of the last stage, without a loss: of each micro-batch.
    pub outputs: BTreeMap<usize, (MicroBatch, Vec<Tensor>)>,
    /// Of the first stage: of each micro-batch.
    input_gradients: BTreeMap<usize, (MicroBatch, Vec<Option<Tensor>>)>,
}

impl Results {
    /// Gives the tensors of the batch the gradients of the first stage's inputs.
    pub fn backward_of(&mut self, batch: &[Tensor]) -> Outcome<()> {
        let parts = std::mem::take(&mut self.input_gradients);
        let mut with_gradients = (Vec::new(), Vec::new());
        for (number, tensor) in batch.iter().enumerate() {
            let of = |(_, gradients): &(MicroBatch, Vec<Option<Tensor>>)| {
                gradients.get(number).is_some_and(Option::is_some)
            };
            if !tensor.requires_grad() || !parts.values().any(of) {
                continue;
            }
            let _no_grad = tch::no_grad_guard();
            let mut own = Vec::new();
            for (micro_batch, gradients) in parts.values() {
                let gradient = match gradients.get(number).and_then(Option::as_ref) {
                    Some(gradient) if gradient.is_global() => gradient.to_sbp(tensor.sbp()?)?,
                    Some(gradient) => gradient.shallow_clone(),
                    None => micro_batch.try_of(tensor)?.f_zeros_like()?,
                };
                own.push((*micro_batch, gradient));
            }
            with_gradients.0.push(tensor.shallow_clone());
            with_gradients.1.push(Some(join(&own)?));
        }
        Ok(Graph::of(&with_gradients.0)?.backward(&with_gradients.1)?)
    }
}

/// The step that runs.
pub struct Step<'a, 'l> {
    executor: &'a Executor<'a>,
    messages: Messages<'a>,
    batch: Vec<Tensor>,
    last: Last<'l>,
    /// Inputs that wait for the forward.
    inputs: HashMap<Place, (MicroBatch, Vec<Tensor>)>,
    /// Outputs that wait to be sent, without their graph.
    outputs: HashMap<Place, (MicroBatch, Vec<Tensor>)>,
    /// From forward to backward.
    activations: HashMap<Place, Activation>,
    /// Gradients of outputs that wait for the backward.
    gradients: HashMap<Place, Vec<Option<Tensor>>>,
    /// Gradients of inputs that wait to be sent.
    input_gradients: HashMap<Place, (MicroBatch, Vec<Option<Tensor>>)>,
    /// From the first half of a backward to the second.
    weights: HashMap<Place, WeightGraph>,
    first_outputs: Firsts,
    /// Stages that are computed anew in backward.
    recomputed: BTreeSet<usize>,
    /// Bytes from forward to the end of backward.
    held: HashMap<Place, usize>,
    /// Of stages whose last backward has yet to come.
    no_sync: HashMap<usize, NoSync>,
    results: Results,
    pub measured: Measured,
}

/// What is kept of a forward for its backward.
struct Activation {
    micro_batch: MicroBatch,
    /// Leaves.
    inputs: Vec<Tensor>,
    graph: Kept,
}

enum Kept {
    /// What computed the outputs; of a loss also its gradient.
    Graph(Graph, Option<Tensor>),
    /// Nothing: where the forward's random numbers began.
    Random(Random),
}

impl<'a, 'l> Step<'a, 'l> {
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
            outputs: HashMap::new(),
            activations: HashMap::new(),
            gradients: HashMap::new(),
            input_gradients: HashMap::new(),
            weights: HashMap::new(),
            first_outputs: Firsts::default(),
            recomputed: BTreeSet::new(),
            held: HashMap::new(),
            no_sync,
            results: Results::default(),
            measured: Measured::default(),
        })
    }

    /// Carries out the actions; the error with the action that failed.
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
        let (stage, micro_batch) = place;
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
            Action::SendActivation { .. } => {
                let (of, tensors) = taken(self.outputs.remove(&place))?;
                let receive = Action::RecvActivation { stage: stage + 1, micro_batch };
                let tensors: Vec<_> = tensors.into_iter().map(Some).collect();
                let to = self.executor.schedule.rank_of(stage + 1);
                self.messages.send(to, receive, of, &tensors)?;
            }
            Action::SendGradient { .. } => {
                let (of, tensors) = taken(self.input_gradients.remove(&place))?;
                let receive = Action::RecvGradient { stage: stage - 1, micro_batch };
                let to = self.executor.schedule.rank_of(stage - 1);
                self.messages.send(to, receive, of, &tensors)?;
            }
            computation => self.compute(computation, left)?,
        }
        Ok(())
    }

    fn receive(&mut self, action: Action) -> Outcome<(MicroBatch, Vec<Option<Tensor>>)> {
        let received = self.messages.receive(action)?;
        let mut locals = received.locals.iter();
        let tensor = |description: &Option<crate::message::Description>| {
            let Some(description) = description else { return Ok(None) };
            let local = locals.next().ok_or("a tensor is missing in a message")?;
            description.tensor(local, self.executor.placement, self.executor.device).map(Some)
        };
        let tensors = received.header.tensors.iter().map(tensor).collect::<Outcome<_>>()?;
        Ok((received.header.micro_batch, tensors))
    }

    /// Does a forward or a backward. The last backward of a stage reduces its gradients.
    fn compute(&mut self, action: Action, left: &[Action]) -> Outcome<()> {
        let place = (action.stage(), action.micro_batch());
        let is_another =
            |next: &Action| is_backward_of_weights(*next) && next.stage() == action.stage();
        let is_last = is_backward_of_weights(action) && !left.iter().any(is_another);
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

    fn forward(&mut self, place: Place) -> Outcome<()> {
        let (stage, index) = place;
        let (micro_batch, inputs) = match stage {
            0 => self.part_of_batch(index)?,
            _ => taken(self.inputs.remove(&place))?,
        };
        if matches!(self.last, Last::Outputs) {
            let outputs = tch::no_grad(|| self.outputs_of(stage, &inputs))?;
            return self.give_outputs(place, micro_batch, outputs);
        }
        let mut bytes = match self.has_inputs_anyway(stage) {
            true => 0,
            false => inputs.iter().map(bytes_of).sum::<Outcome<usize>>()?,
        };
        let graph = match self.recomputed.contains(&stage) {
            true => {
                let random = Random::state(self.executor.device, self.executor.placement)?;
                let before = versions(&inputs);
                let (outputs, seed) = tch::no_grad(|| self.run_stage(stage, &inputs, micro_batch))?;
                if versions(&inputs) != before {
                    return Err("the stage changes its inputs in place, so that they cannot be \
                                used to compute it anew: change a copy"
                        .into());
                }
                if let Some((loss, _)) = &seed {
                    self.add_loss(loss, micro_batch)?;
                } else {
                    // Outputs of a model of which nothing requires a gradient need none either,
                    // which only the graph would show.
                    self.give_outputs(place, micro_batch, floating(&outputs))?;
                }
                Kept::Random(random)
            }
            false => {
                let ran = self
                    .measured(stage, &inputs, |step| step.run_stage(stage, &inputs, micro_batch));
                let ((outputs, seed), allocated) = ran?;
                bytes += allocated;
                match seed {
                    Some((loss, seed)) => {
                        check_loss(&loss)?;
                        self.add_loss(&loss, micro_batch)?;
                        Kept::Graph(Graph::of(&[loss])?, Some(seed))
                    }
                    None => {
                        let graph = Graph::of(&outputs)?;
                        self.give_outputs(place, micro_batch, outputs)?;
                        Kept::Graph(graph, None)
                    }
                }
            }
        };
        self.activations.insert(place, Activation { micro_batch, inputs, graph });
        self.hold(place, bytes);
        Ok(())
    }

    /// Whether the inputs are parts of the batch, or outputs that another stage of this rank holds:
    /// its backward is later.
    fn has_inputs_anyway(&self, stage: usize) -> bool {
        let is_held = |before: usize| {
            self.executor.stages.contains_key(&before) && !self.recomputed.contains(&before)
        };
        stage.checked_sub(1).is_none_or(is_held)
    }

    /// What `run` gives, and the bytes that it keeps: measured once for each shape of the inputs.
    fn measured<T>(
        &mut self,
        stage: usize,
        inputs: &[Tensor],
        run: impl FnOnce(&mut Self) -> Outcome<T>,
    ) -> Outcome<(T, usize)> {
        let key = (stage, inputs.iter().map(Tensor::size).collect());
        let allocated = self.executor.allocated;
        let known = allocated.borrow().get(&key).copied();
        if let Some(bytes) = known {
            return Ok((run(self)?, bytes));
        }
        let (ran, bytes) = allocated_by(|| run(self))?;
        allocated.borrow_mut().insert(key, bytes);
        Ok((ran?, bytes))
    }

    /// So many bytes more are held for the backward.
    fn hold(&mut self, place: Place, bytes: usize) {
        *self.held.entry(place).or_default() += bytes;
        self.measured.hold(&self.held);
    }

    fn part_of_batch(&self, index: usize) -> Outcome<(MicroBatch, Vec<Tensor>)> {
        let count = self.executor.schedule.micro_batches();
        let first =
            self.batch.first().ok_or("the first stage needs the batch: step(&[inputs], ..)")?;
        let rows = crate::micro_batch::local_rows(first)?.unwrap_or(0);
        if rows < count as i64 {
            return Err(format!(
                "a batch of shape {:?} has too few rows for {count} micro-batches",
                first.size()
            )
            .into());
        }
        let micro_batch = MicroBatch::new(index, count, rows);
        let part = |tensor: &Tensor| {
            Outcome::Ok(
                micro_batch.try_of(tensor)?.detach().set_requires_grad(tensor.requires_grad()),
            )
        };
        Ok((micro_batch, self.batch.iter().map(part).collect::<Outcome<_>>()?))
    }

    fn outputs_of(&self, stage: usize, inputs: &[Tensor]) -> Outcome<Vec<Tensor>> {
        let stage = taken(self.executor.stages.get(&stage))?;
        let train = matches!(self.last, Last::Loss(_));
        caught(|| stage.forward_micro_batch(inputs, train))
    }

    /// The outputs; of the last stage instead the loss and its gradient.
    fn run_stage(
        &mut self,
        stage: usize,
        inputs: &[Tensor],
        micro_batch: MicroBatch,
    ) -> Outcome<(Vec<Tensor>, Option<Loss>)> {
        let outputs = self.outputs_of(stage, inputs)?;
        let Last::Loss(loss) = &mut self.last else { return Ok((outputs, None)) };
        if stage + 1 < self.executor.schedule.stages() {
            return Ok((outputs, None));
        }
        let loss = caught(|| Ok(loss(&outputs, micro_batch)))?;
        if loss.numel() != 1 {
            return Err(format!("a loss has one element, not the shape {:?}", loss.size()).into());
        }
        let weight = micro_batch.weight();
        let seed = tch::no_grad(|| loss.detach().ones_like() * weight);
        Ok((Vec::new(), Some((loss, seed))))
    }

    fn add_loss(&mut self, loss: &Tensor, micro_batch: MicroBatch) -> Outcome<()> {
        let term = tch::no_grad(|| loss.detach() * micro_batch.weight());
        self.results.loss = Some(match self.results.loss.take() {
            None => term,
            Some(sum) => sum + term,
        });
        Ok(())
    }

    /// Gives outputs to the next stage.
    fn give_outputs(
        &mut self,
        (stage, index): Place,
        micro_batch: MicroBatch,
        outputs: Vec<Tensor>,
    ) -> Outcome<()> {
        let schedule = self.executor.schedule;
        self.first_outputs.check(stage, micro_batch, &outputs)?;
        if stage + 1 == schedule.stages() {
            self.results.outputs.insert(index, (micro_batch, outputs));
            return Ok(());
        }
        let leaf = |output: Tensor| output.detach().set_requires_grad(output.requires_grad());
        let given = (micro_batch, outputs.into_iter().map(leaf).collect());
        if schedule.rank_of(stage + 1) == schedule.rank_of(stage) {
            self.inputs.insert((stage + 1, index), given);
        } else {
            self.outputs.insert((stage, index), given);
        }
        Ok(())
    }

    /// What a backward begins with.
    fn begin_backward(&mut self, place: Place) -> Outcome<Backward> {
        let Activation { micro_batch, inputs, graph } = taken(self.activations.remove(&place))?;
        let (graph, seed) = match graph {
            Kept::Graph(graph, seed) => (graph, seed),
            Kept::Random(random) => {
                let ran = self.measured(place.0, &inputs, |step| {
                    random.replay(|| {
                        tch::with_grad(|| step.run_stage(place.0, &inputs, micro_batch))
                    })?
                });
                let ((outputs, seed), allocated) = ran?;
                self.hold(place, allocated);
                match seed {
                    Some((loss, seed)) => {
                        check_loss(&loss)?;
                        (Graph::of(&[loss])?, Some(seed))
                    }
                    None => (Graph::of(&outputs)?, None),
                }
            }
        };
        let gradients = match seed {
            Some(seed) => vec![Some(seed)],
            None => taken(self.gradients.remove(&place))?,
        };
        Ok(Backward { micro_batch, inputs, graph, gradients })
    }

    fn backward(&mut self, place: Place, is_last: bool) -> Outcome<()> {
        let Backward { micro_batch, inputs, graph, gradients } = self.begin_backward(place)?;
        self.sync_if(is_last, place);
        graph.backward(&gradients)?;
        let gradient = |input: &Tensor| Some(input.grad()).filter(Tensor::defined);
        let gradients = inputs.iter().map(gradient).collect();
        self.give_gradients(place, micro_batch, gradients)
    }

    /// The backward that follows reduces gradients if it is the last one of its stage.
    fn sync_if(&mut self, is_last: bool, (stage, _): Place) {
        if is_last {
            self.no_sync.remove(&stage);
        }
    }

    fn backward_weight(&mut self, place: Place, is_last: bool) -> Outcome<()> {
        let weights = taken(self.weights.remove(&place))?;
        self.sync_if(is_last, place);
        Ok(weights.backward()?)
    }

    fn backward_input(&mut self, place: Place) -> Outcome<()> {
        let Backward { micro_batch, inputs, graph, gradients } = self.begin_backward(place)?;
        let leaves: Vec<&Tensor> = inputs.iter().filter(|input| input.requires_grad()).collect();
        let (of_leaves, weights) = graph.backward_inputs(&gradients, &leaves)?;
        self.weights.insert(place, weights);
        let mut of_leaves = of_leaves.into_iter();
        let gradient =
            |input: &Tensor| input.requires_grad().then(|| of_leaves.next()).flatten()?;
        let gradients = inputs.iter().map(gradient).collect();
        self.give_gradients(place, micro_batch, gradients)
    }

    /// Gives gradients of inputs to the stage before.
    fn give_gradients(
        &mut self,
        (stage, index): Place,
        micro_batch: MicroBatch,
        gradients: Vec<Option<Tensor>>,
    ) -> Outcome<()> {
        let schedule = self.executor.schedule;
        if stage == 0 {
            self.results.input_gradients.insert(index, (micro_batch, gradients));
            return Ok(());
        }
        if schedule.rank_of(stage - 1) == schedule.rank_of(stage) {
            self.gradients.insert((stage - 1, index), gradients);
        } else {
            self.input_gradients.insert((stage, index), (micro_batch, gradients));
        }
        Ok(())
    }
}

/// What a backward begins with.
struct Backward {
    micro_batch: MicroBatch,
    /// Leaves.
    inputs: Vec<Tensor>,
    graph: Graph,
    /// Where the graph begins: of the outputs, or of the loss.
    gradients: Vec<Option<Tensor>>,
}

/// A loss, and the gradient that its backward begins with.
type Loss = (Tensor, Tensor);

/// Tensors that gradients may come back to.
fn floating(tensors: &[Tensor]) -> Vec<Tensor> {
    let leaf = |tensor: &Tensor| {
        tensor.detach().set_requires_grad(tensor.is_floating_point() || tensor.is_complex())
    };
    tensors.iter().map(leaf).collect()
}

/// What this rank has of a tensor.
fn bytes_of(tensor: &Tensor) -> Outcome<usize> {
    let local = local_of(tensor)?;
    Ok(local.numel() * local.f_kind()?.elt_size_in_bytes())
}

/// Stages with a forward whose backward does not come right after it. It is all of a stage's
/// micro-batches that are computed anew, so that their outputs are alike.
fn stages_that_wait(actions: &[Action]) -> BTreeSet<usize> {
    let place = |action: Action| (action.stage(), action.micro_batch());
    let computations: Vec<Action> =
        actions.iter().copied().filter(|action| action.is_computation()).collect();
    let waits = |pair: &&[Action]| {
        matches!(pair[0], Action::Forward { .. })
            && (place(pair[0]) != place(pair[1]) || matches!(pair[1], Action::Forward { .. }))
    };
    computations.windows(2).filter(waits).map(|pair| pair[0].stage()).collect()
}

fn is_backward_of_weights(action: Action) -> bool {
    matches!(action, Action::Backward { .. } | Action::BackwardWeight { .. })
}

/// What an action needs that an earlier one has made.
fn taken<T>(made: Option<T>) -> Outcome<T> {
    made.ok_or_else(|| "the schedule has not computed before what this needs".into())
}

fn check_loss(loss: &Tensor) -> Outcome<()> {
    match loss.requires_grad() {
        true => Ok(()),
        false => {
            Err("the loss requires no gradient: compute it of the outputs, with gradients on, \
                      and have some weight of the model require one"
                .into())
        }
    }
}

/// A panic as an error. Nothing around it then unwinds, such as tch's `no_grad`, which would leave
/// gradients off.
pub fn caught<T>(run: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let result = catch_unwind(AssertUnwindSafe(run));
    result.unwrap_or_else(|panic| Err(panic_text(panic.as_ref()).into()))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_default())
}
