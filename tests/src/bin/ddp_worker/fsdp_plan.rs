//! What an `Fsdp` says of its memory before it needs it.

use std::fs;

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;
use flow_ddp::{Fsdp, MemoryPlan, ReduceOp, ZeroRedundancyOptimizer};
use tch::nn::{self, Adam, ModuleT, OptimizerConfig, SequentialT, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{error, says};
use crate::models::{Vectors, device, store};

const LAYERS: usize = 40;
const WIDTH: i64 = 1024;

fn net(store: &VarStore) -> SequentialT {
    let mut net = nn::seq_t();
    for layer in 0..LAYERS {
        let path = store.root() / format!("fc{layer}");
        let config = nn::LinearConfig { bias: false, ..Default::default() };
        net = net.add(nn::linear(path, WIDTH, WIDTH, config)).add_fn(|x| x.tanh());
    }
    net
}

/// The memory of a training with Adam is what was planned.
pub fn of_adam(group: &ProcessGroup) -> Result<()> {
    let plan = compared(group, Adam::default())?;
    ensure!(plan.optimizer == 2 * plan.parameters, "{plan}");
    Ok(())
}

/// The same with SGD, in processes that have not trained before.
pub fn of_sgd(group: &ProcessGroup) -> Result<()> {
    let plan = compared(group, Sgd::default())?;
    ensure!(plan.optimizer == 0, "{plan}");
    Ok(())
}

fn compared(
    group: &ProcessGroup,
    config: impl OptimizerConfig + Copy + Send + 'static,
) -> Result<MemoryPlan> {
    // What libtorch allocates once for all.
    let first = store();
    let layer = nn::linear(first.root(), WIDTH, 8, Default::default());
    trained(group, &first, layer, config)?;
    let before = bytes(group)?;
    let store = store();
    let model = net(&store);
    let plan = Fsdp::plan(&store, config, group.world_size())?;
    let training = trained(group, &store, model, config)?;
    let more = bytes(group)?.saturating_sub(before);
    drop(training);
    // After a step the memory of buckets may have been given back.
    let least = plan.total() - plan.buckets;
    ensure!(more > least - least / 50, "{more} bytes, and the plan is {plan}");
    ensure!(more < plan.total() + plan.total() / 20, "{more} bytes, and the plan is {plan}");
    Ok(plan)
}

/// Trains some steps, and returns what has the memory.
fn trained<M: ModuleT>(
    group: &ProcessGroup,
    store: &VarStore,
    model: M,
    config: impl OptimizerConfig + Send + 'static,
) -> Result<(Fsdp<M>, ZeroRedundancyOptimizer)> {
    let model = Fsdp::new(model, store, group)?;
    let optimizer = model.optimizer(config, 1e-3)?;
    let input = Tensor::ones([2, WIDTH], (Kind::Float, device()));
    for _ in 0..3 {
        optimizer.zero_grad()?;
        model.try_forward_t(&input, true)?.sum(Kind::Float).f_backward()?;
        optimizer.step()?;
    }
    Ok((model, optimizer))
}

/// The bytes of all ranks: what is shared counts once.
fn bytes(group: &ProcessGroup) -> Result<u64> {
    group.barrier()?;
    let rollup = fs::read_to_string("/proc/self/smaps_rollup")?;
    let mut bytes = [kib(&rollup, "Pss:")? << 10];
    group.all_reduce(&mut bytes, ReduceOp::Sum)?;
    Ok(bytes[0] as u64)
}

fn kib(text: &str, name: &str) -> Result<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).context("no such line")?;
    Ok(line.split_whitespace().next().context("no number")?.parse()?)
}

/// A model of twice the machine's memory, of which nothing has been written, is an error of all ranks.
pub fn too_large(group: &ProcessGroup) -> Result<()> {
    if fs::read_to_string("/proc/sys/vm/overcommit_memory")?.trim() == "2" {
        println!("SKIPPED: the kernel gives no more memory than there is (vm.overcommit_memory)");
        return Ok(());
    }
    let information = fs::read_to_string("/proc/meminfo")?;
    let all = (kib(&information, "MemTotal:")? + kib(&information, "SwapTotal:")?) << 10;
    let store = store();
    // Each a quarter, which the kernel does not refuse.
    let parameters = (0..8).map(|i| {
        let tensor = Tensor::empty([all / 16], (Kind::Float, device()));
        store.root().add(&format!("w{i}"), tensor, true)
    });
    let model = Vectors(parameters.collect());
    let plan = Fsdp::plan(&store, Adam::default(), group.world_size())?;
    ensure!(plan.parameters > (all as u64) * 19 / 10, "{plan}");
    let text = error(Fsdp::new(model, &store, group))?;
    ensure!(text.lines().count() == 1, "{text}");
    says(&text, &["Fsdp: training needs", "are there: take a machine with more memory"])?;
    // All goes on with a model that fits.
    let small = crate::models::store();
    let model = Fsdp::new(Vectors::new(&small, &[1000]), &small, group)?;
    model.optimizer(Adam::default(), 1e-3)?;
    Ok(())
}
