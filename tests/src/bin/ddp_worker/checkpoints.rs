//! Sharded checkpoints of global tensors, on processes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flow_global::checkpoint::ShardedCheckpoints;
use flow_global::{B, GlobalTensor, NdSbp, Placement, S, distribute, distribute_tensor};
use flow_tensor::ProcessGroup;
use flow_tests::registry::{Scenario, Test, by_hand, launched, scenario};
use flow_tests::{Process, TEST_TIMEOUT, assert_contains};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, Module, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "a_training_goes_on_under_another_layout",
        goes_on,
        &[launched(4), by_hand(&[4]), by_hand(&[2, 2])],
    )
    .checked_by(|test| {
        for process in start(test) {
            process.finish(TEST_TIMEOUT).success();
        }
    }),
    scenario("no_rank_ever_has_the_whole_model", in_parts, &[launched(4), by_hand(&[2, 2])])
        .checked_by(|test| {
            for _ in ["saves", "resumes"] {
                for process in start(test) {
                    process.finish(TEST_TIMEOUT).success();
                }
            }
        }),
    scenario("a_rank_killed_in_a_save_leaves_the_older", killed, &[by_hand(&[3])])
        .checked_by(older_is_whole),
];

/// Where the ranks find the folder of checkpoints.
pub const FOLDER: &str = "FLOW_TEST_FOLDER";

/// The job's processes, which save in the test's folder.
fn start(test: &Test) -> Vec<Process> {
    let commands = test.commands().into_iter();
    let with_folder = commands.map(|mut command| {
        command.env(FOLDER, test.folder.path());
        Process::start(command)
    });
    with_folder.collect()
}

pub fn folder() -> Result<PathBuf> {
    Ok(std::env::var_os(FOLDER).context("the test says where")?.into())
}

/// A training and its next three losses: column and row parallel beside data parallel first, then in
/// parts over two ranks.
fn goes_on(group: &ProcessGroup) -> Result<()> {
    let mesh = Placement::new(group, [[0, 1], [2, 3]])?;
    let by_column_and_row = |name: &str| match name {
        "one.weight" | "one.bias" => vec![B, S(0)],
        "two.weight" => vec![B, S(1)],
        _ => vec![B, B],
    };
    let line = Placement::new(group, [3, 1])?;
    type Layout<'a> = (&'a Placement, &'a dyn Fn(&str) -> NdSbp, NdSbp);
    let layouts: [Layout; 2] =
        [(&mesh, &by_column_and_row, vec![S(0), B]), (&line, &|_| vec![S(0)], vec![S(0)])];
    let mut losses = Vec::new();
    for (placement, sbp, batches) in layouts {
        let mut vs = VarStore::new(Device::Cpu);
        let net = nn::seq()
            .add(nn::linear(vs.root() / "one", 6, 5, Default::default()))
            .add_fn(Tensor::relu)
            .add(nn::linear(vs.root() / "two", 5, 4, Default::default()));
        vs.double();
        distribute(&vs, placement, |name, _| sbp(name))?;
        let mut optimizer = nn::Adam::default().build(&vs, 0.01)?;
        let step = |optimizer: &mut Optimizer, step: usize| -> Result<f64> {
            let batch = Tensor::arange(24, (Kind::Double, Device::Cpu)).view([4, 6]);
            let batch = (batch * (step as f64 + 1.0)).sin();
            let batch = tch::no_grad(|| distribute_tensor(&batch, placement, &batches))?;
            let loss = net.forward(&batch).square().mean(Kind::Double);
            optimizer.backward_step(&loss);
            Ok(loss.full()?.double_value(&[]))
        };
        let mut checkpoints = ShardedCheckpoints::open(folder()?, group)?;
        match checkpoints.latest::<usize>()? {
            None => {
                for number in 0..3 {
                    step(&mut optimizer, number)?;
                }
                checkpoints.save(3, &vs, Some(&optimizer), &3)?;
            }
            Some(checkpoint) => {
                ensure!(checkpoint.step() == 3 && checkpoint.state == 3);
                checkpoint.resume(&vs, Some(&mut optimizer))?;
            }
        }
        losses
            .push((3..6).map(|number| step(&mut optimizer, number)).collect::<Result<Vec<f64>>>()?);
    }
    let far = losses[0].iter().zip(&losses[1]).any(|(one, other)| (one - other).abs() > 1e-12);
    ensure!(!far, "{losses:?}");
    Ok(())
}

/// A number of bytes that the kernel knows of this process.
pub fn memory(what: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kilobytes.context("it has no such line")?.parse::<u64>()? << 10)
}

