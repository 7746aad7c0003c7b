//! Forward and backward in half precision.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::comm_hooks::Bf16Compress;
use flow_ddp::{Ddp, DdpBuilder, Error, MixedPrecision};
use tch::nn::{self, ModuleT, Optimizer, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{Draws, SentAs, error, random_models, same_everywhere, says, values};
use crate::models::{self, Vectors, device, on_gpu, store};

pub const LARGE: i64 = 40_000;
const BFLOAT16: MixedPrecision =
    MixedPrecision { param: Some(Kind::BFloat16), reduce: None, buffer: None };

/// Matrices that multiply the input one after the other, and vectors that are added to it. With `cast`,
/// forward itself casts all of them, and the input.
#[derive(Debug)]
pub struct Net {
    parameters: Vec<Tensor>,
    /// Which parameters forward uses, in which order.
    uses: Vec<usize>,
    cast: Option<Kind>,
}

pub const WIDTH: i64 = 3;

impl Net {
    pub fn new(store: &VarStore, lengths: &[i64], uses: &[usize], cast: Option<Kind>) -> Self {
        let mut parameters = Vec::new();
        for (index, &length) in lengths.iter().enumerate() {
            let size = if length == WIDTH { vec![WIDTH, WIDTH] } else { vec![length] };
            let count: i64 = size.iter().product();
            let start = (Tensor::arange(count, (Kind::Float, device())) * 0.37).sin() / 2;
            let name = format!("w{index}");
            parameters.push(store.root().add(&name, start.view(&size[..]), true));
        }
        let _ = store.root().add("tied", parameters[0].shallow_clone(), false);
        Self { parameters, uses: uses.to_vec(), cast }
    }
}

impl ModuleT for Net {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        let cast = |tensor: &Tensor| {
            self.cast.map_or_else(|| tensor.shallow_clone(), |kind| tensor.to_kind(kind))
        };
        let parameters: Vec<Tensor> = self.parameters.iter().map(cast).collect();
        let mut x = cast(input);
        for &index in &self.uses {
            let parameter = &parameters[index];
            x = if parameter.dim() == 2 {
                x.matmul(parameter).tanh()
            } else {
                &x + (parameter * &x.narrow(1, 0, 1)).square().sum(x.kind()) / LARGE
            };
        }
        if train { x } else { -x }
    }
}

fn same_bits(what: &str, actual: &Tensor, expected: &Tensor) -> Result<()> {
    ensure!(actual.defined() == expected.defined(), "{what}: {actual:?} instead of {expected:?}");
    if !actual.defined() {
        return Ok(());
    }
    ensure!(actual.kind() == expected.kind(), "{what}: {actual:?} instead of {expected:?}");
    let [own, other] =
        [actual, expected].map(|tensor| tensor.detach().to(tch::Device::Cpu).contiguous());
    ensure!(
        flow_autograd::bytes(&own)? == flow_autograd::bytes(&other)?,
        "{what} is {own}, and {other} where the model casts itself"
    );
    Ok(())
}

/// Variables and gradients have the same bits, and are in single precision.
fn same_variables(actual: &VarStore, expected: &VarStore) -> Result<()> {
    let expected = expected.variables();
    for (name, tensor) in actual.variables() {
        ensure!(tensor.kind() == Kind::Float, "{name} is {tensor:?}");
        same_bits(&name, &tensor, &expected[&name])?;
        same_bits(&format!("{name}.grad"), &tensor.grad(), &expected[&name].grad())?;
    }
    Ok(())
}

/// Random models and options: outputs, gradients and weights have the same bits as where the model
/// itself casts its parameters, and gradients are sent in the same type.
pub fn random(group: &ProcessGroup) -> Result<()> {
    random_models(group, 16, trained)
}

/// A model whose parameters `Ddp` casts, or one that casts them itself.
struct Trained {
    store: VarStore,
    model: Ddp<Net>,
    optimizer: Option<Optimizer>,
}

