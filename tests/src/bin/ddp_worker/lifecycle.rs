//! Wrapping, unwrapping, and what stays as it was.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, DistributedSampler, TensorCollectives};
use tch::nn::{self, Module, ModuleT, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{
    copies, error, failure, gradient_is, in_place, mean, plausible, same_everywhere, says,
};
use crate::models::{self, Vectors, device, on_gpu, store};

/// Parameters that are frozen before wrapping have no part in anything.
pub fn frozen(group: &ProcessGroup) -> Result<()> {
    let vectors = |store: &VarStore| {
        let vectors = Vectors::new(store, &[10, 40_000, 10]);
        let _ = vectors.0[1].set_requires_grad(false);
        vectors
    };
    let store = store();
    frozen_in(group, Ddp::new(vectors(&store), &store, group)?)?;
    let vectors = vectors(&self::store());
    let named =
        vectors.0.iter().enumerate().map(|(i, w)| (format!("w{i}"), w.shallow_clone())).collect();
    frozen_in(group, Ddp::from_tensors(vectors, named, vec![], group)?)
}

fn frozen_in(group: &ProcessGroup, model: Ddp<Vectors>) -> Result<()> {
    for _ in 0..3 {
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        model.forward(&Tensor::from(group.rank() as f32)).f_backward()?;
        for trained in [0, 2] {
            gradient_is(&model.0[trained], mean(group, |rank| rank as f64))?;
        }
        ensure!(!model.0[1].grad().defined());
    }
    let stats = model.stats();
    ensure!(stats.buckets.iter().all(|b| !b.parameters.contains(&"w1".to_string())), "{stats:?}");
    // It is no buffer either: nobody sends it with each forward.
    let _ = model.0[1].data().fill_(group.rank() as f64);
    let _ = model.forward(&Tensor::from(1f32));
    ensure!(
        model.0[1].data().max().double_value(&[]) == group.rank() as f64,
        "a frozen parameter was overwritten"
    );
    // Trained after all, it would be trained by each rank alone.
    let _ = model.0[1].set_requires_grad(true);
    says(
        &error(model.forward(&Tensor::from(1f32)).f_backward())?,
        &["w1 was frozen", "call refresh"],
    )
}

/// Parameters are frozen and unfrozen between steps.
pub fn refreshed(group: &ProcessGroup) -> Result<()> {
    let input = Tensor::from(group.rank() as f32);
    let expected = mean(group, |rank| rank as f64);
    for (view, is_static) in [(false, false), (true, false), (false, true), (true, true)] {
        let store = store();
        let mut model = Ddp::builder(group)
            .gradient_as_bucket_view(view)
            .static_graph(is_static)
            .wrap(Vectors::new(&store, &[10, 40_000, 10]), &store)?;
        for trained in [&[0, 1, 2][..], &[0, 2], &[1], &[0, 1, 2]] {
            for (index, vector) in model.0.iter().enumerate() {
                let _ = vector.set_requires_grad(trained.contains(&index));
                flow_autograd::set_grad(vector, Some(&vector.full_like(7.0)))?;
            }
            model.refresh()?;
            for steps in 1..=3 {
                model.forward(&input).f_backward()?;
                for (index, vector) in model.0.iter().enumerate() {
                    let steps = if trained.contains(&index) { f64::from(steps) } else { 0.0 };
                    gradient_is(vector, 7.0 + steps * expected)?;
                }
            }
            let stats = model.stats();
            let reduced: usize = stats.buckets.iter().map(|bucket| bucket.parameters.len()).sum();
            ensure!(reduced == trained.len(), "{trained:?} are trained: {stats:?}");
        }
        ensure!(model.stats().backwards == 12);

        // What is accumulated is reduced after all, and nothing of a frozen one is left over.
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        model.without_sync(|model| model.forward(&input).f_backward())?;
        let _ = model.0[2].set_requires_grad(false);
        says(&error(model.refresh())?, &["w2 was frozen with a gradient that is not reduced"])?;
        let _ = model.0[2].set_requires_grad(true);
        model.refresh()?;
        model.forward(&input).f_backward()?;
        model.0.iter().try_for_each(|w| gradient_is(w, 2.0 * expected))?;

        // A gradient that was dropped is none.
        model.without_sync(|model| model.forward(&input).f_backward())?;
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        let _ = model.0[0].set_requires_grad(false);
        model.refresh()?;

        // Rank 0's values, as when a model is wrapped, of what was frozen.
        let _ = tch::no_grad(|| model.0[0].shallow_clone().fill_(group.rank() as f64 + 3.0));
        let _ = model.0[0].set_requires_grad(true);
        model.refresh()?;
        ensure!(model.0[0].detach() == Tensor::full_like(&model.0[0].detach(), 3.0));

        // Another one's: this one goes on as before.
        let _ = model.0[2].set_requires_grad(false);
        model.refresh()?;
        let _ = model.0[2].set_requires_grad(true);
        let named = vec![("w2".to_owned(), model.0[2].shallow_clone())];
        let other = Ddp::from_tensors((), named, vec![], group)?;
        says(&error(model.refresh())?, &["parameter w2 is wrapped in a Ddp already"])?;
        drop(other);
        let _ = model.0[2].set_requires_grad(false);
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        model.forward(&input).f_backward()?;
        model.0[..2].iter().try_for_each(|w| gradient_is(w, expected))?;
        let _ = model.0[2].set_requires_grad(true);
        model.refresh()?;
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        model.forward(&input).f_backward()?;
        model.forward(&input).f_backward()?;

        // Not all ranks, or nothing.
        let _ = model.0[1].set_requires_grad(group.rank() != 1);
        says(&error(model.refresh())?, &["w1", "rank 0", "rank 1", "requires_grad=false"])?;
        model.0.iter().for_each(|w| drop(w.set_requires_grad(false)));
        says(&error(model.refresh())?, &["no parameter that requires a gradient"])?;
        model.0.iter().for_each(|w| drop(w.set_requires_grad(true)));
        model.forward(&input).f_backward()?;
        model.0.iter().try_for_each(|w| gradient_is(w, 3.0 * expected))?;
    }
    Ok(())
}

#[derive(Debug)]
struct WithBuffer {
    weight: Tensor,
    buffer: Tensor,
    count: Tensor,
}

impl ModuleT for WithBuffer {
    fn forward_t(&self, x: &Tensor, _train: bool) -> Tensor {
        (x * &self.weight).sum(Kind::Float) + self.buffer.sum(Kind::Float)
    }
}

impl WithBuffer {
    /// Buffers hold `own`, one of them lies in memory column by column.
    fn new(store: &VarStore, own: i64) -> Self {
        let mut weight = store.root().ones("weight", &[3]);
        let _ = tch::no_grad(|| weight.fill_(own));
        let buffer = store.root().add_tensor("buffer", own, &[2, 3]);
        let count = store.root().add_tensor("count", own, &[1]);
        Self { weight, buffer, count }
    }

    fn buffers(&self) -> (f64, f64) {
        (self.buffer.max().double_value(&[]), self.count.max().double_value(&[]))
    }
}

trait AddTensor {
    fn add_tensor(&self, name: &str, value: i64, shape: &[i64]) -> Tensor;
}

impl AddTensor for nn::Path<'_> {
    fn add_tensor(&self, name: &str, value: i64, shape: &[i64]) -> Tensor {
        let mut tensor = self.zeros_no_train(name, shape);
        let _ = tensor.fill_(value);
        tensor
    }
}

