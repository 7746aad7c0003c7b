//! The state of tch's optimizers, which tch itself can neither read nor set.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::size_of;
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

impl StateDict {
    /// Checks that this is the state of an optimizer of such [`parameters`](Self::parameters).
    ///
    /// # Errors
    ///
    /// It is not. The error names the first parameter that differs.
    pub fn check_parameters(&self, own: &[String]) -> Result<(), Error> {
        let saved = &self.parameters;
        let number = (0..own.len().max(saved.len())).find(|&i| own.get(i) != saved.get(i));
        let Some(number) = number else { return Ok(()) };
        let found = saved.get(number).map_or("none", String::as_str);
        let expected = own.get(number).map_or("none", String::as_str);
        let reason = format!("parameter {number} is {found} in the state, {expected} was expected");
        Err(Error::Libtorch { operation: LOAD_STATE, reason })
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
        state(c_optimizer(self, STATE)?)
    }

    fn load_state(&mut self, state: &StateDict) -> Result<(), Error> {
        load_state(c_optimizer(self, LOAD_STATE)?, state)
    }
}

impl OptimizerState for COptimizer {
    fn state(&self) -> Result<StateDict, Error> {
        state(pointer(self))
    }

    fn load_state(&mut self, state: &StateDict) -> Result<(), Error> {
        load_state(pointer(self), state)
    }
}

const STATE: &str = "OptimizerState::state";
const LOAD_STATE: &str = "OptimizerState::load_state";

/// The optimizer is one that lives.
fn state(optimizer: *const C_optimizer) -> Result<StateDict, Error> {
    let mut tensors = Vec::<(String, Tensor)>::new();
    // SAFETY: the optimizer is alive; `push_tensor` fits the data.
    unsafe {
        let data = (&raw mut tensors).cast();
        ffi::check(STATE, ffi::flow_optimizer_state(optimizer, data, push_tensor))?;
    }
    Ok(StateDict { parameters: parameters(optimizer, STATE)?, tensors })
}

/// The optimizer is one that lives, and borrowed mutably.
fn load_state(optimizer: *mut C_optimizer, state: &StateDict) -> Result<(), Error> {
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
