//! Models in bf16 and f16, beside plain tensors of that kind: layouts must not cost precision.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::common::ranks::ranks;
use flow_global::{B, GlobalTensor, Placement, S, Sbp, distribute, distribute_tensor};
use flow_harness::runs_apart;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

/// Ranks are threads, which share libtorch's generator: one draws at a time.
fn seeded(seed: i64) -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(seed);
    guard
}

/// A network with a normalization and an embedding's worth of classes.
struct Model {
    vs: nn::VarStore,
    network: nn::Sequential,
}

impl Model {
    fn new(kind: Kind) -> Self {
        let _seeded = seeded(3);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let network = nn::seq()
            .add(nn::linear(&root / "up", 24, 64, Default::default()))
            .add_fn(Tensor::relu)
            .add(nn::layer_norm(&root / "norm", vec![64], Default::default()))
            .add(nn::linear(&root / "down", 64, 10, Default::default()));
        match kind {
            Kind::BFloat16 => vs.bfloat16(),
            Kind::Half => vs.half(),
            _ => vs.double(),
        }
        Self { vs, network }
    }

    /// The loss, and the gradients by name, as plain tensors in double precision.
    fn step(&self, x: &Tensor, y: &Tensor) -> Vec<(String, Tensor)> {
        let loss = self.network.forward(x).cross_entropy_for_logits(y);
        loss.backward();
        let plain = |tensor: &Tensor| tensor.full().unwrap().to_kind(Kind::Double);
        let mut all = vec![("loss".to_owned(), plain(&loss))];
        let gradient = |(name, tensor): (String, Tensor)| (name, plain(&tensor.grad()));
        all.extend(self.variables().into_iter().map(gradient));
        all
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        let mut all: Vec<_> = self.vs.variables().into_iter().collect();
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        all
    }
}

fn batch(kind: Kind) -> (Tensor, Tensor) {
    let _seeded = seeded(4);
    let x = Tensor::randn([32, 24], (Kind::Double, Device::Cpu));
    let y = Tensor::randint(10, [32], (Kind::Int64, Device::Cpu));
    // The values are the same in all kinds.
    (x.to_kind(Kind::BFloat16).to_kind(kind), y)
}

/// The greatest error of each value, in parts of its greatest element.
fn errors(values: &[(String, Tensor)], exact: &[(String, Tensor)]) -> Vec<f64> {
    let error = |((_, value), (_, exact)): (&(String, Tensor), &(String, Tensor))| {
        let scale = exact.abs().max().double_value(&[]);
        (value - exact).abs().max().double_value(&[]) / scale
    };
    values.iter().zip(exact).map(error).collect()
}

/// A step in double precision from the weights of a model of this kind, and the errors of the same
/// step in that kind.
fn plain_step(kind: Kind) -> (Vec<(String, Tensor)>, Vec<f64>) {
    let (model, exact) = (Model::new(kind), Model::new(Kind::Double));
    tch::no_grad(|| {
        exact
            .variables()
            .iter_mut()
            .zip(model.variables())
            .for_each(|(own, other)| own.1.copy_(&other.1))
    });
    let step = |model: &Model, kind: Kind| {
        let (x, y) = batch(kind);
        model.step(&x, &y)
    };
    let exact = step(&exact, Kind::Double);
    let errors = errors(&step(&model, kind), &exact);
    (exact, errors)
}

#[test]
fn gradients_are_as_exact_as_those_of_plain_tensors() {
    // Less than AMX: some virtual machines announce it and let nobody use it.
    let less = [("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")];
    if runs_apart(gradients_are_as_exact_as_those_of_plain_tensors, &less) {
        return;
    }
    let layouts: [(&str, Sbp, Sbp, Sbp); 3] =
        [("data", B, B, S(0)), ("model", S(0), S(1), B), ("everywhere", S(0), S(0), S(0))];
    for (kind, step) in [(Kind::BFloat16, 1.0 / 128.0), (Kind::Half, 1.0 / 1024.0)] {
        for (layout, up, down, data) in layouts {
            ranks(2, |group| {
                let (exact, plain) = plain_step(kind);
                let placement = Placement::all(&group).unwrap();
                let model = Model::new(kind);
                let sbp = |name: &str, _: &Tensor| match name {
                    "up.weight" => [up],
                    "down.weight" => [down],
                    _ => [B],
                };
                distribute(&model.vs, &placement, sbp).unwrap();
                let (x, y) = batch(kind);
                let [x, y] = [x, y].map(|one| distribute_tensor(&one, &placement, [data]).unwrap());
                assert_eq!(model.network.forward(&x).kind(), kind);
                let values = model.step(&x, &y);
                let errors = errors(&values, &exact);
                for (((name, _), own), plain) in values.iter().zip(errors).zip(plain) {
                    // Sums in another order round otherwise.
                    let bound = 2.0 * (plain + step);
                    assert!(own <= bound, "{kind:?} {layout} {name}: {own}, plain {plain}");
                }
            });
        }
    }
}
