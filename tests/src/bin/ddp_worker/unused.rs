//! `find_unused_parameters`.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, DdpBuilder};
use tch::{Kind, Tensor};

use crate::helpers::{gradient_is, mean, plausible};
use crate::models::{Vectors, device, store};

const LARGE: i64 = 40_000;

fn builders(group: &ProcessGroup) -> impl Iterator<Item = DdpBuilder> {
    let builder = || Ddp::builder(group).find_unused_parameters(true).bucket_cap_mb(0.01);
    [false, true].map(|view| builder().gradient_as_bucket_view(view)).into_iter()
}

/// PyTorch's test: rank 0 uses one parameter, the others another, none a third.
pub fn found(group: &ProcessGroup) -> Result<()> {
    for builder in builders(group) {
        let store = store();
        let [t0, t1, never] = ["t0", "t1", "never"].map(|name| store.root().ones(name, &[2, 2]));
        let model = builder.wrap((), &store)?;
        let others = (group.world_size() - 1) as f64;
        for round in 1..=3 {
            let used = if group.rank() == 0 { &t0 } else { &t1 };
            (used + Tensor::ones([2, 2], (Kind::Float, device())))
                .mean(Kind::Float)
                .f_backward()?;
            // 0.25 on each rank that uses it; two ranks: 0.125 on both. Not cleared, they add up.
            let share = 0.25 / group.world_size() as f64;
            gradient_is(&t0, share * round as f64).context("t0")?;
            gradient_is(&t1, share * others * round as f64).context("t1")?;
            ensure!(!never.grad().defined(), "the parameter that nobody uses has got a gradient");
        }
        plausible(&model.stats(), 3)?;
    }
    Ok(())
}

/// Used by all, by one, by none, in turns; gradients are removed in between.
pub fn now_and_then(group: &ProcessGroup) -> Result<()> {
    for builder in builders(group) {
        let store = store();
        let model = builder.wrap(Vectors::new(&store, &[LARGE, 10, LARGE]), &store)?;
        for step in 0..9 {
            model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            let uses = |rank: usize| match step % 3 {
                0 => true,
                1 => rank == step % group.world_size(),
                _ => false,
            };
            let factor = |rank: usize| (step + rank) as f64;
            let own = (0, factor(group.rank()));
            let factors =
                if uses(group.rank()) { vec![own, (1, own.1), (2, own.1)] } else { vec![own] };
            model.weighted_sum(&factors).f_backward()?;
            gradient_is(&model.0[0], mean(group, factor))?;
            for index in [1, 2] {
                let used = (0..group.world_size()).any(uses);
                ensure!(
                    model.0[index].grad().defined() == used,
                    "step {step}: w{index} was used: {used}"
                );
                if used {
                    gradient_is(
                        &model.0[index],
                        mean(group, |rank| if uses(rank) { factor(rank) } else { 0.0 }),
                    )?;
                }
            }
        }
    }
    Ok(())
}

/// A parameter that no rank uses keeps the gradient it had, though the ranks' differ.
pub fn everywhere(group: &ProcessGroup) -> Result<()> {
    for builder in builders(group) {
        let store = store();
        let model = builder.wrap(Vectors::new(&store, &[10, LARGE, 10]), &store)?;
        model.weighted_sum(&[(0, 1.0), (1, 1.0), (2, 1.0)]).f_backward()?;
        let kept = Tensor::full([LARGE], group.rank() as f64, (Kind::Float, device()));
        flow_autograd::set_grad(&model.0[1], Some(&kept))?;
        let kept = Tensor::full([10], group.rank() as f64 + 0.1, (Kind::Float, device()));
        flow_autograd::set_grad(&model.0[2], Some(&kept))?;
        for _ in 0..3 {
            model.weighted_sum(&[(0, 1.0)]).f_backward()?;
            gradient_is(&model.0[1], group.rank() as f64)?;
            ensure!(model.0[2].grad() == kept, "{}", model.0[2].grad());
        }
        // What was reduced before, and then not used by anybody, stays as well.
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        model.weighted_sum(&[(0, 1.0), (1, 2.0), (2, group.rank() as f64)]).f_backward()?;
        for _ in 0..3 {
            model.weighted_sum(&[(0, 5.0)]).f_backward()?;
            gradient_is(&model.0[1], 2.0)?;
            gradient_is(&model.0[2], mean(group, |rank| rank as f64))?;
        }
    }
    Ok(())
}

/// What a parameter gathered under `no_sync` counts, also if only another rank uses it in the
/// backward that reduces.
pub fn accumulated(group: &ProcessGroup) -> Result<()> {
    for builder in builders(group) {
        let store = store();
        let model = builder.wrap(Vectors::new(&store, &[10, LARGE, 10]), &store)?;
        for step in 0..3 {
            model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            let before = |rank: usize| (step + 2 * rank) as f64;
            let own = before(group.rank());
            model.without_sync(|model| model.weighted_sum(&[(1, own), (2, own)]).f_backward())?;
            let mut factors = vec![(0, 1.0)];
            // In the last step no rank uses them in the backward that reduces.
            let late = |rank: usize| if rank == 0 && step < 2 { 7.0 } else { 0.0 };
            if late(group.rank()) != 0.0 {
                factors.extend([(1, 7.0), (2, 7.0)]);
            }
            model.weighted_sum(&factors).f_backward()?;
            let expected = mean(group, |rank| before(rank) + late(rank));
            gradient_is(&model.0[1], expected)?;
            gradient_is(&model.0[2], expected)?;
        }
    }
    Ok(())
}
