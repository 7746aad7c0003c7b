//! Training on several ranks against training in one process.

use std::collections::btree_map::{BTreeMap, Entry};

use anyhow::{Context, Result, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::{Ddp, TensorCollectives, convert_sync_batchnorm};
use tch::nn::{self, ModuleT, OptimizerConfig, Path, SequentialT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::helpers::{
    close, copies, gradient_is, gradients, in_place, mean, part, plausible, same_everywhere, values,
};
use crate::models::{self, device, on_gpu, store};

fn float() -> (Kind, Device) {
    (Kind::Float, device())
}

fn index() -> (Kind, Device) {
    (Kind::Int64, device())
}

/// Input r on rank r: the gradient is the mean of the ranks.
pub fn linear(group: &ProcessGroup) -> Result<()> {
    for view in [false, true] {
        let store = store();
        let linear = nn::linear(store.root(), 1, 5, Default::default());
        let model = Ddp::builder(group).gradient_as_bucket_view(view).wrap(linear, &store)?;
        let mut optimizer = nn::Sgd::default().build(&store, 0.01)?;
        for _ in 0..100 {
            optimizer.zero_grad();
            model
                .forward(&Tensor::from_slice(&[group.rank() as f32]).to(device()))
                .sum(Kind::Float)
                .backward();
            gradient_is(&model.ws, (group.world_size() - 1) as f64 / 2.0)?;
            gradient_is(model.bs.as_ref().context("it has a bias")?, 1.0)?;
            optimizer.step();
        }
        same_everywhere(group, &store)?;
        plausible(&model.stats(), 100)?;
    }
    Ok(())
}

pub fn mlp(group: &ProcessGroup) -> Result<()> {
    against_one_process(group, &[6, 784], models::mlp, 4, |_| Ok(()))
}

pub fn lenet(group: &ProcessGroup) -> Result<()> {
    against_one_process(group, &[3, 1, 28, 28], models::lenet, 4, |_| Ok(()))
}

/// With the statistics of all ranks, running ones too, which come to stay when the kind changes.
pub fn sync_batchnorm(group: &ProcessGroup) -> Result<()> {
    let build = |path: &Path| {
        models::batchnorm(&(path / "norms"))
            .add(nn::linear(path / "wide", 10, 2048, Default::default()))
            .add(nn::linear(path / "fc", 2048, 10, Default::default()))
    };
    // Single precision is not enough for more steps.
    let steps = if on_gpu() { 5 } else { 20 };
    against_one_process(group, &[4, 3, 8, 8], build, steps, |store| {
        let layers = convert_sync_batchnorm(store, group)?;
        ensure!(layers == 2, "{layers} layers");
        Ok(())
    })
}

/// A loss that has the gradient of another loss in it (a gradient penalty): each rank's gradients,
/// made by the bare model, are averaged as any others.
pub fn gradient_penalty(group: &ProcessGroup) -> Result<()> {
    let loss = |model: &dyn Fn(&Tensor) -> Tensor, x: &Tensor| -> Result<Tensor> {
        let x = x.detach().set_requires_grad(true);
        let score = model(&x).tanh().sum(Kind::Float);
        let slope = Tensor::f_run_backward(&[&score], &[&x], true, true)?.swap_remove(0);
        Ok(score.square() + slope.square().sum(Kind::Float) * 10.0)
    };
    for view in [false, true] {
        let (wrapped, alone) = (store(), store());
        let model = models::mlp(&wrapped.root());
        let model = Ddp::builder(group).gradient_as_bucket_view(view).wrap(model, &wrapped)?;
        let bare = models::mlp(&alone.root());
        let mut copy = values(&alone);
        let initial = values(&wrapped);
        copy.iter_mut().for_each(|(name, tensor)| tensor.copy_(&initial[name]));
        for _ in 0..3 {
            let x = Tensor::randn([4, 784], float());
            for store in [&wrapped, &alone] {
                let variables = store.variables();
                variables.values().try_for_each(|tensor| flow_autograd::set_grad(tensor, None))?;
            }
            loss(&|x| model.forward_t(x, true), &x)?.f_backward()?;
            loss(&|x| bare.forward_t(x, true), &x)?.f_backward()?;
            let mut expected = gradients(&alone)?;
            for gradient in expected.values_mut() {
                group.all_reduce_tensor(gradient, ReduceOp::Avg)?;
            }
            close(&gradients(&wrapped)?, &expected, 1e-5)?;
        }
    }
    Ok(())
}

/// The same model on the ranks' parts of a batch, and in this process on the whole. Sums are then
/// rounded otherwise, of which training makes more in each step: in double precision on the CPU, so
/// that it stays far below any other difference.
fn against_one_process(
    group: &ProcessGroup,
    shape: &[i64],
    build: fn(&Path) -> SequentialT,
    steps: i64,
    prepare: impl Fn(&VarStore) -> Result<()>,
) -> Result<()> {
    let mut joined = shape.to_vec();
    joined[0] *= group.world_size() as i64;
    for view in [false, true] {
        let (mut alone_store, mut store) = (store(), store());
        // As most are trained on GPUs, which multiply in fewer bits.
        let (kind, tolerance) = if on_gpu() { (Kind::Float, 5e-3) } else { (Kind::Double, 1e-10) };
        tch::manual_seed(1);
        let alone = build(&alone_store.root());
        tch::manual_seed(1 + group.rank() as i64); // rank 0's weights are those that count
        let net = build(&store.root());
        prepare(&store)?;
        alone_store.set_kind(kind);
        store.set_kind(kind);
        let model = Ddp::builder(group).gradient_as_bucket_view(view).wrap(net, &store)?;
        let optimizer = || nn::sgd(0.9, 0.0, 0.0, false);
        let mut alone_optimizer = optimizer().build(&alone_store, 0.05)?;
        let mut optimizer = optimizer().build(&store, 0.05)?;
        for step in 0..steps {
            tch::manual_seed(100 + step);
            let (x, y) = (
                Tensor::randn(&joined, (kind, device())),
                Tensor::randint(10, [joined[0]], index()),
            );
            // As `cross_entropy_for_logits`, which is in single precision whatever the model is in.
            let loss =
                |logits: Tensor, labels: &Tensor| logits.log_softmax(-1, kind).nll_loss(labels);
            alone_optimizer.zero_grad();
            loss(alone.forward_t(&x, true), &y).backward();
            optimizer.zero_grad();
            loss(model.forward_t(&part(&x, group), true), &part(&y, group)).f_backward()?;
            close(&gradients(&store)?, &gradients(&alone_store)?, tolerance)
                .with_context(|| format!("step {step}"))?;
            alone_optimizer.step();
            optimizer.step();
            let stats = model.stats();
            plausible(&stats, step as u64 + 1)?;
            ensure!(
                copies() || on_gpu() || in_place(&stats) > 0,
                "no gradient was born in shared memory: {stats:?}"
            );
        }
        close(&values(&store), &values(&alone_store), tolerance)?;
        same_everywhere(group, &store)?;
    }
    Ok(())
}

/// With running statistics, one process stands for all ranks by taking their parts one after the
/// other, each with the buffers that rank 0 had before, and keeping those that rank 0 has after. On
/// the CPU, arithmetic is the same to the bit.
pub fn mobilenet(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size() as i64;
    // On GPUs a sum is another to the last bit, of which small batches make much in a few steps.
    let (steps, tolerance) = if on_gpu() { (1, 5e-3) } else { (3, 0.0) };
    let (alone_store, store) = (store(), store());
    tch::manual_seed(1);
    let alone = tch::vision::mobilenet::v2(&alone_store.root(), 10);
    tch::manual_seed(1 + group.rank() as i64);
    let model = Ddp::new(tch::vision::mobilenet::v2(&store.root(), 10), &store, group)?;
    let mut alone_optimizer = nn::Sgd::default().build(&alone_store, 0.05)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.05)?;
    for step in 0..steps {
        tch::manual_seed(100 + step);
        let (x, y) = (
            Tensor::randn([4 * ranks, 3, 32, 32], float()),
            Tensor::randint(10, [4 * ranks], index()),
        );
        let loss = |model: &dyn ModuleT, rank: usize| {
            tch::manual_seed(1000 * (step + 1) + rank as i64); // for the dropout
            let part = |joined: &Tensor| joined.chunk(ranks, 0).swap_remove(rank);
            model.forward_t(&part(&x), true).cross_entropy_for_logits(&part(&y))
        };
        let buffers: Vec<Tensor> =
            alone_store.variables().into_values().filter(|t| !t.requires_grad()).collect();
        let copies = || buffers.iter().map(Tensor::copy).collect::<Vec<_>>();
        let put = |copies: &[Tensor]| {
            buffers
                .iter()
                .zip(copies)
                .for_each(|(buffer, copy)| buffer.shallow_clone().copy_(copy));
        };
        let (before, mut after, mut sums) = (copies(), Vec::new(), BTreeMap::new());
        for rank in 0..group.world_size() {
            put(&before);
            alone_optimizer.zero_grad();
            loss(&alone, rank).f_backward()?;
            for (name, gradient) in gradients(&alone_store)? {
                match sums.entry(name) {
                    Entry::Vacant(none) => drop(none.insert(gradient.copy())),
                    Entry::Occupied(mut sum) => *sum.get_mut() += gradient,
                }
            }
            if rank == 0 {
                after = copies();
            }
        }
        put(&after);
        for (name, mut gradient) in gradients(&alone_store)? {
            gradient.copy_(&(&sums[&name] / ranks));
        }
        optimizer.zero_grad();
        loss(&model, group.rank()).f_backward()?;
        close(&gradients(&store)?, &gradients(&alone_store)?, tolerance)
            .with_context(|| format!("step {step}"))?;
        alone_optimizer.step();
        optimizer.step();
    }
    plausible(&model.stats(), steps as u64)?;
    // Each rank's running statistics have seen its own last part; rank 0's are those that count.
    let trained =
        |store| values(store).into_iter().filter(|(name, _)| !name.contains("running")).collect();
    close(&trained(&store), &trained(&alone_store), tolerance)?;
    if group.rank() == 0 {
        close(&values(&store), &values(&alone_store), tolerance)?;
    }
    Ok(())
}

/// libtorch may make a gradient of memory that backward still reads, here a view of what flows on
/// to `scale`: reducing it where it lies would change that.
pub fn shared_gradients(group: &ProcessGroup) -> Result<()> {
    const LENGTH: i64 = 64 << 10;
    let store = store();
    let scale = store.root().ones("scale", &[LENGTH]);
    let offset = store.root().ones("offset", &[LENGTH]);
    let other = store.root().ones("other", &[LENGTH]);
    let own = |rank: usize| (rank + 1) as f64;
    let model = Ddp::builder(group).bucket_cap_mb(1e-3).wrap((), &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.0)?;
    for _ in 0..20 {
        optimizer.zero_grad();
        let scaled = (&scale * own(group.rank())).view([1, LENGTH]);
        let (other, offset) = (other.view([1, LENGTH]), offset.view([1, LENGTH]));
        let factors = Tensor::full([1, LENGTH], own(group.rank()), float());
        ((scaled + other + offset) * factors).sum(Kind::Float).f_backward()?;
        gradient_is(&store.root().get("offset").context("offset")?, mean(group, own))
            .context("offset")?;
        gradient_is(&store.root().get("other").context("other")?, mean(group, own))
            .context("other")?;
        gradient_is(&scale, mean(group, |rank| own(rank) * own(rank))).context("scale")?;
    }
    plausible(&model.stats(), 20)
}
