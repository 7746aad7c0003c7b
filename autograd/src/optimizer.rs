//! The state of tch's optimizers, which tch itself can neither read nor set.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::size_of;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use tch::nn::{Optimizer, OptimizerConfig, VarStore};
use tch::{COptimizer, Device, TchError, Tensor};
use torch_sys::{C_optimizer, C_tensor};

use crate::{Error, ffi};

/// The state that an optimizer keeps from step to step: PyTorch's `optimizer.state_dict()["state"]`.
#[derive(Debug, Default)]
pub struct StateDict {
    /// A text for each parameter of the optimizer, in the order in which the model was made. It has
    /// the kind of optimizer, the parameter's shape and its type, as in `Adam of [3, 4] Float`.
    pub parameters: Vec<String>,
    /// The state's tensors. Each is named by its parameter's number, and as PyTorch calls it:
    /// `0.momentum_buffer`, `0.exp_avg`, `0.step`. A parameter that has had no gradient has none,
    /// nor has one of SGD without momentum.
    pub tensors: Vec<(String, Tensor)>,
}

/// What a rank has of an optimizer's state. The tensors may share the optimizer's memory.
#[derive(Debug)]
pub struct StateParts {
    /// [`StateDict::parameters`].
    pub parameters: Vec<String>,
    /// The parts.
    pub parts: Vec<StatePart>,
    /// They are the whole state, which each rank has.
    pub are_whole: bool,
}

/// Elements of a tensor of the state.
#[derive(Debug)]
pub struct StatePart {
    /// The tensor's name, as in [`StateDict::tensors`].
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<i64>,
    /// The first of the elements, row-major.
    pub start: usize,
    /// The elements, in the same order.
    pub tensor: Tensor,
}

impl StateParts {
    /// Makes the parts of a rank that has the whole state.
    pub fn whole(state: StateDict) -> Self {
        let mut parts = Vec::with_capacity(state.tensors.len());
        for (name, tensor) in state.tensors {
            parts.push(StatePart { name, shape: tensor.size(), start: 0, tensor });
        }
        Self { parameters: state.parameters, parts, are_whole: true }
    }
}

/// A [`StateDict`] that is read piece by piece.
pub trait SavedState {
    /// Returns [`StateDict::parameters`].
    fn parameters(&self) -> &[String];

    /// Returns the names and shapes of the tensors.
    fn shapes(&self) -> Vec<(String, Vec<i64>)>;

    /// Returns elements of a tensor, row-major: a tensor of one dimension on the CPU or the state's
    /// device, with memory that nothing else uses.
    ///
    /// # Errors
    ///
    /// They cannot be read.
    fn read(&self, name: &str, elements: Range<usize>) -> Result<Tensor, Error>;

    /// Checks that this is the state of an optimizer of such [`parameters`](StateDict::parameters).
    ///
    /// # Errors
    ///
    /// It is not. The error names the first parameter that differs.
    fn check_parameters(&self, own: &[String]) -> Result<(), Error> {
        let saved = self.parameters();
        let number = (0..own.len().max(saved.len())).find(|&i| own.get(i) != saved.get(i));
        let Some(number) = number else { return Ok(()) };
        let found = saved.get(number).map_or("none", String::as_str);
        let expected = own.get(number).map_or("none", String::as_str);
        let reason = format!("parameter {number} is {found} in the state, {expected} was expected");
        Err(Error::Libtorch { operation: LOAD_STATE, reason })
    }
}

impl SavedState for StateDict {
    fn parameters(&self) -> &[String] {
        &self.parameters
    }

    fn shapes(&self) -> Vec<(String, Vec<i64>)> {
        self.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.size())).collect()
    }

    fn read(&self, name: &str, elements: Range<usize>) -> Result<Tensor, Error> {
        let found = self.tensors.iter().find(|(known, _)| known == name);
        let Some((_, tensor)) = found else {
            let reason = format!("the state has no {name}");
            return Err(Error::Libtorch { operation: LOAD_STATE, reason });
        };
        let flat = tensor.detach().f_reshape([-1]);
        flat.and_then(|flat| flat.f_narrow(0, elements.start as i64, elements.len() as i64))
            .map(|elements| elements.copy())
            .map_err(|error| Error::Libtorch { operation: LOAD_STATE, reason: error.to_string() })
    }
}

