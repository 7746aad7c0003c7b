//! Virtual ranks: the bits of one process on any number of processes.

use anyhow::{Context, Result, bail, ensure};
use flow_autograd::OptimizerState;
use flow_comm::ProcessGroup;
use flow_ddp::comm_hooks::Bf16Compress;
use flow_ddp::{
    BoxError, BufferCommHook, Ddp, DdpBuilder, Error, GradScaler, MixedPrecision,
    TensorCollectives, ZeroRedundancyOptimizer, convert_sync_batchnorm,
};
use tch::nn::{self, Adam, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, error, own_group, says, values};
use crate::models::{Vectors, batchnorm, on_gpu, store};
use crate::random_options::model::{Layer, Net, Operation, WIDTH, When};

const STEPS: u64 = 3;

/// A random training, which all ranks draw alike.
#[derive(Debug)]
struct Training {
    seed: u64,
    virtual_ranks: usize,
    /// Ranks of the job, not always in order.
    ranks: Vec<usize>,
    layers: Vec<Layer>,
    kind: Kind,
    rows: i64,
    cap: f64,
    bucket_view: bool,
    tune: u32,
    /// All but the last of a virtual rank are under `no_sync`.
    backwards: usize,
    steps: Steps,
    clips: bool,
    /// A parameter is frozen after the first step.
    refreshes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Steps {
    Sgd,
    Adam,
    Zero,
    Scaled,
}

impl Training {
    fn draw(seed: u64, job: usize) -> Self {
        let draws = &mut Draws(seed);
        let virtual_ranks = 1 + draws.below(6) as usize;
        let mut ranks: Vec<usize> = (0..job).collect();
        if draws.below(4) == 0 {
            ranks.rotate_left(1);
        }
        ranks.truncate(1 + draws.below(virtual_ranks.min(job) as u64) as usize);
        let kind = if draws.below(4) == 0 { Kind::Double } else { Kind::Float };
        let steps = [Steps::Sgd, Steps::Adam, Steps::Zero, Steps::Scaled][draws.below(4) as usize];
        let mut layers = Vec::new();
        for number in 0..2 + draws.below(6) {
            let operation = match draws.below(11) {
                _ if number == 0 => Operation::Linear,
                0 | 1 => Operation::Linear,
                2 => Operation::Conv,
                3 => Operation::BatchNorm,
                4 => Operation::Dropout,
                5 => Operation::Scalar,
                6 => Operation::One,
                7 => Operation::Empty,
                8 => Operation::Large,
                9 if steps == Steps::Sgd => Operation::Complex,
                9 => Operation::Average,
                _ => Operation::Count,
            };
            let (when, permuted) = (When::Always, steps == Steps::Sgd && draws.below(3) == 0);
            let (recomputed, tied_to) = (false, None);
            let frozen = number > 0 && draws.below(8) == 0;
            layers.push(Layer { operation, when, kind, permuted, frozen, recomputed, tied_to });
        }
        let has_norm = layers.iter().any(|layer| layer.operation == Operation::BatchNorm);
        Self {
            seed,
            virtual_ranks,
            ranks,
            layers,
            kind,
            rows: if has_norm { 3 } else { 1 },
            cap: [0.00001, 0.05, 25.0][draws.below(3) as usize],
            bucket_view: draws.below(3) == 0,
            tune: draws.below(2) as u32,
            backwards: 1 + draws.below(2) as usize,
            steps,
            clips: steps != Steps::Scaled && draws.below(2) == 0,
            refreshes: steps != Steps::Zero && draws.below(4) == 0,
        }
    }

