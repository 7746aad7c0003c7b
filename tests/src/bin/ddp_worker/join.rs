//! Joins that end early, fail or are misused, and joinables of one's own.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, anyhow, bail, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::{
    BoxError, CommHook, Ddp, Error, GradBucket, Join, JoinContext, JoinHook, JoinOptions, Joinable,
    Pending, convert_sync_batchnorm, join,
};
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{error, gradient_is, says};
use crate::models::{self, Vectors, device, store};

const LENGTHS: [i64; 2] = [40_000, 10];
const THROWS: JoinOptions =
    JoinOptions { divide_by_initial_world_size: true, throw_on_early_termination: true };

fn vectors(group: &ProcessGroup, store: &VarStore) -> Result<Ddp<Vectors>> {
    Ok(Ddp::new(Vectors::new(store, &LENGTHS), store, group)?)
}

fn step<M: ModuleT>(model: &Ddp<M>, input: &Tensor) -> Result<(), Error> {
    let output = model.try_forward_t(input, true)?;
    output.sum(output.kind()).f_backward().map_err(Error::from_backward)
}

fn train<M: ModuleT>(model: &Ddp<M>, input: &Tensor, steps: usize) -> Result<(), Error> {
    (0..steps).try_for_each(|_| step(model, input))
}

fn one() -> Tensor {
    Tensor::from(1f32).to(device())
}

fn images() -> Tensor {
    Tensor::randn([4, 3, 8, 8], (Kind::Float, device()))
}

/// The last rank has no more batches: all ranks learn it at once, and which ranks those are.
fn ends_early<M: ModuleT>(group: &ProcessGroup, model: &Ddp<M>, input: &Tensor) -> Result<()> {
    let last = group.world_size() - 1;
    model.join_with(THROWS, || train(model, input, 2)).context("all have two batches")?;
    for steps in [0, 2] {
        let own = if group.rank() == last { steps } else { 5 };
        let result = model.join_with(THROWS, || train(model, input, own));
        let Err(Error::EndedEarly { rank, ended, active }) = result else {
            bail!("{result:?} instead of EndedEarly");
        };
        ensure!(rank == group.rank() && ended == [last], "rank {rank}, {ended:?}");
        ensure!(active == (0..last).collect::<Vec<_>>(), "{active:?}");
        // Also where the loop takes the error for its end.
        let text = error(model.join_with(THROWS, || -> Result<(), Error> {
            let _ = train(model, input, own);
            Ok(())
        }))?;
        says(&text, &["have ended, the ranks [0", "throw_on_early_termination is set"])?;
        train(model, input, 2).context("without a join")?;
    }
    Ok(())
}

/// It is an error if that is asked for, and the model can be trained on: with and without buffers,
/// and with layers that have collectives of their own.
pub fn ended_early(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = vectors(group, &store)?;
    ends_early(group, &model, &one())?;
    model.join(|| train(&model, &one(), group.rank())).context("vectors")?;
    for is_synced in [false, true] {
        let store = models::store();
        let net = models::batchnorm(&store.root());
        let model = Ddp::builder(group).forward_sync_buffers(!is_synced).wrap(net, &store)?;
        if is_synced {
            convert_sync_batchnorm(&store, group)?;
        }
        ends_early(group, &model, &images())?;
    }
    Ok(())
}

/// `forward_t` cannot return the error: backward does.
pub fn ended_early_in_forward_t(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let net = models::batchnorm(&store.root());
    let model = Ddp::new(net, &store, group)?;
    convert_sync_batchnorm(&store, group)?;
    let train = |steps| -> Result<(), Error> {
        for _ in 0..steps {
            let loss = model.forward_t(&images(), true).sum(Kind::Float);
            loss.f_backward().map_err(Error::from_backward)?;
        }
        Ok(())
    };
    let result = model.join_with(THROWS, || train(1 + group.rank()));
    ensure!(matches!(result, Err(Error::EndedEarly { .. })), "{result:?}");
    Ok(train(2)?)
}