/// Buffers are rank 0's from construction on, and anew with each forward in training mode; or each
/// rank's own all along.
pub fn buffers(group: &ProcessGroup) -> Result<()> {
    let own = group.rank() as i64 + 5;
    for (broadcast, in_forward) in [(true, true), (false, true), (true, false)] {
        let store = store();
        let builder =
            Ddp::builder(group).broadcast_buffers(broadcast).forward_sync_buffers(in_forward);
        let model = builder.wrap(WithBuffer::new(&store, own), &store)?;
        let expected = if broadcast { 5.0 } else { own as f64 };
        ensure!(
            model.buffers() == (expected, expected),
            "{:?} instead of {expected}",
            model.buffers()
        );
        ensure!(
            model.weight.detach() == Tensor::from_slice(&[5f32; 3]).to(device()),
            "{}",
            model.weight
        );
        let x = Tensor::from(1f32);
        let set = |value: i64| {
            let _ = model.buffer.shallow_clone().fill_(value);
            let _ = model.count.shallow_clone().fill_(value);
        };
        set(own);
        let _ = tch::no_grad(|| model.forward_t(&x, false));
        ensure!(
            model.buffers() == (own as f64, own as f64),
            "a forward in evaluation changed the buffers"
        );
        model.without_sync(|model| model.forward_t(&x, true)).f_backward()?;
        ensure!(
            model.buffers() == (own as f64, own as f64),
            "a forward under no_sync changed the buffers"
        );
        model.try_forward_t(&x, true)?.f_backward()?;
        let after_forward = if in_forward { expected } else { own as f64 };
        ensure!(
            model.buffers() == (after_forward, after_forward),
            "{:?} instead of {after_forward}",
            model.buffers()
        );
        model.sync_buffers()?;
        ensure!(
            model.buffers() == (expected, expected),
            "{:?} instead of {expected}",
            model.buffers()
        );
    }
    Ok(())
}

