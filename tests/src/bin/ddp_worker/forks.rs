//! What becomes of a rank that forks: its child, which is not replaced by another program, neither
//! disturbs it nor hangs. A child returns from its scenario too, and drops its copies of all that
//! its parent has.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use flow_comm::env::{Membership, Rendezvous};
use flow_comm::store::Store;
use flow_comm::{DType, Error, Lane, ProcessGroup, ReduceOp};
use flow_ddp::Ddp;
use flow_tests::registry::{Scenario, by_hand, launched, scenario};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

/// Far longer than a child takes on a busy machine.
const CHILD_TIMEOUT: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "a_child_neither_takes_nor_gives_back_memory",
        memory,
        &[launched(2), by_hand(&[2]), by_hand(&[1, 1])],
    ),
    scenario(
        "operations_of_a_child_fail_at_once",
        operations,
        &[launched(2), by_hand(&[2]), by_hand(&[1, 1])],
    ),
    scenario("a_fork_beside_busy_threads", busy, &[launched(2), by_hand(&[1, 1])]),
    scenario("a_connection_to_the_store_belongs_to_its_maker", store, &[launched(2)]),
    scenario(
        "tensors_of_a_child",
        tensors,
        &[
            launched(2),
            launched(2).mode("hooks", "FLOW_DDP_PROGRESS", "hooks"),
            launched(2).mode("thread", "FLOW_DDP_PROGRESS", "thread"),
        ],
    ),
    scenario("children_join_anew", joins_anew, &[launched(2), by_hand(&[2])]),
];

/// A forked process.
struct Child(Pid);

impl Child {
    fn ends_well(self) -> Result<()> {
        let begin = Instant::now();
        loop {
            match waitpid(self.0, Some(WaitPidFlag::WNOHANG))? {
                WaitStatus::Exited(_, 0) => return Ok(()),
                WaitStatus::StillAlive if begin.elapsed() < CHILD_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(2))
                }
                WaitStatus::StillAlive => {
                    kill(self.0, Signal::SIGKILL)?;
                    bail!("the forked process hangs");
                }
                end => bail!("the forked process ended with {end:?}"),
            }
        }
    }
}

/// None in the child.
fn forked() -> Result<Option<Child>> {
    // SAFETY: the child uses no lock but those of the libraries that this is about, and malloc's,
    // which is made for that.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Some(Child(child))),
        ForkResult::Child => Ok(None),
    }
}

fn sum_of_ranks(group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank() as i64, group.world_size() as i64);
    let mut sum = [rank];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum[0] == size * (size - 1) / 2, "{sum:?}");
    Ok(())
}

/// Uses all of a group, and has each rank wait so long for the others that it looks whether they
/// have left.
fn go_on(group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    for late in 0..size {
        if late == rank {
            std::thread::sleep(Duration::from_millis(300));
        }
        sum_of_ranks(group)?;
    }
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let sent = group.start(Lane::To(next), "send", move |group| {
        group.send(&vec![rank as i64; 300_000], next)
    })?;
    let mut received = vec![0_i64; 300_000];
    group.recv(&mut received, before)?;
    sent.wait()?;
    ensure!(received.iter().all(|&from| from == before as i64));
    sum_of_ranks(&group.duplicate()?)
}

fn is_forked<T>(what: &str, result: Result<T, Error>, group: &ProcessGroup) -> Result<()> {
    let Err(error) = result else { bail!("{what} works in a forked process") };
    let (rank, text) = (group.ranks()[group.rank()], error.to_string());
    let (pid, parent) = (std::process::id(), std::os::unix::process::parent_id());
    ensure!(matches!(error, Error::Forked { .. }), "{what}: {error:?}");
    let right = text.starts_with(&format!(
        "rank {rank}: {what} failed: this process (pid {pid}) was forked from rank"
    ));
    ensure!(right && text.contains(&format!("rank {rank} (pid {parent} on ")), "{text}");
    Ok(())
}

