//! Sparse gradients.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use flow_autograd::Forward;
use flow_comm::ProcessGroup;
use flow_ddp::{BoxError, CommHook, Ddp, GradBucket, JoinOptions, Pending};
use tch::nn::{self, Module, ModuleT, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{
    Draws, SentAs, close, error, gradient_is, mean, own_group, part, same_everywhere, says, values,
};
use crate::models::{Vectors, device, store};

const KINDS: [(Kind, f64); 4] =
    [(Kind::Float, 1e-6), (Kind::Double, 1e-12), (Kind::Half, 1e-3), (Kind::BFloat16, 8e-3)];

/// The rows of a table that a rank looks up, each with a factor.
struct Lookups {
    rows: Vec<i64>,
    factors: Vec<f64>,
}

impl Lookups {
    fn new(draws: &mut Draws, rows: i64) -> Self {
        let count = if rows == 0 { 0 } else { draws.below(5) };
        let mut lookups = Self { rows: Vec::new(), factors: Vec::new() };
        for _ in 0..count {
            lookups.rows.push(draws.below(rows as u64) as i64);
            lookups.factors.push(draws.below(4) as f64 - 1.0);
        }
        lookups
    }

    /// The sum of what is looked up.
    fn loss(&self, table: &Tensor) -> Tensor {
        let factors = Tensor::from_slice(&self.factors).to_device(device());
        let found = embedding(table, &self.rows).to_kind(Kind::Double);
        (found * factors.unsqueeze(1)).sum(Kind::Double)
    }

    /// The gradient of the loss, times `scale`.
    fn add_gradient(&self, sum: &Tensor, scale: f64) {
        for (&row, factor) in self.rows.iter().zip(&self.factors) {
            let _ = sum.get(row).g_add_scalar_(factor * scale);
        }
    }
}

fn embedding(table: &Tensor, rows: &[i64]) -> Tensor {
    Tensor::embedding(table, &Tensor::from_slice(rows).to_device(device()), -1, false, true)
}

/// Random tables and lookups, some of them by no rank, against the mean of all ranks' gradients.
pub fn random(group: &ProcessGroup) -> Result<()> {
    reduced(group, 24)?;
    reduced(&own_group(group)?, 6).context("alone")
}

fn reduced(group: &ProcessGroup, rounds: u64) -> Result<()> {
    let mut draws = Draws(27);
    for round in 0..rounds {
        let (kind, tolerance) = KINDS[draws.below(4) as usize];
        let rows = [0, 1, 2, 7, 40][draws.below(5) as usize];
        let width = [0, 1, 3][draws.below(3) as usize];
        let table = Tensor::ones([rows, width], (kind, device())).set_requires_grad(true);
        let weight = Tensor::ones([10], (Kind::Float, device())).set_requires_grad(true);
        let named = [("table", &table), ("also table", &table), ("weight", &weight)];
        let named = named.map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
        let name = if group.rank() == 0 { "table" } else { "also table" };
        let as_dense = draws.below(3) == 0;
        let delayed: &[&str] = if draws.below(3) == 0 { &["table"] } else { &[] };
        let names = [name];
        let model = Ddp::builder(group)
            .find_unused_parameters(true)
            .gradient_as_bucket_view(draws.below(2) == 0)
            .sparse_gradients(if as_dense { &[] } else { &names })
            .sparse_as_dense(as_dense)
            .delay_all_reduce_named_params(delayed, "weight")
            .wrap_tensors((), named.into(), vec![])?;
        for step in 0..3 {
            for parameter in [&table, &weight] {
                flow_autograd::set_grad(parameter, None)?;
            }
            let expected = Tensor::zeros([rows, width], (Kind::Double, device()));
            // libtorch cannot add sparse gradients of half precision up.
            let accumulates = matches!(kind, Kind::Float | Kind::Double);
            let local_backwards = if accumulates { draws.below(2) } else { 0 };
            let mut is_used = false;
            for backward in 0..=local_backwards {
                let mut own = None;
                for rank in 0..group.world_size() {
                    let lookups = Lookups::new(&mut draws, rows);
                    let uses = draws.below(3) > 0;
                    if uses {
                        lookups.add_gradient(&expected, 1.0 / group.world_size() as f64);
                    }
                    is_used |= uses;
                    if rank == group.rank() {
                        own = Some(lookups).filter(|_| uses);
                    }
                }
                let mut loss = weight.sum(Kind::Double) * (group.rank() + 1) as f64;
                if let Some(lookups) = own {
                    loss += lookups.loss(&table);
                }
                let _no_sync = (backward < local_backwards).then(|| model.no_sync());
                loss.f_backward()?;
            }
            gradient_is(&weight, (local_backwards + 1) as f64 * mean(group, |r| (r + 1) as f64))?;
            let gradient = table.grad();
            ensure!(gradient.defined() == is_used, "round {round}, step {step}: {is_used}");
            if is_used {
                ensure!(
                    gradient.is_sparse() != as_dense && gradient.kind() == kind,
                    "{gradient:?}"
                );
                let dense = if as_dense { gradient } else { gradient.to_dense(None, false) };
                let difference = dense.to_kind(Kind::Double) - &expected;
                let limit = (expected.abs() + 1.0) * tolerance;
                ensure!(
                    difference.abs().le_tensor(&limit).all().int64_value(&[]) == 1,
                    "round {round}, step {step}: {difference}"
                );
            }
        }
    }
    Ok(())
}

/// An embedding and a linear layer.
fn words(store: &VarStore, sparse: bool) -> nn::Sequential {
    let config = nn::EmbeddingConfig { sparse, ..Default::default() };
    nn::seq().add(nn::embedding(store.root() / "words", 30, 4, config)).add(nn::linear(
        store.root() / "out",
        4,
        3,
        Default::default(),
    ))
}

/// The words of all ranks in one step.
fn batch(step: i64, ranks: usize) -> Tensor {
    let count = 6 * ranks as i64;
    (Tensor::arange(count, (Kind::Int64, device())) * 7 + step).remainder(30)
}

/// Trains with sparse gradients, and in one process with dense ones.
pub fn trained(group: &ProcessGroup) -> Result<()> {
    for (is_static, communication, in_backward) in [
        (false, None, false),
        (true, None, false),
        (false, Some(Kind::Double), false),
        (false, None, true),
    ] {
        let sparse = store();
        let net = words(&sparse, true);
        let mut builder = Ddp::builder(group).static_graph(is_static);
        if let Some(kind) = communication {
            builder = builder.comm_hook(SentAs(kind));
        }
        if in_backward {
            builder = builder.optimizer_in_backward(nn::Sgd::default(), 0.5);
        }
        let model = builder.sparse_gradients(&["words.weight"]).wrap(net, &sparse)?;
        let mut dense = store();
        let alone = words(&dense, false);
        dense.copy(&sparse)?;
        let mut optimizer = nn::Sgd::default().build(&sparse, 0.5)?;
        let mut optimizer_alone = nn::Sgd::default().build(&dense, 0.5)?;
        for step in 0..5 {
            let all = batch(step, group.world_size());
            let loss = model.forward_t(&part(&all, group), true).square().mean(Kind::Float);
            optimizer.zero_grad();
            loss.f_backward()?;
            // One that steps in backward has freed the gradients.
            optimizer.step();
            optimizer_alone.backward_step(&alone.forward(&all).square().mean(Kind::Float));
        }
        close(&values(&sparse), &values(&dense), 1e-5)?;
        same_everywhere(group, &sparse)?;
        let stats = model.stats();
        let of_words: Vec<_> =
            stats.buckets.iter().filter(|b| b.parameters == ["words.weight"]).collect();
        // Six words, of which each has an index and four numbers.
        ensure!(of_words.len() == 1 && of_words[0].bytes <= 6 * (8 + 4 * 4), "{stats:?}");
    }
    Ok(())
}

/// A rank that has ended has no entries.
pub fn in_join(group: &ProcessGroup) -> Result<()> {
    joined(group)?;
    joined(&own_group(group)?).context("alone")
}

fn joined(group: &ProcessGroup) -> Result<()> {
    for divide_by_initial_world_size in [true, false] {
        let table = Tensor::ones([4, 3], (Kind::Float, device())).set_requires_grad(true);
        let named = vec![("table".to_owned(), table.shallow_clone())];
        let builder = Ddp::builder(group).sparse_gradients(&["table"]);
        let model = builder.wrap_tensors((), named, vec![])?;
        let options = JoinOptions { divide_by_initial_world_size, ..Default::default() };
        model.join_with(options, || -> Result<()> {
            for step in 0..=group.rank() {
                flow_autograd::set_grad(&table, None)?;
                embedding(&table, &[1, 1, 3]).sum(Kind::Float).f_backward()?;
                let active = group.world_size() - step;
                let ranks = if divide_by_initial_world_size { group.world_size() } else { active };
                row_is(&table, 1, (2 * active) as f64 / ranks as f64)?;
                row_is(&table, 0, 0.0)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Every element in a row of the gradient must be `expected`.
fn row_is(table: &Tensor, row: i64, expected: f64) -> Result<()> {
    let gradient = table.grad();
    let dense = if gradient.is_sparse() { gradient.to_dense(None, false) } else { gradient };
    let difference = (dense.get(row) - expected).abs().max().double_value(&[]);
    ensure!(difference <= 1e-6, "row {row} should be {expected}: {dense}");
    Ok(())
}

/// What backwards under `no_sync` have added up stays as it is.
pub fn refreshed(group: &ProcessGroup) -> Result<()> {
    for as_dense in [false, true] {
        let table = Tensor::ones([4, 3], (Kind::Float, device())).set_requires_grad(true);
        let named = vec![("table".to_owned(), table.shallow_clone())];
        let mut model = Ddp::builder(group)
            .gradient_as_bucket_view(true)
            .sparse_gradients(if as_dense { &[] } else { &["table"] })
            .sparse_as_dense(as_dense)
            .wrap_tensors((), named, vec![])?;
        for _ in 0..2 {
            flow_autograd::set_grad(&table, None)?;
            let no_sync = model.no_sync();
            embedding(&table, &[group.rank() as i64, 3]).sum(Kind::Float).f_backward()?;
            drop(no_sync);
            model.refresh()?;
            embedding(&table, &[3]).sum(Kind::Float).f_backward()?;
            row_is(&table, 3, 2.0)?;
            row_is(&table, 0, 1.0 / group.world_size() as f64)?;
        }
    }
    Ok(())
}

/// Counts the last buckets.
struct Counting(Arc<AtomicUsize>);

impl CommHook for Counting {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        if bucket.parameters().any(|(name, _)| name.starts_with("words")) {
            return Err("it has a sparse gradient".into());
        }
        self.0.fetch_add(usize::from(bucket.is_last()), Ordering::Relaxed);
        Ok(bucket.all_reduce()?)
    }
}

/// Hooks get all other buckets, of which one is the last.
pub fn beside_hooks(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let count = Arc::new(AtomicUsize::new(0));
    let model = Ddp::builder(group)
        .bucket_cap_mb(1e-5)
        .sparse_gradients(&["words.weight"])
        .comm_hook(Counting(Arc::clone(&count)))
        .wrap(words(&store, true), &store)?;
    for step in 0..3 {
        let words = part(&batch(step, group.world_size()), group);
        model.forward_t(&words, true).sum(Kind::Float).f_backward()?;
    }
    let count = count.load(Ordering::Relaxed);
    ensure!(count == 3, "{count} last buckets in 3 backwards");
    Ok(())
}

pub fn misused(group: &ProcessGroup) -> Result<()> {
    // A gradient that is not of the kind that was said.
    for (names, is_sparse, text) in [
        (&["words.weight"][..], false, "words.weight is not sparse: do not name it in"),
        (
            &[],
            true,
            "words.weight is sparse: name it in sparse_gradients, or set sparse_as_dense(true)",
        ),
    ] {
        let store = store();
        let model =
            Ddp::builder(group).sparse_gradients(names).wrap(words(&store, is_sparse), &store)?;
        let words = part(&batch(0, group.world_size()), group);
        says(&error(model.forward_t(&words, true).sum(Kind::Float).f_backward())?, &[text])?;
    }
    // Indices of other dimensions on other ranks.
    let table = Tensor::ones([4, 3], (Kind::Float, device())).set_requires_grad(true);
    let named = vec![("table".to_owned(), table.shallow_clone())];
    let model = Ddp::builder(group).sparse_gradients(&["table"]).wrap_tensors((), named, vec![])?;
    let factor = Tensor::eye(4, (Kind::Float, device())).slice(1, 0, 3, 1);
    let loss = if group.rank() == 0 {
        embedding(&table, &[1, 2]).sum(Kind::Float)
    } else {
        let gradient = factor.to_sparse_sparse_dim(2);
        flow_autograd::custom_function(
            &[&table],
            |inputs| Ok(Forward { outputs: vec![inputs[0].sum(Kind::Float)], saved: vec![] }),
            move |_, _| Ok(vec![Some(gradient.shallow_clone())]),
        )?
        .swap_remove(0)
    };
    says(&error(loss.f_backward())?, &["indices of [1, 2] dimensions"])?;
    drop(model);
    // On one rank only: the others learn it at once.
    let model = Ddp::builder(group).sparse_gradients(&["table"]).wrap_tensors(
        (),
        vec![("table".to_owned(), table.shallow_clone())],
        vec![],
    )?;
    let loss = if group.rank() == 0 {
        table.sum(Kind::Float)
    } else {
        embedding(&table, &[1, 2]).sum(Kind::Float)
    };
    flow_autograd::set_grad(&table, None)?;
    says(&error(loss.f_backward())?, &["rank 0", "the gradient of table is not sparse"])?;
    drop(model);
    // Names of what cannot be sparse.
    let vectors = Vectors::new(&store(), &[10]).0;
    let single = Tensor::from(1f32).to_device(device()).set_requires_grad(true);
    for (tensor, wanted, text) in [
        (&vectors[0], "w1", "names w1, which is no parameter: w is one"),
        (&single, "w", "it must be Float, Double, Half or BFloat16, of one dimension or more"),
    ] {
        let named = vec![("w".to_owned(), tensor.shallow_clone())];
        let builder = Ddp::builder(group).sparse_gradients(&[wanted]);
        says(&error(builder.wrap_tensors((), named, vec![]))?, &[text])?;
    }
    Ok(())
}
