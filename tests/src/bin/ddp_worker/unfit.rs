//! Tensors that cannot be sent or written to, in everything that takes tensors: an error in one
//! line, or the right thing, but no panic.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{
    Checkpoints, Ddp, DistributedSampler, OptimizerState, ReduceOp, StateDict, TensorCollectives,
    TryBackwardStep,
};
use tch::nn::{self, OptimizerConfig};
use tch::{Kind, Tensor};

use crate::helpers::{error, says};
use crate::models::{Vectors, device, store};

/// What a function must say of a tensor; `None` where it must do the right thing.
struct Unfit {
    name: &'static str,
    tensor: Tensor,
    sent: Option<&'static str>,
    reduced: Option<&'static str>,
    written: Option<&'static str>,
    /// As a buffer, or as a parameter that is not trained.
    kept: Option<&'static str>,
    trained: Option<&'static str>,
}

fn unfit() -> Vec<Unfit> {
    let ones = |shape: &[i64], kind| Tensor::ones(shape, (kind, device()));
    let matrix = || ones(&[2, 3], Kind::Float);
    // Everywhere the same reason.
    let never = |name, tensor, reason| {
        let reason = Some(reason);
        Unfit {
            name,
            tensor,
            sent: reason,
            reduced: reason,
            written: reason,
            kept: reason,
            trained: reason,
        }
    };
    // As no reduction knows the type.
    let odd = |kind, name| {
        let reason = Some(name);
        Unfit {
            name,
            tensor: ones(&[2, 3], kind),
            sent: None,
            reduced: reason,
            written: None,
            kept: None,
            trained: reason,
        }
    };
    let read_only = |name, tensor| {
        let reason = Some("share memory, as expand() makes them: use contiguous()");
        Unfit {
            name,
            tensor,
            sent: None,
            reduced: reason,
            written: reason,
            kept: reason,
            trained: reason,
        }
    };
    vec![
        never("undefined", Tensor::new(), "is undefined"),
        never(
            "sparse",
            matrix().to_sparse_sparse_dim(2),
            "has the layout Sparse: make it dense by to_dense()",
        ),
        never(
            "compressed",
            matrix().to_sparse_csr(None),
            "has the layout SparseCsr: make it dense by to_dense()",
        ),
        never("quantized", matrix().quantize_per_tensor(0.5, 0, Kind::QInt8), "is quantized"),
        Unfit { trained: None, ..odd(Kind::ComplexFloat, "ComplexFloat") },
        odd(Kind::Bool, "Bool"),
        odd(Kind::Int16, "Int16"),
        read_only("expanded", ones(&[1, 3], Kind::Float).expand([2, 3], false)),
        read_only("windows", ones(&[4], Kind::Float).as_strided([2, 3], [1, 1], None)),
    ]
}

/// `result` is `expected`, an error or none. Errors have one line, and name the operation.
fn is<E>(result: Result<(), E>, expected: Option<&str>, operation: &str) -> Result<()>
where
    E: std::error::Error + Send + Sync + 'static,
{
    match expected {
        None => Ok(result?),
        Some(reason) => {
            let text = error(result)?;
            ensure!(text.lines().count() == 1, "{text}");
            says(&text, &[reason, operation])
        }
    }
}

pub fn tensors(group: &ProcessGroup) -> Result<()> {
    for unfit in unfit() {
        collectives(group, &unfit).context(unfit.name)?;
        models(group, &unfit).context(unfit.name)?;
        optimizers(&unfit).context(unfit.name)?;
    }
    // The imaginary part of a conjugate is negated only when it is read.
    let one = Tensor::ones([3], (Kind::Float, device()));
    let mut negated = Tensor::complex(&one, &one).conj().imag();
    ensure!(negated.is_neg());
    group.all_reduce_tensor(&mut negated, ReduceOp::Sum)?;
    ensure!(negated == &one * -(group.world_size() as i64), "{negated}");
    // Nothing was broken by all this.
    group.barrier()?;
    Ok(())
}