fn trained(group: &ProcessGroup, seed: u64) -> Result<()> {
    let mut draws = Draws(seed);
    let kind = [Kind::BFloat16, Kind::Half][draws.below(2) as usize];
    let reduce = [None, Some(Kind::Float), Some(Kind::BFloat16), Some(Kind::Half)];
    let reduce = reduce[draws.below(4) as usize];
    let count = 1 + draws.below(5) as usize;
    let mut lengths = Vec::new();
    for _ in 0..count {
        lengths.push([0, 1, WIDTH, WIDTH, 10, LARGE][draws.below(6) as usize]);
    }
    let find_unused = draws.below(3) == 0;
    let static_graph = !find_unused && draws.below(3) == 0;
    let in_backward = draws.below(3) == 0;
    let view = draws.below(2) == 0;
    let caps = [[0.00001, 0.1], [0.01, 25.0]][draws.below(2) as usize];
    let micro_batches = draws.below(3);
    let forwards = 1 + draws.below(2);
    let freezes = count > 1 && !static_graph && draws.below(2) == 0;
    let mut uses: Vec<usize> = Vec::new();
    for rank in 0..group.world_size() {
        let mut own = Vec::new();
        if !find_unused {
            own.extend(0..count);
        }
        for _ in 0..draws.below(count as u64) {
            own.push(draws.below(count as u64) as usize);
        }
        own.push(count - 1);
        if rank == group.rank() {
            uses = own;
        }
    }

    let wrap = |mixed: bool| -> Result<Trained> {
        let store = store();
        let net = Net::new(&store, &lengths, &uses, (!mixed).then_some(kind));
        let mut builder: DdpBuilder = Ddp::builder(group)
            .bucket_cap_mb_list(&caps)
            .find_unused_parameters(find_unused)
            .static_graph(static_graph)
            .gradient_as_bucket_view(view);
        builder = if mixed {
            builder.mixed_precision(MixedPrecision { param: Some(kind), reduce, buffer: None })
        } else {
            builder.comm_hook(SentAs(reduce.unwrap_or(kind)))
        };
        let config = nn::Sgd { momentum: 0.9, ..Default::default() };
        if in_backward {
            let model = builder.optimizer_in_backward(config, 0.05).wrap(net, &store)?;
            return Ok(Trained { store, model, optimizer: None });
        }
        let optimizer = config.build(&store, 0.05)?;
        Ok(Trained { model: builder.wrap(net, &store)?, optimizer: Some(optimizer), store })
    };
    let mut both = [wrap(true)?, wrap(false)?];
    for step in 0..5 {
        for trained in &mut both {
            if freezes && (step == 2 || step == 4) {
                let _ = trained.model.parameters[0].set_requires_grad(step == 4);
                trained.model.refresh()?;
            }
            for parameter in trained.store.trainable_variables() {
                flow_autograd::set_grad(&parameter, None)?;
            }
        }
        if draws.below(4) == 0 {
            both[0].model.cast_parameters()?;
        }
        let evaluates = draws.below(group.world_size() as u64 + 1) as usize;
        let leaves_out = draws.below(4) == 0;
        for backward in 0..=micro_batches {
            let salt = f64::from(step) + 10.0 * backward as f64 + 100.0 * group.rank() as f64;
            let input = (Tensor::arange(2 * WIDTH, (Kind::Float, device())) + salt).sin();
            let input = input.view([2, WIDTH]);
            let mut outputs = [Vec::new(), Vec::new()];
            for (trained, outputs) in both.iter().zip(&mut outputs) {
                let model = &trained.model;
                let _no_sync = (backward < micro_batches).then(|| model.no_sync());
                let mut losses = Vec::new();
                for forward in 0..forwards {
                    let output = model.forward_t(&(&input * (1 + forward) as f64), true);
                    losses.push(output.to_kind(Kind::Float).square().sum(Kind::Float));
                    outputs.push(output.detach());
                }
                // Its loss is thrown away.
                if leaves_out && backward == micro_batches {
                    outputs.push(model.forward_t(&input, true).detach());
                }
                // On one rank alone, or on none.
                if group.rank() == evaluates {
                    outputs.push(tch::no_grad(|| model.forward_t(&input, false)));
                }
                let loss = losses.into_iter().reduce(|a, b| a + b).context("a forward")?;
                loss.f_backward()?;
                if group.rank() == evaluates {
                    outputs.push(model.forward_t(&input, false).detach());
                }
            }
            for (own, other) in outputs[0].iter().zip(&outputs[1]) {
                same_bits(&format!("an output of step {step}"), own, other)?;
            }
        }
        let [mixed, explicit] = &both;
        same_variables(&mixed.store, &explicit.store).with_context(|| format!("step {step}"))?;
        for trained in &mut both {
            if let Some(optimizer) = &mut trained.optimizer {
                optimizer.step();
            }
        }
    }
    same_variables(&both[0].store, &both[1].store)
}