/// What the model gets after it is wrapped would not be shared.
pub fn changed(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let own = group.rank() as i64 + 5;
    let mut model = Ddp::new(WithBuffer::new(&store, own), &store, group)?;
    let x = Tensor::from(1f32).to(device());
    let another = model.buffer.shallow_clone();
    model.try_forward_t(&x, true)?.f_backward()?;
    drop(another);
    let _ = model.buffer.fill_(own);
    model.try_forward_t(&x, true)?.f_backward()?;
    ensure!(model.buffers() == (5.0, 5.0), "a buffer that was written to is no longer rank 0's");
    let buffer =
        std::mem::replace(&mut model.buffer, Tensor::ones([2, 3], (Kind::Float, device())));
    drop(model.forward_t(&x, false));
    model.without_sync(|model| model.try_forward_t(&x, true).map(drop))?;
    // As long as the old one is held, it might be the model's.
    drop(model.try_forward_t(&x, true)?);
    // Whoever finds it ends the group, in which another rank may still be in that forward.
    group.barrier()?;
    drop(buffer);
    says(
        &error(model.try_forward_t(&x, true))?,
        &["the buffer buffer", "copy_", "wrap the model again"],
    )?;
    // On one rank only: the others, who wait for its buffers, hear of it. On GPUs no host waits
    // there.
    if !on_gpu() {
        let store = self::store();
        let mut model = Ddp::new(WithBuffer::new(&store, own), &store, group)?;
        if group.rank() == 1 {
            model.buffer = Tensor::ones([2, 3], (Kind::Float, device()));
        }
        says(&error(model.try_forward_t(&x, true))?, &["rank 1", "the buffer buffer", "copy_"])?;
    }

    let store = self::store();
    let model = Ddp::new(Vectors::new(&store, &[10]), &store, group)?;
    model.forward(&x).f_backward()?;
    let _fixed = store.root().zeros_no_train("fixed", &[2]);
    model.forward(&x).f_backward()?;
    let _later = (store.root() / "head").ones("later", &[2]);
    says(
        &error(model.forward(&x).f_backward())?,
        &["head.later was added after the model was wrapped"],
    )
}

/// A dropped wrapper leaves hooks and allocator as they were before; a second one works.
pub fn wrapped_again(group: &ProcessGroup) -> Result<()> {
    fn sendable<T: Send>(value: T) -> T {
        value
    }
    let store = store();
    let mut vectors = Vectors::new(&store, &[40_000, 10]);
    for round in 0..3 {
        let model = sendable(Ddp::new(vectors, &store, group)?);
        let input = |rank: usize| (rank + round) as f64;
        // Training may run on another thread than wrapping.
        let model = std::thread::scope(|scope| {
            let train = || {
                model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
                model.forward(&Tensor::from(input(group.rank()) as f32)).f_backward()?;
                anyhow::Ok(model)
            };
            scope.spawn(train).join().map_err(|_| anyhow::anyhow!("training panicked"))?
        })?;
        model.0.iter().try_for_each(|w| gradient_is(w, mean(group, input)))?;
        ensure!(copies() || in_place(&model.stats()) > 0, "{:?}", model.stats());
        let inside = flow_autograd::data_ptr(&Tensor::zeros([100_000], (Kind::Float, device())));
        let before = group.arena().usage().0;
        vectors = model.into_inner();
        vectors.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        ensure!(group.arena().usage().0 < before, "dropping the wrapper freed nothing");
        vectors.forward(&Tensor::from(input(group.rank()) as f32)).f_backward()?;
        vectors
            .0
            .iter()
            .try_for_each(|w| gradient_is(w, input(group.rank())))
            .context("unwrapped")?;
        let outside = Tensor::zeros([100_000], (Kind::Float, device()));
        let at = |pointer: *mut u8| pointer.addr().wrapping_sub(group.arena().at(0).addr());
        ensure!(
            group.arena().contains(at(inside), 1),
            "a large tensor was not born in shared memory"
        );
        ensure!(
            !group.arena().contains(at(flow_autograd::data_ptr(&outside)), 1),
            "the allocator is still there after the wrapper"
        );
    }
    Ok(())
}