/// An error of one rank is that of all, whether they train or have ended.
pub fn failing(group: &ProcessGroup) -> Result<()> {
    for steps in [0, 5] {
        let store = store();
        let model = vectors(group, &store)?;
        let result = model.join(|| {
            if group.rank() > 0 {
                return Ok(train(&model, &one(), steps)?);
            }
            train(&model, &one(), 1)?;
            Err(anyhow!("the disk\nis full").context("reading a batch"))
        });
        let text = format!("{:#}", result.err().context("there should have been an error")?);
        if group.rank() == 0 {
            says(&text, &["reading a batch: the disk\nis full"])?;
        } else {
            let cause = "its part of a join failed: reading a batch: the disk is full";
            says(&text, &["rank 0 aborted the group: ", cause])?;
        }
    }
    Ok(())
}

/// A rank that is alone fails nobody, whose group others than the model use too.
pub fn failing_alone(group: &ProcessGroup) -> Result<()> {
    for rank in 0..group.world_size() {
        let Some(alone) = group.new_group(&[rank])? else { continue };
        let store = store();
        let model = vectors(&alone, &store)?;
        let text = error(model.join(|| Err::<(), _>(anyhow!("no batch"))))?;
        ensure!(text == "no batch", "{text}");
        alone.barrier()?;
        model.join(|| train(&model, &one(), 1))?;
    }
    Ok(())
}

pub fn panicking(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = vectors(group, &store)?;
    let body = || {
        if group.rank() == 0 {
            panic!("no batch");
        }
        train(&model, &one(), 5)
    };
    match catch_unwind(AssertUnwindSafe(|| model.join(body))) {
        Ok(result) => says(&error(result)?, &["its part of a join failed: it panicked"]),
        Err(_) => {
            ensure!(group.rank() == 0, "a rank that does not panic has panicked");
            Ok(())
        }
    }
}

/// Panics where the rank has used no parameter.
struct Panics;

impl CommHook for Panics {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        assert!(bucket.used().any(|is_used| is_used), "nothing is used");
        Ok(bucket.all_reduce()?)
    }
}

/// In a rank that has ended; the model is of no more use.
pub fn panicking_hook(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let builder = Ddp::builder(group).comm_hook(Panics);
    let model = builder.wrap(Vectors::new(&store, &LENGTHS), &store)?;
    let body = || train(&model, &one(), group.rank());
    let cause = "its part of a join failed: it panicked";
    match catch_unwind(AssertUnwindSafe(|| model.join(body))) {
        Ok(result) => says(&error(result)?, &[cause])?,
        Err(_) => ensure!(group.rank() == 0, "a rank that does not panic has panicked"),
    }
    says(&error(train(&model, &one(), 1))?, &[cause])
}

pub fn dropped(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = vectors(group, &store)?;
    let guard = Join::new(&[&model], JoinOptions::default())?;
    train(&model, &one(), 1)?;
    if group.rank() == 0 {
        drop(guard);
        return Ok(());
    }
    let text = error(train(&model, &one(), 1).and_then(|()| guard.finish()))?;
    says(&text, &["its part of a join failed: it was dropped without finish()"])
}

/// Of a rank that has not ended, while another one has: on both.
pub fn missing_gradients(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = vectors(group, &store)?;
    let text = error(model.join(|| {
        if group.rank() == 0 {
            model.weighted_sum(&[(0, 1.0)]).f_backward().map_err(Error::from_backward)?;
        }
        Ok::<_, Error>(())
    }))?;
    says(&text, &["some parameters got no gradient in this backward: rank 0: w1;"])
}

/// A rank that does not join is found out.
pub fn of_some_ranks(group: &ProcessGroup) -> Result<()> {
    let store = store();
    let model = vectors(group, &store)?;
    let train = || train(&model, &one(), 1);
    let text = error(if group.rank() == 0 { train() } else { model.join(train) })?;
    says(&text, &["ranks disagree", "all_gather"])
}

