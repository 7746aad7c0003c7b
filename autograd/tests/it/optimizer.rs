//! The optimizers' state, saved and loaded.

use flow_autograd::{OptimizerState, StateDict};
use tch::nn::{self, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

/// A model with weights `[3, 4]` and a bias, and an optimizer for it.
struct Training {
    vs: VarStore,
    weights: Tensor,
    bias: Tensor,
    optimizer: Optimizer,
}

impl Training {
    fn new(config: impl OptimizerConfig) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let (weights, bias) = (vs.root().ones("weights", &[3, 4]), vs.root().zeros("bias", &[4]));
        let optimizer = config.build(&vs, 0.05).unwrap();
        Self { vs, weights, bias, optimizer }
    }

    /// Steps `range` of a training whose steps all have other gradients.
    fn steps(&mut self, range: std::ops::Range<i64>) {
        for step in range {
            let input =
                Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]).cos() * (step + 1);
            let loss = (input.matmul(&self.weights) + &self.bias - 0.3).square().mean(Kind::Float);
            self.optimizer.backward_step(&loss);
        }
    }

    fn values(&self) -> Vec<Vec<f32>> {
        let value = |tensor: &Tensor| Vec::try_from(tensor.detach().view(-1)).unwrap();
        vec![value(&self.weights), value(&self.bias)]
    }
}

fn names(state: &StateDict) -> Vec<&str> {
    state.tensors.iter().map(|(name, _)| name.as_str()).collect()
}

/// Ten steps, and five, a new start with what was saved, and five, end with the same weights to the
/// bit; without the state they do not. The state has `parts` for each parameter.
fn goes_on(config: impl OptimizerConfig + Copy, parts: &[&str]) {
    let mut whole = Training::new(config);
    whole.steps(0..10);

    let mut first = Training::new(config);
    first.steps(0..5);
    let saved = first.optimizer.state().unwrap();
    let expected: Vec<String> =
        (0..2).flat_map(|i| parts.iter().map(move |part| format!("{i}.{part}"))).collect();
    assert_eq!(names(&saved), expected);
    let second_of = |state: Option<&StateDict>| {
        let mut second = Training::new(config);
        second.vs.copy(&first.vs).unwrap();
        if let Some(state) = state {
            second.optimizer.load_state(state).unwrap();
        }
        second.steps(5..10);
        second.values()
    };
    let unsaved = second_of(None);
    let resumed = second_of(Some(&saved));
    assert_eq!(resumed, whole.values());
    assert_ne!(unsaved, resumed);
    assert_eq!(
        second_of(Some(&saved)),
        resumed,
        "loading has not tied the saved tensors to the optimizer"
    );

    first.steps(5..10);
    assert_eq!(first.values(), whole.values(), "saving changed nothing");
}