/// Reads and replaces an optimizer's [`StateDict`], to be kept in a checkpoint. Learning rate,
/// momentum and other options are not part of it.
///
/// For the optimizers that tch has: `Sgd`, `Adam`, `AdamW` and `RmsProp`.
///
/// ```
/// use flow_autograd::OptimizerState;
/// use tch::nn::{self, OptimizerConfig};
///
/// let vs = nn::VarStore::new(tch::Device::Cpu);
/// let weight = vs.root().ones("weight", &[2]);
/// let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&vs, 0.1)?;
/// optimizer.backward_step(&weight.sum(tch::Kind::Float));
/// let state = optimizer.state()?;
/// assert_eq!(state.parameters, ["SGD with momentum of [2] Float"]);
/// assert_eq!(state.tensors[0].0, "0.momentum_buffer");
///
/// let mut other = nn::sgd(0.9, 0.0, 0.0, false).build(&vs, 0.1)?;
/// other.load_state(&state)?; // goes on as `optimizer` would
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait OptimizerState {
    /// Returns a copy of the state.
    ///
    /// # Errors
    ///
    /// tch's optimizer is not laid out as expected.
    fn state(&self) -> Result<StateDict, Error>;

    /// Replaces the state by copies of `state`'s tensors, on the parameters' device.
    ///
    /// # Errors
    ///
    /// `state` is of another kind of optimizer, or of another model. The optimizer is then as it
    /// was.
    fn load_state(&mut self, state: &StateDict) -> Result<(), Error>;

    /// Returns what this rank has of the state, to be written before the next step. All ranks call this.
    ///
    /// # Errors
    ///
    /// Those of [`state`](Self::state); a failure of another rank.
    fn parts(&self) -> Result<StateParts, Error> {
        self.state().map(StateParts::whole)
    }

    /// Replaces the state as [`load_state`](Self::load_state) does, and reads no more of `saved` than
    /// this rank is to have.
    ///
    /// # Errors
    ///
    /// Those of [`load_state`](Self::load_state) and of reading.
    fn load_from(&mut self, saved: &dyn SavedState) -> Result<(), Error> {
        self.load_state(&read(saved)?)
    }

    /// Gathers the whole state on rank `to`, for its [`state`](Self::state), where ranks share it. All
    /// ranks call this after a step; checkpoints do. Others have nothing to gather, and do nothing.
    ///
    /// # Errors
    ///
    /// A failure of this rank or another.
    fn consolidate_state_dict(&self, to: usize) -> Result<(), Error> {
        let _ = to;
        Ok(())
    }
}

impl OptimizerState for Optimizer {
    fn state(&self) -> Result<StateDict, Error> {
        state(c_optimizer(self, STATE)?, true)
    }

    fn parts(&self) -> Result<StateParts, Error> {
        state(c_optimizer(self, STATE)?, false).map(StateParts::whole)
    }

    fn load_state(&mut self, state: &StateDict) -> Result<(), Error> {
        set_state(c_optimizer(self, LOAD_STATE)?, state, true)
    }

    fn load_from(&mut self, saved: &dyn SavedState) -> Result<(), Error> {
        set_state(c_optimizer(self, LOAD_STATE)?, &read(saved)?, false)
    }
}

impl OptimizerState for COptimizer {
    fn state(&self) -> Result<StateDict, Error> {
        state(pointer(self), true)
    }

    fn parts(&self) -> Result<StateParts, Error> {
        state(pointer(self), false).map(StateParts::whole)
    }

    fn load_state(&mut self, state: &StateDict) -> Result<(), Error> {
        set_state(pointer(self), state, true)
    }

    fn load_from(&mut self, saved: &dyn SavedState) -> Result<(), Error> {
        set_state(pointer(self), &read(saved)?, false)
    }
}

const STATE: &str = "OptimizerState::state";
const LOAD_STATE: &str = "OptimizerState::load_state";

/// Returns the state, or a copy. The optimizer is one that lives.
fn state(optimizer: *const C_optimizer, copy: bool) -> Result<StateDict, Error> {
    let mut tensors = Vec::<(String, Tensor)>::new();
    // SAFETY: the optimizer is alive; `push_tensor` fits the data.
    unsafe {
        let data = (&raw mut tensors).cast();
        ffi::check(STATE, ffi::flow_optimizer_state(optimizer, copy, data, push_tensor))?;
    }
    Ok(StateDict { parameters: parameters(optimizer, STATE)?, tensors })
}

/// Reads a whole state.
fn read(saved: &dyn SavedState) -> Result<StateDict, Error> {
    let mut tensors = Vec::new();
    for (name, shape) in saved.shapes() {
        let elements = shape.iter().product::<i64>() as usize;
        let tensor = saved.read(&name, 0..elements)?.view(&shape[..]);
        tensors.push((name, tensor));
    }
    Ok(StateDict { parameters: saved.parameters().to_vec(), tensors })
}