/// What the child frees, the parent keeps; the child gets no memory that is the parent's to hand
/// out.
fn memory(group: &ProcessGroup) -> Result<()> {
    let mark = |index: usize| (group.rank() * 100 + index + 1) as i64;
    let mut kept: Vec<_> =
        (0..8).map(|_| group.alloc_shared::<i64>(MIB / 8)).collect::<Result<_, _>>()?;
    kept.iter_mut().enumerate().for_each(|(index, block)| block.fill(mark(index)));
    let is_whole = |kept: &[flow_comm::SharedBuffer<i64>]| {
        kept.iter()
            .enumerate()
            .all(|(index, block)| block.iter().all(|&element| element == mark(index)))
    };
    // To be handed out next.
    drop(group.alloc_shared::<i64>(MIB / 8)?);
    // Blocks that were in use when a group failed lose their pages at once when they are freed.
    group.duplicate()?.abort("as a test");
    let Some(child) = forked()? else {
        ensure!(is_whole(&kept), "the child reads something else");
        ensure!(group.arena().allocate(MIB).is_none() && group.arena().allocate(64).is_none());
        is_forked("alloc_shared", group.alloc_shared::<i64>(10).map(drop), group)?;
        drop(kept);
        return Ok(());
    };
    for _ in 0..100 {
        sum_of_ranks(group)?;
    }
    let mut new = group.alloc_shared::<i64>(MIB / 8)?;
    new.fill(-1);
    child.ends_well()?;
    ensure!(is_whole(&kept), "the child has freed its parent's memory");
    ensure!(
        new.iter().all(|&element| element == -1),
        "the child has written to its parent's memory"
    );
    kept.iter_mut().try_for_each(|block| group.all_reduce(block, ReduceOp::Max))?;
    go_on(group)?;
    Ok(())
}

/// They fail at once, and the parent's group does not notice.
fn operations(group: &ProcessGroup) -> Result<()> {
    let other = (group.rank() + 1) % group.world_size();
    let sub = group.new_group(&[0, 1])?.context("both are in it")?;
    go_on(&sub)?; // with threads
    let Some(child) = forked()? else {
        let all = "a collective";
        for group in [group, &sub] {
            is_forked(all, group.all_reduce(&mut [1.0_f32], ReduceOp::Sum), group)?;
            is_forked(all, group.broadcast(&mut [1.0_f32], 0), group)?;
            is_forked(all, group.barrier(), group)?;
            let started = group.start(Lane::Collectives, "all_reduce", |group| {
                group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)
            });
            is_forked("all_reduce", started.map(drop), group)?;
            is_forked(
                &format!("send to rank {other} of the group"),
                group.send(&[1.0_f32], other),
                group,
            )?;
            is_forked(
                &format!("recv from rank {other} of the group"),
                group.recv(&mut [1.0_f32], other),
                group,
            )?;
            is_forked("new_group", group.duplicate().map(drop), group)?;
            is_forked("segments", group.segments(0, DType::F32, vec![10]).map(drop), group)?;
            is_forked("progress", group.progress(), group)?;
            is_forked("finish_buckets", group.finish_buckets().map(drop), group)?;
            is_forked("use_cuda", group.use_cuda().map(drop), group)?;
            is_forked("nccl", group.nccl(0).map(drop), group)?;
            is_forked("check", group.check("check"), group)?;
            group.abort("by a child");
            group.await_error_details("a test", "of a child");
            ensure!(group.collect_error_details().is_empty() && !group.awaits_error_details());
        }
        drop(sub);
        return Ok(());
    };
    child.ends_well()?;
    go_on(group)?;
    go_on(&sub)?;
    Ok(())
}