fn collectives(group: &ProcessGroup, unfit: &Unfit) -> Result<()> {
    let handle = || unfit.tensor.shallow_clone();
    // Of a tensor that can be sent.
    let options = || (unfit.tensor.kind(), device());
    is(group.all_reduce_tensor(&mut handle(), ReduceOp::Sum), unfit.reduced, "all_reduce")?;
    // The root only sends; the others have a tensor that can be written to, if the root's can be
    // sent.
    let mut tensor = match group.rank() {
        0 => handle(),
        _ if unfit.sent.is_none() => Tensor::zeros([2, 3], options()),
        _ => handle(),
    };
    is(group.broadcast_tensor(&mut tensor, 0), unfit.sent, "broadcast")?;
    if unfit.sent.is_none() {
        ensure!(tensor == Tensor::ones([2, 3], options()), "{tensor}");
    }
    let unknown = group.broadcast_tensor(&mut handle(), group.world_size());
    ensure!(unknown.is_err(), "there is no such root");
    if unfit.written.is_some() && group.rank() != 0 {
        is(group.broadcast_tensor(&mut handle(), 0), unfit.written, "broadcast")?;
    }
    let gathered = group.all_gather_tensor(&handle());
    if unfit.sent.is_none() {
        let gathered = gathered.as_ref().ok().context("it can be gathered")?;
        ensure!(
            gathered.size() == [group.world_size() as i64, 2, 3]
                && *gathered == gathered.ones_like()
        );
    }
    is(gathered.map(drop), unfit.sent, "all_gather")
}

fn models(group: &ProcessGroup, unfit: &Unfit) -> Result<()> {
    let good =
        || ("good".to_string(), Tensor::ones([2], (Kind::Float, device())).set_requires_grad(true));
    let bad = || ("bad".to_string(), unfit.tensor.shallow_clone());
    let wrap = |parameters, buffers| Ddp::from_tensors((), parameters, buffers, group).map(drop);
    is(wrap(vec![good(), bad()], vec![]), unfit.kept, "bad ")?;
    is(wrap(vec![bad(), good()], vec![]), unfit.kept, "bad ")?;
    is(wrap(vec![good()], vec![bad()]), unfit.kept, "bad ")?;
    let store = store();
    let _ = store.root().add("good", good().1, true);
    let _ = store.root().add("bad", bad().1, false);
    is(Ddp::new((), &store, group).map(drop), unfit.kept, "bad ")?;
    // What is not written to may overlap.
    let unwritten = unfit.kept.filter(|_| unfit.sent.is_some());
    let builder = Ddp::builder(group).broadcast_buffers(false);
    is(builder.wrap_tensors((), vec![good()], vec![bad()]).map(drop), unwritten, "bad ")?;
    if let Ok(trained) = bad().1.f_detach().and_then(|tensor| tensor.f_set_requires_grad(true)) {
        is(wrap(vec![good(), ("bad".into(), trained)], vec![]), unfit.trained, "bad ")?;
    }
    // On one rank only: an error of all.
    let last = group.world_size() - 1;
    let mixed = if group.rank() == last { bad() } else { good() };
    if let Some(reason) = unfit.kept {
        let text = error(wrap(vec![good(), mixed], vec![]))?;
        says(&text, &[&format!("rank {last} has a model that cannot be wrapped: bad"), reason])?;
    }
    Ok(())
}

fn optimizers(unfit: &Unfit) -> Result<()> {
    let store = store();
    let weight = store.root().ones("weight", &[2, 3]);
    let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&store, 0.1)?;
    let tensors = vec![("0.momentum_buffer".to_string(), unfit.tensor.shallow_clone())];
    let state = StateDict { tensors, ..optimizer.state()? };
    let loaded = optimizer.load_state(&state);
    let fits = unfit.sent.is_none() && unfit.tensor.kind() == Kind::Float;
    ensure!(loaded.is_ok() == fits, "{loaded:?}");
    if let Err(error) = loaded {
        let text = error.to_string();
        ensure!(text.lines().count() == 1 && text.contains("0.momentum_buffer"), "{text}");
    }
    optimizer.try_backward_step(&weight.sum(Kind::Float))?;
    // No loss to go back from: it is of many elements, or of none, or nothing was computed.
    ensure!(optimizer.try_backward_step(&unfit.tensor).is_err());
    Ok(())
}

