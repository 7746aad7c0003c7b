//! The state of tch's optimizers, which tch itself can neither read nor set.

use std::cell::Cell;
use std::ffi::{c_char, c_void, CStr, CString};
use std::mem::size_of;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use tch::nn::{Optimizer, OptimizerConfig, VarStore};
use tch::{COptimizer, Device, TchError, Tensor};
use torch_sys::{C_optimizer, C_tensor};

use crate::{ffi, Error};

/// What an optimizer remembers from step to step, to be kept in a checkpoint: PyTorch's
/// `optimizer.state_dict()["state"]`. Learning rate, momentum and other options are not part of it.
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
/// assert_eq!(state[0].0, "0.momentum_buffer");
///
/// let mut other = nn::sgd(0.9, 0.0, 0.0, false).build(&vs, 0.1)?;
/// other.load_state(&state)?; // goes on as `optimizer` would
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait OptimizerState {
    /// Copies of the state's tensors. Each is named by its parameter's number, in the order in
    /// which the model was made, and as PyTorch calls it: `0.momentum_buffer`, `0.exp_avg`,
    /// `0.step`. A parameter that has had no gradient has none, nor has one of SGD without
    /// momentum.
    ///
    /// # Errors
    ///
    /// tch's optimizer is not laid out as expected.
    fn state(&self) -> Result<Vec<(String, Tensor)>, Error>;

    /// Replaces the state by copies of `state`'s tensors, on the parameters' device.
    ///
    /// # Errors
    ///
    /// `state` is of another kind of optimizer, or of another model. The optimizer is then as it
    /// was.
    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<(), Error>;
}

impl OptimizerState for Optimizer {
    fn state(&self) -> Result<Vec<(String, Tensor)>, Error> {
        const OPERATION: &str = "OptimizerState::state";
        let optimizer = c_optimizer(self, OPERATION)?;
        let mut state = Vec::<(String, Tensor)>::new();
        // SAFETY: the optimizer is alive; `visit` fits the data.
        unsafe {
            ffi::check(
                OPERATION,
                ffi::flow_optimizer_state(optimizer, (&raw mut state).cast(), visit),
            )?
        };
        Ok(state)
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<(), Error> {
        const OPERATION: &str = "OptimizerState::load_state";
        let optimizer = c_optimizer(self, OPERATION)?;
        let name = |(name, _): &(String, Tensor)| CString::new(name.as_str());
        let names: Vec<CString> =
            state.iter().map(name).collect::<Result<_, _>>().map_err(|_| Error::Libtorch {
                operation: OPERATION,
                reason: "a name in the state has a zero byte".into(),
            })?;
        let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let tensors: Vec<*const C_tensor> =
            state.iter().map(|(_, tensor)| tensor.as_ptr()).collect();
        // SAFETY: the optimizer, which is borrowed mutably, and as many names and tensors as said
        // are alive.
        unsafe {
            let result = ffi::flow_set_optimizer_state(
                optimizer,
                names.as_ptr(),
                tensors.as_ptr(),
                state.len(),
            );
            ffi::check(OPERATION, result)
        }
    }
}

/// # Safety
///
/// `state` must point to a `Vec<(String, Tensor)>` that nothing else uses during the call, `name` must be
/// a C string, and `tensor` the caller's, to give away.
unsafe extern "C" fn visit(state: *mut c_void, name: *const c_char, tensor: *mut C_tensor) {
    // SAFETY: the caller's promise.
    let (state, name, tensor) = unsafe {
        (
            &mut *state.cast::<Vec<(String, Tensor)>>(),
            CStr::from_ptr(name),
            Tensor::from_ptr(tensor),
        )
    };
    // Only a failed allocation panics here.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        state.push((name.to_string_lossy().into_owned(), tensor))
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

    let find = || {
        let noted = Noted(Cell::new(null_mut()));
        let probe = (&noted).build(&VarStore::new(Device::Cpu), 0.0).ok()?;
        words(&probe).iter().position(|&word| word == noted.0.get())
    };
    let place = *PLACE.get_or_init(find);
    let unknown =
        || Error::Libtorch { operation, reason: "this version of tch is not known".into() };
    Ok(words(optimizer)[place.ok_or_else(unknown)?])
}
