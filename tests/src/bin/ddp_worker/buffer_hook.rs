//! Buffers that a hook communicates.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail, ensure};
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::{
    BoxError, BufferCommHook, BufferCommHookLocation, Ddp, Error, JoinOptions, TensorCollectives,
};
use tch::nn::{ModuleT, SequentialT, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{close, error, failure, mean, says, values};
use crate::models::{self, device};

/// Averages buffers, and counts how often. Fails on rank 1 if it is told to.
struct Average {
    location: BufferCommHookLocation,
    calls: Arc<AtomicUsize>,
    fails: bool,
}

impl Average {
    fn new(location: BufferCommHookLocation) -> Self {
        Self { location, calls: Arc::default(), fails: false }
    }
}

impl BufferCommHook for Average {
    fn run(
        &mut self,
        group: &ProcessGroup,
        buffers: &mut [(String, Tensor)],
    ) -> Result<(), BoxError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.fails && group.rank() == 1 {
            return Err("the statistics are wrong".into());
        }
        for (_, buffer) in buffers {
            let mut mean = buffer.copy();
            group.all_reduce_tensor(&mut mean, ReduceOp::Avg)?;
            buffer.copy_(&mean);
        }
        Ok(())
    }

    fn location(&self) -> BufferCommHookLocation {
        self.location
    }
}

/// What is wrong with a hook on rank 1.
#[derive(Clone, Copy)]
enum Fault {
    /// A group of its own fails, in which no other rank is.
    OwnGroup,
    /// It makes a new tensor instead of writing into the buffer.
    Replaces,
}

impl Fault {
    fn text(self) -> &'static str {
        match self {
            Self::OwnGroup => "enough of it",
            Self::Replaces => "another tensor in place of the buffer",
        }
    }
}

struct Faulty {
    fault: Fault,
    own: ProcessGroup,
}

impl BufferCommHook for Faulty {
    fn run(
        &mut self,
        group: &ProcessGroup,
        buffers: &mut [(String, Tensor)],
    ) -> Result<(), BoxError> {
        if group.rank() != 1 {
            return Ok(());
        }
        match self.fault {
            Fault::OwnGroup => {
                self.own.abort("enough of it");
                self.own.barrier()?;
            }
            Fault::Replaces => {
                buffers[0].1 = Tensor::zeros_like(&buffers[0].1);
            }
        }
        Ok(())
    }
}

const LOCATIONS: [BufferCommHookLocation; 2] =
    [BufferCommHookLocation::PreForward, BufferCommHookLocation::PostForward];

/// A model of each rank, all in one process: what the wrapped model is compared with.
struct Twins(Vec<(VarStore, SequentialT)>);

impl Twins {
    fn of(store: &VarStore, ranks: usize) -> Result<Self> {
        let mut twins = Vec::new();
        for _ in 0..ranks {
            let mut twin = models::store();
            let net = models::batchnorm(&twin.root());
            twin.copy(store)?;
            twins.push((twin, net));
        }
        Ok(Self(twins))
    }

    fn average_buffers(&self) {
        let trained: Vec<_> = self.0.iter().map(|(store, _)| store.variables()).collect();
        for (name, tensor) in &trained[0] {
            if tensor.requires_grad() {
                continue;
            }
            let all: Vec<Tensor> = trained.iter().map(|one| one[name].shallow_clone()).collect();
            let mean = Tensor::stack(&all, 0).mean_dim(0, false, tensor.kind());
            all.into_iter().for_each(|mut buffer| buffer.copy_(&mean));
        }
    }
}

/// A model whose buffers are averaged, and how often they were.
struct Averaging {
    store: VarStore,
    model: Ddp<SequentialT>,
    calls: Arc<AtomicUsize>,
}

impl Averaging {
    fn new(group: &ProcessGroup, location: BufferCommHookLocation) -> Result<Self> {
        let store = models::store();
        let net = models::batchnorm(&store.root());
        let hook = Average::new(location);
        let calls = Arc::clone(&hook.calls);
        let model = Ddp::builder(group).buffer_comm_hook(hook).wrap(net, &store)?;
        Ok(Self { store, model, calls })
    }
}

/// Ranks see different batches. With the average before or after each forward, they have the
/// buffers of one process that does the same with a model of each; a backward follows.
pub fn averaged(group: &ProcessGroup) -> Result<()> {
    for location in LOCATIONS {
        let Averaging { store, model, calls } = Averaging::new(group, location)?;
        let twins = Twins::of(&store, group.world_size())?;
        tch::manual_seed(7);
        for step in 0..3 {
            let shape = [group.world_size() as i64, 4, 3, 8, 8];
            let batches = Tensor::randn(shape, (Kind::Float, device())) * (step + 1);
            if location == BufferCommHookLocation::PreForward {
                twins.average_buffers();
            }
            for (rank, (_, twin)) in twins.0.iter().enumerate() {
                drop(tch::no_grad(|| twin.forward_t(&batches.get(rank as i64), true)));
            }
            if location == BufferCommHookLocation::PostForward {
                twins.average_buffers();
            }
            let output = model.try_forward_t(&batches.get(group.rank() as i64), true)?;
            output.sum(Kind::Float).f_backward().map_err(Error::from_backward)?;
            close(&values(&store), &values(&twins.0[group.rank()].0), 1e-5)
                .with_context(|| format!("{location:?}, step {step}"))?;
        }
        let made = calls.load(Ordering::Relaxed);
        ensure!(made == 3, "{location:?}: {made} calls in 3 steps");
        let x = Tensor::randn([4, 3, 8, 8], (Kind::Float, device()));
        drop(model.try_forward_t(&x, false)?);
        model.without_sync(|model| model.try_forward_t(&x, true).map(drop))?;
        let made = calls.load(Ordering::Relaxed);
        ensure!(made == 3, "{location:?}: called in evaluation or under no_sync");
    }
    Ok(())
}