/// A machine has one copy of the parameters.
pub fn memory(group: &ProcessGroup) -> Result<()> {
    const LENGTH: i64 = 4 << 20;
    let bytes = 2 * LENGTH;
    let used = || group.arena().usage().0 as i64;
    let wrap = |builder: DdpBuilder| -> Result<(Ddp<Vectors>, i64)> {
        let store = store();
        let net = Vectors::new(&store, &[LENGTH]);
        let before = used();
        let model = builder.wrap(net, &store)?;
        let more = used() - before;
        group.barrier()?;
        Ok((model, more))
    };
    // All are kept: what a model leaves behind is freed at any time.
    let plain = || Ddp::builder(group).comm_hook(Bf16Compress);
    let (_first, _) = wrap(plain())?;
    let (_second, without) = wrap(plain())?;
    let (_third, with) = wrap(Ddp::builder(group).mixed_precision(BFLOAT16))?;
    let copy = with - without;
    let own = if group.local_index() > 0 { 0 } else { bytes };
    // Blocks come in sizes that are an eighth apart.
    ensure!(
        (copy - own).abs() < bytes / 4,
        "rank {} has {copy} bytes for a copy, not {own}",
        group.rank()
    );
    // It is freed, if not before the last rank has left it.
    let before = used();
    for _ in 0..16 {
        wrap(Ddp::builder(group).mixed_precision(BFLOAT16))?;
    }
    let left = used() - before;
    ensure!(left < 8 * bytes, "rank {} has {left} bytes more", group.rank());
    Ok(())
}

/// A backward through a graph from before the parameters were cast again fails, rather than to compute
/// with others.
pub fn outdated(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let net = Net::new(&store, &[WIDTH, WIDTH], &[0, 1], None);
    let model = Ddp::builder(group).mixed_precision(BFLOAT16).wrap(net, &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.3)?;
    let input = Tensor::ones([2, WIDTH], (Kind::Float, device()));
    let loss = || model.forward_t(&input, true).sum(Kind::Float);
    let first = loss();
    // Nothing has changed.
    let second = loss();
    (first + second).f_backward()?;
    optimizer.step();
    let before = loss();
    before.f_backward()?;
    let kept = model.without_sync(|_| loss());
    optimizer.step();
    loss().f_backward()?;
    if on_gpu() {
        return Ok(()); // each forward has a copy of its own
    }
    optimizer.step();
    let last = loss();
    let text = error(model.without_sync(|_| kept.f_backward()))?;
    says(&text, &["modified by an inplace operation"])?;
    drop(last);
    Ok(())
}

/// Weights that differ between the ranks of a machine are an error of all ranks, within some steps.
pub fn differing(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let net = Net::new(&store, &[WIDTH], &[0], None);
    let model = Ddp::builder(group).mixed_precision(BFLOAT16).wrap(net, &store)?;
    let rate = if group.rank() == 0 { 0.3 } else { 0.1 };
    let mut optimizer = nn::Sgd::default().build(&store, rate)?;
    let input = Tensor::ones([2, WIDTH], (Kind::Float, device()));
    let step = |optimizer: &mut Optimizer| -> Result<(), Error> {
        optimizer.zero_grad();
        let loss = model.try_forward_t(&input, true)?.square().sum(Kind::Float);
        loss.f_backward().map_err(Error::from_backward)?;
        optimizer.step();
        Ok(())
    };
    let failed = (0..20).find_map(|_| step(&mut optimizer).err());
    let text = failed.context("nothing was found in 20 steps")?.to_string();
    says(&text, &["tied is not the same on all ranks of this machine"])
}

