//! Records the operations on global tensors, for [`crate::explain`] and [`crate::planner`].

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use flow_autograd::global::Node;
use tch::Tensor;

use crate::error::Result;
use crate::explain::Table;
use crate::handle::{find_spec, globals};
use crate::placement::Placement;
use crate::policy;
use crate::region::shape;
use crate::rules::infer::Choice;
use crate::rules::op::{Input, Op};
use crate::rules::rule;
use crate::runtime::Runtime;
use crate::sbp::{B, NdSbp};
use crate::trace::{Phase, Role, Trace};

/// Runs `body`. Returns the operations on global tensors that this rank has carried out for it,
/// with what `body` returns. Those of backward and of the optimizer are among them.
pub fn record<T>(body: impl FnOnce() -> T) -> (T, Trace) {
    let recorder = Arc::new(Mutex::new(Recorder::default()));
    let result = {
        let _recording = Recording::start(recorder.clone());
        body()
    };
    let trace = std::mem::take(&mut lock(&recorder).trace);
    (result, trace)
}

/// Runs `body`, and returns what it moved between ranks, with what `body` returns.
///
/// ```
/// use flow_global::{explain, randn, Placement, B, S};
/// use flow_tensor::ProcessGroup;
/// use tch::Kind;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = ProcessGroup::from_env()?;
/// let placement = Placement::all(&group)?;
/// let x = randn([4, 6], Kind::Float, &placement, &[S(0)])?;
/// let w = randn([6, 8], Kind::Float, &placement, &[B])?;
/// let (y, table) = explain(|| x.matmul(&w));
/// println!("{table}"); // mm([4, 6] S(0), [6, 8] B) -> S(0)
/// # assert_eq!(y.size(), [4, 8]);
/// # assert_eq!(table.rows.len(), 1);
/// # Ok(())
/// # }
/// ```
pub fn explain<T>(body: impl FnOnce() -> T) -> (T, Table) {
    let (result, trace) = record(body);
    (result, Table::of(&trace))
}

/// A trace in the making, and which of its values the tensors are.
#[derive(Default)]
pub(crate) struct Recorder {
    trace: Trace,
    /// Of the rank whose operations it records, once there was one.
    runtime: Option<Arc<Runtime>>,
    ids: HashMap<u64, usize>,
    /// Leaves whose gradients are being reduced, and these in the trace.
    reduced: Vec<(Tensor, usize)>,
}

/// Recorders that threads have started.
static RECORDERS: Mutex<Vec<Arc<Mutex<Recorder>>>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static OWN: RefCell<Option<Arc<Mutex<Recorder>>>> = const { RefCell::new(None) };
}

/// Has what this thread does recorded while it lives, and what autograd's threads do for its rank.
struct Recording {
    recorder: Arc<Mutex<Recorder>>,
    before: Option<Arc<Mutex<Recorder>>>,
}

impl Recording {
    fn start(recorder: Arc<Mutex<Recorder>>) -> Self {
        lock(&RECORDERS).push(recorder.clone());
        COUNT.fetch_add(1, Ordering::Relaxed);
        let before = OWN.replace(Some(recorder.clone()));
        Self { recorder, before }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        OWN.set(self.before.take());
        COUNT.fetch_sub(1, Ordering::Relaxed);
        lock(&RECORDERS).retain(|other| !Arc::ptr_eq(other, &self.recorder));
    }
}

/// Returns the recorder for this thread: its own, or that of its rank.
fn current(runtime: &Arc<Runtime>) -> Option<Arc<Mutex<Recorder>>> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    if let Some(own) = OWN.with_borrow(Clone::clone) {
        lock(&own).runtime.get_or_insert_with(|| runtime.clone());
        return Some(own);
    }
    let recorders = lock(&RECORDERS);
    let of_rank = recorders.iter().find(|recorder| {
        lock(recorder).runtime.as_ref().is_some_and(|of| Arc::ptr_eq(of, runtime))
    });
    of_rank.cloned()
}

/// Returns whether [`operation`] is to be called.
pub(crate) fn is_on() -> bool {
    COUNT.load(Ordering::Relaxed) != 0 || prints()
}

/// Returns whether `FLOW_EXPLAIN` is 1.
fn prints() -> bool {
    static PRINTS: OnceLock<bool> = OnceLock::new();
    *PRINTS.get_or_init(|| policy::is_set("FLOW_EXPLAIN"))
}

/// Notes an operation that has run, what its inputs were boxed to, and what it returned.
pub(crate) fn operation(
    op: &Op,
    placement: &Placement,
    inputs: &[Option<Tensor>],
    wanted: &[NdSbp],
    returned: &[Option<Tensor>],
    node: Node,
) -> Result<()> {
    note(placement, |recorder| recorder.operation(op, placement, inputs, wanted, returned, node))
}

/// Notes that a tensor was boxed because the program asked for it.
pub(crate) fn conversion(tensor: &Tensor, result: &Tensor) -> Result<()> {
    let Some(spec) = is_on().then(|| find_spec(result)).flatten() else { return Ok(()) };
    let node = Node::now(tensor.requires_grad());
    note(spec.placement(), |recorder| {
        let input = recorder.value(tensor, spec.placement())?;
        let output = recorder.trace.convert(input, spec.placement(), spec.sbp(), phase(node));
        recorder.ids.extend(globals()?.id(result).map(|id| (id, output)));
        Ok(())
    })
}