    /// Trains on the ranks of a group. Returns the weights, the buffers and what the optimizer keeps, as bits.
    /// Of a `ZeroRedundancyOptimizer` rank 0 has that.
    fn run(&self, group: &ProcessGroup) -> Result<Vec<(String, Vec<u8>)>> {
        tch::manual_seed(self.seed as i64 + group.rank() as i64);
        let store = store();
        let net = Net::new(&store, &self.layers, self.kind, group.rank());
        let builder = Ddp::builder(group)
            .virtual_ranks(self.virtual_ranks)
            .bucket_cap_mb(self.cap)
            .gradient_as_bucket_view(self.bucket_view)
            .tune(self.tune);
        let mut model = builder.wrap(net, &store)?;
        let mut optimizer = match self.steps {
            Steps::Adam => Adam::default().build(&store, 0.1)?,
            _ => nn::sgd(0.9, 0.0, 0.0, false).build(&store, 0.1)?,
        };
        let zero = match self.steps {
            Steps::Zero => Some(ZeroRedundancyOptimizer::new(&store, group, Adam::default(), 0.1)?),
            _ => None,
        };
        let mut scaler = GradScaler::new(1024.0, 2.0, 0.5, 2);
        let before = Tensor::rand([1], (Kind::Double, tch::Device::Cpu));
        for step in 0..STEPS {
            if self.refreshes && step == 1 {
                let _ = model.parameters_of(0)[1].set_requires_grad(false);
                model.refresh()?;
            }
            for part in model.virtual_ranks() {
                model.in_virtual_rank(part, step, || self.backward(&model, &scaler))?;
            }
            match &zero {
                Some(zero) => {
                    if self.clips {
                        zero.clip_grad_norm(0.3)?;
                    }
                    zero.step()?;
                }
                None if self.steps == Steps::Scaled => {
                    scaler.step(&mut optimizer)?;
                    scaler.update()?;
                }
                None => {
                    if self.clips {
                        optimizer.clip_grad_norm(0.3);
                    }
                    optimizer.step();
                }
            }
        }
        let after = Tensor::rand([1], (Kind::Double, tch::Device::Cpu));
        tch::manual_seed(self.seed as i64 + group.rank() as i64);
        for drawn in [before, after] {
            ensure!(
                Tensor::rand([1], (Kind::Double, tch::Device::Cpu)) == drawn,
                "virtual ranks have changed the random numbers outside"
            );
        }
        let mut named: Vec<(String, Tensor)> = values(&store).into_iter().collect();
        match &zero {
            Some(zero) => {
                zero.consolidate_state_dict(0)?;
                if group.rank() == 0 {
                    named.extend(zero.state()?.tensors);
                }
            }
            None => named.extend(optimizer.state()?.tensors),
        }
        named.into_iter().map(|(name, tensor)| Ok((name, bits(&tensor)?))).collect()
    }

    fn backward(&self, model: &Ddp<Net>, scaler: &GradScaler) -> Result<(), Error> {
        for number in 0..self.backwards {
            let _guard = (number + 1 < self.backwards).then(|| model.no_sync());
            let input = Tensor::randn([self.rows, WIDTH], (self.kind, tch::Device::Cpu));
            let loss = model.try_forward_t(&input, true)?.square().mean(self.kind);
            let loss = if self.steps == Steps::Scaled { scaler.scale(&loss) } else { loss };
            loss.f_backward().map_err(Error::from_backward)?;
        }
        Ok(())
    }
}

/// The bytes of a tensor.
pub fn bits(tensor: &Tensor) -> Result<Vec<u8>> {
    let tensor = tensor.detach();
    let real = if tensor.is_complex() { tensor.view_as_real() } else { tensor };
    Ok(flow_autograd::bytes(&real.contiguous())?.to_vec())
}

/// Random models on random ranks, beside each of these ranks alone.
pub fn random(group: &ProcessGroup) -> Result<()> {
    let alone = own_group(group)?;
    let first = 1000 * group.world_size() as u64;
    for seed in first..first + 60 {
        let training = Training::draw(seed, group.world_size());
        if let Some(some) = group.new_group(&training.ranks)? {
            compare(&training, &some, &alone).with_context(|| format!("{training:?}"))?;
        }
    }
    Ok(())
}

fn compare(training: &Training, group: &ProcessGroup, alone: &ProcessGroup) -> Result<()> {
    let actual = training.run(group)?;
    let expected = training.run(alone)?;
    for ((name, actual), (expected_name, expected)) in actual.iter().zip(&expected) {
        ensure!(name == expected_name, "{name} instead of {expected_name}");
        ensure!(actual == expected, "{name} has other bits than on one process");
    }
    let has_all = training.steps != Steps::Zero || group.rank() == 0;
    ensure!(!has_all || actual.len() == expected.len(), "{} of {}", actual.len(), expected.len());
    Ok(())
}

/// With as many virtual ranks as ranks, up to three on one machine, sums have the order of a plain `Ddp`. Each
/// virtual rank draws numbers of its own in each step.
pub fn as_plain(group: &ProcessGroup) -> Result<()> {
    let mut trained = Vec::new();
    let mut drawn = Vec::new();
    for is_plain in [false, true] {
        let store = store();
        let net = crate::models::mlp(&store.root());
        tch::no_grad(|| {
            for (number, tensor) in store.trainable_variables().into_iter().enumerate() {
                let angles = Tensor::arange(tensor.numel() as i64, (Kind::Float, tch::Device::Cpu));
                let start = angles.sin().reshape(tensor.size()) * 0.1 + number as f64 * 0.01;
                tensor.shallow_clone().copy_(&start);
            }
        });
        let builder = Ddp::builder(group);
        let builder = if is_plain { builder } else { builder.virtual_ranks(group.world_size()) };
        let model = builder.wrap(net, &store)?;
        let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&store, 0.1)?;
        for step in 0..3 {
            let start = (step + 10 * group.rank() as u64) as f64;
            let x = Tensor::arange(4 * 784, (Kind::Float, tch::Device::Cpu)).view([4, 784]) + start;
            let backward = || -> Result<(), Error> {
                let loss = model.try_forward_t(&x.sin(), true)?.square().mean(Kind::Float);
                loss.f_backward().map_err(Error::from_backward)
            };
            optimizer.zero_grad();
            if is_plain {
                backward()?;
            } else {
                model.in_virtual_rank(group.rank(), step, || {
                    drawn.push(f64::try_from(Tensor::rand([], (Kind::Double, x.device())))?);
                    backward().map_err(anyhow::Error::from)
                })?;
            }
            optimizer.step();
        }
        let all = values(&store).into_iter();
        trained.push(all.map(|(_, tensor)| bits(&tensor)).collect::<Result<Vec<_>>>()?);
    }
    ensure!(trained[0] == trained[1], "virtual ranks have other bits than a plain Ddp");
    let all = group.all_gather_tensor(&Tensor::from_slice(&drawn))?;
    let mut all = Vec::<f64>::try_from(all.reshape([-1]))?;
    all.sort_by(f64::total_cmp);
    ensure!(all.windows(2).all(|pair| pair[0] < pair[1]), "some draw the same numbers: {all:?}");
    Ok(())
}

