//! One tensor under several names.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, DdpBuilder};
use tch::nn::{ModuleT, OptimizerConfig, VarStore};
use tch::{Kind, Tensor, nn};

use crate::helpers::{
    close, error, gradient_is, gradients, mean, part, plausible, same_everywhere, says, values,
};
use crate::models::{device, store};

/// Encodes and decodes by the same weight, and counts its steps in a buffer of two names.
#[derive(Debug)]
struct Autoencoder {
    encoder: Tensor,
    decoder: Tensor,
    bias: Tensor,
    steps: Tensor,
}

impl Autoencoder {
    /// The weight is made as `z.encoder` and tied as `a.decoder`. 128 KiB: it is born in shared
    /// memory.
    fn new(store: &VarStore) -> Self {
        let root = store.root();
        let double = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, device())) * 0.05;
        let encoder = (&root / "z").add("encoder", double(&[64, 256]), true);
        let decoder = (&root / "a").add("decoder", encoder.shallow_clone(), false);
        let bias = root.add("bias", double(&[256]), true);
        let steps = root.add("steps", Tensor::zeros([1], (Kind::Double, device())), false);
        let _ = root.add("also_steps", steps.shallow_clone(), false);
        Self { encoder, decoder, bias, steps }
    }
}

impl ModuleT for Autoencoder {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        if train {
            let _ = self.steps.shallow_clone().g_add_scalar_(1);
        }
        (x.matmul(&self.encoder) + &self.bias).tanh().matmul(&self.decoder.tr())
    }
}

fn builders(group: &ProcessGroup) -> impl Iterator<Item = DdpBuilder> {
    [false, true].map(|view| Ddp::builder(group).gradient_as_bucket_view(view)).into_iter()
}

/// Trains as one process does on the joined batch; the first name is the one that counts.
pub fn trained(group: &ProcessGroup) -> Result<()> {
    for builder in builders(group) {
        let (alone_store, store) = (store(), store());
        tch::manual_seed(1);
        let alone = Autoencoder::new(&alone_store);
        tch::manual_seed(1 + group.rank() as i64);
        let model = builder.wrap(Autoencoder::new(&store), &store)?;
        let optimizer = || nn::sgd(0.9, 0.0, 0.0, false);
        let mut alone_optimizer = optimizer().build(&alone_store, 0.05)?;
        let mut optimizer = optimizer().build(&store, 0.05)?;
        for step in 0..4 {
            tch::manual_seed(100 + step);
            let x = Tensor::randn([4 * group.world_size() as i64, 64], (Kind::Double, device()));
            let loss = |model: &dyn ModuleT, x: &Tensor| {
                (model.forward_t(x, true) - x).square().mean(Kind::Double)
            };
            alone_optimizer.backward_step(&loss(&alone, &x));
            optimizer.zero_grad();
            loss(&model, &part(&x, group)).f_backward()?;
            close(&gradients(&store)?, &gradients(&alone_store)?, 1e-12)
                .with_context(|| format!("step {step}"))?;
            optimizer.step();
        }
        close(&values(&store), &values(&alone_store), 1e-12)?;
        same_everywhere(group, &store)?;
        let stats = model.stats();
        plausible(&stats, 4)?;
        let mut names: Vec<String> =
            stats.buckets.into_iter().flat_map(|bucket| bucket.parameters).collect();
        names.sort();
        ensure!(names == ["a.decoder", "bias"], "{names:?}");
        ensure!(model.steps.double_value(&[0]) == 4.0, "{}", model.steps);
    }
    Ok(())
}

/// However the names come, and whether all ranks tie the same.
pub fn named(group: &ProcessGroup) -> Result<()> {
    let weight = || Tensor::ones([2, 3], (Kind::Float, device())).set_requires_grad(true);
    let named = |name: &str, tensor: &Tensor| (name.to_string(), tensor.shallow_clone());

    // Of two stores; a parameter that is called a buffer as well is no buffer.
    let (one, other, weight_of_both) = (store(), store(), weight());
    let _ = one.root().add("weight", weight_of_both.shallow_clone(), true);
    let _ = other.root().add("weight", weight_of_both.shallow_clone(), true);
    let both = one.variables().into_iter().chain(other.variables()).collect();
    let model = Ddp::from_tensors((), both, other.variables().into_iter().collect(), group)?;
    let own = group.rank() as f64;
    (&weight_of_both * own).sum(Kind::Float).f_backward()?;
    gradient_is(&weight_of_both, mean(group, |rank| rank as f64))?;
    drop(model);

    // A view is another tensor, if of the same memory.
    let whole = weight().detach();
    let [head, tail] = [0, 1].map(|row| whole.narrow(0, row, 1).set_requires_grad(true));
    let again = whole.narrow(0, 0, 1).set_requires_grad(true);
    let parts = vec![named("head", &head), named("tail", &tail), named("again", &again)];
    let model = Ddp::from_tensors((), parts, vec![], group)?;
    ((&head + &tail * 2) + &again * 3).sum(Kind::Float).f_backward()?;
    for (part, expected) in [(&head, 1.0), (&tail, 2.0), (&again, 3.0)] {
        gradient_is(part, expected)?;
    }
    drop(model);

    // Tied on all ranks but one.
    let last = group.world_size() - 1;
    let (a, b) = (weight(), weight());
    let tied = |odd| vec![named("a", &a), named("b", if odd { &b } else { &a })];
    let text = error(Ddp::from_tensors((), tied(group.rank() == last), vec![], group))?;
    says(
        &text,
        &[
            "differs between ranks",
            "rank 0 has parameter b",
            "the same tensor as a",
            &format!("rank {last} has"),
        ],
    )
}

/// A model can be in one `Ddp` at a time.
pub fn wrapped_twice(group: &ProcessGroup) -> Result<()> {
    let store = store();
    Autoencoder::new(&store);
    let first = Ddp::new((), &store, group)?;
    let reason = "parameter a.decoder is wrapped in a Ddp already: drop the first";
    says(&error(Ddp::new((), &store, group))?, &[reason])?;
    let weight = store.variables().remove("z.encoder").context("z.encoder")?;
    // On one rank only: an error of all.
    let fresh = Tensor::ones([64, 256], (Kind::Double, device())).set_requires_grad(true);
    let named = vec![("w".to_string(), if group.rank() == 0 { weight } else { fresh })];
    let text = error(Ddp::from_tensors((), named, vec![], group))?;
    says(
        &text,
        &["rank 0 has a model that cannot be wrapped: parameter w is wrapped in a Ddp already"],
    )?;
    drop(first);
    drop(Ddp::new((), &store, group)?);
    // A parameter may not be what others are computed from, either.
    let computed = Tensor::ones([2], (Kind::Float, device())).set_requires_grad(true) * 2;
    let text = error(Ddp::from_tensors((), vec![("computed".into(), computed)], vec![], group))?;
    says(&text, &["computed", "leaf"])
}