/// Notes that a gradient was boxed for its leaf. Without a result yet it is reduced with others, and
/// the leaf gets it at the end of backward.
pub(crate) fn gradient(leaf: &Tensor, gradient: &Tensor, result: Option<&Tensor>) -> Result<()> {
    let Some(spec) = is_on().then(|| find_spec(leaf)).flatten() else { return Ok(()) };
    note(spec.placement(), |recorder| {
        let input = recorder.value(gradient, spec.placement())?;
        let of = recorder.value(leaf, spec.placement())?;
        let output = recorder.trace.gradient(input, of);
        match result {
            Some(result) => recorder.ids.extend(globals()?.id(result).map(|id| (id, output))),
            None => recorder.reduced.push((leaf.shallow_clone(), output)),
        }
        Ok(())
    })
}

/// Has `change` note it in the recorder; with `FLOW_EXPLAIN=1`, the first rank prints each kind of call once.
fn note(placement: &Placement, change: impl Fn(&mut Recorder) -> Result<()>) -> Result<()> {
    static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let runtime = placement.runtime()?;
    if let Some(recorder) = current(runtime) {
        change(&mut lock(&recorder))?;
    }
    if prints() && runtime.rank() == 0 {
        let mut one = Recorder::default();
        change(&mut one)?;
        for row in crate::explain::rows(&one.trace) {
            let text = row.to_string();
            if lock(&PRINTED).insert(text.clone()) {
                eprintln!("flow-explain:{text}");
            }
        }
    }
    Ok(())
}

/// Names by the numbers of variables. A number is never used again.
struct Names(VecDeque<(u64, String)>);

static NAMES: Mutex<Names> = Mutex::new(Names(VecDeque::new()));

impl Names {
    /// More names are forgotten, the first one first.
    const MAX: usize = 1 << 16;

    fn add(&mut self, id: u64, name: &str) {
        if self.0.len() == Self::MAX {
            self.0.pop_front();
        }
        self.0.push_back((id, name.to_owned()));
    }

    fn find(&self, id: u64) -> Option<&str> {
        self.0.iter().find(|(other, _)| *other == id).map(|(_, name)| name.as_str())
    }
}

/// Gives a variable the name that it has in traces.
pub(crate) fn name(variable: &Tensor, name: &str) -> Result<()> {
    if let Some(id) = globals()?.id(variable) {
        lock(&NAMES).add(id, name);
    }
    Ok(())
}

impl Recorder {
    /// Returns the id of a tensor in the trace. One that is not known was there before; a plain
    /// tensor is one that all ranks have.
    fn value(&mut self, tensor: &Tensor, placement: &Placement) -> Result<usize> {
        let id = globals()?.id(tensor);
        if let Some(&known) = id.and_then(|id| self.ids.get(&id)) {
            return Ok(known);
        }
        if let Some(id) = id {
            let globals = globals()?;
            let mut reduced = self.reduced.iter();
            if let Some(&(_, known)) =
                reduced.find(|(leaf, _)| globals.id(&leaf.grad()) == Some(id))
            {
                self.ids.insert(id, known);
                return Ok(known);
            }
        }
        let is_weight = id.is_some() && tensor.requires_grad() && tensor.is_leaf();
        let role = if is_weight { Role::Weight } else { Role::Input };
        let name = id.and_then(|id| lock(&NAMES).find(id).map(str::to_owned)).unwrap_or_default();
        let value = match find_spec(tensor) {
            Some(spec) => self.trace.leaf(role, &name, input(tensor), spec.placement(), spec.sbp()),
            None => {
                let sbp = vec![B; placement.axes()];
                self.trace.leaf(role, &name, input(tensor), placement, &sbp)
            }
        };
        self.ids.extend(id.map(|id| (id, value)));
        Ok(value)
    }

    fn operation(
        &mut self,
        op: &Op,
        placement: &Placement,
        inputs: &[Option<Tensor>],
        wanted: &[NdSbp],
        returned: &[Option<Tensor>],
        node: Node,
    ) -> Result<()> {
        let mut ids = Vec::new();
        for tensor in inputs {
            ids.push(tensor.as_ref().map(|tensor| self.value(tensor, placement)).transpose()?);
        }
        let broadcast = vec![B; placement.axes()];
        let mut sbps = Vec::new();
        for tensor in returned {
            let spec = tensor.as_ref().and_then(find_spec);
            sbps.push(spec.map_or_else(|| broadcast.clone(), |spec| spec.sbp().to_vec()));
        }
        let choice =
            Choice { inputs: wanted.to_vec(), outputs: sbps, shapes: Vec::new(), has_code: false };
        let results: Vec<_> = returned.iter().map(|tensor| Some(input(tensor.as_ref()?))).collect();
        let choice = rule(op.name).map(|_| &choice);
        let outputs = self.trace.call(op, placement, &ids, choice, &results, phase(node));
        for (tensor, value) in returned.iter().zip(outputs) {
            let (Some(tensor), Some(value)) = (tensor, value) else { continue };
            if let Some(id) = globals()?.id(tensor) {
                self.ids.insert(id, value);
            }
        }
        Ok(())
    }
}

fn phase(node: Node) -> (Phase, Option<u64>) {
    (if node.is_backward { Phase::Backward } else { Phase::Forward }, node.number)
}

/// Returns a tensor as rules see it.
fn input(tensor: &Tensor) -> Input {
    Input::new(shape(&tensor.size()), tensor.kind())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_not_kept_for_ever() {
        let mut names = Names(VecDeque::new());
        (0..=Names::MAX as u64).for_each(|id| names.add(id, &format!("w{id}")));
        assert_eq!((names.find(0), names.find(1)), (None, Some("w1")));
        assert_eq!(names.0.len(), Names::MAX);
    }
}