struct NoHook;

impl BufferCommHook for NoHook {
    fn run(&mut self, _: &ProcessGroup, _: &mut [(String, Tensor)]) -> Result<(), BoxError> {
        Ok(())
    }
}

/// Options that exclude virtual ranks: one line each, on all ranks.
pub fn refused(group: &ProcessGroup) -> Result<()> {
    let ranks = group.world_size();
    let own = store();
    let builder = || Ddp::builder(group).virtual_ranks(ranks);
    let refuse = |builder: DdpBuilder, words: &[&str]| -> Result<()> {
        let text = error(builder.wrap((), &own))?;
        ensure!(text.lines().count() == 1, "{text}");
        says(&text, words)
    };
    let _ = batchnorm(&own.root());
    if on_gpu() {
        return refuse(builder(), &["virtual_ranks", "is on a GPU"]);
    }
    let zero = ZeroRedundancyOptimizer::new(&own, group, Adam::default(), 0.1)?;
    let mixed = MixedPrecision { reduce: Some(Kind::BFloat16), ..Default::default() };
    for (builder, option) in [
        (builder().find_unused_parameters(true), "find_unused_parameters"),
        (builder().static_graph(true), "static_graph"),
        (
            builder().delay_all_reduce_named_params(&["fc.weight"], "fc.bias"),
            "delay_all_reduce_named_params",
        ),
        (builder().sparse_gradients(&["fc.weight"]), "sparse_gradients"),
        (builder().sparse_as_dense(true), "sparse_as_dense"),
        (builder().broadcast_buffers(false), "broadcast_buffers(false)"),
        (builder().forward_sync_buffers(false), "forward_sync_buffers(false)"),
        (builder().buffer_comm_hook(NoHook), "buffer_comm_hook"),
        (builder().comm_hook(Bf16Compress), "comm_hook"),
        (builder().optimizer_in_backward(Adam::default(), 0.1), "optimizer_in_backward"),
        (builder().hook_with_zero_step(&zero), "hook_with_zero_step"),
        (builder().mixed_precision(mixed), "mixed_precision"),
    ] {
        refuse(builder, &["virtual_ranks", "excludes", option])?;
    }
    let few = ranks - 1;
    refuse(Ddp::builder(group).virtual_ranks(few), &["virtual_ranks", "there are more ranks"])?;
    if group.rank() == 0 {
        refuse(Ddp::builder(group).virtual_ranks(ranks), &["virtual_ranks: Some"])?;
    } else {
        refuse(Ddp::builder(group).virtual_ranks(ranks + 1), &["virtual_ranks: Some"])?;
    }
    let halves = store();
    let _ = halves.root().add("half", Tensor::ones([3], (Kind::BFloat16, own.device())), true);
    let text = error(builder().wrap((), &halves))?;
    says(&text, &["virtual_ranks", "half is BFloat16", "make it Float"])?;
    convert_sync_batchnorm(&own, group)?;
    refuse(builder(), &["excludes convert_sync_batchnorm"])
}

