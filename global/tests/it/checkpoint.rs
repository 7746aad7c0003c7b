//! Checkpoints of a model and its optimizer, on ranks that are threads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::pytorch::pytorch;
use crate::common::ranks::ranks;
use flow_autograd::OptimizerState;
use flow_ddp::{Checkpoints, Ddp, DistributedSampler};
use flow_global::checkpoint::{CheckpointError, ShardedCheckpoints};
use flow_global::{B, GlobalTensor, NdSbp, P, Placement, S, Sbp, distribute, distribute_tensor};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

/// An MLP with a buffer, in double precision.
struct Training {
    vs: VarStore,
    model: nn::Sequential,
    optimizer: Optimizer,
}

impl Training {
    fn new(hidden: i64) -> Self {
        Self::with(hidden, nn::Adam::default())
    }

    fn with(hidden: i64, optimizer: impl OptimizerConfig) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let root = vs.root();
        let model = nn::seq()
            .add(nn::linear(&root / "one", 6, hidden, Default::default()))
            .add_fn(Tensor::relu)
            .add(nn::linear(&root / "two", hidden, 3, Default::default()));
        let _ = root.zeros_no_train("count", &[2]);
        vs.double();
        let optimizer = optimizer.build(&vs, 0.01).unwrap();
        Self { vs, model, optimizer }
    }

    /// A step, and its loss.
    fn step(&mut self, input: &Tensor) -> f64 {
        let loss = self.model.forward(input).square().mean(Kind::Double);
        self.optimizer.backward_step(&loss);
        loss.full().unwrap().double_value(&[])
    }

    /// Steps on plain batches.
    fn steps(&mut self, steps: Range<usize>) -> Vec<f64> {
        steps.map(|step| self.step(&batch(step))).collect()
    }
}

fn batch(step: usize) -> Tensor {
    (Tensor::arange(24, (Kind::Double, Device::Cpu)).view([4, 6]) * (step as f64 + 1.0)).sin()
}

#[test]
fn plain_tensors_are_rank_0s() {
    let folder = tempdir().unwrap();
    let losses = ranks(2, |group| {
        let mut training = Training::new(5);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        assert!(checkpoints.latest::<f64>().unwrap().is_none());
        training.steps(0..3);
        checkpoints.save(3, &training.vs, Some(&training.optimizer), &0.1).unwrap();
        training.steps(3..6)
    });
    let resumed = ranks(3, |group| {
        let mut training = Training::new(5);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        let checkpoint = checkpoints.latest::<f64>().unwrap().unwrap();
        assert_eq!((checkpoint.step(), checkpoint.state), (3, 0.1));
        checkpoint.resume(&training.vs, Some(&mut training.optimizer)).unwrap();
        training.steps(3..6)
    });
    for other in &resumed {
        assert_eq!(*other, losses[0], "to the bit");
    }
}

/// How a training lies: how many ranks there are, the placement, the SBPs of its variables by name,
/// and those of its batches.
struct Layout {
    size: usize,
    ranks: (Vec<usize>, Vec<usize>),
    variables: fn(&str) -> NdSbp,
    batches: NdSbp,
}

/// Layouts on two to four ranks.
fn layouts() -> Vec<Layout> {
    let all = vec![0, 1, 2, 3];
    vec![
        // Data parallel, and its variables in parts.
        Layout {
            size: 4,
            ranks: (all.clone(), vec![4]),
            variables: |_| vec![B],
            batches: vec![S(0)],
        },
        Layout { size: 4, ranks: (all, vec![4]), variables: |_| vec![S(0)], batches: vec![S(0)] },
        // Megatron's, beside data parallel.
        Layout {
            size: 4,
            ranks: (vec![0, 2, 3, 1], vec![2, 2]),
            variables: |name| match name {
                "one.weight" | "one.bias" => vec![B, S(0)],
                "two.weight" => vec![B, S(1)],
                _ => vec![B, B],
            },
            batches: vec![S(0), B],
        },
        // Ranks outside.
        Layout {
            size: 4,
            ranks: (vec![3, 1], vec![2]),
            variables: |name| vec![if name.ends_with("weight") { S(1) } else { S(0) }],
            batches: vec![B],
        },
        // Fewer ranks.
        Layout {
            size: 3,
            ranks: (vec![0, 1, 2], vec![3]),
            variables: |_| vec![S(0)],
            batches: vec![S(0)],
        },
        Layout {
            size: 2,
            ranks: (vec![1, 0], vec![2]),
            variables: |name| vec![if name.ends_with("weight") { S(1) } else { S(0) }],
            batches: vec![B],
        },
    ]
}

