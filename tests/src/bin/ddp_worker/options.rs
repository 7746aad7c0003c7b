//! Types, buckets, layouts.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::{Ddp, TensorCollectives};
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Kind, Tensor};

use crate::helpers::{
    SentAs, copies, error, gradient_is, in_place, mean, plausible, same_everywhere, says,
};
use crate::models::{self, Vectors, device, on_gpu, store};

/// Parameters of several types in one model, and a model all in bf16.
pub fn kinds(group: &ProcessGroup) -> Result<()> {
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    for view in [false, true] {
        let named: Vec<(String, Tensor)> = (0..8)
            .map(|i| {
                let shape = if i < 4 { [50_000] } else { [7] };
                let tensor = Tensor::ones(shape, (kinds[i % 4], device())).set_requires_grad(true);
                (format!("w{i}"), tensor)
            })
            .collect();
        let tensors: Vec<Tensor> = named.iter().map(|(_, t)| t.shallow_clone()).collect();
        let model =
            Ddp::builder(group).gradient_as_bucket_view(view).wrap_tensors((), named, vec![])?;
        for step in 0..4 {
            tensors.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            // Powers of two, so that no type rounds their mean over two ranks much.
            let factor = |rank: usize| (4 * (rank + step)) as f64;
            let one = |w: &Tensor| (w * factor(group.rank())).sum(Kind::Double);
            tensors.iter().map(one).reduce(|a, b| a + b).context("not empty")?.f_backward()?;
            for tensor in &tensors {
                ensure!(tensor.grad().kind() == tensor.kind());
                gradient_is(tensor, mean(group, factor))
                    .with_context(|| format!("{:?}", tensor.kind()))?;
            }
        }
        let stats = model.stats();
        plausible(&stats, 4)?;
        ensure!(stats.buckets.len() == 4, "a bucket for each type: {stats:?}");

        let mut store = store();
        let net = models::mlp(&store.root());
        store.bfloat16();
        let model = Ddp::builder(group).gradient_as_bucket_view(view).wrap(net, &store)?;
        let mut optimizer = nn::Sgd::default().build(&store, 0.1)?;
        for _ in 0..3 {
            let x = Tensor::randn([4, 784], (Kind::BFloat16, device()));
            optimizer.zero_grad();
            model.forward_t(&x, true).square().mean(Kind::Float).f_backward()?;
            optimizer.step();
        }
        same_everywhere(group, &store)?;
        ensure!(copies() || on_gpu() || in_place(&model.stats()) > 0, "{:?}", model.stats());
    }
    Ok(())
}

/// Gradients of half precision whose sum is too large for their type, large ones and small ones.
pub fn large_halves(group: &ProcessGroup) -> Result<()> {
    let half = (Kind::Half, device());
    let all = [70_000, 7].map(|length| Tensor::ones([length], half).set_requires_grad(true));
    let named = [("large", &all[0]), ("small", &all[1])];
    let named = named.map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
    let _model = Ddp::builder(group).wrap_tensors((), named.into(), vec![])?;
    for _ in 0..2 {
        all.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        let loss: Tensor = all.iter().map(|w| w.sum(Kind::Double) * 60_000).sum();
        loss.f_backward()?;
        all.iter().try_for_each(|w| gradient_is(w, 60_000.0))?;
    }
    Ok(())
}