/// A model and its Adam, together 192 MB, of which each of four ranks has 48, are saved by one job
/// and resumed by another one. A rank never has more at once than its part and a copy.
fn in_parts(group: &ProcessGroup) -> Result<()> {
    const PART: u64 = 48 << 20;
    let placement = Placement::new(group, [[0, 1], [2, 3]])?;
    let vs = VarStore::new(Device::Cpu);
    for (name, sbp) in
        [("a", [S(0), S(1)]), ("b", [S(1), S(0)]), ("c", [S(0); 2]), ("d", [S(1); 2])]
    {
        let zeros = flow_global::zeros([2048, 2048], Kind::Float, &placement, sbp)?;
        let _ = vs.root().add(name, zeros, true);
    }
    let mut optimizer = nn::Adam::default().build(&vs, 0.01)?;
    let mut checkpoints = ShardedCheckpoints::open(folder()?, group)?;
    let checkpoint = checkpoints.latest::<()>()?;
    if checkpoint.is_none() {
        let sums = vs.trainable_variables().into_iter().map(|weight| weight.sum(Kind::Float));
        optimizer.backward_step(&sums.sum::<Tensor>());
    }
    // From here on the kernel counts anew how much there is at most.
    std::fs::write("/proc/self/clear_refs", "5")?;
    let before = memory("VmRSS")?;
    let (what, limit) = match checkpoint {
        None => {
            checkpoints.save(1, &vs, Some(&optimizer), &())?;
            ("saving", PART)
        }
        // The optimizer's state is new here.
        Some(checkpoint) => {
            checkpoint.resume(&vs, Some(&mut optimizer))?;
            ("resuming", 2 * PART)
        }
    };
    let more = memory("VmHWM")? - before;
    ensure!(more < limit, "{what} takes {more} bytes more, of {limit} at most");
    Ok(())
}

/// 96 MB of the numbers from `first` on, in parts.
fn model(group: &ProcessGroup, first: i64) -> Result<VarStore> {
    let vs = VarStore::new(Device::Cpu);
    let numbers = Tensor::arange_start(first, first + (12 << 20), (Kind::Int64, Device::Cpu));
    let _ = vs.root().add("numbers", numbers, false);
    let ranks: Vec<usize> = (0..group.world_size()).collect();
    distribute(&vs, &Placement::new(group, ranks)?, |_, _| vec![S(0)])?;
    Ok(vs)
}

/// How long rank 1's file was when it was killed.
const KILLED_AT: &str = "killed-at";

/// Rank 1 is killed when the first bytes of its second file are there.
fn killed(group: &ProcessGroup) -> Result<()> {
    let mut checkpoints = ShardedCheckpoints::open(folder()?, group)?;
    checkpoints.save(1, &model(group, 1)?, None, &())?;
    if group.rank() == 1 {
        let file = folder()?.join(".checkpoint.partial/rank-00001.safetensors");
        let killed_at = folder()?.join(KILLED_AT);
        std::thread::spawn(move || {
            loop {
                let bytes = std::fs::metadata(&file).map_or(0, |file| file.len());
                if bytes > 0 && std::fs::write(&killed_at, bytes.to_string()).is_ok() {
                    let _ = kill_process(getpid(), Signal::KILL);
                }
                std::thread::sleep(Duration::from_micros(100));
            }
        });
    }
    checkpoints.save(2, &model(group, 2)?, None, &())?;
    Ok(())
}

fn older_is_whole(test: &Test) {
    let ranks: Vec<_> = start(test).into_iter().map(|rank| rank.finish(TEST_TIMEOUT)).collect();
    assert_eq!(ranks[1].code, None, "{}", ranks[1].stderr);
    for rank in [&ranks[0], &ranks[2]] {
        assert_contains(&rank.stderr, &["rank 1 (pid ", "died"]);
    }
    // The others remove what was written.
    let bytes = std::fs::read_to_string(test.folder.path().join(KILLED_AT)).unwrap();
    assert!(bytes.parse::<u64>().unwrap() < 32 << 20, "it was whole");
    // Another job goes on.
    let group = ProcessGroup::in_process(1).unwrap().remove(0);
    let vs = model(&group, 3).unwrap();
    let latest =
        ShardedCheckpoints::open(test.folder.path(), &group).unwrap().latest::<()>().unwrap();
    let latest = latest.expect("a checkpoint");
    assert_eq!(latest.step(), 1);
    latest.resume(&vs, None).unwrap();
    let numbers = vs.variables()["numbers"].full().unwrap();
    assert_eq!(numbers, Tensor::arange_start(1, 1 + (12 << 20), (Kind::Int64, Device::Cpu)));
}
