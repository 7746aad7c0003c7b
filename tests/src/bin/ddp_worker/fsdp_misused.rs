//! `Fsdp` where it cannot work: errors that say what would be right, on all ranks.

use anyhow::{Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Ddp, Error, Fsdp, JoinOptions, join};
use tch::nn::{Adam, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{error, says};
use crate::models::{Vectors, store};

/// What is refused, and what goes on after it.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let says_in_a_line = |text: String, words: &[&str]| {
        ensure!(text.lines().count() == 1, "{text}");
        says(&text, words)
    };
    let unlike = store();
    let model = Vectors::new(&unlike, if rank == 1 { &[10, 11] } else { &[10, 10] });
    let words = ["rank 0 has parameter w1 [10]", "rank 1 has parameter w1 [11]"];
    says_in_a_line(error(Fsdp::new(model, &unlike, group))?, &words)?;
    let empty = store();
    let text = error(Fsdp::new(Vectors(Vec::new()), &empty, group))?;
    says_in_a_line(text, &["Fsdp: the VarStore has no trainable variables"])?;

    // tch's own optimizer finds no gradients.
    let own = store();
    let model = Fsdp::new(Vectors::new(&own, &[10, 100_000]), &own, group)?;
    let mut plain = Sgd::default().build(&own, 0.1)?;
    plain.backward_step(&model.weighted_sum(&[(0, 1.0), (1, 1.0)]));
    let input = Tensor::ones([1], (Kind::Float, tch::Device::Cpu));
    let words = ["Fsdp: the gradients of the last backward were not used", "Fsdp::optimizer"];
    says_in_a_line(error(model.try_forward_t(&input, true))?, &words)?;
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    optimizer.step()?;
    let value = || own.variables()["w0"].double_value(&[3]);
    ensure!(value().abs() < 1e-6, "the step was not taken: {}", value());
    group.barrier()?;
    optimizer.zero_grad()?;

    // A change by each rank.
    let mut w0 = own.variables().remove("w0").unwrap_or_default();
    let _ = tch::no_grad(|| w0.g_add_scalar_(1.0));
    let words = ["Fsdp: w0 was changed in place", "Fsdp::write"];
    says_in_a_line(error(model.try_forward_t(&input, true))?, &words)?;
    model.weighted_sum(&[(0, 1.0), (1, 1.0)]).f_backward()?;
    says_in_a_line(error(optimizer.step())?, &["w0 was changed in place", "Fsdp::write"])?;

    // A change by one rank for all, and one that fails.
    let optimizer = model.optimizer(Sgd::default(), 1.0)?;
    optimizer.zero_grad()?;
    model.write(|| w0.f_fill_(5.0).map(|_| ()))?;
    ensure!(value() == 5.0, "{}", value());
    model.write(|| w0.f_mul_scalar_(2.0).map(|_| ()))?;
    ensure!(value() == 10.0, "{}", value());
    let text = error(model.write(|| Err("no such file")))?;
    says_in_a_line(text, &["writing into parameters: no such file"])?;
    optimizer.backward_step(&model.try_forward_t(&input, true)?)?;
    ensure!((value() - 9.0).abs() < 1e-6, "{}", value());

    // Other memory.
    let before = w0.detach();
    group.barrier()?;
    w0.set_data(&before.copy());
    model.try_forward_t(&input, true)?.f_backward()?;
    says_in_a_line(error(optimizer.step())?, &["w0 has other memory since (set_data"])?;
    w0.set_data(&before);

    // What only a Ddp or its optimizer can do.
    let text = error(join(&[&*model], JoinOptions::default(), || Ok::<_, Error>(())))?;
    says_in_a_line(text, &["that of an Fsdp", "as many inputs"])?;
    let optimizer = model.optimizer(Adam::default(), 1.0)?;
    let text = error(join(&[&optimizer], JoinOptions::default(), || Ok::<_, Error>(())))?;
    says_in_a_line(text, &["an Fsdp cannot join", "as many inputs"])?;
    let builder = Ddp::builder(group).hook_with_zero_step(&optimizer);
    let other = store();
    let text = error(builder.wrap(Vectors::new(&other, &[10]), &other))?;
    says_in_a_line(text, &["the optimizer of an Fsdp: call step after backward"])?;

    // One that the store gets later.
    let _ = own.root().ones("later", &[3]);
    let text = error(model.optimizer(Adam::default(), 1.0))?;
    says_in_a_line(text, &["got variables since the model was wrapped"])?;
    Ok(())
}

/// Ranks on several machines.
pub fn on_nodes(group: &ProcessGroup) -> Result<()> {
    let own: VarStore = store();
    let text = error(Fsdp::new(Vectors::new(&own, &[10]), &own, group))?;
    says(&text, &["Fsdp", "ranks are on this machine: all must be on one"])
}