impl Layout {
    fn on(&self, group: &ProcessGroup, training: &Training) -> Placement {
        let (ranks, shape) = &self.ranks;
        let placement = match shape[..] {
            [2, 2] => Placement::new(group, [[ranks[0], ranks[1]], [ranks[2], ranks[3]]]),
            _ => Placement::new(group, ranks.clone()),
        };
        let placement = placement.unwrap();
        distribute(&training.vs, &placement, |name, _| (self.variables)(name)).unwrap();
        placement
    }

    fn steps(
        &self,
        training: &mut Training,
        placement: &Placement,
        steps: Range<usize>,
    ) -> Vec<f64> {
        let step = |step| {
            let input =
                tch::no_grad(|| distribute_tensor(&batch(step), placement, &self.batches)).unwrap();
            training.step(&input)
        };
        steps.map(step).collect()
    }
}

/// Each rank has as much of the optimizer's state as of the parameters, but of those with fewer rows
/// than ranks, which operations make B.
fn lie_as_their_parameters(training: &Training) {
    let parameters = training.vs.trainable_variables();
    for (name, tensor) in training.optimizer.state().unwrap().tensors {
        let number: usize = name.split('.').next().unwrap().parse().unwrap();
        if tensor.dim() > 0 && tensor.size()[0] >= 4 {
            assert_eq!(tensor.sbp().unwrap(), parameters[number].sbp().unwrap(), "{name}");
        }
    }
}

/// Trains under each layout, saves, and goes on under each other one as a plain training does.
fn goes_on_under_any_layout(config: impl OptimizerConfig + Copy + Sync) {
    let start = tempdir().unwrap();
    let expected = ranks(1, |group| {
        let mut training = Training::with(5, config);
        let mut checkpoints = ShardedCheckpoints::open(start.path(), &group).unwrap();
        checkpoints.save(0, &training.vs, Some(&training.optimizer), &()).unwrap();
        training.steps(0..6)
    });
    let expected = &expected[0];
    let resume = |folder: &Path, group: &ProcessGroup, training: &mut Training| {
        let mut checkpoints = ShardedCheckpoints::open(folder, group).unwrap();
        let checkpoint = checkpoints.latest::<()>().unwrap().unwrap();
        checkpoint.resume(&training.vs, Some(&mut training.optimizer)).unwrap();
        checkpoint.step()
    };
    let close = |losses: &[f64], expected: &[f64], what: &str| {
        let is_close = |(one, other): (&f64, &f64)| (one - other).abs() < 1e-12;
        assert!(
            losses.len() == 3 && losses.iter().zip(expected).all(is_close),
            "{what}: {losses:?} {expected:?}"
        );
    };
    for (index, from) in layouts().iter().enumerate() {
        let folder = tempdir().unwrap();
        ranks(from.size, |group| {
            let mut training = Training::with(5, config);
            let placement = from.on(&group, &training);
            assert_eq!(resume(start.path(), &group, &mut training), 0);
            let losses = from.steps(&mut training, &placement, 0..3);
            close(&losses, &expected[..3], &format!("layout {index}"));
            let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
            checkpoints.save(3, &training.vs, Some(&training.optimizer), &()).unwrap();
        });
        for (other, to) in layouts().iter().enumerate() {
            ranks(to.size, |group| {
                let mut training = Training::with(5, config);
                let placement = to.on(&group, &training);
                assert_eq!(resume(folder.path(), &group, &mut training), 3);
                lie_as_their_parameters(&training);
                let losses = to.steps(&mut training, &placement, 3..6);
                close(&losses, &expected[3..], &format!("layout {index} as {other}"));
            });
        }
        ranks(1, |group| {
            let mut training = Training::with(5, config);
            resume(folder.path(), &group, &mut training);
            close(&training.steps(3..6), &expected[3..], &format!("layout {index} as plain"));
        });
    }
}

#[test]
fn adam_goes_on_under_any_layout() {
    goes_on_under_any_layout(nn::Adam::default());
}

#[test]
fn sgd_with_momentum_goes_on_under_any_layout() {
    goes_on_under_any_layout(nn::sgd(0.9, 0.0, 0.0, false));
}