/// Models of several joins of the job are reduced in place, all of them, whichever ends first.
pub fn joined_again(group: &ProcessGroup) -> Result<()> {
    const LENGTH: i64 = 40_000;
    let model = |group: &ProcessGroup| {
        let store = store();
        Ddp::new(Vectors::new(&store, &[LENGTH, 10]), &store, group)
    };
    let reduces_in_place = |model: &Ddp<Vectors>| {
        let input = |rank: usize| (rank + 1) as f64;
        for _ in 0..3 {
            model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            model.forward(&Tensor::from(input(group.rank()) as f32)).f_backward()?;
            model.0.iter().try_for_each(|w| gradient_is(w, mean(group, input)))?;
            let reduced = in_place(&model.stats());
            ensure!(copies() || reduced == LENGTH as usize * 4, "{reduced} bytes in place");
        }
        anyhow::Ok(())
    };
    let first = model(group)?;
    for round in 0..3 {
        let again = ProcessGroup::from_env()?;
        let second = model(&again)?;
        for _ in 0..2 {
            reduces_in_place(&first).context("the first model")?;
            reduces_in_place(&second).context("the second model")?;
        }
        if round == 1 {
            drop(again); // the model keeps what it needs
            reduces_in_place(&second).context("without its group")?;
        }
        drop(second);
        reduces_in_place(&first).context("after the second model")?;
    }
    // As if each evaluation joined anew, now with the first model gone.
    let again = ProcessGroup::from_env()?;
    let last = model(&again)?;
    drop(first);
    reduces_in_place(&last).context("after the first model")?;
    let third = ProcessGroup::from_env()?;
    reduces_in_place(&model(&third)?).context("a third join")?;
    drop(last);
    let outside = Tensor::zeros([LENGTH], (Kind::Float, device()));
    let at = |group: &ProcessGroup| {
        flow_autograd::data_ptr(&outside).addr().wrapping_sub(group.arena().at(0).addr())
    };
    for group in [group, &again, &third] {
        ensure!(
            !group.arena().contains(at(group), 1),
            "the allocator is still there after the last model"
        );
    }

    // A model that some ranks have alone allocates in their join: with others there is no common
    // place but that of a new one.
    let some = group.new_group(&[0, group.world_size() - 1])?;
    let some = some.filter(|_| group.world_size() > 2);
    let alone = some.as_ref().map(&model).transpose()?;
    let again = ProcessGroup::from_env()?;
    let all = model(&again)?;
    reduces_in_place(&all).context("a model of all beside one of some")?;
    drop(all);
    if let (Some(alone), Some(some)) = (&alone, &some) {
        alone.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        alone.forward(&Tensor::from(some.rank() as f32)).f_backward()?;
        alone.0.iter().try_for_each(|w| gradient_is(w, 0.5))?;
        ensure!(copies() || in_place(&alone.stats()) > 0, "the allocator is not back where it was");
    }
    Ok(())
}