/// Complex parameters beside real ones, large and small, transposed, empty and of one element. Some
/// gradients come as conjugates that are computed only when they are read. Each rank's gradients are
/// those of the bare model.
pub fn complex(group: &ProcessGroup) -> Result<()> {
    let kinds = [Kind::ComplexFloat, Kind::ComplexDouble, Kind::Float];
    let sizes: [&[i64]; 5] = [&[200, 100], &[3, 2], &[], &[0, 3], &[5]];
    let make = || -> Vec<Tensor> {
        let mut all = Vec::new();
        for kind in kinds {
            for size in sizes {
                let tensor = Tensor::ones(size, (kind, device()));
                let tensor = if size.len() == 2 { tensor.tr() } else { tensor };
                all.push(tensor.set_requires_grad(true));
            }
        }
        all
    };
    for (view, is_static) in [(false, false), (true, false), (true, true)] {
        let (wrapped, bare) = (make(), make());
        let named = wrapped.iter().enumerate();
        let named = named.map(|(index, w)| (format!("w{index}"), w.shallow_clone())).collect();
        let builder = Ddp::builder(group).gradient_as_bucket_view(view).static_graph(is_static);
        let _model = builder.bucket_cap_mb(0.01).wrap_tensors((), named, vec![])?;
        for step in 0..4 {
            let mut losses = [&wrapped, &bare].map(|_| Tensor::zeros([], (Kind::Double, device())));
            for (index, (w, other)) in wrapped.iter().zip(&bare).enumerate() {
                if step != 2 {
                    flow_autograd::set_grad(w, None)?;
                    flow_autograd::set_grad(other, None)?;
                }
                let mut factor = Tensor::randn(w.size(), (w.kind(), device()));
                if index % 2 == 1 {
                    factor = factor.conj();
                }
                for (loss, w) in losses.iter_mut().zip([w, other]) {
                    let product = w * &factor;
                    let product = if product.is_complex() { product.real() } else { product };
                    *loss += product.sum(Kind::Double);
                }
            }
            losses.iter().try_for_each(Tensor::f_backward)?;
            for (index, (w, other)) in wrapped.iter().zip(&bare).enumerate() {
                let mut expected = other.grad().resolve_conj();
                let (gradient, mut real) = (w.grad(), expected.shallow_clone());
                if expected.is_complex() {
                    real = expected.view_as_real();
                }
                group.all_reduce_tensor(&mut real, ReduceOp::Avg)?;
                if expected.is_complex() {
                    expected = real.view_as_complex();
                }
                ensure!(gradient.kind() == w.kind() && gradient.size() == w.size());
                let is_close = gradient.allclose(&expected, 1e-5, 1e-6, false);
                ensure!(is_close, "step {step}, w{index}: {gradient} instead of {expected}");
                // The next step adds to them.
                flow_autograd::set_grad(other, Some(&expected.copy()))?;
            }
        }
    }
    Ok(())
}

/// The gradient of a sign is zeros that have no memory. On some ranks it is a usual one.
pub fn zeros_without_memory(group: &ProcessGroup) -> Result<()> {
    let bare = Tensor::ones([300], (Kind::Float, device())).set_requires_grad(true);
    bare.sgn().sum(Kind::Float).f_backward()?;
    ensure!(bare.grad().internal_is_zerotensor());
    for view in [false, true] {
        let make = || Tensor::ones([300], (Kind::Float, device())).set_requires_grad(true);
        let tensors = [make(), make()];
        let named = ["sign", "mixed"].map(String::from).into_iter();
        let named = named.zip(tensors.iter().map(Tensor::shallow_clone)).collect();
        let builder = Ddp::builder(group).gradient_as_bucket_view(view);
        let _model = builder.wrap_tensors((), named, vec![])?;
        let [sign, mixed] = &tensors;
        for step in 0..4 {
            if step != 2 {
                tensors.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
            }
            let is_sign = group.rank().is_multiple_of(2);
            let second = if is_sign { mixed.sgn() } else { mixed * 4 };
            (sign.sgn() + second).sum(Kind::Float).f_backward()?;
            let once = mean(group, |rank| if rank.is_multiple_of(2) { 0.0 } else { 4.0 });
            gradient_is(sign, 0.0)?;
            gradient_is(mixed, if step == 2 { 2.0 * once } else { once })?;
        }
    }
    Ok(())
}