/// In half precision weights and state come back to the bit.
#[test]
fn half_precision_comes_back_under_another_number_of_ranks() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let folder = tempdir().unwrap();
        let train = |group: ProcessGroup, ranks: Vec<usize>, sbp: Sbp| {
            let mut vs = VarStore::new(Device::Cpu);
            let layer = nn::linear(vs.root(), 6, 5, Default::default());
            vs.set_kind(kind);
            let placement = Placement::new(&group, ranks).unwrap();
            distribute(&vs, &placement, |name, _| vec![if name == "bias" { B } else { sbp }])
                .unwrap();
            let mut optimizer = nn::Adam::default().build(&vs, 0.1).unwrap();
            let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
            if let Some(checkpoint) = checkpoints.latest::<()>().unwrap() {
                checkpoint.resume(&vs, Some(&mut optimizer)).unwrap();
            } else {
                let loss = layer.forward(&batch(0).to_kind(kind)).square().mean(kind);
                optimizer.backward_step(&loss);
                checkpoints.save(1, &vs, Some(&optimizer), &()).unwrap();
            }
            let state = optimizer.state().unwrap().tensors.into_iter();
            let mut tensors: Vec<_> = state.chain(vs.variables()).collect();
            tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
            let full = |(name, tensor): (String, Tensor)| (name, tensor.full().unwrap());
            tensors.into_iter().map(full).collect::<Vec<_>>()
        };
        let saved = ranks(2, |group| train(group, vec![1, 0], S(0)));
        let resumed = ranks(3, |group| train(group, vec![0, 1, 2], S(1)));
        assert!(saved[0].iter().filter(|(_, tensor)| tensor.kind() == kind).count() >= 4);
        resumed.iter().for_each(|resumed| assert_eq!(*resumed, saved[0]));
    }
}

#[test]
fn terms_and_other_groups_are_errors() {
    let folder = tempdir().unwrap();
    ranks(2, |group| {
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        let mut save = |group: &ProcessGroup, sbp: Sbp| {
            let vs = VarStore::new(Device::Cpu);
            let _ = vs.root().zeros("w", &[4]);
            let placement = Placement::new(group, [0, 1]).unwrap();
            distribute(&vs, &placement, |_, _| vec![sbp]).unwrap();
            checkpoints.save(1, &vs, None, &()).unwrap_err().to_string()
        };
        let error = "cannot save or load model.w: it is [P], partial; make it S or B \
                     by to_global";
        assert_eq!(save(&group, P), error);
        let error = "cannot save or load model.w: its placement [0, 1] is of another process \
                     group; open ShardedCheckpoints with that one";
        assert_eq!(save(&group.duplicate().unwrap(), S(0)), error);
    });
}

/// `Ddp`'s checkpoints, which rank 0 writes for all, refuse what no rank has all of.
#[test]
fn checkpoints_of_ddp_name_those_of_global_tensors() {
    let folder = tempdir().unwrap();
    let errors = ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root() / "one", 6, 4, Default::default());
        let model = Ddp::new(net, &vs, &group).unwrap();
        let placement = Placement::new(&group, [0, 1]).unwrap();
        distribute(&vs, &placement, |name, _| vec![if name == "one.weight" { S(0) } else { B }])
            .unwrap();
        let optimizer = nn::Sgd::default().build(&vs, 0.1).unwrap();
        let sampler = DistributedSampler::new(4, &group);
        let mut checkpoints = flow_ddp::Checkpoints::open(folder.path(), &group).unwrap();
        let saved = checkpoints.save(1, &model, &vs, &optimizer, &sampler, &());
        saved.err().map(|error| error.to_string())
    });
    let error = format!(
        "cannot save one.weight in {}: it is a global tensor, and no rank has all of it; use \
         flow::global::checkpoint::ShardedCheckpoints, where each rank saves its part",
        folder.path().join("step-1").display()
    );
    assert_eq!(errors, [Some(error.clone()), Some(error)]);
}