/// A group of some of the ranks trains by itself, while the others do not.
pub fn sub_group(group: &ProcessGroup) -> Result<()> {
    let members = [0, group.world_size() - 1];
    let sub = group.new_group(&members)?;
    ensure!(sub.is_some() == members.contains(&group.rank()));
    if let Some(sub) = sub {
        let store = store();
        let model = Ddp::new(Vectors::new(&store, &[40_000, 10]), &store, &sub)?;
        for _ in 0..3 {
            model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            model.forward(&Tensor::from(group.rank() as f32)).f_backward()?;
            model.0.iter().try_for_each(|w| gradient_is(w, members[1] as f64 / 2.0))?;
        }
        same_everywhere(&sub, &store)?;
        let uses = if sub.rank() == 0 { vec![(0, 1.0)] } else { vec![(0, 1.0), (1, 1.0)] };
        let text = failure(&model, || model.weighted_sum(&uses).f_backward())?;
        says(&text, &[&format!("rank {}: Ddp", group.rank()), "backward: rank 0: w1"])?;
    }
    // What befell the sub-group is no matter to the group it came from.
    group.barrier()?;
    Ok(())
}

/// Two hundred steps need no more memory than twenty.
pub fn memory(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = Ddp::new(models::mlp(&store.root()), &store, group)?;
    let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&store, 0.01)?;
    let mut train = |steps| {
        for _ in 0..steps {
            let x = Tensor::randn([16, 784], (Kind::Float, device()));
            let loss = model.forward_t(&x, true).square().mean(Kind::Float);
            optimizer.backward_step(&loss);
        }
    };
    train(20);
    let before = resident()?;
    train(200);
    let after = resident()?;
    ensure!(after < before + (8 << 20), "memory grew from {before} to {after} bytes");
    Ok(())
}

/// From the second backward on the host waits for a GPU in no step. The fake writes down when
/// it does.
pub fn waits(group: &ProcessGroup) -> Result<()> {
    let prefix = std::env::var("FLOW_FAKE_WAITS").context("only the fake can tell")?;
    let file = format!("{prefix}.{}", group.rank());
    let waits = || std::fs::read_to_string(&file).unwrap_or_default();
    let store = store();
    let net = nn::seq_t().add(models::mlp(&store.root())).add(nn::batch_norm1d(
        store.root(),
        10,
        Default::default(),
    ));
    let model = Ddp::builder(group).bucket_cap_mb(0.1).wrap(net, &store)?;
    let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&store, 0.01)?;
    let mut train = |steps| {
        for _ in 0..steps {
            let x = Tensor::randn([16, 784], (Kind::Float, device()));
            optimizer.backward_step(&model.forward_t(&x, true).square().mean(Kind::Float));
        }
    };
    train(2);
    let before = waits();
    ensure!(!before.is_empty(), "the fake has noted no waits at all");
    train(5);
    let after = waits();
    ensure!(before == after, "the host waited for the device: {:?}", after.strip_prefix(&before));
    Ok(())
}

/// Bytes of this process' memory that are there.
fn resident() -> Result<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    let pages: usize = pages.split(' ').nth(1).context("statm has two fields")?.parse()?;
    Ok(pages * rustix::param::page_size())
}

/// All ranks' indices are those of the whole data set.
pub fn sampler(group: &ProcessGroup) -> Result<()> {
    let length = 5 * group.world_size();
    let sampler = DistributedSampler::new(length, group).shuffle(true).seed(3);
    let own: Vec<i64> = sampler.iter().map(|index| index as i64).collect();
    let all = group.all_gather_tensor(&Tensor::from_slice(&own))?;
    let mut all: Vec<i64> = all.flatten(0, 1).try_into()?;
    all.sort_unstable();
    ensure!(all == (0..length as i64).collect::<Vec<_>>(), "{all:?}");
    Ok(())
}

/// With one rank, nothing is installed.
pub fn alone(group: &ProcessGroup) -> Result<()> {
    if let Some(one) = group.new_group(&[0])? {
        let store = store();
        let model = Ddp::new(Vectors::new(&store, &[40_000, 10]), &store, &one)?;
        let hook = flow_autograd::GradHook::install(&model.0[0], |_| Ok(()))?;
        let _guard = model.no_sync();
        model.forward(&Tensor::from(3f32)).f_backward()?;
        model.0.iter().try_for_each(|w| gradient_is(w, 3.0))?;
        ensure!(model.stats().backwards == 0 && model.stats().buckets.is_empty());
        plausible(&model.stats(), 0)?;
        drop(hook);
    }
    Ok(())
}
