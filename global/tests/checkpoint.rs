//! Checkpoints of a model and its optimizer, on ranks that are threads.

use std::path::Path;
use std::process::Command;

use flow_autograd::OptimizerState;
use flow_global::checkpoint::{CheckpointError, Checkpoints};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

/// Runs `body` on each of so many ranks.
fn ranks<T: Send>(size: usize, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(size).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| body(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// An MLP with a buffer, and Adam.
struct Training {
    vs: VarStore,
    model: nn::Sequential,
    optimizer: Optimizer,
}

impl Training {
    fn new(hidden: i64) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let root = vs.root();
        let model = nn::seq()
            .add(nn::linear(&root / "one", 6, hidden, Default::default()))
            .add_fn(Tensor::relu)
            .add(nn::linear(&root / "two", hidden, 3, Default::default()));
        let _ = root.zeros_no_train("count", &[2]);
        let optimizer = nn::Adam::default().build(&vs, 0.01).unwrap();
        Self { vs, model, optimizer }
    }

    /// A step, and its loss.
    fn step(&mut self, input: &Tensor) -> f64 {
        let loss = self.model.forward(input).square().mean(Kind::Float);
        self.optimizer.backward_step(&loss);
        loss.double_value(&[])
    }
}

fn batch(step: usize) -> Tensor {
    (Tensor::arange(24, (Kind::Float, Device::Cpu)).view([4, 6]) * (step as f64 + 1.0)).sin()
}

#[test]
fn plain_tensors_are_rank_0s() {
    let folder = tempdir().unwrap();
    let losses = ranks(2, |group| {
        let mut training = Training::new(5);
        let mut checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        assert!(checkpoints.latest::<f64>().unwrap().is_none());
        let _: f64 = (0..3).map(|step| training.step(&batch(step))).sum();
        checkpoints.save(3, &training.vs, Some(&training.optimizer), &0.1).unwrap();
        (3..6).map(|step| training.step(&batch(step))).collect::<Vec<_>>()
    });
    let resumed = ranks(3, |group| {
        let mut training = Training::new(5);
        let mut checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let checkpoint = checkpoints.latest::<f64>().unwrap().unwrap();
        assert_eq!((checkpoint.step(), checkpoint.state), (3, 0.1));
        checkpoint.resume(&training.vs, Some(&mut training.optimizer)).unwrap();
        (3..6).map(|step| training.step(&batch(step))).collect::<Vec<_>>()
    });
    for other in &resumed {
        assert_eq!(*other, losses[0], "to the bit");
    }
}

#[test]
fn what_does_not_fit_is_an_error_that_says_so() {
    let folder = tempdir().unwrap();
    ranks(1, |group| {
        let training = Training::new(5);
        let mut checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let error = checkpoints.save(1, &training.vs, None, &f64::NAN).unwrap_err().to_string();
        assert!(error.starts_with("cannot save the program's state: "), "{error}");
        checkpoints.save(1, &training.vs, None, &[1, 2]).unwrap();
        let latest = |checkpoints: &mut Checkpoints| {
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
        assert_eq!(error, "model: it has no one.bias of F32 [4]");
        let mut training = Training::new(5);
        let error = reason(checkpoint.resume(&training.vs, Some(&mut training.optimizer)));
        assert_eq!(error, "optimizer: it was saved without one");
        let _ = training.vs.root().zeros("more", &[1]);
        let error = reason(checkpoint.resume(&training.vs, None));
        assert_eq!(error, "model: it has no more of F32 [1]");
        checkpoints.save(2, &training.vs, None, &[1, 2]).unwrap();
        let error = reason(latest(&mut checkpoints).resume(&Training::new(5).vs, None));
        assert_eq!(error, "model: it has more, and this model has not");

        let mut momentum = nn::sgd(0.9, 0.0, 0.0, false).build(&other.vs, 0.1).unwrap();
        other.step(&batch(0));
        checkpoints.save(3, &other.vs, Some(&other.optimizer), &[1, 2]).unwrap();
        let error = reason(latest(&mut checkpoints).resume(&other.vs, Some(&mut momentum)));
        assert!(error.contains("is Adam of [4] Float in the state"), "{error}");
        assert!(momentum.state().unwrap().tensors.is_empty());
    });
}

/// `flow-checkpoint merge` with these arguments: whether it has succeeded, and its errors.
fn merge(checkpoint: &Path, out: &Path) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flow-checkpoint"));
    let output = command.arg("merge").args([checkpoint, out]).output().unwrap();
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn flow_checkpoint_merges() {
    let folder = tempdir().unwrap();
    let (step, out) = (folder.path().join("step-7"), folder.path().join("model.safetensors"));
    let saved = ranks(2, |group| {
        let training = Training::new(5);
        let mut checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save(7, &training.vs, Some(&training.optimizer), &()).unwrap();
        training.vs
    });
    assert_eq!(merge(&step, &out), (true, String::new()));
    let mut vs = Training::new(5).vs;
    vs.load(&out).unwrap();
    for (name, variable) in saved[0].variables() {
        assert_eq!(vs.variables()[&name], variable, "{name}");
    }
    std::fs::remove_file(step.join("rank-00000.safetensors")).unwrap();
    let (is_merged, error) = merge(&step, &out);
    let file = "step-7/rank-00000.safetensors: No such file or directory";
    assert!(!is_merged && error.contains(file) && error.lines().count() == 1, "{error}");
}