#[test]
fn what_does_not_fit_is_an_error_that_says_so() {
    let folder = tempdir().unwrap();
    ranks(1, |group| {
        let training = Training::new(5);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        let error = checkpoints.save(1, &training.vs, None, &f64::NAN).unwrap_err().to_string();
        assert!(error.starts_with("cannot save the program's state: "), "{error}");
        checkpoints.save(1, &training.vs, None, &[1, 2]).unwrap();
        let latest = |checkpoints: &mut ShardedCheckpoints| {
            checkpoints.latest::<Vec<u8>>().unwrap().expect("a checkpoint")
        };
        let reason = |result: Result<(), CheckpointError>| match result.unwrap_err() {
            CheckpointError::Other { what, reason, .. } => format!("{what}: {reason}"),
            error => panic!("{error}"),
        };
        assert!(checkpoints.latest::<String>().is_err());

        let mut other = Training::new(4);
        let checkpoint = latest(&mut checkpoints);
        let error = reason(checkpoint.resume(&other.vs, None));
        assert_eq!(error, "model: its one.bias is F64 [5], not F64 [4]");
        let mut half = Training::new(5);
        half.vs.half();
        let error = reason(checkpoint.resume(&half.vs, None));
        assert_eq!(error, "model: its count is F64 [2], not F16 [2]");
        let mut training = Training::new(5);
        let error = reason(checkpoint.resume(&training.vs, Some(&mut training.optimizer)));
        assert_eq!(error, "optimizer: it was saved without one");
        let _ = training.vs.root().zeros("more", &[1]);
        let error = reason(checkpoint.resume(&training.vs, None));
        assert_eq!(error, "model: it has no more");
        checkpoints.save(2, &training.vs, None, &[1, 2]).unwrap();
        let error = reason(latest(&mut checkpoints).resume(&Training::new(5).vs, None));
        assert_eq!(error, "model: it has more, and this model has not");

        let mut momentum = nn::sgd(0.9, 0.0, 0.0, false).build(&other.vs, 0.1).unwrap();
        other.step(&batch(0));
        checkpoints.save(3, &other.vs, Some(&other.optimizer), &[1, 2]).unwrap();
        let error = reason(latest(&mut checkpoints).resume(&other.vs, Some(&mut momentum)));
        assert!(error.contains("is Adam of [4] Double in the state"), "{error}");
        assert!(momentum.state().unwrap().tensors.is_empty());
    });
}

/// `flow-checkpoint` with these arguments.
fn flow_checkpoint(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flow-checkpoint"));
    command.args(arguments).output().unwrap()
}

/// `flow-checkpoint merge` with these arguments: whether it has succeeded, and its errors.
fn merge(checkpoint: &Path, out: &Path) -> (bool, String) {
    let output = flow_checkpoint(&["merge", checkpoint.to_str().unwrap(), out.to_str().unwrap()]);
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

/// What `flow-checkpoint` printed, and its exit code.
fn printed(arguments: &[&str]) -> (String, Option<i32>) {
    let output = flow_checkpoint(arguments);
    (String::from_utf8(output.stdout).unwrap(), output.status.code())
}

/// Checkpoints of both kinds have the same tensors, are whole, and are told from others.
#[test]
fn flow_checkpoint_looks_into_both_kinds() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let group = ProcessGroup::in_process(1).unwrap().remove(0);
    let vs = VarStore::new(Device::Cpu);
    let weight = vs.root().add("weight", Tensor::ones([70, 60], (Kind::Float, Device::Cpu)), true);
    let _ = vs.root().add("count", Tensor::zeros([0, 3], (Kind::Int64, Device::Cpu)), false);
    let model = Ddp::new((), &vs, &group).unwrap();
    let mut optimizer = nn::Adam::default().build(&vs, 0.1).unwrap();
    optimizer.backward_step(&weight.square().sum(Kind::Float));
    let sampler = DistributedSampler::new(10, &group);
    let mut plain = Checkpoints::open(path("plain"), &group).unwrap();
    plain.save(1, &model, &vs, &optimizer, &sampler, &()).unwrap();
    let mut sharded = ShardedCheckpoints::open(path("sharded"), &group).unwrap();
    sharded.save(1, &vs, Some(&optimizer), &()).unwrap();
    let _ = tch::no_grad(|| weight.get(3).narrow(0, 7, 2).fill_(0.0));
    plain.save(2, &model, &vs, &optimizer, &sampler, &()).unwrap();
    let [plain, sharded, changed] = ["plain/step-1", "sharded/step-1", "plain/step-2"].map(path);

    let tensors = "model.count: I64 [0, 3]\nmodel.weight: F32 [70, 60]\n\
                   optimizer.0.exp_avg: F32 [70, 60]\noptimizer.0.exp_avg_sq: F32 [70, 60]\n\
                   optimizer.0.step: I64 []\n5 tensors, 50408 bytes\n";
    for checkpoint in [&plain, &sharded] {
        assert_eq!(printed(&["inspect", checkpoint]), (tensors.to_owned(), Some(0)));
        assert_eq!(printed(&["verify", checkpoint]), (String::new(), Some(0)));
    }
    let model = format!("{plain}/model.safetensors");
    let tensors = "count: I64 [0, 3]\nweight: F32 [70, 60]\n2 tensors, 16800 bytes\n";
    assert_eq!(printed(&["inspect", &model]), (tensors.to_owned(), Some(0)));
    assert_eq!(printed(&["diff", &plain, &sharded]), (String::new(), Some(0)));
    let difference = "model.weight: 2 of 4200 elements differ\n".to_owned();
    assert_eq!(printed(&["diff", &sharded, &changed]), (difference, Some(1)));
    let (lines, code) = printed(&["diff", &model, &plain]);
    assert!(code == Some(1) && lines.starts_with(&format!("count: only in {model}\n")), "{lines}");

    for (file, checkpoint) in
        [(model, &plain), (format!("{sharded}/rank-00000.safetensors"), &sharded)]
    {
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let output = flow_checkpoint(&["verify", checkpoint]);
        let error = String::from_utf8(output.stderr).unwrap();
        let expected = format!("flow-checkpoint: {file} is damaged: ");
        assert!(error.starts_with(&expected) && error.lines().count() == 1, "{error}");
        assert_eq!(output.status.code(), Some(2));
    }
    let output = flow_checkpoint(&["inspect", &path("none")]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.starts_with(&format!("flow-checkpoint: cannot read {}: ", path("none"))),
        "{error}"
    );
}