/// Forks while threads use the group and the arena: any lock may be held.
fn busy(group: &ProcessGroup) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let allocating: Vec<_> = (0..2)
        .map(|_| {
            let (stop, arena) = (Arc::clone(&stop), Arc::clone(group.arena()));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _blocks: Vec<_> = (1..20).map(|i| arena.allocate(i * 10_000)).collect();
                }
            })
        })
        .collect();
    let twin = group.duplicate()?;
    for round in 0..6 {
        let works: Vec<_> = (0..4)
            .map(|_| {
                twin.start(Lane::Collectives, "all_reduce", |group| {
                    let mut data = vec![1.0_f32; 500_000];
                    group.all_reduce(&mut data, ReduceOp::Sum)?;
                    Ok(data)
                })
            })
            .collect::<Result<_, _>>()?;
        let Some(child) = forked()? else {
            allocating.into_iter().for_each(std::mem::forget); // there are no such threads
            ensure!(group.arena().allocate(100).is_none());
            is_forked("a collective", twin.barrier(), &twin)?;
            let mut works = works.into_iter();
            let error = works
                .next()
                .context("there are some")?
                .wait()
                .err()
                .context("the work is its parent's")?;
            ensure!(error.to_string().contains(
                "all_reduce failed: it runs in the process that this one was forked from"
            ));
            drop(works);
            drop(twin);
            if round % 2 == 0 {
                std::process::exit(0);
            }
            return Ok(());
        };
        for work in works {
            ensure!(
                work.wait()?.iter().all(|&element| element == group.world_size() as f32),
                "round {round}"
            );
        }
        child.ends_well()?;
    }
    // A program that takes the child's place is none of its business.
    ensure!(std::process::Command::new("true").status()?.success());
    stop.store(true, Ordering::Relaxed);
    ensure!(allocating.into_iter().all(|thread| thread.join().is_ok()));
    go_on(group)?;
    go_on(&twin)?;
    Ok(())
}

/// Under flow-launch.
fn store(group: &ProcessGroup) -> Result<()> {
    let Rendezvous::Server { address, token } = Membership::from_env()?.rendezvous else {
        bail!("no store is served")
    };
    let store = Store::connect(&address, &token, CHILD_TIMEOUT)?;
    let (own, child) = (format!("own {}", group.rank()), format!("child {}", group.rank()));
    store.set(&own, b"before")?;
    let Some(process) = forked()? else {
        let error = store
            .set(&own, b"from the child")
            .err()
            .context("the connection is its parent's")?
            .to_string();
        ensure!(
            error.contains(&format!("set \"{own}\": the connection is that of the process")),
            "{error}"
        );
        Store::connect(&address, &token, CHILD_TIMEOUT)?.set(&child, b"here")?;
        return Ok(());
    };
    ensure!(store.get(&child, CHILD_TIMEOUT)? == b"here");
    process.ends_well()?;
    ensure!(store.get(&own, CHILD_TIMEOUT)? == b"before");
    go_on(group)?;
    Ok(())
}