/// Gradients sent with fewer bits are exact to that type's rounding, and the optimizer sees their
/// own type.
pub fn communication_kinds(group: &ProcessGroup) -> Result<()> {
    for view in [false, true] {
        for (kind, epsilon) in [
            (Kind::BFloat16, 1.0 / 256.0),
            (Kind::Half, 1.0 / 2048.0),
            (Kind::Float, 1e-6),
            (Kind::Double, 1e-6),
        ] {
            let store = store();
            let builder = Ddp::builder(group).comm_hook(SentAs(kind)).gradient_as_bucket_view(view);
            let model = builder.wrap(Vectors::new(&store, &[40_000, 10]), &store)?;
            for step in 0..3 {
                if step != 1 {
                    model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
                } else {
                    model.0.iter().for_each(|w| w.shallow_clone().zero_grad());
                }
                let input = |rank: usize| 1.0 / (rank + step + 3) as f64;
                model.forward(&Tensor::from(input(group.rank()) as f32)).f_backward()?;
                let expected = mean(group, input);
                for vector in &model.0 {
                    let gradient = vector.grad();
                    ensure!(gradient.kind() == Kind::Float);
                    let error = (gradient - expected).abs().max().double_value(&[]);
                    // Rounded before and after.
                    ensure!(
                        error <= 2.0 * epsilon * expected,
                        "{kind:?}: wrong by {error}, of {expected}"
                    );
                    ensure!(error > 0.0 || epsilon <= 1e-6, "{kind:?} cannot be that exact");
                }
            }
            let stats = model.stats();
            plausible(&stats, 3)?;
            let bytes: usize = stats.buckets.iter().map(|bucket| bucket.bytes).sum();
            // On GPUs, each place is aligned to 512 bytes; w1 comes first.
            let small =
                (10 * kind.elt_size_in_bytes()).next_multiple_of(if on_gpu() { 512 } else { 1 });
            ensure!(bytes == small + 40_000 * kind.elt_size_in_bytes(), "{stats:?}");
        }
    }
    Ok(())
}

/// More buckets than can be under way at once.
pub fn many_buckets(group: &ProcessGroup) -> Result<()> {
    for (count, cap) in [(10, 100), (150, 1), (200, 4 * 1000)] {
        for view in [false, true] {
            let store = store();
            let lengths: Vec<i64> =
                (0..count).map(|i| if i % 50 == 3 { 20_000 } else { i % 7 + 1 }).collect();
            let builder = Ddp::builder(group).bucket_cap_mb(f64::from(cap) / f64::from(1 << 20));
            let model = builder
                .gradient_as_bucket_view(view)
                .wrap(Vectors::new(&store, &lengths), &store)?;
            for step in 0..5 {
                model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
                let factor = |index: usize, rank: usize| ((index + 1) * (rank + step)) as f64;
                let factors: Vec<_> =
                    (0..lengths.len()).map(|i| (i, factor(i, group.rank()))).collect();
                model.weighted_sum(&factors).f_backward()?;
                for (index, vector) in model.0.iter().enumerate() {
                    gradient_is(vector, mean(group, |rank| factor(index, rank)))
                        .with_context(|| format!("w{index} of {count} in step {step}"))?;
                }
            }
            let stats = model.stats();
            plausible(&stats, 5)?;
            let parameters: usize =
                stats.buckets.iter().map(|bucket| bucket.parameters.len()).sum();
            ensure!(parameters == lengths.len());
            ensure!(
                cap > 1 || stats.buckets.len() == lengths.len(),
                "{} buckets",
                stats.buckets.len()
            );
        }
    }
    Ok(())
}

/// Buckets follow, from the second backward on, the order in which rank 0's gradients came in the
/// first.
pub fn ready_order(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let builder = Ddp::builder(group).bucket_cap_mb(1e-6);
    let model = builder.wrap(Vectors::new(&store, &[10, 40_000, 10, 40_000]), &store)?;
    // Each rank uses them in another order; backward goes the other way.
    let mut uses = [2, 0, 3, 1];
    uses.rotate_left(group.rank());
    let factor = |index: usize, rank: usize| (index + 10 * rank) as f64;
    for step in 0..3 {
        model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
        model.weighted_sum(&uses.map(|index| (index, factor(index, group.rank())))).f_backward()?;
        for (index, vector) in model.0.iter().enumerate() {
            gradient_is(vector, mean(group, |rank| factor(index, rank)))?;
        }
        let order: Vec<String> =
            model.stats().buckets.into_iter().flat_map(|bucket| bucket.parameters).collect();
        let expected = if step == 0 { ["w3", "w2", "w1", "w0"] } else { ["w1", "w3", "w0", "w2"] };
        ensure!(order == expected, "step {step}: {order:?} instead of {expected:?}");
    }
    Ok(())
}