/// Buffers are cast, and a batch norm trains with them.
pub fn buffers(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let net = models::batchnorm(&store.root());
    let _ = store.root().zeros_no_train("count", &[1]);
    let count = store.root().add("steps", Tensor::from_slice(&[7i64]).to_device(device()), false);
    let mixed = MixedPrecision { buffer: Some(Kind::BFloat16), ..BFLOAT16 };
    let model = Ddp::builder(group).mixed_precision(mixed).wrap(net, &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.1)?;
    let input = Tensor::ones([4, 3, 8, 8], (Kind::Float, device())) + group.rank() as f64;
    for _ in 0..3 {
        let output = model.forward_t(&input, true);
        ensure!(output.kind() == Kind::BFloat16, "{output:?}");
        optimizer.backward_step(&output.square().mean(Kind::Float));
    }
    for (name, tensor) in values(&store) {
        let expected = match name.as_str() {
            "steps" => Kind::Int64,
            name if name.contains("running") || name == "count" => Kind::BFloat16,
            _ => Kind::Float,
        };
        ensure!(tensor.kind() == expected, "{name} is {tensor:?}");
    }
    ensure!(count.int64_value(&[0]) == 7, "{count}");
    Ok(())
}

/// In a join each rank casts for itself, and computes with its own parameters.
pub fn in_join(group: &ProcessGroup) -> Result<()> {
    let mut finals = Vec::new();
    for mixed in [true, false] {
        let store = store();
        let cast = (!mixed).then_some(Kind::BFloat16);
        let net = Net::new(&store, &[WIDTH, 10], &[0, 1], cast);
        let builder = Ddp::builder(group);
        let builder = if mixed {
            builder.mixed_precision(BFLOAT16)
        } else {
            builder.comm_hook(SentAs(Kind::BFloat16))
        };
        let model = builder.wrap(net, &store)?;
        let mut optimizer = nn::Sgd::default().build(&store, 0.3)?;
        let input = Tensor::ones([2, WIDTH], (Kind::Float, device())) * (group.rank() + 1) as f64;
        for _ in 0..2 {
            model.join(|| -> Result<()> {
                for _ in 0..=group.rank() {
                    optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float));
                }
                Ok(())
            })?;
        }
        optimizer.backward_step(&model.forward_t(&input, true).sum(Kind::Float));
        same_everywhere(group, &store)?;
        finals.push(store);
    }
    same_variables(&finals[0], &finals[1])
}

/// Sparse gradients stay sparse, and inputs that are indices stay what they are.
pub fn sparse(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let net = nn::embedding(store.root() / "words", 4, 2, config);
    let builder = Ddp::builder(group).sparse_gradients(&["words.weight"]);
    let model = builder.mixed_precision(BFLOAT16).wrap(net, &store)?;
    let table = store.variables()["words.weight"].shallow_clone();
    let words = Tensor::from_slice(&[group.rank() as i64, 3]).to_device(device());
    for _ in 0..2 {
        flow_autograd::set_grad(&table, None)?;
        model.forward_t(&words, true).sum(Kind::Float).f_backward()?;
        let gradient = table.grad();
        ensure!(gradient.is_sparse() && gradient.kind() == Kind::Float, "{gradient:?}");
        let dense = gradient.to_dense(None, false);
        let [first, last] = [0, 3].map(|row| dense.double_value(&[row, 1]));
        let share = 1.0 / group.world_size() as f64;
        ensure!((first - share).abs() < 1e-6 && (last - 1.0).abs() < 1e-6, "{dense}");
    }
    Ok(())
}