/// What cannot be joined is an error of all ranks.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let nothing = || Ok::<_, Error>(());
    says(&error(join(&[], JoinOptions::default(), nothing))?, &["there is nothing to join"])?;

    let store = store();
    let builder = Ddp::builder(group).static_graph(true);
    let model = builder.wrap(Vectors::new(&store, &LENGTHS), &store)?;
    says(&error(model.join(nothing))?, &["join: build without static_graph(true)"])?;

    let norms = models::store();
    let model = Ddp::builder(group)
        .broadcast_buffers(false)
        .wrap(models::batchnorm(&norms.root()), &norms)?;
    model.join(nothing)?;
    convert_sync_batchnorm(&norms, group)?;
    convert_sync_batchnorm(&norms, group)?;
    let words = ["set throw_on_early_termination", "convert_sync_batchnorm"];
    says(&error(model.join(nothing))?, &words)?;
    model.join_with(THROWS, nothing)?;

    let store = models::store();
    let model = vectors(group, &store)?;
    let own = JoinOptions { throw_on_early_termination: group.rank() > 0, ..Default::default() };
    let text = error(model.join_with(own, nothing))?;
    says(&text, &["rank 0 has JoinOptions", "throw_on_early_termination: true"])?;
    let inner = model.join(|| {
        let inner = error(model.join(nothing));
        train(&model, &one(), 1 + group.rank())?;
        Ok::<_, anyhow::Error>(inner)
    })?;
    says(&inner?, &["join: another join is under way", "give it all of them"])?;
    let twice = error(join(&[&model, &model], JoinOptions::default(), nothing))?;
    says(&twice, &["join: the model is in a join already: give it to one, once"])?;

    let unfit = Unfit { group: group.duplicate()?, is_fit: group.rank() > 0 };
    let text = error(join(&[&model, &unfit], JoinOptions::default(), nothing))?;
    let own = "rank 0: join: its reason";
    let of_rank_0 = "join: another rank cannot begin it: rank 0: join: its reason";
    says(&text, &[if unfit.is_fit { of_rank_0 } else { own }])?;
    // It is as it was.
    train(&model, &one(), 2)?;
    Ok(())
}

/// Fits, or is no joinable.
struct Unfit {
    group: ProcessGroup,
    is_fit: bool,
}

impl Joinable for Unfit {
    fn join_group(&self) -> &ProcessGroup {
        &self.group
    }

    fn join_hook(&self, _: JoinContext) -> Result<Box<dyn JoinHook + '_>, BoxError> {
        if self.is_fit { Ok(Box::new(Idle)) } else { Err("its reason".into()) }
    }
}

struct Idle;

impl JoinHook for Idle {
    fn main_hook(&mut self, _: i64, _: &[usize]) -> Result<(), BoxError> {
        Ok(())
    }
}

/// A join of each model, of which ranks that have ended would shadow one only.
pub fn nested(group: &ProcessGroup) -> Result<()> {
    let stores = [store(), store()];
    let models = [vectors(group, &stores[0])?, vectors(group, &stores[1])?];
    let train = || models.iter().try_for_each(|model| train(model, &one(), group.rank()));
    let text = error(models[0].join(|| models[1].join(train)))?;
    says(&text, &["another join is under way", "join(&[&model, &other], ..)"])
}

/// Ranks that have not ended train the models in different orders, or have different forwards.
pub fn out_of_step(group: &ProcessGroup) -> Result<()> {
    let stores = [store(), store()];
    let models = [vectors(group, &stores[0])?, vectors(group, &stores[1])?];
    let joinables: [&dyn Joinable; 2] = [&models[0], &models[1]];
    let first = usize::from(group.rank() == 0);
    let text = error(join(&joinables, JoinOptions::default(), || {
        [first, 1 - first].iter().try_for_each(|&number| train(&models[number], &one(), 1))
    }))?;
    says(&text, &["ranks are about to do different things", "(joinable 1, code 1)"])?;

    let store = models::store();
    let model = Ddp::new(models::batchnorm(&store.root()), &store, group)?;
    let text = error(model.join(|| {
        if group.rank() == 0 {
            let _ = model.try_forward_t(&images(), true)?;
        }
        train(&model, &images(), 1)
    }))?;
    says(&text, &["ranks are about to do different things", "(joinable 0, code 0)"])
}