/// A program that turns it off in forwards calls it itself.
pub fn by_hand(group: &ProcessGroup) -> Result<()> {
    for location in LOCATIONS {
        let store = models::store();
        let net = models::batchnorm(&store.root());
        let builder = Ddp::builder(group).forward_sync_buffers(false);
        let model = builder.buffer_comm_hook(Average::new(location)).wrap(net, &store)?;
        let variables = store.variables();
        let mut buffer = variables.get("bn1.running_mean").context("a buffer")?.shallow_clone();
        let own = |rank| rank as f64 + 1.0;
        let _ = buffer.fill_(own(group.rank()));
        let x = Tensor::zeros([4, 3, 8, 8], (Kind::Float, device()));
        model.try_forward_t(&x, true)?.sum(Kind::Float).f_backward()?;
        // Zeros have zeros as their statistics.
        let expected = [0.9 * own(group.rank()), 0.9 * mean(group, own)];
        for (what, expected) in ["before", "after"].into_iter().zip(expected) {
            if what == "after" {
                model.sync_buffers()?;
            }
            let found = buffer.double_value(&[0]);
            ensure!((found - expected).abs() < 1e-6, "{what} sync_buffers: {found}");
        }
    }
    Ok(())
}

/// Ranks that have ended call the hook with the others. In the end all have the same buffers.
pub fn in_join(group: &ProcessGroup) -> Result<()> {
    for location in LOCATIONS {
        let Averaging { store, model, calls } = Averaging::new(group, location)?;
        model.join_with(JoinOptions::default(), || {
            for _ in 0..=group.rank() {
                let x = Tensor::randn([4, 3, 8, 8], (Kind::Float, device()));
                let loss = model.try_forward_t(&x, true)?.sum(Kind::Float);
                loss.f_backward().map_err(Error::from_backward)?;
            }
            Ok::<_, Error>(())
        })?;
        let made = calls.load(Ordering::Relaxed);
        ensure!(made == group.world_size(), "{location:?}: {made} calls");
        crate::helpers::same_everywhere(group, &store)?;
    }
    Ok(())
}

/// An error of one rank is that of all; so is a hook that some ranks lack, or that has nothing to do.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let x = Tensor::randn([4, 3, 8, 8], (Kind::Float, device()));
    for location in LOCATIONS {
        let store = models::store();
        let net = models::batchnorm(&store.root());
        let hook = Average { fails: true, ..Average::new(location) };
        let model = Ddp::builder(group).buffer_comm_hook(hook).wrap(net, &store)?;
        let result = model.try_forward_t(&x, true);
        if group.rank() == 1 {
            let Err(Error::BufferCommHook { rank: 1, reason }) = result else {
                bail!("{result:?} instead of BufferCommHook");
            };
            ensure!(reason == "the statistics are wrong", "{reason}");
        } else {
            says(&error(result)?, &["rank 1", "the statistics are wrong"])?;
        }
    }
    for fault in [Fault::OwnGroup, Fault::Replaces] {
        let store = models::store();
        let net = models::batchnorm(&store.root());
        let hook = Faulty { fault, own: crate::helpers::own_group(group)? };
        let model = Ddp::builder(group).buffer_comm_hook(hook).wrap(net, &store)?;
        let text = failure(&model, || {
            let output = model.try_forward_t(&x, true)?;
            output.sum(Kind::Float).f_backward().map_err(Error::from_backward)
        })?;
        says(&text, &[fault.text()])?;
    }
    let store = models::store();
    let net = models::batchnorm(&store.root());
    let mut builder = Ddp::builder(group);
    if group.rank() == 0 {
        builder = builder.buffer_comm_hook(Average::new(BufferCommHookLocation::PostForward));
    }
    says(
        &error(builder.wrap(net, &store).map(drop))?,
        &["rank 0 has options", "Average PostForward", "buffer_comm_hook: none"],
    )?;
    let net = models::batchnorm(&models::store().root());
    let builder = Ddp::builder(group).broadcast_buffers(false);
    let builder = builder.buffer_comm_hook(Average::new(BufferCommHookLocation::PreForward));
    says(
        &error(builder.wrap(net, &store).map(drop))?,
        &["buffer_comm_hook: ranks share no buffers: leave broadcast_buffers on"],
    )
}
