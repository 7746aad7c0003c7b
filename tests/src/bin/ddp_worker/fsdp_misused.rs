//! `Fsdp` where it cannot work: errors that say what would be right, on all ranks.

use anyhow::{Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, Error, Fsdp, JoinOptions, MixedPrecision, join};
use tch::nn::{Adam, ModuleT, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{error, says};
use crate::models::{Vectors, device, store};

fn says_in_a_line(text: String, words: &[&str]) -> Result<()> {
    ensure!(text.lines().count() == 1, "{text}");
    says(&text, words)
}

fn wrapped(group: &ProcessGroup, store: &VarStore) -> flow_ddp::Result<Fsdp<Vectors>> {
    Fsdp::new(Vectors::new(store, &[10, 100_000]), store, group)
}

fn backward(model: &Fsdp<Vectors>) -> flow_ddp::Result<()> {
    let loss = model.weighted_sum(&[(0, 1.0), (1, 1.0)]);
    loss.f_backward().map_err(Error::from_backward)
}

/// Models and options that cannot be, and what only a `Ddp` or its optimizer can do.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let unlike = store();
    let model = Vectors::new(&unlike, if rank == 1 { &[10, 11] } else { &[10, 10] });
    let words = ["rank 0 has parameter w1 [10]", "rank 1 has parameter w1 [11]"];
    says_in_a_line(error(Fsdp::new(model, &unlike, group))?, &words)?;
    let empty = store();
    says_in_a_line(error(Fsdp::new(Vectors(Vec::new()), &empty, group))?, &["no parameter"])?;
    let tied = store();
    let mut model = Vectors::new(&tied, &[10, 10]);
    let first = model.0[0].detach();
    model.0[1].set_data(&first);
    says_in_a_line(error(Fsdp::new(model, &tied, group))?, &["lie in the same memory"])?;

    // A model of which a Ddp has a parameter stays that one's.
    let own = store();
    let ddp = Ddp::new(Vectors::new(&own, &[10]), &own, group)?;
    let again = Vectors(vec![ddp.0[0].shallow_clone()]);
    says_in_a_line(error(Fsdp::new(again, &own, group))?, &["wrapped in a Ddp already"])?;
    stays_apart(group, &own)?;
    drop(ddp);
    let half = MixedPrecision { param: Some(Kind::Half), ..Default::default() };
    let double = store();
    let like = (Kind::Double, device());
    let model = Vectors(vec![double.root().add("w0", Tensor::ones([10], like), true)]);
    let text = error(Fsdp::builder(group).mixed_precision(half).wrap(model, &double))?;
    says_in_a_line(text, &["make all parameters Float"])?;
    stays_apart(group, &double)?;

    let own = store();
    let model = wrapped(group, &own)?;
    let text = error(join(&[&*model], JoinOptions::default(), || Ok::<_, Error>(())))?;
    says_in_a_line(text, &["that of an Fsdp", "as many inputs"])?;
    let optimizer = model.optimizer(Adam::default(), 1.0)?;
    let text = error(join(&[&optimizer], JoinOptions::default(), || Ok::<_, Error>(())))?;
    says_in_a_line(text, &["a sharded model cannot join", "as many inputs"])?;
    let builder = Ddp::builder(group).hook_with_zero_step(&optimizer);
    let other = store();
    let text = error(builder.wrap(Vectors::new(&other, &[10]), &other))?;
    says_in_a_line(text, &["the optimizer of a sharded model: call step after backward"])?;
    let again = Vectors(model.0.iter().map(Tensor::shallow_clone).collect());
    let left = store();
    drop(wrapped(group, &left)?);
    let again_left = Vectors(left.trainable_variables());
    for (model, store) in [(again, &own), (again_left, &left)] {
        let text = error(Ddp::new(model, store, group))?;
        says_in_a_line(text, &["have w0 in common", "call into_inner of the Fsdp"])?;
    }
    let apart = store();
    drop(wrapped(group, &apart)?.into_inner());
    Ddp::new(Vectors(apart.trainable_variables()), &apart, group)?;
    let _ = own.root().ones("later", &[3]);
    let text = error(model.optimizer(Adam::default(), 1.0))?;
    says_in_a_line(text, &["got variables since the model was wrapped"])
}

/// Each rank can change `w0` for itself.
fn stays_apart(group: &ProcessGroup, store: &VarStore) -> Result<()> {
    let mut w0 = store.variables().remove("w0").unwrap_or_default();
    let value = 2.0 + group.rank() as f64;
    tch::no_grad(|| w0.f_fill_(value).map(|_| ()))?;
    group.barrier()?;
    ensure!(w0.double_value(&[0]) == value, "w0 is {}, not {value}", w0.double_value(&[0]));
    Ok(())
}

