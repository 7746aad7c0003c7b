//! Models that tch's optimizers train, and what else trains them.

use anyhow::{Context, Result, ensure};
use flow_autograd::StateDict;
use tch::nn::{self, Adam, AdamW, OptimizerConfig, RmsProp, Sgd, VarStore};
use tch::{COptimizer, Kind, TchError, Tensor};

use crate::models::device;

/// Elements of a parameter whose gradient is reduced where it is born, and whose state ranks share.
pub const LARGE: i64 = 17_000;

/// One of tch's optimizers.
#[derive(Clone, Copy, Debug)]
pub enum Config {
    Sgd(Sgd),
    Adam(Adam),
    AdamW(AdamW),
    RmsProp(RmsProp),
}

impl OptimizerConfig for Config {
    fn build_copt(&self, learning_rate: f64) -> Result<COptimizer, TchError> {
        match self {
            Self::Sgd(config) => config.build_copt(learning_rate),
            Self::Adam(config) => config.build_copt(learning_rate),
            Self::AdamW(config) => config.build_copt(learning_rate),
            Self::RmsProp(config) => config.build_copt(learning_rate),
        }
    }
}

const MOMENTUM: Sgd = Sgd { momentum: 0.9, dampening: 0.0, wd: 0.01, nesterov: true };

/// All of tch's optimizers, with options that change their states.
pub fn configs() -> [Config; 6] {
    [
        Config::Sgd(Sgd::default()),
        Config::Sgd(MOMENTUM),
        Config::Adam(Adam::default()),
        Config::Adam(Adam::default().amsgrad(true).wd(0.01)),
        Config::AdamW(AdamW::default()),
        Config::RmsProp(nn::rms_prop(0.9, 1e-6, 0.01, 0.9, true)),
    ]
}

/// Parameters of several types, one of which has two names.
#[derive(Debug)]
pub struct Parameters(pub Vec<Tensor>);

impl Parameters {
    pub fn new(store: &VarStore, kinds: &[(i64, Kind)]) -> Self {
        let root = store.root();
        let mut all = Vec::new();
        for (index, &(length, kind)) in kinds.iter().enumerate() {
            let start = Tensor::arange(length, (Kind::Float, device())) * 0.01 + 0.5;
            let path = root.set_group(index % 2);
            all.push(path.add(&format!("w{index}"), start.to_kind(kind), true));
        }
        let _ = root.add("tied", all[0].shallow_clone(), false);
        Self(all)
    }

    /// A loss whose gradients depend on the parameters themselves.
    pub fn loss(&self, uses: &[(usize, f64)]) -> Result<Tensor> {
        let mut sum = Tensor::zeros([], (Kind::Double, device()));
        for &(index, factor) in uses {
            sum += (&self.0[index] * factor).abs().square().sum(Kind::Float);
        }
        Ok(sum)
    }
}

/// All variables have the same bits, NaN too.
pub fn same_bits(actual: &VarStore, expected: &VarStore) -> Result<()> {
    let expected = expected.variables();
    for (name, tensor) in actual.variables() {
        same_elements(&name, &tensor, &expected[&name])?;
    }
    Ok(())
}

/// Two tensors have the same bits.
pub fn same_elements(name: &str, actual: &Tensor, expected: &Tensor) -> Result<()> {
    let described = |tensor: &Tensor| format!("{:?} of {:?}", tensor.size(), tensor.kind());
    ensure!(described(actual) == described(expected), "{name} is {actual:?}, not {expected:?}");
    let size = actual.kind().elt_size_in_bytes();
    let [own, other] = [actual, expected]
        .map(|tensor| tensor.detach().to(tch::Device::Cpu).contiguous().view([-1]));
    let [own_bytes, other_bytes] = [flow_autograd::bytes(&own)?, flow_autograd::bytes(&other)?];
    let pairs = own_bytes.chunks(size).zip(other_bytes.chunks(size));
    let unequal: Vec<i64> = pairs.zip(0..).filter(|((a, b), _)| a != b).map(|(_, at)| at).collect();
    if let Some(&first) = unequal.first() {
        anyhow::bail!(
            "{} of {} elements of {name} differ from those with tch's optimizer after backward, the \
             first is number {first}: {} and {}",
            unequal.len(),
            own.numel(),
            own.get(first),
            other.get(first)
        );
    }
    Ok(())
}

/// Leaves all variables without gradients.
pub fn drop_gradients(store: &VarStore) -> Result<()> {
    let trained = store.trainable_variables();
    Ok(trained.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?)
}

/// Two states have the same bits, NaN too.
pub fn same_state(actual: &StateDict, expected: &StateDict) -> Result<()> {
    ensure!(actual.parameters == expected.parameters, "{actual:?} is not {expected:?}");
    ensure!(names(actual) == names(expected), "{actual:?} is not {expected:?}");
    for (name, tensor) in &actual.tensors {
        let other = expected.tensors.iter().find(|(other, _)| other == name).context("checked")?;
        same_elements(name, tensor, &other.1)?;
    }
    Ok(())
}

/// The names of a state's tensors, sorted.
fn names(state: &StateDict) -> Vec<&str> {
    let mut names: Vec<&str> = state.tensors.iter().map(|(name, _)| name.as_str()).collect();
    names.sort();
    names
}
