//! Mistakes that are errors on every rank.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::Ddp;
use tch::{Kind, Tensor};

use crate::helpers::{SentAs, error, failure, gradient_is, says};
use crate::models::{Vectors, device, store};

/// Parameters without a gradient fail the backward on all ranks, with the names of all of them.
pub fn unused(group: &ProcessGroup) -> Result<()> {
    // What each rank leaves out: one rank one of them, all the same, each another.
    let cases: [fn(usize) -> Vec<usize>; 4] = [
        |rank| if rank == 1 { vec![1] } else { vec![] },
        |_| vec![1],
        |rank| vec![rank],
        |rank| {
            if rank == 0 { vec![0, 2] } else { vec![] }
        },
    ];
    for (number, leaves_out) in cases.iter().enumerate() {
        for good_steps in [0, 2] {
            let store = store();
            // Large ones of a bucket each, so that some are reduced before the failure.
            let builder = Ddp::builder(group).bucket_cap_mb(0.01);
            let model =
                builder.wrap(Vectors::new(&store, &[40_000, 40_000, 40_000, 10]), &store)?;
            let all: Vec<(usize, f64)> = (0..4).map(|index| (index, 1.0)).collect();
            for _ in 0..good_steps {
                model.weighted_sum(&all).f_backward()?;
            }
            let own = leaves_out(group.rank());
            let used: Vec<_> =
                all.iter().copied().filter(|(index, _)| !own.contains(index)).collect();
            let text = failure(&model, || model.weighted_sum(&used).f_backward())?;
            let (_, text) =
                text.split_once("no gradient in this backward: ").with_context(|| text.clone())?;
            let context = || format!("case {number} after {good_steps} good steps: {text}");
            for rank in 0..group.world_size() {
                let names: Vec<String> = leaves_out(rank).iter().map(|i| format!("w{i}")).collect();
                let listed = format!("rank {rank}: {}", names.join(", "));
                ensure!(text.contains(&listed) != names.is_empty(), context());
            }
            says(text, &["find_unused_parameters", "before wrapping"]).with_context(context)?;
            // The group cannot be used any more, and says why.
            let text = error(model.weighted_sum(&all).f_backward())?;
            says(&text, &["unusable", "no gradient"]).with_context(context)?;
            drop(model);
            // Wrapped again, all is well.
            let w0 = store.root().get("w0").context("w0")?;
            flow_autograd::set_grad(&w0, None)?;
            let again =
                Ddp::from_tensors((), vec![("w0".into(), w0.shallow_clone())], vec![], group)?;
            (&w0 * 2).sum(Kind::Float).f_backward()?;
            gradient_is(&w0, 2.0)?;
            drop(again);
        }
    }
    Ok(())
}

/// A parameter that is frozen after wrapping is named as such.
pub fn frozen_later(group: &ProcessGroup) -> Result<()> {
    for good_steps in [0, 2] {
        let store = store();
        let model = Ddp::new(Vectors::new(&store, &[10, 40_000]), &store, group)?;
        let all = [(0, 1.0), (1, 1.0)];
        for _ in 0..good_steps {
            model.weighted_sum(&all).f_backward()?;
        }
        let _ = model.0[1].set_requires_grad(false);
        let text = error(model.weighted_sum(&all).f_backward())?;
        says(
            &text,
            &[
                "rank 0: w1 (frozen after wrapping)",
                "rank 1: w1 (frozen after wrapping)",
                "before wrapping",
            ],
        )?;
    }
    Ok(())
}

/// Models that differ are an error on every rank, which names what differs and both ranks.
pub fn differing_models(group: &ProcessGroup) -> Result<()> {
    let last = group.world_size() - 1;
    let odd = group.rank() == last;
    let ranks = ["rank 0 has".to_string(), format!("rank {last} has")];
    let tensor =
        |shape: &[i64], kind| Tensor::zeros(shape, (kind, device())).set_requires_grad(true);
    let plain = || {
        vec![
            ("first".to_string(), tensor(&[3], Kind::Float)),
            ("weight".into(), tensor(&[2], Kind::Float)),
        ]
    };
    type Change = fn(Vec<(String, Tensor)>) -> Vec<(String, Tensor)>;
    let changes: [(Change, &str); 6] = [
        (
            |mut t| {
                t[1].0 = "renamed".into();
                t
            },
            "renamed",
        ),
        (
            |mut t| {
                t[1].1 = Tensor::zeros([3], (Kind::Float, device())).set_requires_grad(true);
                t
            },
            "[3]",
        ),
        (
            |mut t| {
                t[1].1 = Tensor::zeros([2], (Kind::Double, device())).set_requires_grad(true);
                t
            },
            "Double",
        ),
        (
            |t| {
                let _ = t[1].1.set_requires_grad(false);
                t
            },
            "requires_grad=false",
        ),
        (
            |mut t| {
                t.pop();
                t
            },
            "nothing",
        ),
        (
            |mut t| {
                t.swap(0, 1);
                t
            },
            "first",
        ),
    ];
    for (change, named) in changes {
        let tensors = if odd { change(plain()) } else { plain() };
        let text = error(Ddp::from_tensors((), tensors, vec![], group))?;
        says(&text, &["differs between ranks", &ranks[0], &ranks[1], "weight", named])?;
    }
    // Longer on one rank than on the other.
    let mut tensors = plain();
    if odd {
        tensors.push(("another".into(), tensor(&[1], Kind::Float)));
    }
    let text = error(Ddp::from_tensors((), tensors, vec![], group))?;
    says(&text, &["another", "rank 0 has nothing", &ranks[1]])?;
    // Options.
    let builder = if odd { Ddp::builder(group).bucket_cap_mb(3.0) } else { Ddp::builder(group) };
    says(&error(builder.wrap_tensors((), plain(), vec![]))?, &["options", &ranks[0], &ranks[1]])?;
    // Nothing was broken by all this.
    Ddp::from_tensors((), plain(), vec![], group)?;
    Ok(())
}

/// Models that cannot be wrapped, alike on all ranks.
pub fn unfit_models(group: &ProcessGroup) -> Result<()> {
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, device()));
    let trained = |shape: &[i64]| float(shape).set_requires_grad(true);
    let named = |tensor| vec![("weight".to_string(), tensor)];
    says(&error(Ddp::from_tensors((), named(float(&[2])), vec![], group))?, &["no parameter"])?;
    says(&error(Ddp::from_tensors((), vec![], vec![], group))?, &["no parameter"])?;
    let complex = Tensor::empty([2], (Kind::ComplexHalf, device())).set_requires_grad(true);
    says(
        &error(Ddp::from_tensors((), named(complex), vec![], group))?,
        &["weight", "ComplexHalf"],
    )?;
    let builder = || Ddp::builder(group);
    says(
        &error(builder().bucket_cap_mb(0.0).wrap_tensors((), named(trained(&[2])), vec![]))?,
        &["cap"],
    )?;
    let integers = builder().comm_hook(SentAs(Kind::Int));
    says(&error(integers.wrap_tensors((), named(trained(&[2])), vec![]))?, &["Int", "BFloat16"])?;
    // Parameters without elements are no mistake.
    let model = Ddp::from_tensors(
        (),
        vec![("none".into(), trained(&[0])), ("some".into(), trained(&[2]))],
        vec![],
        group,
    )?;
    drop(model);
    Ok(())
}
