//! A training step with `Ddp` in single precision, one in mixed precision, and one in which each rank
//! casts the parameters for itself.
//!
//! Blocks of all take turns in the same processes, on models with the same weights. The bytes of large
//! tensors on all ranks show what the copy of the parameters takes.

use anyhow::Result;
use flow_autograd::Replacements;
use flow_ddp::comm_hooks::Bf16Compress;
use flow_ddp::{Ddp, DdpBuilder, MixedPrecision, ProcessGroup, ReduceOp};
use serde_json::json;
use tch::nn::{self, Module, ModuleT, OptimizerConfig, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::in_turn::{self, LEARNING_RATE, Options, Step};
use crate::models::Model;

const KIND: Kind = Kind::BFloat16;
const MIB: f64 = (1 << 20) as f64;

pub fn run(options: &Options) -> Result<()> {
    let (group, x, y) = in_turn::begin(options.model)?;
    let mixed = MixedPrecision { param: Some(KIND), reduce: None, buffer: Some(KIND) };
    let model = options.model;
    let single = step(model, Ddp::builder(&group), false, &x, &y)?;
    let before = used(&group)?;
    let buffers = MixedPrecision { buffer: Some(KIND), ..Default::default() };
    let own = Ddp::builder(&group).comm_hook(Bf16Compress).mixed_precision(buffers);
    let own = step(model, own, true, &x, &y)?;
    let between = used(&group)?;
    let shared = step(model, Ddp::builder(&group).mixed_precision(mixed), false, &x, &y)?;
    let copy = used(&group)? - between - (between - before);
    let mut steps = [single, shared, own];
    let [single, shared, own] = in_turn::times(&group, options, &mut steps)?;
    if group.rank() == 0 {
        let model = options.model.name();
        let ranks = group.world_size();
        if options.json {
            let line = json!({
                "bench": "mixed_precision", "model": model, "ranks": ranks, "single_ms": single,
                "mixed_ms": shared, "each_rank_casts_ms": own, "copy_mib": copy,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}: {single:.3} ms in single precision, {shared:.3} ms in mixed precision, \
                 {own:.3} ms where each rank casts for itself; {copy:.1} MiB for the copy"
            );
        }
    }
    Ok(())
}

/// A model whose rank casts the parameters, and the input, in each forward.
#[derive(Debug)]
struct Casting {
    net: Box<dyn ModuleT>,
    parameters: Vec<Tensor>,
}

impl Module for Casting {
    fn forward(&self, x: &Tensor) -> Tensor {
        let casts: Vec<Tensor> = self.parameters.iter().map(|p| p.to_kind(KIND)).collect();
        let pairs: Vec<(&Tensor, &Tensor)> = self.parameters.iter().zip(&casts).collect();
        let replacements = Replacements::new(&pairs).expect("libtorch makes them");
        replacements.during(|| self.net.forward_t(&x.to_kind(KIND), true))
    }
}

/// Returns what runs a training step. `casts`: the model casts its parameters itself.
fn step(model: Model, builder: DdpBuilder, casts: bool, x: &Tensor, y: &Tensor) -> Result<Step> {
    let x = x.shallow_clone();
    let y = y.shallow_clone();
    let vs = VarStore::new(x.device());
    tch::manual_seed(0);
    let net: Box<dyn ModuleT> = Box::new(model.build(&vs.root()));
    let parameters = vs.trainable_variables();
    let net: Box<dyn ModuleT> = if casts { Box::new(Casting { net, parameters }) } else { net };
    let model = builder.wrap(nn::func_t(move |x, train| net.forward_t(x, train)), &vs)?;
    let mut optimizer = Sgd::default().build(&vs, LEARNING_RATE)?;
    Ok(Box::new(move || {
        let output = model.forward_t(&x, true).to_kind(Kind::Float);
        output.cross_entropy_for_logits(&y).f_backward()?;
        optimizer.step();
        optimizer.zero_grad();
        Ok(())
    }))
}

/// Returns the MiB of large tensors on all ranks.
fn used(group: &ProcessGroup) -> Result<f64> {
    let mut bytes = [group.arena().usage().0 as f64];
    group.all_reduce(&mut bytes, ReduceOp::Sum)?;
    Ok(bytes[0] / MIB)
}
