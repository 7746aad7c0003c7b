//! Trains the models of `scripts/parity/models.py`, whose header describes them, and compares every
//! bit with what PyTorch's DistributedDataParallel made of them.

use std::hash::Hasher;
use std::num::Wrapping;

use anyhow::{Context, Result, bail, ensure};
use flow_ddp::comm_hooks::Bf16Compress;
use flow_ddp::{BoxError, CommHook, GradBucket, Pending, ReduceOp, TensorCollectives};
use flow_ddp::{Ddp, JoinOptions, MixedPrecision, ProcessGroup};
use flow_tests::registry::{Job, Scenario, Test, launched, scenario};
use flow_tests::{Process, TEST_TIMEOUT};
use serde_json::Value;
use tch::nn::{self, ModuleT, OptimizerConfig, Path, SequentialT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::models;

/// What PyTorch made of the models.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/parity/models.json");

const JOBS: &[Job] = &[
    launched(2),
    launched(2).mode("copies", "FLOW_DDP_COPY", "1"),
    launched(2).mode("thread", "FLOW_DDP_PROGRESS", "thread"),
];

/// For what takes long: kernels of half precision without vector instructions.
const ONE_JOB: &[Job] = &[JOBS[0]];

pub const SCENARIOS: &[Scenario] = &[
    scenario("mlp_is_pytorchs", |group| agrees(group, &MODELS[0]), JOBS).checked_by(passes),
    scenario("mlp_in_mixed_precision_is_pytorchs", |group| agrees_mixed(group, &MODELS[0]), JOBS)
        .checked_by(passes),
    scenario("lenet_is_pytorchs", |group| agrees(group, &MODELS[1]), JOBS).checked_by(passes),
    scenario(
        "lenet_in_mixed_precision_is_pytorchs",
        |group| agrees_mixed(group, &MODELS[1]),
        ONE_JOB,
    )
    .checked_by(passes),
    scenario("batchnorm_is_pytorchs", |group| agrees(group, &MODELS[2]), JOBS).checked_by(passes),
    scenario(
        "batchnorm_in_mixed_precision_is_pytorchs",
        |group| agrees_mixed(group, &MODELS[2]),
        ONE_JOB,
    )
    .checked_by(passes),
];

fn stored() -> Result<Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(FILE)?)?)
}

/// With the kernels that PyTorch used, which its environment chooses.
fn passes(test: &Test) {
    let stored = stored().expect("the file is there");
    let version = env!("LIBTORCH_VERSION");
    if stored["torch"] != version {
        println!(
            "SKIPPED: parity with PyTorch: its results are those of {}, this is {version}",
            stored["torch"]
        );
        return;
    }
    let environment = stored["environment"].as_object().expect("variables");
    let mut command = test.commands().remove(0);
    command.envs(environment.iter().map(|(name, value)| (name, value.as_str().expect("a value"))));
    let output = Process::start(command).finish(TEST_TIMEOUT).success();
    assert_eq!(output, format!("{} passed\n", test.name).repeat(2));
}

/// Without a hook, with each hook that PyTorch has too, and in a join whose ranks have different
/// numbers of steps.
fn agrees(group: &ProcessGroup, model: &Model) -> Result<()> {
    check_variants(group, model, &["", "_fp16", "_bf16", "_join", "_join_by_active"])
}

fn agrees_mixed(group: &ProcessGroup, model: &Model) -> Result<()> {
    check_variants(group, model, &["_mixed_bf16", "_mixed_fp16"])
}

fn check_variants(group: &ProcessGroup, model: &Model, variants: &[&str]) -> Result<()> {
    let stored = stored()?;
    for variant in variants {
        let name = format!("{}{variant}", model.name);
        check(group, model, &stored, &name).context(name)?;
    }
    Ok(())
}

/// PyTorch's fp16_compress_hook, which divides half numbers before it adds them and so loses a bit
/// of the smallest ones. `Fp16Compress` does not: it averages in single precision.
struct HalvesDividedFirst;

impl CommHook for HalvesDividedFirst {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let mut flat = bucket.buffer()?.to_kind(Kind::Half) / bucket.group().world_size() as f64;
        bucket.group().all_reduce_tensor(&mut flat, ReduceOp::Sum)?;
        Ok(Pending::ready(flat.to_kind(Kind::Float)))
    }
}

pub struct Model {
    name: &'static str,
    pub input: &'static [i64],
    build: fn(&Path) -> SequentialT,
    /// Name and scale of each parameter, in PyTorch's order; batch normalization's keep what they
    /// start with.
    parameters: &'static [(&'static str, Option<f32>)],
}

pub const BATCH_NORM: Model = Model {
    name: "batchnorm",
    input: &[3, 16, 16],
    build: models::batchnorm,
    parameters: &[
        ("conv1.weight", Some(0.5)),
        ("bn1.weight", None),
        ("bn1.bias", None),
        ("conv2.weight", Some(0.25)),
        ("bn2.weight", None),
        ("bn2.bias", None),
        ("fc.weight", Some(0.5)),
        ("fc.bias", Some(0.5)),
    ],
};

const MODELS: [Model; 3] = [
    Model {
        name: "mlp",
        input: &[784],
        build: models::mlp,
        parameters: &[
            ("fc1.weight", Some(0.0625)),
            ("fc1.bias", Some(0.0625)),
            ("fc2.weight", Some(0.125)),
            ("fc2.bias", Some(0.125)),
        ],
    },
    Model {
        name: "lenet",
        input: &[1, 28, 28],
        build: models::lenet,
        parameters: &[
            ("conv1.weight", Some(0.5)),
            ("conv1.bias", Some(0.5)),
            ("conv2.weight", Some(0.0625)),
            ("conv2.bias", Some(0.0625)),
            ("fc1.weight", Some(0.0625)),
            ("fc1.bias", Some(0.0625)),
            ("fc2.weight", Some(0.125)),
            ("fc2.bias", Some(0.125)),
        ],
    },
    BATCH_NORM,
];