/// Hugging Face's layout has the tensors of the model, in files that are not too long.
#[test]
fn flow_checkpoint_lays_out_several_files() {
    let folder = tempdir().unwrap();
    let step = folder.path().join("step-1");
    let out = folder.path().join("out");
    let expected = ranks(2, |group| {
        let training = Training::new(5);
        let layout = &layouts()[5];
        layout.on(&group, &training);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        checkpoints.save(1, &training.vs, None, &()).unwrap();
        // In the order of names: all ranks gather the same one.
        let variables = BTreeMap::from_iter(training.vs.variables()).into_iter();
        variables.map(|(name, tensor)| (name, tensor.full().unwrap())).collect::<Vec<_>>()
    });
    let [from, to] = [&step, &out].map(|path| path.to_str().unwrap());
    assert_eq!(printed(&["merge", from, to, "--file-bytes", "130"]), (String::new(), Some(0)));
    let index = std::fs::read(out.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let mut bytes = 0;
    for (name, tensor) in &expected[0] {
        let file = index["weight_map"][name].as_str().expect("it is in the index");
        let read = Tensor::read_safetensors(out.join(file)).unwrap();
        let (_, found) = read.iter().find(|(found, _)| found == name).expect("it is in the file");
        assert_eq!(found, tensor);
        let all = read.iter().map(|(_, tensor)| tensor.numel() * 8).sum::<usize>();
        assert!(all <= 130 || read.len() == 1, "{file} has {all} bytes");
        bytes += tensor.numel() * 8;
    }
    assert_eq!(index["metadata"]["total_size"], bytes);
    assert!(std::fs::read_dir(&out).unwrap().count() > 2);
}

/// The file is PyTorch's and tch's, whatever lay in parts: their models compute the same.
#[test]
fn flow_checkpoint_merges() {
    let folder = tempdir().unwrap();
    let step = folder.path().join("step-7");
    let out = folder.path().join("model.safetensors");
    let expected = ranks(4, |group| {
        let mut training = Training::new(5);
        let layout = &layouts()[2];
        let placement = layout.on(&group, &training);
        layout.steps(&mut training, &placement, 0..2);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        checkpoints.save(7, &training.vs, Some(&training.optimizer), &()).unwrap();
        tch::no_grad(|| training.model.forward(&batch(9))).full().unwrap()
    });
    let sum = expected[0].square().sum(Kind::Double).double_value(&[]);
    assert_eq!(merge(&step, &out), (true, String::new()));
    let mut plain = Training::new(5);
    plain.vs.load(&out).unwrap();
    let output = tch::no_grad(|| plain.model.forward(&batch(9)));
    assert!((output - &expected[0]).abs().max().double_value(&[]) < 1e-12);

    let program = r#"
import sys
import merged, torch
tensors = merged.load(sys.argv[1])
assert tensors.pop("count").tolist() == [0, 0]
one, two = torch.nn.Linear(6, 5).double(), torch.nn.Linear(5, 3).double()
model = torch.nn.ModuleDict({"one": one, "two": two})
model.load_state_dict(tensors)
batch = torch.sin(torch.arange(24, dtype=torch.float64).view(4, 6) * 10)
print(two(one(batch).relu()).square().sum().item())
"#;
    if let Some(printed) = pytorch(program, &out) {
        let read: f64 = printed.trim().parse().unwrap();
        assert!((read - sum).abs() < 1e-9 * sum, "{read}, not {sum}");
    }

    std::fs::remove_file(step.join("rank-00000.safetensors")).unwrap();
    let (is_merged, error) = merge(&step, &out);
    let file = "step-7/rank-00000.safetensors: No such file or directory";
    assert!(!is_merged && error.contains(file) && error.lines().count() == 1, "{error}");
}
