//! `static_graph`.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::Ddp;
use tch::{Kind, Tensor};

use crate::helpers::{Draws, failure, gradient_is, mean, plausible, says};
use crate::models::{Vectors, store};
use crate::nested::{factor, nest};

const LARGE: i64 = 40_000;

/// Random models: each parameter's gradient comes as often as drawn, and on the ranks that are
/// drawn; some only under `no_sync`.
pub fn random(group: &ProcessGroup) -> Result<()> {
    for seed in 0..40 {
        let mut draws = Draws(seed);
        let count = 1 + draws.below(6) as usize;
        let lengths: Vec<i64> =
            (0..count).map(|_| [1, 0, 10, LARGE][draws.below(4) as usize]).collect();
        // The order in which gradients come in a backward, of each rank. All ranks have the last
        // parameter, so that each has a backward.
        let mut graphs: Vec<Vec<usize>> = Vec::new();
        for _ in 0..group.world_size() {
            let length = draws.below(2 * count as u64);
            let mut graph: Vec<usize> =
                (0..length).map(|_| draws.below(count as u64) as usize).collect();
            graph.push(count - 1);
            graphs.push(graph);
        }
        let times = |index: usize| {
            mean(group, |rank| graphs[rank].iter().filter(|&&other| other == index).count() as f64)
        };
        let store = store();
        let model = Ddp::builder(group)
            .static_graph(true)
            .find_unused_parameters(seed % 3 == 0)
            .gradient_as_bucket_view(seed % 2 == 0)
            .bucket_cap_mb_list(&[[0.00001, 0.1], [0.01, 25.0]][draws.below(2) as usize])
            .wrap(Vectors::new(&store, &lengths), &store)?;
        let factor = factor();
        let loss = nest(&model, &graphs[group.rank()], &factor)?;
        let micro_batches = draws.below(3) as usize;
        let keeps = draws.below(2) == 1;
        let mut sum = 0.0;
        for step in 0..4 {
            let _ = factor.shallow_clone().fill_((step + 1) as f64);
            if !keeps {
                model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
                sum = 0.0;
            }
            for _ in 0..micro_batches {
                model.without_sync(|_| loss().f_backward())?;
            }
            loss().f_backward()?;
            sum += ((step + 1) * (micro_batches + 1)) as f64;
            for (index, vector) in model.0.iter().enumerate() {
                let what =
                    || format!("seed {seed}, step {step}, w{index} of {lengths:?}, {graphs:?}");
                if times(index) == 0.0 {
                    ensure!(!vector.grad().defined(), "{}: nobody uses it", what());
                } else if lengths[index] == 0 {
                    ensure!(vector.grad().defined(), "{}: some rank uses it", what());
                } else {
                    gradient_is(vector, times(index) * sum).with_context(what)?;
                }
            }
        }
        plausible(&model.stats(), 4)?;
        let left: usize = (0..count).filter(|&index| times(index) > 0.0).count();
        let reduced: usize =
            model.stats().buckets.iter().map(|bucket| bucket.parameters.len()).sum();
        ensure!(reduced == left, "{reduced} parameters are reduced, {left} are used by some rank");
    }
    Ok(())
}

/// A graph that is another one in a later backward, on one rank only, is every rank's error.
pub fn changed(group: &ProcessGroup) -> Result<()> {
    let first = [0, 1, 0];
    for (later, words) in [
        (
            &[0, 1, 0, 0][..],
            "w0 has got more gradients in a backward than in the first one, which had 2",
        ),
        (&[0, 1], "no gradient in this backward: rank 0: w0"),
        (&[1, 1, 0], "w1 has got more gradients in a backward than in the first one, which had 1"),
        (&[0, 2, 1, 0], "w2 has got a gradient, and got none on any rank before"),
    ] {
        let store = store();
        let builder = Ddp::builder(group).static_graph(true);
        let model = builder.wrap(Vectors::new(&store, &[LARGE, 10, 10]), &store)?;
        nest(&model, &first, &factor())?().f_backward()?;
        model.0[..2].iter().zip([2.0, 1.0]).try_for_each(|(w, times)| gradient_is(w, times))?;
        let graph = if group.rank() == 0 { later } else { &first[..] };
        let loss = nest(&model, graph, &factor())?;
        // A rank that had all gradients before rank 0 failed gets the error in its next backward.
        let text = match loss().f_backward() {
            Ok(()) => failure(&model, || loss().f_backward())?,
            Err(error) => error.to_string(),
        };
        says(&text, &[words, "static_graph(true)"])?;
    }
    Ok(())
}

/// One parameter is used by rank 0, another by the others. A third, which none uses, keeps its
/// `.grad`.
pub fn unused(group: &ProcessGroup) -> Result<()> {
    for view in [false, true] {
        let store = store();
        let model = Ddp::builder(group)
            .static_graph(true)
            .gradient_as_bucket_view(view)
            .wrap(Vectors::new(&store, &[LARGE, 10, 10]), &store)?;
        let own = usize::from(group.rank() > 0);
        let kept = Tensor::full([10], group.rank() as f64, (Kind::Float, crate::models::device()));
        flow_autograd::set_grad(&model.0[2], Some(&kept))?;
        for step in 1..=3 {
            model.weighted_sum(&[(own, f64::from(step))]).f_backward()?;
            let sum = f64::from(step * (step + 1) / 2);
            gradient_is(&model.0[0], mean(group, |rank| if rank == 0 { sum } else { 0.0 }))?;
            gradient_is(&model.0[1], mean(group, |rank| if rank == 0 { 0.0 } else { sum }))?;
            gradient_is(&model.0[2], group.rank() as f64)?;
        }
    }
    Ok(())
}