/// Several models can be trained one after the other, and not in one backward.
pub fn two_models(group: &ProcessGroup) -> Result<()> {
    let stores = [store(), store()];
    let models = [vectors(group, &stores[0])?, vectors(group, &stores[1])?];
    let joinables: [&dyn Joinable; 2] = [&models[0], &models[1]];
    let ranks = group.world_size();
    // Each rank has a step more than the one before.
    join(&joinables, JoinOptions::default(), || -> Result<()> {
        for number in 0..group.rank() {
            for (model, store) in models.iter().zip(&stores) {
                store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
                step(model, &one())?;
                let share = (ranks - 1 - number) as f64 / ranks as f64;
                model.0.iter().try_for_each(|w| gradient_is(w, share))?;
            }
        }
        Ok(())
    })?;
    let at_once = || {
        let outputs = models.each_ref().map(|model| model.forward(&one()));
        (&outputs[0] + &outputs[1]).f_backward().map_err(Error::from_backward)
    };
    join(&joinables, THROWS, at_once).context("no rank ends early")?;
    join(&joinables, JoinOptions::default(), || {
        let _local = models[0].no_sync();
        at_once()
    })?;
    let text = error(join(&joinables, JoinOptions::default(), at_once))?;
    says(&text, &["a joined model is in backward", "wrap models that one backward goes through"])
}

/// Counts steps of all ranks.
struct Counter {
    group: ProcessGroup,
    context: RefCell<Option<JoinContext>>,
    shadowed: Cell<usize>,
    last_joiners: RefCell<Vec<usize>>,
}

impl Counter {
    fn add(&self, steps: i64) -> Result<i64, Error> {
        if let Some(context) = &*self.context.borrow() {
            context.notify(7)?;
        }
        let mut sum = [steps];
        self.group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum[0])
    }
}

impl Joinable for Counter {
    fn join_group(&self) -> &ProcessGroup {
        &self.group
    }

    fn join_hook(&self, context: JoinContext) -> Result<Box<dyn JoinHook + '_>, BoxError> {
        self.context.replace(Some(context));
        Ok(Box::new(Shadow(self)))
    }
}

struct Shadow<'a>(&'a Counter);

impl JoinHook for Shadow<'_> {
    fn main_hook(&mut self, code: i64, active: &[usize]) -> Result<(), BoxError> {
        if code != 7 || active.is_empty() || active.contains(&self.0.group.rank()) {
            return Err(format!("code {code}, {active:?} have not ended").into());
        }
        self.0.shadowed.set(self.0.shadowed.get() + 1);
        Ok(self.0.group.all_reduce(&mut [0i64], ReduceOp::Sum)?)
    }

    fn post_hook(&mut self, last_joiners: &[usize]) -> Result<(), BoxError> {
        self.0.last_joiners.replace(last_joiners.to_vec());
        Ok(self.0.group.barrier()?)
    }
}

impl Drop for Shadow<'_> {
    fn drop(&mut self) {
        self.0.context.take();
    }
}

/// A joinable of one's own beside a model, in either order.
pub fn own(group: &ProcessGroup) -> Result<()> {
    for model_is_first in [false, true] {
        let store = store();
        let model = vectors(group, &store)?;
        let counter = Counter {
            group: group.duplicate()?,
            context: RefCell::default(),
            shadowed: Cell::default(),
            last_joiners: RefCell::default(),
        };
        let joinables: [&dyn Joinable; 2] =
            if model_is_first { [&model, &counter] } else { [&counter, &model] };
        // Two steps, three, and so on; the last rank as many as the one before.
        let ranks = group.world_size();
        let own = 2 + group.rank().min(ranks - 2);
        join(&joinables, JoinOptions::default(), || -> Result<()> {
            for number in 0..own {
                model.0.iter().try_for_each(|w| flow_autograd::set_grad(w, None))?;
                step(&model, &one())?;
                let active = (0..ranks).filter(|rank| 2 + rank.min(&(ranks - 2)) > number).count();
                model.0.iter().try_for_each(|w| gradient_is(w, active as f64 / ranks as f64))?;
                ensure!(counter.add(1)? == active as i64, "not all are counted");
            }
            Ok(())
        })?;
        ensure!(counter.shadowed.get() == ranks - own, "{} steps", counter.shadowed.get());
        ensure!(*counter.last_joiners.borrow() == [ranks - 2, ranks - 1]);
        ensure!(counter.add(1)? == ranks as i64, "the join is over");
    }
    Ok(())
}