/// A model, and what it is to do wrong on rank 0; all ranks get an error with these words.
type Misuse = (fn(&Ddp<Vectors>) -> Result<(), Error>, &'static [&'static str]);

const MISUSES: &[Misuse] = &[
    (|model| run(model, 1, || backward(model, &[0, 1])), &["in_virtual_rank(1)", "not its turn"]),
    (|model| run(model, 0, || run(model, 0, || Ok(()))), &["in_virtual_rank(0)", "runs already"]),
    (|model| run(model, 0, || Ok(())), &["virtual rank 0", "w0 got no gradient"]),
    (|model| run(model, 0, || backward(model, &[0])), &["virtual rank 0", "w1 got no gradient"]),
    (
        |model| {
            run(model, 0, || backward(model, &[0, 1]))?;
            run(model, 1, || Ok(()))
        },
        &["virtual rank 1", "no backward"],
    ),
    (
        |model| {
            run(model, 0, || backward(model, &[0, 1]))?;
            run(model, 1, || {
                backward(model, &[0, 1])?;
                backward(model, &[0, 1])
            })
        },
        &["virtual rank 1 runs several backwards"],
    ),
    (
        |model| {
            run(model, 0, || Err(Error::Join { rank: 0, reason: "the data has an end".to_owned() }))
        },
        &["the data has an end"],
    ),
    (|model| backward(model, &[0, 1]), &["outside of in_virtual_rank"]),
    (
        |model| {
            let forward = model.try_forward_t(&Tensor::from(1.0_f32), true);
            forward.map(drop).inspect_err(|error| model.abort(&error.to_string()))
        },
        &["forward in training mode outside of in_virtual_rank"],
    ),
    (|model| model.join(|| Ok(())), &["build without virtual_ranks"]),
];

fn run(
    model: &Ddp<Vectors>,
    part: usize,
    body: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    model.in_virtual_rank(part, 0, body)
}

fn backward(model: &Ddp<Vectors>, weights: &[usize]) -> Result<(), Error> {
    let factors: Vec<(usize, f64)> = weights.iter().map(|&weight| (weight, 1.0)).collect();
    model.weighted_sum(&factors).f_backward().map_err(Error::from_backward)
}

fn step(model: &Ddp<Vectors>) -> Result<(), Error> {
    for part in model.virtual_ranks() {
        run(model, part, || backward(model, &[0, 1]))?;
    }
    Ok(())
}

/// Rank 0 makes a mistake: no rank waits for it, and all may wrap the model again.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let own = store();
    for (number, (misuse, words)) in MISUSES.iter().enumerate() {
        let wrapped = || wrap(&own, group, number);
        let model = wrapped()?;
        let joins = number + 1 == MISUSES.len();
        let result = if group.rank() == 0 || joins {
            misuse(&model)
        } else {
            // The next step at the latest.
            step(&model).and_then(|()| step(&model))
        };
        let Err(error) = result else { bail!("misuse {number} is no error") };
        says(&error.to_string(), words).with_context(|| format!("misuse {number}"))?;
    }
    let plain = Ddp::new(Vectors::new(&store(), &[]), &own, group)?;
    ensure!(plain.virtual_ranks() == (group.rank()..group.rank() + 1));
    says(
        &error(plain.in_virtual_rank(0, 0, || Ok::<(), Error>(())))?,
        &["build with virtual_ranks"],
    )
}

/// Two virtual ranks for rank 0, and some for each other.
fn wrap(own: &VarStore, group: &ProcessGroup, number: usize) -> Result<Ddp<Vectors>> {
    let vectors = if number == 0 {
        Vectors::new(own, &[10, 20_000])
    } else {
        let mut named: Vec<_> = own.variables().into_iter().collect();
        named.sort_by(|(one, _), (other, _)| one.cmp(other));
        Vectors(named.into_iter().map(|(_, tensor)| tensor).collect())
    };
    let model = Ddp::builder(group).virtual_ranks(2 * group.world_size()).wrap(vectors, own)?;
    ensure!(group.rank() > 0 || model.virtual_ranks() == (0..2));
    Ok(model)
}