/// What cannot be is an error of all ranks that says what would be right.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let wrap = |mixed: MixedPrecision, kind: Kind| {
        let weight = Tensor::ones([3], (kind, device()));
        let trained = weight.is_floating_point();
        let named = vec![("w".to_owned(), weight.set_requires_grad(trained))];
        let free = Tensor::ones([3], (Kind::Float, device())).set_requires_grad(true);
        let named = named.into_iter().chain([("v".to_owned(), free)]).collect();
        Ddp::builder(group).mixed_precision(mixed).wrap_tensors((), named, vec![])
    };
    let param = |kind| MixedPrecision { param: Some(kind), ..Default::default() };
    for (mixed, kind, words) in [
        (
            param(Kind::Int),
            Kind::Float,
            ["cannot compute in Int", "param must be BFloat16 or Half"],
        ),
        (param(Kind::Double), Kind::Float, ["compute in Double", "must be BFloat16 or Half"]),
        (BFLOAT16, Kind::Int64, ["w is Int64", "make all parameters Float"]),
        (BFLOAT16, Kind::Double, ["w is Double", "make all parameters Float"]),
        (
            MixedPrecision { reduce: Some(Kind::Int), ..BFLOAT16 },
            Kind::Float,
            ["has reduce Int", "must be Float, Double, Half or BFloat16"],
        ),
        (
            MixedPrecision { buffer: Some(Kind::Bool), ..BFLOAT16 },
            Kind::Float,
            ["has buffer Bool", "must be Float, Double, Half or BFloat16"],
        ),
    ] {
        let text = error(wrap(mixed, kind).map(drop))?;
        says(&text, &words)?;
        ensure!(text.lines().count() == 1, "{text}");
    }
    let vectors = store();
    let net = Vectors::new(&vectors, &[3]);
    let mixed = MixedPrecision { reduce: Some(Kind::Float), ..BFLOAT16 };
    let builder = Ddp::builder(group).mixed_precision(mixed).comm_hook(Bf16Compress);
    says(&error(builder.wrap(net, &vectors).map(drop))?, &["leave reduce or the hook out"])?;
    let kinds = [Kind::Half, Kind::BFloat16];
    let text = error(wrap(param(kinds[group.rank().min(1)]), Kind::Float).map(drop))?;
    says(&text, &["rank 0 has", "param: Some(Half)", "param: Some(BFloat16)"])?;

    // Operations that write into a parameter.
    let vectors = store();
    let net = nn::func_t({
        let weight = Vectors::new(&vectors, &[3]).0.swap_remove(0);
        move |x, _| {
            let mut weight = weight.shallow_clone();
            let two = Tensor::from(2f32).to_device(device());
            let doubled = tch::no_grad(|| weight.f_mul_(&two)).map(drop);
            let text = doubled.expect_err("it would write");
            assert!(text.to_string().contains("would change a tensor"), "{text}");
            x * &weight
        }
    });
    let model = Ddp::builder(group).mixed_precision(BFLOAT16).wrap(net, &vectors)?;
    let input = Tensor::ones([3], (Kind::Float, device()));
    let output = model.forward_t(&input, true);
    ensure!(output.sum(Kind::Float).double_value(&[]) == 3.0, "{output}");
    output.sum(Kind::Float).f_backward()?;
    Ok(())
}

/// Whoever writes into the copy of all ranks, through a view of it, is found in the next forward.
pub fn written(group: &ProcessGroup) -> Result<()> {
    let vectors = store();
    let weight = Vectors::new(&vectors, &[3]).0.swap_remove(0);
    let net = nn::func_t(move |_, _| weight.view([3]));
    let model = Ddp::builder(group).mixed_precision(BFLOAT16).wrap(net, &vectors)?;
    let input = Tensor::ones([3], (Kind::Float, device()));
    let output = model.forward_t(&input, true);
    if on_gpu() {
        return Ok(()); // each forward has a copy of its own
    }
    if group.rank() == 0 {
        let _ = tch::no_grad(|| output.detach().f_mul_scalar_(2.0))?;
    }
    let text = error(model.try_forward_t(&input, true).map(drop))?;
    says(&text, &["rank 0", "the copy of w0 in half precision was changed in place"])
}
