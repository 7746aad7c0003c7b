//! A backward inside a backward, as in checkpointing.

use anyhow::{Context, Result, ensure};
use flow_autograd::GradHook;
use flow_comm::ProcessGroup;
use flow_ddp::Ddp;
use tch::{Kind, Tensor};

use crate::helpers::{error, failure, gradient_is, mean, plausible, says};
use crate::models::{Vectors, device, store};

pub type Loss = Box<dyn Fn() -> Tensor + Send>;

/// As for a checkpointed block, another backward runs inside that of `gate`.
struct Checkpoint {
    gate: Tensor,
    _hook: GradHook,
}

impl Checkpoint {
    fn new(inner: Loss) -> Result<Self> {
        let gate = Tensor::ones([1], (Kind::Float, device())).set_requires_grad(true);
        let hook = GradHook::install(&gate, move |_| Ok(tch::with_grad(&inner).f_backward()?))?;
        Ok(Self { gate, _hook: hook })
    }

    /// The block, after what computes `before` and whose backward comes after its own.
    fn after(&self, before: Tensor) -> Tensor {
        before * &self.gate
    }
}

/// A loss whose backward computes the gradient of the last of these vectors, after an inner one has
/// done so for those before. Each gradient is the factor.
pub fn nest(vectors: &Vectors, indices: &[usize], factor: &Tensor) -> Result<Loss> {
    let term = |index: usize| -> Loss {
        let (vector, factor) = (vectors.0[index].shallow_clone(), factor.shallow_clone());
        Box::new(move || (&vector * &factor).sum(Kind::Float))
    };
    let (first, rest) = indices.split_first().context("a test uses some vector")?;
    rest.iter().try_fold(term(*first), |inner, &index| {
        let (own, block) = (term(index), Checkpoint::new(inner)?);
        Ok(Box::new(move || block.after(own())) as Loss)
    })
}

pub fn factor() -> Tensor {
    Tensor::ones([1], (Kind::Float, device()))
}

/// Inner gradients fill buckets before outer ones come, or share one with them, or are all there
/// are.
pub fn reduced(group: &ProcessGroup) -> Result<()> {
    for (cap, all_inside) in [(0.01, false), (0.01, true), (25.0, false), (25.0, true)] {
        let store = store();
        let builder = Ddp::builder(group).bucket_cap_mb(cap);
        let model = builder.wrap(Vectors::new(&store, &[40_000, 10, 40_000, 10]), &store)?;
        let factor = factor();
        let mut loss = nest(&model, &[0, 1, 2, 3], &factor)?;
        if all_inside {
            let block = Checkpoint::new(loss)?;
            loss = Box::new(move || block.after(Tensor::from(2f32).to(device())));
        }
        for step in 0..4 {
            let own = |rank: usize| (step + 2 * rank) as f64;
            let _ = factor.shallow_clone().fill_(own(group.rank()));
            model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            loss().f_backward()?;
            model.0.iter().try_for_each(|w| gradient_is(w, mean(group, own)))?;
        }
        plausible(&model.stats(), 4)?;
    }
    Ok(())
}

/// Only the end of the outermost backward says which parameters get no gradient.
pub fn unused(group: &ProcessGroup) -> Result<()> {
    for find in [true, false] {
        let store = store();
        let builder = Ddp::builder(group).find_unused_parameters(find);
        let model = builder.wrap(Vectors::new(&store, &[40_000, 10, 40_000, 10]), &store)?;
        let loss = nest(&model, &[0, 3, 1], &factor())?;
        if find {
            for step in 1..=3 {
                loss().f_backward()?;
                [0, 1, 3].iter().try_for_each(|&i| gradient_is(&model.0[i], f64::from(step)))?;
                ensure!(
                    !model.0[2].grad().defined(),
                    "the parameter that nobody uses has got a gradient"
                );
            }
        } else {
            let text = failure(&model, || loss().f_backward())?;
            says(&text, &["no gradient in this backward: rank 0: w2; rank 1: w2"])?;
        }
    }
    Ok(())
}

/// What has been reduced cannot be added to.
pub fn twice(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = Ddp::new(Vectors::new(&store, &[10, 10]), &store, group)?;
    let loss = nest(&model, &[0, 1, 0], &factor())?;
    says(&error(loss().f_backward())?, &["w0 got its gradient twice in one backward"])
}

/// Delayed ones may come several times, before another comes; or another does not come. What comes
/// after it is too late.
pub fn delayed(group: &ProcessGroup) -> Result<()> {
    let own = |rank: usize| (rank + 1) as f64;
    for (graph, is_static) in
        [(&[0, 1, 0, 2][..], false), (&[1, 0, 0], false), (&[0, 1, 0, 2, 0], true)]
    {
        let store = store();
        let builder = Ddp::builder(group).bucket_cap_mb(0.01).static_graph(is_static);
        let model = builder
            .find_unused_parameters(true)
            .delay_all_reduce_named_params(&["w0", "w3"], "w2")
            .wrap(Vectors::new(&store, &[40_000, 10, 10, 10]), &store)?;
        let factor = factor();
        let _ = factor.shallow_clone().fill_(own(group.rank()));
        let loss = nest(&model, graph, &factor)?;
        for _ in 0..4 {
            model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            loss().f_backward()?;
            for (index, vector) in model.0.iter().enumerate() {
                let times = graph.iter().filter(|&&other| other == index).count() as f64;
                if times > 0.0 {
                    gradient_is(vector, times * mean(group, own))?;
                }
            }
        }
        let stats = model.stats();
        let bucket = stats.buckets.iter().find(|bucket| bucket.parameters.contains(&"w0".into()));
        let names = &bucket.context("w0 is reduced")?.parameters;
        ensure!(names.iter().all(|name| name == "w0" || name == "w3"), "{names:?}");
    }
    // Names in any order, and of a tensor that has two.
    let vectors = Vectors::new(&store(), &[40_000, 10, 10]);
    let mut named = Vec::new();
    for (name, index) in [("a", 0), ("also a", 0), ("b", 1), ("also b", 1), ("c", 2)] {
        named.push((name.to_owned(), vectors.0[index].shallow_clone()));
    }
    let names = if group.rank() == 0 { ["c", "also a"] } else { ["also a", "c"] };
    let builder = Ddp::builder(group).delay_all_reduce_named_params(&names, "also b");
    let mut model = builder.wrap_tensors((), named, vec![])?;
    for _ in 0..2 {
        vectors.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        nest(&vectors, &[0, 2, 0, 1], &factor())?().f_backward()?;
        let times = [2.0, 1.0, 1.0];
        vectors.0.iter().zip(times).try_for_each(|(w, times)| gradient_is(w, times))?;
        model.refresh()?;
    }
    drop(model);

    let builder = || Ddp::builder(group).delay_all_reduce_named_params(&["w0"], "w1");
    let store = store();
    let model = builder().wrap(Vectors::new(&store, &[10, 10]), &store)?;
    let loss = nest(&model, &[0, 1, 0], &factor())?;
    says(&error(loss().f_backward())?, &["w0 got its gradient twice in one backward"])?;
    drop(model);
    let vectors = || Vectors::new(&crate::models::store(), &[10]).0.remove(0);
    let named = |name: &str| vec![(name.to_owned(), vectors())];
    let text = error(builder().wrap_tensors((), named("w0"), vec![]))?;
    says(&text, &["names w1, which is no parameter"])?;
    let builder = Ddp::builder(group).delay_all_reduce_named_params(&["w0"], "w0");
    says(&error(builder.wrap_tensors((), named("w0"), vec![]))?, &["name another parameter"])
}