/// A buffer that gets other data after wrapping is an error where it no longer fits.
pub fn replaced_buffers(group: &ProcessGroup) -> Result<()> {
    #[derive(Debug)]
    struct Sum(Tensor, Tensor);
    impl nn::ModuleT for Sum {
        fn forward_t(&self, x: &Tensor, _train: bool) -> Tensor {
            (&self.0 * x).sum(Kind::Float) + self.1.sum(Kind::Float)
        }
    }
    let float = |shape: &[i64], value: f64| Tensor::full(shape, value, (Kind::Float, device()));
    let x = float(&[1], 1.0);
    let own = group.rank() as f64 + 1.0;
    for (data, fits) in [
        (float(&[3], own), true),
        (float(&[3, 2], own).select(1, 0), true),
        (float(&[4], own), false),
        (float(&[2], own), false),
        (float(&[3], own).to_kind(Kind::Double), false),
    ] {
        let (weight, mut buffer) = (float(&[2], 1.0).set_requires_grad(true), float(&[3], own));
        let model = Sum(weight.shallow_clone(), buffer.shallow_clone());
        let model = Ddp::from_tensors(
            model,
            vec![("weight".into(), weight)],
            vec![("running".into(), buffer.shallow_clone())],
            group,
        )?;
        buffer.set_data(&data);
        let result = model.try_forward_t(&x, true);
        if fits {
            result?.f_backward()?;
            ensure!(model.1.double_value(&[2]) == 1.0, "{}", model.1);
        } else {
            let text = error(result)?;
            says(&text, &[&format!("rank {}", group.rank())])?;
            ensure!(text.lines().count() == 1, "{text}");
        }
    }
    Ok(())
}

/// A rank without memory for what it makes is an error on all ranks, none waits for it.
pub fn no_memory(group: &ProcessGroup) -> Result<()> {
    const LENGTH: i64 = 300_000; // of each of three parameters
    let last = group.world_size() - 1;
    // What the rank gets for each attempt: nothing, enough to broadcast the model, and enough for
    // the buckets.
    let mut room = vec![vec![], vec![], vec![]];
    let mut held = Vec::new();
    if group.rank() == last {
        for (attempt, parameters) in [(1, 3), (2, 1), (2, 1), (2, 1)] {
            let block = group.arena().allocate(parameters * LENGTH as usize * 4);
            room[attempt].push(block.context("the region is full already")?);
        }
        let mut bytes = 1 << 50;
        while bytes > 256 << 10 {
            match group.arena().allocate(bytes) {
                Some(block) => held.push(block),
                None => bytes /= 2,
            }
        }
    }
    for (attempt, freed) in room.into_iter().enumerate() {
        drop(freed);
        let store = store();
        let wrapped = Ddp::new(Vectors::new(&store, &[LENGTH; 3]), &store, group);
        ensure!(wrapped.is_ok() == (attempt == 2), "{attempt}: {:?}", wrapped.err());
        if let Err(error) = wrapped {
            let text = error.to_string();
            says(&text, &[&format!("rank {last}: "), "no room"])?;
            says(&text, if group.rank() == last { &[] } else { &["cannot wrap its model"] })?;
        }
        group.barrier()?;
    }
    drop(held);
    Ok(())
}

/// What a checkpoint cannot keep is an error of all ranks, also of those that write nothing.
pub fn checkpoints(group: &ProcessGroup) -> Result<()> {
    let mut pid = [i64::from(std::process::id())];
    group.broadcast(&mut pid, 0)?;
    let folder = std::env::temp_dir().join(format!("flow-unfit-{}", pid[0]));
    let sampler = DistributedSampler::new(10, group);
    for (is_complex, words) in [
        (true, ["cannot save weight in ", "it is of kind ComplexDouble"]),
        (false, ["cannot save 0.momentum_buffer in ", "it is sparse"]),
    ] {
        let store = store();
        let kind = if is_complex { Kind::ComplexDouble } else { Kind::Float };
        let weight = store.root().add("weight", Tensor::ones([4, 2], (kind, device())), true);
        let model = Ddp::builder(group).sparse_gradients(&["weight"]);
        let model = if is_complex { Ddp::builder(group) } else { model }.wrap((), &store)?;
        let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&store, 0.1)?;
        if !is_complex {
            let rows = Tensor::from_slice(&[1i64]).to_device(device());
            let found = Tensor::embedding(&weight, &rows, -1, false, true);
            optimizer.try_backward_step(&found.sum(Kind::Float))?;
        }
        let mut checkpoints = Checkpoints::open(&folder, group)?;
        let text = error(checkpoints.save(1, &model, &store, &optimizer, &sampler, &()))?;
        says(&text, &words)?;
    }
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}