/// Parameters, and thereby gradients, that do not lie in the order of their indices: gradients keep
/// their parameters' strides, as libtorch's own do.
pub fn layouts(group: &ProcessGroup) -> Result<()> {
    let builder = |view| Ddp::builder(group).gradient_as_bucket_view(view);
    let sent_in_another = |view| builder(view).comm_hook(SentAs(Kind::Double));
    for builder in [builder(false), builder(true), sent_in_another(false), sent_in_another(true)] {
        let float = (Kind::Float, device());
        tch::manual_seed(group.rank() as i64);
        // Columns first, as channels_last does for convolutions; once large, once small; and one
        // with gaps.
        let transposed = |rows, columns| Tensor::randn([rows, columns], float).tr();
        let gaps = Tensor::randn([100, 4], float).slice(1, 0, 2, 1);
        let channels_last = Tensor::randn([64, 5, 5, 32], float).permute([0, 3, 1, 2]);
        let pointwise = Tensor::randn([64, 1, 1, 32], float).permute([0, 3, 1, 2]);
        let turned = |a, b, c| Tensor::randn([a, b, c], float).permute([1, 2, 0]);
        let all = [
            transposed(200, 300),
            transposed(3, 5),
            gaps,
            channels_last,
            pointwise,
            turned(20, 30, 40),
            turned(2, 3, 4),
        ];
        let named: Vec<(String, Tensor)> = all
            .into_iter()
            .enumerate()
            .map(|(i, tensor)| (format!("w{i}"), tensor.set_requires_grad(true)))
            .collect();
        let tensors: Vec<Tensor> = named.iter().map(|(_, t)| t.shallow_clone()).collect();
        // Each element's gradient is another, so that none may change its place.
        let factors = |step: usize, index: usize, rank: usize| {
            tch::manual_seed((100 * step + 10 * index + rank) as i64);
            Tensor::randn(tensors[index].size(), float)
        };
        let backward = |step: usize, rank: usize| {
            let one =
                |(index, w): (usize, &Tensor)| (w * factors(step, index, rank)).sum(Kind::Float);
            anyhow::Ok(
                tensors
                    .iter()
                    .enumerate()
                    .map(one)
                    .reduce(|a, b| a + b)
                    .context("not empty")?
                    .f_backward()?,
            )
        };
        backward(0, 0)?;
        // Those that steps are taken along.
        let strides = |tensor: &Tensor| -> Vec<i64> {
            tensor
                .size()
                .iter()
                .zip(tensor.stride())
                .filter(|(length, _)| **length > 1)
                .map(|(_, s)| s)
                .collect()
        };
        let expected_strides: Vec<Vec<i64>> = tensors.iter().map(|w| strides(&w.grad())).collect();
        let model = builder.wrap_tensors((), named, vec![])?;
        for tensor in &tensors {
            let all =
                tch::no_grad(|| flow_ddp::TensorCollectives::all_gather_tensor(group, tensor))?;
            ensure!(
                (0..group.world_size() as i64).all(|r| all.get(r) == all.get(0)),
                "ranks start with their own"
            );
        }
        for step in 0..6 {
            for tensor in &tensors {
                match step {
                    0..3 => flow_autograd::set_grad(tensor, None)?,
                    3 => tensor.shallow_clone().zero_grad(),
                    // A gradient that has the parameter's strides on some ranks only.
                    _ => {
                        let odd = step % group.world_size() == group.rank();
                        let zeros = if odd {
                            Tensor::zeros(tensor.size(), float)
                        } else {
                            tensor.detach().zeros_like()
                        };
                        flow_autograd::set_grad(tensor, Some(&zeros))?;
                    }
                }
            }
            backward(step, group.rank())?;
            for (index, tensor) in tensors.iter().enumerate() {
                let sum = (0..group.world_size())
                    .map(|rank| factors(step, index, rank))
                    .reduce(|a, b| a + b);
                let expected = sum.context("not empty")? / group.world_size() as i64;
                ensure!(
                    tensor.grad().allclose(&expected, 1e-5, 1e-6, false),
                    "w{index} in step {step}"
                );
                if step <= 3 {
                    let (own, expected) = (strides(&tensor.grad()), &expected_strides[index]);
                    ensure!(
                        own == *expected,
                        "w{index} in step {step}: strides {own:?} instead of {expected:?}"
                    );
                }
            }
        }
        plausible(&model.stats(), 6)?;
    }
    in_place_by_memory(group)?;
    // Ranks that order their memory differently.
    let matrix = Tensor::ones([2, 3], (Kind::Float, device()));
    let matrix = if group.rank() == 0 { matrix } else { matrix.tr().contiguous().tr() };
    let named = vec![("w".to_string(), matrix.set_requires_grad(true))];
    let text = error(Ddp::from_tensors((), named, vec![], group))?;
    says(&text, &["rank 0 has parameter w [2, 3]", "rank 1 has", "memory order [1, 0]"])
}