/// Makes a model, with the values that it starts with.
pub fn start(model: &Model, store: &VarStore) -> Result<SequentialT> {
    let net = (model.build)(&store.root());
    let variables = store.variables();
    for (number, (name, scale)) in model.parameters.iter().enumerate() {
        let mut variable =
            variables.get(*name).with_context(|| format!("{name} is no variable"))?.shallow_clone();
        if let Some(scale) = scale {
            let start = values(number as u32 + 1, &variable.size(), *scale);
            tch::no_grad(|| variable.copy_(&start));
        }
    }
    Ok(net)
}

pub fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("a number is missing in the file")
}

fn check(group: &ProcessGroup, model: &Model, stored: &Value, name: &str) -> Result<()> {
    let expected = &stored["models"][name];
    let steps = number(&stored["steps"])? as u32;
    let batch = number(&stored["batch"])? as i64;
    let rank = group.rank();

    let store = VarStore::new(Device::Cpu);
    let net = start(model, &store)?;
    let variables = store.variables();
    for (number, (name, _)) in model.parameters.iter().enumerate() {
        let stored = &expected["parameters"][number];
        ensure!(
            stored["name"] == *name && stored["initial"] == checksum(&variables[*name])?,
            "{name} starts otherwise"
        );
    }
    let builder = Ddp::builder(group);
    let builder = match expected["hook"].as_str() {
        None => builder,
        Some("fp16") => builder.comm_hook(HalvesDividedFirst),
        Some("bf16") => builder.comm_hook(Bf16Compress),
        Some(other) => bail!("there is no hook {other}"),
    };
    let mixed = match expected["mixed"].as_str() {
        None => None,
        Some("bfloat16") => Some(Kind::BFloat16),
        Some("float16") => Some(Kind::Half),
        Some(other) => bail!("there is no type {other}"),
    };
    let mixed = MixedPrecision { param: mixed, reduce: None, buffer: mixed };
    let ddp = builder.mixed_precision(mixed).wrap(net, &store)?;
    let sgd = nn::sgd(number(&expected["momentum"])?, 0.0, 0.0, false);
    let mut optimizer = sgd.build(&store, number(&expected["learning_rate"])?)?;
    let join = &expected["join"];
    let steps = join["steps"][rank].as_u64().map_or(steps, |steps| steps as u32);
    let mut train = || -> Result<()> {
        for step in 0..steps {
            let salt = 1000 + 4 * step + 2 * rank as u32;
            let shape: Vec<i64> = [batch].iter().chain(model.input).copied().collect();
            let x = values(salt, &shape, 2.0);
            if step == 0 {
                ensure!(
                    expected["inputs"][rank] == checksum(&x)?,
                    "the first input is another one"
                );
            }
            let labels = labels(salt, batch);
            let output = ddp.forward_t(&x, true).to_kind(Kind::Float);
            let loss = output.cross_entropy_for_logits(&Tensor::from_slice(&labels));
            optimizer.zero_grad();
            loss.f_backward()?;
            optimizer.step();
            let bits = format!("{:08x}", (loss.double_value(&[]) as f32).to_bits());
            let stored = &expected["losses"][rank][step as usize];
            ensure!(*stored == bits, "the loss of step {step} is {bits}, PyTorch's {stored}");
        }
        Ok(())
    };
    match join["divide_by_initial_world_size"].as_bool() {
        None => train()?,
        Some(divide_by_initial_world_size) => {
            let options = JoinOptions { divide_by_initial_world_size, ..Default::default() };
            ddp.join_with(options, train)?;
        }
    }
    for stored in expected["parameters"]
        .as_array()
        .into_iter()
        .chain(expected["buffers"][rank].as_array())
        .flatten()
    {
        let name = stored["name"].as_str().context("a name is missing in the file")?;
        let variable = variables.get(name).with_context(|| format!("{name} is no variable"))?;
        ensure!(
            stored["final"] == checksum(variable)?,
            "{name} is not what PyTorch has at the end"
        );
    }
    Ok(())
}

fn hash(salt: u32, k: u32) -> u32 {
    let mix = |h: Wrapping<u32>, shift: usize, factor: u32| (h ^ (h >> shift)) * Wrapping(factor);
    let h = Wrapping(k) * Wrapping(2_654_435_761) + Wrapping(salt);
    let h = mix(mix(h, 16, 0x85eb_ca6b), 13, 0xc2b2_ae35);
    (h ^ (h >> 16)).0
}

/// The labels of the input of this salt.
pub fn labels(salt: u32, batch: i64) -> Vec<i64> {
    (0..batch as u32).map(|k| i64::from(hash(salt + 1, k) % 10)).collect()
}

pub fn values(salt: u32, shape: &[i64], scale: f32) -> Tensor {
    let count = shape.iter().product::<i64>() as u32;
    let value = |k| ((hash(salt, k) >> 8) as f32 / (1 << 24) as f32 - 0.5) * scale;
    Tensor::from_slice(&(0..count).map(value).collect::<Vec<f32>>()).view(shape)
}

/// FNV-1a over the elements' bytes, in hex.
fn checksum(tensor: &Tensor) -> Result<String> {
    let tensor = tensor.to_kind(Kind::Float).contiguous();
    let bytes = flow_autograd::bytes(&tensor)?;
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(bytes);
    Ok(format!("{:016x}", hasher.finish()))
}