/// Large tensors are born in the arena: the child's come from elsewhere.
fn tensors(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let net = nn::seq_t()
        .add(nn::linear(&root / "first", 300, 300, Default::default()))
        .add(nn::batch_norm1d(&root / "norm", 300, Default::default()))
        .add(nn::linear(&root / "last", 300, 10, Default::default()));
    let model = Ddp::new(net, &vs, group)?;
    let in_arena = |tensor: &Tensor| group.arena().offset_of(tensor.data_ptr().cast(), 1).is_some();
    let full = |value: f64| Tensor::full([100_000], value, (Kind::Float, Device::Cpu));
    let is_full =
        |tensor: &Tensor, value: f64| (tensor - value).abs().max().double_value(&[]) == 0.0;
    let input =
        || Tensor::full([20, 300], 0.5, (Kind::Float, Device::Cpu)) * (1.0 + group.rank() as f64);
    let step = || -> Result<()> {
        model.try_forward_t(&input(), true)?.square().mean(Kind::Float).f_backward()?;
        let gradient = vs.variables()["first.weight"].grad();
        let mut bounds = [gradient.double_value(&[3, 4]), -gradient.double_value(&[3, 4])];
        ensure!(in_arena(&gradient), "the gradient was not born in the arena");
        group.all_reduce(&mut bounds, ReduceOp::Max)?;
        ensure!(bounds[0] == -bounds[1], "ranks have different gradients: {bounds:?}");
        Ok(())
    };
    // libtorch itself refuses a backward in a child of a process that has run one: the first child
    // is to get further.
    for is_first in [true, false] {
        let kept = full(7.0);
        ensure!(in_arena(&kept), "tensors are not born in the arena");
        let Some(child) = forked()? else {
            ensure!(is_full(&kept, 7.0));
            let fresh: Vec<_> = (0..20).map(|i| full(i.into())).collect();
            ensure!(
                fresh
                    .iter()
                    .enumerate()
                    .all(|(i, tensor)| !in_arena(tensor) && is_full(tensor, i as f64))
            );
            drop(kept);
            let output = model.forward_t(&input(), false);
            let forked = format!("was forked from rank {} ", group.rank());
            let error =
                model.try_forward_t(&input(), true).err().context("the child trains")?.to_string();
            ensure!(error.contains(&format!(
                "forward failed: this process (pid {}) {forked}",
                std::process::id()
            )));
            if is_first {
                let error =
                    output.mean(Kind::Float).f_backward().err().context("the child trains")?;
                let error = flow_ddp::Error::from_backward(error);
                ensure!(
                    matches!(error, flow_ddp::Error::Comm(flow_ddp::CommError::Forked { .. })),
                    "{error:?}"
                );
                let error = error.to_string();
                ensure!(error.contains("backward failed: ") && error.contains(&forked), "{error}");
                // The child's abort of the group must not reach it.
                let _ = model.forward_t(&input(), true);
            }
            ensure!(model.stats().buckets.is_empty());
            drop(model.no_sync());
            drop(model);
            return Ok(());
        };
        step()?;
        child.ends_well()?;
        ensure!(is_full(&kept, 7.0), "the child has freed its parent's tensor");
        step()?;
        go_on(group)?;
    }
    Ok(())
}

/// The children are ranks of a job of their own, with an arena of their own.
fn joins_anew(group: &ProcessGroup) -> Result<()> {
    let wrap = |group: &ProcessGroup, vs: &nn::VarStore| {
        Ddp::new(nn::linear(vs.root(), 300, 300, Default::default()), vs, group)
    };
    let train = |group: &ProcessGroup, vs: &nn::VarStore, model: &Ddp<nn::Linear>| -> Result<()> {
        let input =
            Tensor::full([20, 300], 0.5, (Kind::Float, Device::Cpu)) * (1.0 + group.rank() as f64);
        model.forward(&input).square().mean(Kind::Float).f_backward()?;
        let gradient = vs.variables()["weight"].grad();
        let is_ours = group.arena().offset_of(gradient.data_ptr().cast(), 1).is_some();
        ensure!(is_ours, "the gradient was not born in the group's arena");
        go_on(group)
    };
    // The parent's memory is in use before.
    let vs = nn::VarStore::new(Device::Cpu);
    let model = wrap(group, &vs)?;
    let join = || ProcessGroup::join(&Membership::from_env()?, CHILD_TIMEOUT);
    let Some(child) = forked()? else {
        // At the same time as the parent does.
        go_on(&join()?)?;
        let children =
            ProcessGroup::join_named(&Membership::from_env()?, "children", CHILD_TIMEOUT)?;
        go_on(&children)?;
        let mut shared = children.alloc_shared::<i64>(MIB / 8)?;
        shared.fill(1);
        children.all_reduce(&mut shared, ReduceOp::Sum)?;
        ensure!(shared.iter().all(|&element| element == children.world_size() as i64));
        go_on(&children.new_group_of(&[1, 0], "key")?)?;
        let vs = nn::VarStore::new(Device::Cpu);
        let model = wrap(&children, &vs)?;
        train(&children, &vs, &model)?;
        is_forked("a collective", group.barrier(), group)?;
        return Ok(());
    };
    go_on(&join()?)?;
    train(group, &vs, &model)?;
    child.ends_well()?;
    train(group, &vs, &model)?;
    Ok(())
}
