//! Trains with `PowerSgd` as `scripts/parity/power_sgd.py`, whose header describes it, and compares the
//! numbers with those of PyTorch's hooks.

use anyhow::{Context, Result, ensure};
use flow_ddp::comm_hooks::PowerSgd;
use flow_ddp::{Ddp, ProcessGroup};
use flow_tests::registry::{Job, Scenario, Test, launched, scenario};
use flow_tests::{Process, TEST_TIMEOUT, instruction_sets};
use serde_json::Value;
use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::parity::{BATCH_NORM, labels, number, start, values};

/// What PyTorch made of the model.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/parity/power_sgd.json");

const JOBS: &[Job] = &[
    launched(2),
    launched(2).mode("copies", "FLOW_DDP_COPY", "1"),
    launched(2).mode("thread", "FLOW_DDP_PROGRESS", "thread"),
];

pub const SCENARIOS: &[Scenario] =
    &[scenario("power_sgd_is_pytorchs", agrees, JOBS).checked_by(passes)];

fn passes(test: &Test) {
    for set in instruction_sets() {
        let mut command = test.commands().remove(0);
        command.envs(set);
        let output = Process::start(command).finish(TEST_TIMEOUT).success();
        assert_eq!(output, format!("{} passed\n", test.name).repeat(2));
    }
}

fn agrees(group: &ProcessGroup) -> Result<()> {
    let stored: Value = serde_json::from_str(&std::fs::read_to_string(FILE)?)?;
    let cases = stored["cases"].as_object().context("there are cases in the file")?;
    ensure!(cases.len() > 5, "{} cases", cases.len());
    for (name, case) in cases {
        trained(group, &stored, case).with_context(|| name.clone())?;
    }
    Ok(())
}

/// Returns the hook of these arguments of a PowerSGDState.
fn hook(stored: &Value, options: &Value) -> Result<PowerSgd> {
    let rank = number(&options["matrix_approximation_rank"])? as u32;
    let mut hook = PowerSgd::new(rank)
        .start_iter(number(&stored["start"])? as u64)
        .seed(number(&stored["seed"])? as u32)
        .error_feedback(options["use_error_feedback"].as_bool().unwrap_or(true))
        .warm_start(options["warm_start"].as_bool().unwrap_or(true))
        .batched(options["batched"].as_bool().unwrap_or(false));
    if let Some(rate) = options["min_compression_rate"].as_f64() {
        hook = hook.min_compression_rate(rate);
    }
    Ok(hook)
}

fn trained(group: &ProcessGroup, stored: &Value, case: &Value) -> Result<()> {
    let batch = number(&stored["batch"])? as i64;
    let rank = group.rank();
    let mut store = VarStore::new(Device::Cpu);
    let net = start(&BATCH_NORM, &store)?;
    store.double();
    let hook = hook(stored, &case["options"])?;
    let model = Ddp::builder(group).comm_hook(hook).wrap(net, &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, number(&stored["learning_rate"])?)?;
    for step in 0..number(&stored["steps"])? as u32 {
        let salt = 1000 + 4 * step + 2 * rank as u32;
        let shape: Vec<i64> = [batch].iter().chain(BATCH_NORM.input).copied().collect();
        let x = values(salt, &shape, 2.0).to_kind(Kind::Double);
        let labels = Tensor::from_slice(&labels(salt, batch));
        let loss = model.forward_t(&x, true).log_softmax(-1, Kind::Double).nll_loss(&labels);
        optimizer.zero_grad();
        loss.f_backward()?;
        optimizer.step();
        let expected = number(&case["losses"][rank][step as usize])?;
        is_near(&format!("the loss of step {step}"), loss.double_value(&[]), expected)?;
    }
    for (name, variable) in store.variables() {
        let Some(expected) = case["sums"][&name].as_f64() else { continue };
        let weights = values(7, &variable.size(), 2.0).to_kind(Kind::Double);
        is_near(&name, (variable * weights).sum(Kind::Double).double_value(&[]), expected)?;
    }
    Ok(())
}

fn is_near(what: &str, actual: f64, expected: f64) -> Result<()> {
    let difference = (actual - expected).abs();
    ensure!(difference < 1e-9, "{what} is {actual}, PyTorch's {expected}: off by {difference}");
    Ok(())
}
