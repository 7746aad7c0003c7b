//! Models to wrap.

use std::sync::OnceLock;

use flow_comm::ProcessGroup;
use flow_ddp::{DeviceKind, TensorCollectives};
use tch::nn::{self, Module, Path, SequentialT, VarStore};
use tch::{Device, Kind, Tensor};

static DEVICE: OnceLock<Device> = OnceLock::new();

/// Where this run's tensors are.
pub fn device() -> Device {
    *DEVICE.get().unwrap_or(&Device::Cpu)
}

/// Whether gradients take the way of GPUs in this run (`FLOW_TEST_DEVICE=cuda`), if only on
/// fakes.
pub fn on_gpu() -> bool {
    std::env::var("FLOW_TEST_DEVICE").is_ok_and(|kind| kind == "cuda")
}

/// The same in every scenario of this process.
pub fn choose_device(group: &ProcessGroup) -> anyhow::Result<()> {
    let kind = if on_gpu() { DeviceKind::Cuda } else { DeviceKind::Cpu };
    let device = group.use_device(kind)?;
    let first = *DEVICE.get_or_init(|| device);
    anyhow::ensure!(first == device, "the device was {first:?} and is {device:?}");
    Ok(())
}

/// 784-512-10: its first weight is large enough to be born in shared memory, the others are not.
pub fn mlp(path: &Path) -> SequentialT {
    nn::seq_t()
        .add(nn::linear(path / "fc1", 784, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "fc2", 512, 10, Default::default()))
}

/// Two convolutions, two linear layers.
pub fn lenet(path: &Path) -> SequentialT {
    nn::seq_t()
        .add(nn::conv2d(path / "conv1", 1, 32, 5, Default::default()))
        .add_fn(|x| x.max_pool2d_default(2))
        .add(nn::conv2d(path / "conv2", 32, 64, 5, Default::default()))
        .add_fn(|x| x.max_pool2d_default(2).flat_view())
        .add(nn::linear(path / "fc1", 1024, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(path / "fc2", 512, 10, Default::default()))
}

/// Two convolutions with batch normalization, and a linear layer.
pub fn batchnorm(path: &Path) -> SequentialT {
    let conv = |stride| nn::ConvConfig { padding: 1, stride, bias: false, ..Default::default() };
    let ones = nn::BatchNormConfig { ws_init: nn::Init::Const(1.0), ..Default::default() };
    nn::seq_t()
        .add(nn::conv2d(path / "conv1", 3, 8, 3, conv(1)))
        .add(nn::batch_norm2d(path / "bn1", 8, ones))
        .add_fn(|x| x.relu())
        .add(nn::conv2d(path / "conv2", 8, 16, 3, conv(2)))
        .add(nn::batch_norm2d(path / "bn2", 16, ones))
        .add_fn(|x| x.relu().mean_dim([2i64, 3].as_slice(), false, x.kind()))
        .add(nn::linear(path / "fc", 16, 10, Default::default()))
}

/// Vectors that a test uses as it likes.
#[derive(Debug)]
pub struct Vectors(pub Vec<Tensor>);

impl Vectors {
    /// `w0`, `w1`, ... of these lengths, all ones.
    pub fn new(store: &VarStore, lengths: &[i64]) -> Self {
        let root = store.root();
        Self(
            lengths
                .iter()
                .enumerate()
                .map(|(i, &length)| root.ones(&format!("w{i}"), &[length]))
                .collect(),
        )
    }

    /// The sum of these vectors' elements, each vector multiplied by its factor: their gradients
    /// are the factors.
    pub fn weighted_sum(&self, factors: &[(usize, f64)]) -> Tensor {
        let sum = |&(index, factor): &(usize, f64)| (&self.0[index] * factor).sum(Kind::Float);
        factors.iter().map(sum).reduce(|a, b| a + b).expect("a test uses some vector")
    }
}

/// The sum of all elements, each times the input: every gradient is the input.
impl Module for Vectors {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.0
            .iter()
            .map(|w| (w * x).sum(Kind::Float))
            .reduce(|a, b| a + b)
            .expect("a test has some vector")
    }
}

pub fn store() -> VarStore {
    VarStore::new(device())
}
