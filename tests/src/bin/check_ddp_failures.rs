//! Trains, until something happens to rank 1 in step 5: `check_ddp_failures EVENT`. `nothing`
//! trains on until it is killed, `five_steps` ends well.

use std::io::Write;
use std::time::Duration;

use anyhow::{bail, Result};
use flow_autograd::GradHook;
use flow_ddp::{CommError, Ddp, Error, ProcessGroup, TensorCollectives, TryBackwardStep};
use nix::sys::signal::{raise, Signal};
use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn main() -> Result<()> {
    let event = std::env::args().nth(1).unwrap_or_default();
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(group.device());
    // Between the layers a tensor that is no parameter, whose hook runs when one bucket is ready
    // and another is not.
    let gate = Tensor::ones([1], FLOAT).set_requires_grad(true);
    let between = gate.shallow_clone();
    let mut net = nn::seq_t()
        .add(nn::linear(store.root() / "fc1", 784, 512, Default::default()))
        .add_fn(move |x| x.relu() * &between)
        .add(nn::linear(store.root() / "fc2", 512, 10, Default::default()));
    if event == "forward_only_with_buffers" {
        net = net.add(nn::batch_norm1d(store.root() / "norm", 10, Default::default()));
    }
    let frozen = (store.root() / "frozen").ones("weight", &[1]).set_requires_grad(false);
    let mut model = Ddp::builder(&group).bucket_cap_mb(0.01).wrap(net, &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.01)?;

    let loss = |model: &Ddp<nn::SequentialT>| {
        model.forward_t(&Tensor::randn([8, 784], FLOAT), true).square().mean(Kind::Float)
    };
    let mut _hook = None;
    let mut kept = Vec::new();
    for step in 0.. {
        println!("step {step} pid {}", std::process::id());
        std::io::stdout().flush()?;
        if group.rank() == 1 && step == 5 {
            match event.as_str() {
                "exit" => std::process::exit(3),
                "kill" => raise(Signal::SIGKILL)?,
                "hang" => std::thread::sleep(Duration::from_secs(3600)),
                "panic" => panic!("the model cannot go on"),
                "thaw" => drop(frozen.set_requires_grad(true)),
                "hook_panic" => {
                    _hook = Some(GradHook::install(&gate, |_| panic!("the hook cannot go on"))?)
                }
                "hook_error" => {
                    _hook =
                        Some(GradHook::install(&gate, |_| Err("the hook has had enough".into()))?)
                }
                "forward_only" | "forward_only_with_buffers" => drop(loss(&model)),
                "forward_kept" => kept.push(loss(&model)),
                "other_loss" => (&gate * 2).f_backward().map(|()| drop(loss(&model)))?,
                "caught" => {
                    let last = Tensor::ones([1], FLOAT).set_requires_grad(true);
                    let _fails = GradHook::install(&last, |_| {
                        Err("before any gradient of the model".into())
                    })?;
                    let failed = (loss(&model) * &last).f_backward();
                    println!("caught: {failed:?}");
                }
                _ => {}
            }
            if ["forward_only", "forward_kept", "forward_only_with_buffers", "other_loss", "caught"]
                .contains(&event.as_str())
            {
                continue;
            }
        }
        if step == 5 && ["all_forward_only", "all_forward_kept"].contains(&event.as_str()) {
            kept.push(loss(&model));
            if event == "all_forward_only" {
                kept.clear();
            }
            continue;
        }
        if event == "evaluates" && group.rank() == 1 {
            kept.push(tch::no_grad(|| loss(&model)));
            kept.push(model.forward_t(&Tensor::randn([8, 784], FLOAT), false));
        }
        if step == 5 && event.starts_with("all_fail") {
            _hook = Some(GradHook::install(&gate, |_| Err("no rank can go on".into()))?);
        }
        if step == 5 && event == "five_steps"
            || step == 8
                && ["all_forward_only", "all_forward_kept", "evaluates"].contains(&event.as_str())
        {
            break;
        }
        optimizer.zero_grad();
        if let Err(error) = loss(&model).f_backward().map_err(Error::from_backward) {
            drop(_hook.take());
            let again = optimizer.try_backward_step(&loss(&model)).err();
            let again = again.map_or("no error".into(), |error| told(&error));
            let told = told(&error);
            if event != "all_fail_and_wrap" {
                bail!("step {step}: {told}, again: {again}");
            }
            println!("step {step}: {told}, again: {again}");
            model = Ddp::builder(&group).bucket_cap_mb(0.01).wrap(model.into_inner(), &store)?;
            optimizer.try_backward_step(&loss(&model))?;
            break;
        }
        optimizer.step();
    }
    Ok(())
}

/// The error's kind and its text.
fn told(error: &Error) -> String {
    let kind = match error {
        Error::Comm(CommError::PeerLost { .. }) => "PeerLost",
        Error::Comm(CommError::Timeout { .. }) => "Timeout",
        Error::Comm(CommError::Mismatch { .. }) => "Mismatch",
        Error::Comm(CommError::Poisoned { .. }) => "Poisoned",
        Error::Model { .. } => "Model",
        Error::Backward { .. } => "Backward",
        _ => "another",
    };
    format!("{kind}: {error}")
}
