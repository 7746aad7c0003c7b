//! Trains the models of `scripts/parity/models.py`, whose header describes them, and compares every
//! bit with what PyTorch's DistributedDataParallel made of them: `check_parity models.json`, as two
//! ranks.

use std::hash::Hasher;
use std::num::Wrapping;

use anyhow::{bail, ensure, Context, Result};
use flow_ddp::comm_hooks::Bf16Compress;
use flow_ddp::{BoxError, CommHook, GradBucket, Pending, ReduceOp, TensorCollectives};
use flow_ddp::{Ddp, ProcessGroup};
use serde_json::Value;
use tch::nn::{self, ModuleT, OptimizerConfig, Path, SequentialT, VarStore};
use tch::{Device, Kind, Tensor};

fn main() -> Result<()> {
    let path = std::env::args().nth(1).context("the path of models.json is missing")?;
    let stored: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    for model in &MODELS {
        for hook in ["", "_fp16", "_bf16"] {
            let name = format!("{}{hook}", model.name);
            check(&group, model, &stored, &name)
                .with_context(|| format!("rank {}: {name}", group.rank()))?;
        }
    }
    group.barrier()?;
    if group.rank() == 0 {
        println!("{} trainings agree", 3 * MODELS.len());
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

struct Model {
    name: &'static str,
    input: &'static [i64],
    build: fn(&Path) -> SequentialT,
    /// Name and scale of each parameter, in PyTorch's order; batch normalization's keep what they
    /// start with.
    parameters: &'static [(&'static str, Option<f32>)],
}

const MODELS: [Model; 3] = [
    Model {
        name: "mlp",
        input: &[784],
        build: mlp,
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
        build: lenet,
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
    Model {
        name: "batchnorm",
        input: &[3, 16, 16],
        build: batchnorm,
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
    },
];

fn mlp(path: &Path) -> SequentialT {
    nn::seq_t()
        .add(nn::linear(path / "fc1", 784, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "fc2", 512, 10, Default::default()))
}

fn lenet(path: &Path) -> SequentialT {
    nn::seq_t()
        .add(nn::conv2d(path / "conv1", 1, 32, 5, Default::default()))
        .add_fn(|x| x.max_pool2d_default(2))
        .add(nn::conv2d(path / "conv2", 32, 64, 5, Default::default()))
        .add_fn(|x| x.max_pool2d_default(2).flat_view())
        .add(nn::linear(path / "fc1", 1024, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "fc2", 512, 10, Default::default()))
}

fn batchnorm(path: &Path) -> SequentialT {
    let conv = |stride| nn::ConvConfig { padding: 1, stride, bias: false, ..Default::default() };
    let ones = nn::BatchNormConfig { ws_init: nn::Init::Const(1.0), ..Default::default() };
    nn::seq_t()
        .add(nn::conv2d(path / "conv1", 3, 8, 3, conv(1)))
        .add(nn::batch_norm2d(path / "bn1", 8, ones))
        .add_fn(|x| x.relu())
        .add(nn::conv2d(path / "conv2", 8, 16, 3, conv(2)))
        .add(nn::batch_norm2d(path / "bn2", 16, ones))
        .add_fn(|x| x.relu().mean_dim([2i64, 3].as_slice(), false, Kind::Float))
        .add(nn::linear(path / "fc", 16, 10, Default::default()))
}

fn check(group: &ProcessGroup, model: &Model, stored: &Value, name: &str) -> Result<()> {
    let expected = &stored["models"][name];
    let number = |value: &Value| value.as_f64().context("a number is missing in the file");
    let (steps, batch) = (number(&stored["steps"])? as u32, number(&stored["batch"])? as i64);
    let rank = group.rank();

    let store = VarStore::new(Device::Cpu);
    let net = (model.build)(&store.root());
    let variables = store.variables();
    for (number, (name, scale)) in model.parameters.iter().enumerate() {
        let mut variable =
            variables.get(*name).with_context(|| format!("{name} is no variable"))?.shallow_clone();
        if let Some(scale) = scale {
            let start = values(number as u32 + 1, &variable.size(), *scale);
            tch::no_grad(|| variable.copy_(&start));
        }
        let stored = &expected["parameters"][number];
        ensure!(
            stored["name"] == *name && stored["initial"] == checksum(&variable)?,
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
    let ddp = builder.wrap(net, &store)?;
    let sgd = nn::sgd(number(&expected["momentum"])?, 0.0, 0.0, false);
    let mut optimizer = sgd.build(&store, number(&expected["learning_rate"])?)?;
    for step in 0..steps {
        let salt = 1000 + 4 * step + 2 * rank as u32;
        let shape: Vec<i64> = [batch].iter().chain(model.input).copied().collect();
        let x = values(salt, &shape, 2.0);
        if step == 0 {
            ensure!(expected["inputs"][rank] == checksum(&x)?, "the first input is another one");
        }
        let labels: Vec<i64> =
            (0..batch as u32).map(|k| i64::from(hash(salt + 1, k) % 10)).collect();
        let loss = ddp.forward_t(&x, true).cross_entropy_for_logits(&Tensor::from_slice(&labels));
        optimizer.zero_grad();
        loss.f_backward()?;
        optimizer.step();
        let bits = format!("{:08x}", (loss.double_value(&[]) as f32).to_bits());
        let stored = &expected["losses"][rank][step as usize];
        ensure!(*stored == bits, "the loss of step {step} is {bits}, PyTorch's {stored}");
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

fn values(salt: u32, shape: &[i64], scale: f32) -> Tensor {
    let count = shape.iter().product::<i64>() as u32;
    let value = |k| ((hash(salt, k) >> 8) as f32 / (1 << 24) as f32 - 0.5) * scale;
    Tensor::from_slice(&(0..count).map(value).collect::<Vec<f32>>()).view(shape)
}

/// FNV-1a over the elements' bytes, in hex.
fn checksum(tensor: &Tensor) -> Result<String> {
    let tensor = tensor.contiguous();
    let bytes = flow_autograd::bytes(&tensor)?;
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(bytes);
    Ok(format!("{:016x}", hasher.finish()))
}