/// An optimizer of the `VarStore` finds no gradients, which is an error.
pub fn other_optimizer(group: &ProcessGroup) -> Result<()> {
    let own = store();
    let model = wrapped(group, &own)?;
    backward(&model)?;
    model.zero_grad()?;
    let mut plain = Sgd::default().build(&own, 0.1)?;
    backward(&model)?;
    plain.step();
    plain.zero_grad();
    let words = ["Fsdp: the gradients of the last backward were not used", "Fsdp::optimizer"];
    says_in_a_line(error(backward(&model))?, &words)
}

/// Changes of parameters by each rank are errors, those in `write` are made once.
pub fn written(group: &ProcessGroup) -> Result<()> {
    let words = ["w0 was changed in place", "Fsdp::write"];
    let own = store();
    let mut model = wrapped(group, &own)?;
    let mut w0 = model.0[0].shallow_clone();
    let value = || own.variables()["w0"].double_value(&[3]);
    model.write(|| w0.f_fill_(5.0).map(|_| ()))?;
    ensure!(value() == 5.0, "{}", value());
    model.write(|| w0.f_mul_scalar_(2.0).map(|_| ()))?;
    ensure!(value() == 10.0, "{}", value());
    says_in_a_line(error(model.write(|| Err("no such file")))?, &["parameters: no such file"])?;
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    backward(&model)?;
    optimizer.step()?;
    ensure!((value() - 9.0).abs() < 1e-5, "{}", value());
    group.barrier()?;

    // By one rank, before what all ranks call.
    if group.rank() == 1 {
        let _ = tch::no_grad(|| w0.g_add_scalar_(1.0));
    }
    says_in_a_line(error(model.write(|| Ok::<_, Error>(())))?, &words)?;
    says_in_a_line(error(model.refresh())?, &words)?;
    says_in_a_line(error(optimizer.step())?, &words)?;
    says_in_a_line(error(backward(&model))?, &words)?;

    // Other memory.
    let own = store();
    let model = wrapped(group, &own)?;
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    let mut w0 = model.0[0].shallow_clone();
    let other = w0.detach().copy();
    backward(&model)?;
    w0.set_data(&other);
    let words = ["w0 has other memory since (set_data"];
    says_in_a_line(error(optimizer.step())?, &words)?;
    let own = store();
    let model = wrapped(group, &own)?;
    let mut w0 = model.0[0].shallow_clone();
    let change = || {
        w0.set_data(&w0.detach().to_kind(Kind::Double));
        Ok::<_, Error>(())
    };
    says_in_a_line(error(model.write(change))?, &words)
}

/// What ranks write by `write` includes the buffers of the one that does.
pub fn buffers(group: &ProcessGroup) -> Result<()> {
    let own = store();
    let mut mean = own.root().add("mean", Tensor::zeros([3], (Kind::Float, device())), false);
    let model = wrapped(group, &own)?;
    model.write(|| mean.f_fill_(4.0).map(|_| ()))?;
    let value = own.variables()["mean"].double_value(&[1]);
    ensure!(value == 4.0, "rank {} has {value}", group.rank());
    // One rank alone has gradients, which add up and are dropped.
    let alone = crate::helpers::own_group(group)?;
    let own = store();
    let model = wrapped(&alone, &own)?;
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    for _ in 0..3 {
        model.zero_grad()?;
        backward(&model)?;
    }
    optimizer.step()?;
    let value = own.variables()["w0"].double_value(&[3]);
    ensure!(value.abs() < 1e-6, "{value}: gradients have added up");
    Ok(())
}

/// No rank steps without the last one, also not on another machine.
pub fn step_left_out(group: &ProcessGroup) -> Result<()> {
    let own = store();
    let model = wrapped(group, &own)?;
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    let last = group.world_size() - 1;
    backward(&model)?;
    if group.rank() != last {
        let text = error(optimizer.step())?;
        says_in_a_line(text, &[&format!("rank {last} "), "has left the group"])?;
        let value = own.variables()["w0"].double_value(&[3]);
        ensure!(value == 1.0, "{value}: a step was taken");
    }
    Ok(())
}

/// No rank steps while another still reads the parameters after its backward.
pub fn read_before_step(group: &ProcessGroup) -> Result<()> {
    let own = store();
    let model = wrapped(group, &own)?;
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    let input = Tensor::ones([1], (Kind::Float, device()));
    let before = model.forward_t(&input, false).double_value(&[]);
    for step in 0..20 {
        let slow = step % group.world_size();
        optimizer.zero_grad()?;
        backward(&model)?;
        let expected = before - step as f64 * 100_010.0;
        if group.rank() == slow {
            for _ in 0..20 {
                let read = model.forward_t(&input, false).double_value(&[]);
                ensure!((read - expected).abs() < 1.0, "step {step}: {read}, not {expected}");
            }
        }
        optimizer.step()?;
    }
    Ok(())
}