/// Replaces the state by the tensors of `state`, or copies. The optimizer is one that lives, and borrowed
/// mutably.
fn set_state(optimizer: *mut C_optimizer, state: &StateDict, copy: bool) -> Result<(), Error> {
    state.check_parameters(&parameters(optimizer, LOAD_STATE)?)?;
    let mut names = Vec::new();
    for (name, _) in &state.tensors {
        names.push(CString::new(name.as_str()).map_err(|_| Error::Libtorch {
            operation: LOAD_STATE,
            reason: "a name in the state has a zero byte".into(),
        })?);
    }
    let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
    let tensors: Vec<*const C_tensor> =
        state.tensors.iter().map(|(_, tensor)| tensor.as_ptr()).collect();
    // SAFETY: the optimizer, which is borrowed mutably, and as many names and tensors as said are
    // alive.
    unsafe {
        let result = ffi::flow_set_optimizer_state(
            optimizer,
            copy,
            names.as_ptr(),
            tensors.as_ptr(),
            tensors.len(),
        );
        ffi::check(LOAD_STATE, result)
    }
}

/// Returns what [`StateDict::parameters`] has.
fn parameters(
    optimizer: *const C_optimizer,
    operation: &'static str,
) -> Result<Vec<String>, Error> {
    let mut parameters = Vec::<String>::new();
    // SAFETY: the optimizer is alive; `push_text` fits the data.
    unsafe {
        let data = (&raw mut parameters).cast();
        ffi::check(operation, ffi::flow_optimizer_parameters(optimizer, data, push_text))?;
    }
    Ok(parameters)
}

/// # Safety
///
/// `texts` must point to a `Vec<String>` that nothing else uses during the call, and `text` be a C
/// string.
unsafe extern "C" fn push_text(texts: *mut c_void, text: *const c_char) {
    // SAFETY: the caller's promise.
    let (texts, text) = unsafe { (&mut *texts.cast::<Vec<String>>(), CStr::from_ptr(text)) };
    // Only a failed allocation panics here.
    let _ = catch_unwind(AssertUnwindSafe(|| texts.push(text.to_string_lossy().into_owned())));
}

/// # Safety
///
/// `tensors` must point to a `Vec<(String, Tensor)>` that nothing else uses during the call, `name`
/// be a C string, and `tensor` the caller's, to give away.
unsafe extern "C" fn push_tensor(tensors: *mut c_void, name: *const c_char, tensor: *mut C_tensor) {
    // SAFETY: the caller's promise.
    let (tensors, name, tensor) = unsafe {
        (
            &mut *tensors.cast::<Vec<(String, Tensor)>>(),
            CStr::from_ptr(name),
            Tensor::from_ptr(tensor),
        )
    };
    // Only a failed allocation panics here.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        tensors.push((name.to_string_lossy().into_owned(), tensor))
    }));
}

const WORD: usize = size_of::<*mut C_optimizer>();
/// Words in an [`Optimizer`].
const WORDS: usize = size_of::<Optimizer>() / WORD;

// tch's types, in all versions that we build with: `COptimizer` is a pointer to libtorch's
// optimizer, and `Optimizer` is a `COptimizer`, the variables and their number, in an order that
// Rust chooses.
const _: () = assert!(size_of::<COptimizer>() == WORD);
const _: () =
    assert!(size_of::<Optimizer>() == size_of::<(COptimizer, Arc<()>, usize)>() && WORDS == 3);

fn pointer(optimizer: &COptimizer) -> *mut C_optimizer {
    // SAFETY: it is a pointer and nothing else, see above.
    unsafe { *std::ptr::from_ref(optimizer).cast() }
}

fn words(optimizer: &Optimizer) -> [*mut C_optimizer; WORDS] {
    // SAFETY: all its bytes are those of its three fields of a word each, see above.
    unsafe { *std::ptr::from_ref(optimizer).cast() }
}

/// libtorch's optimizer in tch's, where it is private.
fn c_optimizer(optimizer: &Optimizer, operation: &'static str) -> Result<*mut C_optimizer, Error> {
    /// The number of the word that points to it: the same in all optimizers.
    static PLACE: OnceLock<Option<usize>> = OnceLock::new();

    /// Makes optimizers, and notes the pointer to libtorch's.
    struct Noted(Cell<*mut C_optimizer>);

    impl OptimizerConfig for &Noted {
        fn build_copt(&self, lr: f64) -> Result<COptimizer, TchError> {
            let optimizer = COptimizer::sgd(lr, 0.0, 0.0, 0.0, false)?;
            self.0.set(pointer(&optimizer));
            Ok(optimizer)
        }
    }

    let place = *PLACE.get_or_init(|| {
        let noted = Noted(Cell::new(null_mut()));
        let probe = (&noted).build(&VarStore::new(Device::Cpu), 0.0).ok()?;
        words(&probe).iter().position(|&word| word == noted.0.get())
    });
    match place {
        Some(place) => Ok(words(optimizer)[place]),
        None => {
            let reason = "this version of tch is not known".into();
            Err(Error::Libtorch { operation, reason })
        }
    }
}