/// A large gradient in its parameter's layout is reduced where it is; one in another layout is not.
fn in_place_by_memory(group: &ProcessGroup) -> Result<()> {
    let float = (Kind::Float, device());
    let weight = Tensor::ones([64, 5, 5, 32], float).permute([0, 3, 1, 2]).set_requires_grad(true);
    let model =
        Ddp::from_tensors((), vec![("w".to_string(), weight.shallow_clone())], vec![], group)?;
    for contiguous in [false, true] {
        let zeros = if contiguous {
            Tensor::zeros(weight.size(), float)
        } else {
            weight.detach().zeros_like()
        };
        flow_autograd::set_grad(&weight, Some(&zeros))?;
        drop(zeros);
        (&weight * (group.rank() as f64)).sum(Kind::Float).f_backward()?;
        gradient_is(&weight, mean(group, |rank| rank as f64))?;
        let reduced = in_place(&model.stats());
        let all = 64 * 32 * 25 * 4;
        ensure!(
            copies() || on_gpu() || reduced == if contiguous { 0 } else { all },
            "{reduced} of {all} bytes"
        );
    }
    Ok(())
}

/// A thread reduces buckets where the ranks of this node leave it a core: ranks of other nodes have
/// cores of their own.
pub fn who_reduces(group: &ProcessGroup) -> Result<()> {
    let threads = || -> Result<usize> {
        let names = std::fs::read_dir("/proc/self/task")?
            .map(|task| std::fs::read_to_string(task?.path().join("comm")));
        let names = names.collect::<std::io::Result<Vec<_>>>()?;
        Ok(names.iter().filter(|name| name.starts_with("flow-comm-")).count())
    };
    let forced = std::env::var("FLOW_DDP_PROGRESS").is_ok_and(|value| value == "thread");
    let cores = std::thread::available_parallelism()?.get();
    // This worker computes with one thread.
    let expected = usize::from(forced || 2 * group.local_world_size() <= cores);
    let before = threads()?;
    let store = store();
    let _model = Ddp::new(Vectors::new(&store, &[10]), &store, group)?;
    // A thread gets its name when it runs.
    let deadline = Instant::now() + Duration::from_secs(30);
    while threads()? - before < expected && Instant::now() < deadline {
        sleep(Duration::from_millis(1));
    }
    let started = threads()? - before;
    ensure!(started == expected, "{started} threads instead of {expected} on {cores} cores");
    Ok(())
}
