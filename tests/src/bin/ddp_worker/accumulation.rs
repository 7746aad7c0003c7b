//! Gradients over several backwards.

use anyhow::{Context, Result};
use flow_comm::ProcessGroup;
use flow_ddp::Ddp;
use tch::Tensor;
use tch::nn::{self, OptimizerConfig};

use crate::helpers::{gradient_is, mean, plausible};
use crate::models::{Vectors, store};

/// A vector that is born in shared memory, and one that is not.
const LENGTHS: [i64; 2] = [40_000, 10];

/// Under `no_sync` gradients are this rank's own sums; the first backward after it reduces them.
pub fn no_sync(group: &ProcessGroup) -> Result<()> {
    for view in [false, true] {
        let store = store();
        let vectors = Vectors::new(&store, &LENGTHS);
        let model = Ddp::builder(group).gradient_as_bucket_view(view).wrap(vectors, &store)?;
        let mut optimizer = nn::Sgd::default().build(&store, 0.1)?;
        let input = |number: usize, rank: usize| (number * number + 3 * rank + 1) as f64;
        let backward = |number: usize| -> Result<()> {
            Ok(model.forward(&Tensor::from(input(number, group.rank()) as f32)).f_backward()?)
        };
        let all = |expected: f64| model.0.iter().try_for_each(|w| gradient_is(w, expected));
        for round in 0..5 {
            optimizer.zero_grad();
            let first = 4 * round;
            let sum = |count, rank| (first..first + count).map(|n| input(n, rank)).sum::<f64>();
            {
                let _guard = model.no_sync();
                backward(first)?;
                all(sum(1, group.rank())).context("one backward under the guard")?;
                let _inner = model.no_sync();
                backward(first + 1)?;
                all(sum(2, group.rank())).context("two backwards under the guard")?;
            }
            model.without_sync(|_| backward(first + 2))?;
            all(sum(3, group.rank())).context("a backward in the closure")?;
            backward(first + 3)?;
            all(mean(group, |rank| sum(4, rank))).context("the backward that reduces")?;
            optimizer.step();
        }
        // Without clearing, the mean so far is counted by all alike.
        let before = mean(group, |rank| (16..20).map(|n| input(n, rank)).sum());
        backward(20)?;
        all(before + mean(group, |rank| input(20, rank))).context("on top of the last")?;
        plausible(&model.stats(), 6)?;
    }
    Ok(())
}

/// Gradients are local as long as there is one guard, in whatever order they go.
pub fn guards(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = Ddp::new(Vectors::new(&store, &LENGTHS), &store, group)?;
    let own = |rank: usize| (rank + 1) as f64;
    let backward = || Ok(model.forward(&Tensor::from(own(group.rank()) as f32)).f_backward()?);
    let all = |expected: f64| model.0.iter().try_for_each(|w| gradient_is(w, expected));
    let [first, second, third] = [(); 3].map(|()| model.no_sync());
    for (count, guard) in [first, third, second].into_iter().enumerate() {
        backward().and_then(|()| all((count + 1) as f64 * own(group.rank())))?;
        drop(guard);
    }
    backward().and_then(|()| all(mean(group, |rank| 4.0 * own(rank))))
}

/// Several forwards, then as many backwards, in whatever order.
pub fn several_forwards(group: &ProcessGroup) -> Result<()> {
    for view in [false, true] {
        let store = store();
        let vectors = Vectors::new(&store, &LENGTHS);
        let model = Ddp::builder(group).gradient_as_bucket_view(view).wrap(vectors, &store)?;
        let input = |number: usize, rank: usize| (10 * number + rank) as f64;
        for orders in [[0, 1, 2], [2, 0, 1]] {
            let mut losses: Vec<_> = (0..3)
                .map(|n| Some(model.forward(&Tensor::from(input(n, group.rank()) as f32))))
                .collect();
            store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
            let mut expected = 0.0;
            for number in orders {
                losses[number].take().context("once each")?.f_backward()?;
                expected += mean(group, |rank| input(number, rank));
                model.0.iter().try_for_each(|w| gradient_is(w, expected))?;
            }
        }
    }
    Ok(())
}

/// Between steps, gradients may be removed, zeroed in place, or some of each.
pub fn cleared_gradients(group: &ProcessGroup) -> Result<()> {
    for view in [false, true] {
        let store = store();
        let vectors = Vectors::new(&store, &LENGTHS);
        let model = Ddp::builder(group).gradient_as_bucket_view(view).wrap(vectors, &store)?;
        for step in 0..12 {
            for (index, vector) in model.0.iter().enumerate() {
                if (step / (index + 1)) % 2 == 0 {
                    flow_autograd::set_grad(vector, None)?;
                } else {
                    vector.shallow_clone().zero_grad();
                }
            }
            let input = |rank: usize| (step + rank) as f64;
            model.forward(&Tensor::from(input(group.rank()) as f32)).f_backward()?;
            model
                .0
                .iter()
                .try_for_each(|w| gradient_is(w, mean(group, input)))
                .with_context(|| format!("{step}"))?;
        }
    }
    Ok(())
}