#[test]
fn training_goes_on_to_the_bit() {
    goes_on(nn::sgd(0.9, 0.1, 0.01, false), &["momentum_buffer"]);
    goes_on(nn::sgd(0.9, 0.0, 0.0, true), &["momentum_buffer"]);
    goes_on(nn::Adam::default(), &["step", "exp_avg", "exp_avg_sq"]);
    goes_on(nn::AdamW::default(), &["step", "exp_avg", "exp_avg_sq"]);
    goes_on(
        nn::AdamW::default().amsgrad(true),
        &["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    );
    goes_on(nn::RmsProp::default(), &["step", "square_avg"]);
    let all = nn::rms_prop(0.99, 1e-8, 0.0, 0.9, true);
    goes_on(all, &["step", "square_avg", "momentum_buffer", "grad_avg"]);
}

#[test]
fn what_has_had_no_gradient_has_no_state() {
    let mut training = Training::new(nn::Adam::default());
    assert_eq!(names(&training.optimizer.state().unwrap()), [""; 0]);
    training.optimizer.backward_step(&training.bias.sum(Kind::Float));
    let saved = training.optimizer.state().unwrap();
    assert_eq!(names(&saved), ["1.step", "1.exp_avg", "1.exp_avg_sq"]);
    let none = StateDict { tensors: Vec::new(), ..training.optimizer.state().unwrap() };
    training.optimizer.load_state(&none).unwrap();
    assert_eq!(names(&training.optimizer.state().unwrap()), [""; 0]);
    training.optimizer.load_state(&saved).unwrap();
    assert_eq!(names(&training.optimizer.state().unwrap()), names(&saved));

    let mut plain = Training::new(nn::Sgd::default());
    plain.steps(0..2);
    assert_eq!(names(&plain.optimizer.state().unwrap()), [""; 0]);
}

#[test]
fn a_state_is_not_shared_with_what_it_was_loaded_from() {
    let mut training = Training::new(nn::Adam::default());
    training.steps(0..2);
    let saved = training.optimizer.state().unwrap();
    let expected: Vec<Tensor> = saved.tensors.iter().map(|(_, tensor)| tensor.copy()).collect();
    for load in [OptimizerState::load_state, |optimizer: &mut Optimizer, state: &StateDict| {
        optimizer.load_from(state)
    }] {
        load(&mut training.optimizer, &saved).unwrap();
        training.steps(2..3);
        assert!(saved.tensors.iter().zip(&expected).all(|((_, now), before)| now == before));
        load(&mut training.optimizer, &saved).unwrap();
        let loaded = training.optimizer.state().unwrap().tensors;
        assert!(loaded.iter().zip(&expected).all(|((_, now), before)| now == before));
    }
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let mut adam = Training::new(nn::Adam::default());
    adam.steps(0..3);
    let good = adam.optimizer.state().unwrap();
    let of_sgd = {
        let mut sgd = Training::new(nn::sgd(0.9, 0.0, 0.0, false));
        sgd.steps(0..3);
        StateDict { parameters: good.parameters.clone(), ..sgd.optimizer.state().unwrap() }
    };

    let with = |name: &str, tensor: Option<Tensor>| {
        let kept = good
            .tensors
            .iter()
            .filter(|(other, _)| other != name)
            .map(|(name, tensor)| (name.clone(), tensor.copy()));
        let tensors = kept.chain(tensor.map(|tensor| (name.to_owned(), tensor))).collect();
        StateDict { parameters: good.parameters.clone(), tensors }
    };
    let floats = |shape: &[i64]| Some(Tensor::zeros(shape, (Kind::Float, Device::Cpu)));
    for (state, reason) in [
        (of_sgd, "which the optimizer has no place for"),
        (with("0.exp_avg", None), "the state lacks 0.exp_avg"),
        (
            with("2.exp_avg", floats(&[1])),
            "the state has 2.exp_avg, which the optimizer has no place for",
        ),
        (
            with("0.exp_avg", floats(&[4, 3])),
            "0.exp_avg has shape [4, 3] and type Float, its parameter has [3, 4] and Float",
        ),
        (
            with("1.exp_avg", floats(&[4]).map(|t| t.to_kind(Kind::Double))),
            "1.exp_avg has shape [4] and type Double",
        ),
        (with("1.step", floats(&[4])), "1.step is not a count"),
        (with("0.exp_avg", Some(Tensor::new())), "0.exp_avg is undefined"),
        (
            with("0.exp_avg", floats(&[3, 4]).map(|t| t.to_sparse_sparse_dim(2))),
            "0.exp_avg has the layout Sparse",
        ),
        (with("1.\0", floats(&[4])), "a name in the state has a zero byte"),
    ] {
        let error = adam.optimizer.load_state(&state).unwrap_err().to_string();
        assert!(
            error.starts_with("OptimizerState::load_state: ") && error.contains(reason),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
        let now = adam.optimizer.state().unwrap();
        assert_eq!(names(&now), names(&good));
        assert!(now.tensors.iter().zip(&good.tensors).all(|((_, now), (_, good))| now == good));
    }
}

/// Also before it has tensors, in which it could be seen.
#[test]
fn a_state_names_its_optimizer_and_loads_into_no_other() {
    fn state(config: impl OptimizerConfig, steps: i64) -> StateDict {
        let mut training = Training::new(config);
        training.steps(0..steps);
        training.optimizer.state().unwrap()
    }
    let sgd = |momentum| nn::sgd(momentum, 0.0, 0.0, false);
    let refused = |config: &dyn Fn() -> Training, state: &StateDict, expected: &str| {
        let error = config().optimizer.load_state(state).unwrap_err().to_string();
        assert_eq!(error, format!("OptimizerState::load_state: {expected}"));
    };
    let (adam, adam_w) =
        (|| Training::new(nn::Adam::default()), || Training::new(nn::AdamW::default()));
    for steps in [0, 2] {
        refused(
            &adam,
            &state(nn::AdamW::default(), steps),
            "parameter 0 is AdamW of [3, 4] Float in the state, Adam of [3, 4] Float was expected",
        );
        refused(
            &adam_w,
            &state(nn::AdamW::default().amsgrad(true), steps),
            "parameter 0 is AdamW with amsgrad of [3, 4] Float in the state, AdamW of [3, 4] Float \
             was expected",
        );
        refused(
            &|| Training::new(sgd(0.0)),
            &state(nn::rms_prop(0.99, 1e-8, 0.0, 0.9, true), steps),
            "parameter 0 is centered RMSprop with momentum of [3, 4] Float in the state, SGD of \
             [3, 4] Float was expected",
        );
        refused(
            &|| Training::new(sgd(0.9)),
            &state(sgd(0.0), steps),
            "parameter 0 is SGD of [3, 4] Float in the state, SGD with momentum of [3, 4] Float \
             was expected",
        );
    }
    let mut less = state(nn::Adam::default(), 0);
    less.parameters.pop();
    refused(&adam, &less, "parameter 1 is none in the state, Adam of [4] Float was expected");
}
