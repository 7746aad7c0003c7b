//! Checkpoints of one process: what is kept comes back, others can read it, and what cannot be
//! right is an error that names the file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use flow_ddp::{
    CheckpointError, Checkpoints, Ddp, DistributedSampler, ProcessGroup, Stateful, StreamSampler,
    WeightedRandomSampler, ZeroRedundancyOptimizer,
};
use tch::nn::{self, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tempfile::{TempDir, tempdir};

/// A model with parameters and buffers of several kinds, whose optimizer has done steps.
struct Training {
    group: ProcessGroup,
    vs: VarStore,
    model: Ddp<nn::Linear>,
    optimizer: Optimizer,
    sampler: DistributedSampler,
}

impl Training {
    fn new(inputs: i64, steps: usize) -> Self {
        let group = ProcessGroup::from_env().unwrap();
        let vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root() / "dense", inputs, 2, Default::default());
        for (name, kind) in [("half", Kind::BFloat16), ("flag", Kind::Bool), ("count", Kind::Int64)]
        {
            let _ = vs.root().add(name, Tensor::zeros([2, 3], (kind, Device::Cpu)), false);
        }
        let model = Ddp::new(net, &vs, &group).unwrap();
        let optimizer = nn::Adam::default().build(&vs, 0.1).unwrap();
        let sampler = DistributedSampler::new(100, &group);
        let mut training = Self { group, vs, model, optimizer, sampler };
        for _ in 0..steps {
            training.step();
        }
        training
    }

    /// One step, and its loss.
    fn step(&mut self) -> f64 {
        let input = Tensor::arange(self.model.ws.size()[1], (Kind::Float, Device::Cpu));
        let loss = (self.model.forward(&input) - 1.0).square().sum(Kind::Float);
        self.optimizer.backward_step(&loss);
        loss.double_value(&[])
    }

    fn open(&self, folder: &TempDir) -> Checkpoints {
        Checkpoints::open(folder.path(), &self.group).unwrap()
    }

    fn save(&self, checkpoints: &mut Checkpoints, step: usize) -> Result<(), CheckpointError> {
        let state = (step, 0.1 + step as f64);
        checkpoints.save(step, &self.model, &self.vs, &self.optimizer, &self.sampler, &state)
    }

    /// Resumes from the latest checkpoint in `folder`, and returns its step.
    fn resume(&mut self, folder: &TempDir) -> Result<usize, String> {
        let latest =
            self.open(folder).latest::<(usize, f64)>().map_err(|error| error.to_string())?;
        let checkpoint = latest.expect("a checkpoint");
        checkpoint
            .resume(&self.vs, &mut self.optimizer, &mut self.sampler)
            .map_err(|error| error.to_string())?;
        let (step, number) = checkpoint.state;
        assert_eq!(number, 0.1 + step as f64, "to the bit");
        Ok(step)
    }
}

/// The names in `folder`, sorted.
fn names(folder: &Path) -> Vec<String> {
    let name =
        |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(name).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_training_that_resumes_goes_on_as_the_one_that_saved() {
    let folder = tempdir().unwrap();
    let mut training = Training::new(3, 3);
    let _ = tch::no_grad(|| training.vs.variables()["flag"].shallow_clone().fill_(1));
    let _ = tch::no_grad(|| training.vs.variables()["count"].shallow_clone().fill_(1i64 << 40));
    let _ = training.sampler.iter().take(10).count();
    let mut checkpoints = training.open(&folder);
    training.save(&mut checkpoints, 3).unwrap();
    drop(checkpoints);

    let mut other = Training::new(3, 1);
    assert_eq!(other.resume(&folder), Ok(3));
    let saved = training.vs.variables();
    for (name, variable) in other.vs.variables() {
        assert!(variable == saved[&name] && variable.kind() == saved[&name].kind(), "{name}");
    }
    assert_eq!(other.sampler.state(), training.sampler.state());
    for _ in 0..3 {
        assert_eq!(other.step(), training.step());
    }
}

#[test]
fn samplers_of_all_kinds_go_on_where_they_were() {
    let folder = tempdir().unwrap();
    let mut training = Training::new(3, 1);
    let mut checkpoints = training.open(&folder);
    let weighted = |weights: [f64; 3], replicas| {
        let draws = WeightedRandomSampler::new(weights, 20).unwrap();
        DistributedSampler::wrap_replica(draws, replicas, 0).unwrap()
    };
    let two = weighted([1.0, 2.0, 3.0], 2);
    assert_eq!(two.iter().take(4).count(), 4);
    let stream = StreamSampler::with_replicas(2, 1).unwrap();
    let samplers: [&dyn Stateful; 2] = [&two, &stream];
    for (step, sampler) in samplers.into_iter().enumerate() {
        let Training { vs, model, optimizer, .. } = &training;
        checkpoints.save(step, model, vs, optimizer, sampler, &step).unwrap();
        let checkpoint = checkpoints.latest::<usize>().unwrap().expect("a checkpoint");
        let Training { vs, optimizer, .. } = &mut training;
        let mut resumed = weighted([1.0, 2.0, 3.0], 3);
        if step == 0 {
            checkpoint.resume(vs, optimizer, &mut resumed).unwrap();
            assert_eq!(resumed.state(), two.state());
            assert_eq!(resumed.iter().count(), 4); // of the 12 that are left
            let mut other = weighted([1.0, 2.0, 3.5], 3);
            let error = checkpoint.resume(vs, optimizer, &mut other).unwrap_err();
            assert!(matches!(error, CheckpointError::Sampler { .. }), "{error}");
        } else {
            assert!(checkpoint.resume(vs, optimizer, &mut resumed).is_err());
            let mut resumed = StreamSampler::with_replicas(3, 0).unwrap();
            checkpoint.resume(vs, optimizer, &mut resumed).unwrap();
            assert_eq!(resumed.state(), stream.state());
        }
    }
}

#[test]
fn pytorch_reads_the_tensors() {
    let folder = tempdir().unwrap();
    let training = Training::new(3, 2);
    training.save(&mut training.open(&folder), 2).unwrap();
    let checkpoint = folder.path().join("step-2");
    assert_eq!(
        names(&checkpoint),
        ["model.safetensors", "optimizer.safetensors", "state.json", "sums.json"]
    );

    // The format as its specification has it: a length, a JSON header, the bytes.
    let program = r#"
import json, struct, sys
try:
    import torch
except ImportError:
    sys.exit(77)
kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "BOOL": torch.bool, "I64": torch.int64}
for name in ["model.safetensors", "optimizer.safetensors"]:
    data = open(name, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    for key in sorted(key for key in header if key != "__metadata__"):
        begin, end = header[key]["data_offsets"]
        tensor = torch.frombuffer(rest[begin:end], dtype=kinds[header[key]["dtype"]])
        tensor = tensor.reshape(header[key]["shape"])
        print(key, tensor.dtype, list(tensor.shape), float(tensor.double().sum()))
"#;
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let read = Command::new(python).args(["-c", program]).current_dir(&checkpoint).output();
    let Some(read) = read.ok().filter(|read| read.status.code() != Some(77)) else {
        println!("SKIPPED: a checkpoint read by PyTorch: no Python with torch; set PYTHON");
        return;
    };
    let text = String::from_utf8_lossy(&read.stdout);
    assert!(read.status.success(), "{read:?}");
    let weight = &training.vs.variables()["dense.weight"];
    let lines: Vec<&str> = text.lines().collect();
    let sum = |tensor: &Tensor| tensor.sum(Kind::Double).double_value(&[]);
    let line = lines.iter().find(|line| line.starts_with("dense.weight torch.float32 [2, 3] "));
    let read: f64 = line.expect(&text).rsplit(' ').next().unwrap().parse().unwrap();
    assert!((read - sum(weight)).abs() < 1e-6, "{read}, not {}", sum(weight));
    for expected in ["half torch.bfloat16 [2, 3] 0.0", "flag torch.bool [2, 3] 0.0"] {
        assert!(lines.contains(&expected), "{text}");
    }
    assert!(lines.iter().any(|line| line.contains(".exp_avg_sq torch.float32")), "{text}");
}

#[test]
fn the_last_few_are_kept() {
    let folder = tempdir().unwrap();
    let training = Training::new(3, 1);
    let mut checkpoints = training.open(&folder).keep(3);
    for step in [5, 10, 9, 11, 100] {
        training.save(&mut checkpoints, step).unwrap();
    }
    drop(checkpoints); // then the files of the others are gone
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-100", "step-11", "step-9"]);
}

#[test]
fn a_training_that_has_not_read_them_replaces_none() {
    let folder = tempdir().unwrap();
    let mut training = Training::new(3, 1);
    training.save(&mut training.open(&folder), 500).unwrap();
    let error = training.save(&mut training.open(&folder), 1).unwrap_err().to_string();
    let expected = format!("{} has checkpoints of an earlier training", folder.path().display());
    assert!(error.starts_with(&expected) && error.lines().count() == 1, "{error}");
    assert_eq!(training.resume(&folder), Ok(500));
}

/// As a process leaves them that is killed between two steps of replacing or removing a checkpoint.
#[test]
fn what_a_killed_writer_leaves_is_tidied_up() {
    let folder = tempdir().unwrap();
    let mut training = Training::new(3, 1);
    training.save(&mut training.open(&folder), 7).unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::rename(path("step-7"), path(".checkpoint.replaced.step-7")).unwrap();
    for half in [".checkpoint.partial", ".checkpoint.removed", ".checkpoint.removed.step-6"] {
        fs::create_dir(path(half)).unwrap();
        fs::write(path(half).join("model.safetensors"), "half").unwrap();
    }
    assert_eq!(training.resume(&folder), Ok(7));
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-7"]);
}

/// Files that are wrong or missing are damage; what the disk refuses to read may be whole.
#[test]
fn what_cannot_be_read_is_an_error_and_what_is_damaged_is_kept() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut training = Training::new(3, 1);
    let mut checkpoints = training.open(&folder);
    for step in [1, 2] {
        training.save(&mut checkpoints, step).unwrap();
    }
    drop(checkpoints);

    // Reading it is an input/output error.
    let model = path("step-2/model.safetensors");
    fs::rename(&model, path("model")).unwrap();
    symlink("/proc/self/mem", &model).unwrap();
    let error = training.resume(&folder).unwrap_err();
    let expected = format!("cannot read {}: Input/output error", model.display());
    assert!(error.starts_with(&expected) && error.lines().count() == 1, "{error}");
    let error = training.save(&mut training.open(&folder), 3).unwrap_err().to_string();
    assert!(error.contains("has checkpoints of an earlier training"), "{error}");
    fs::rename(path("model"), &model).unwrap();
    assert_eq!(training.resume(&folder), Ok(2));

    for (times, name) in [(1, "step-2.damaged"), (2, "step-2.damaged.2"), (3, "step-2.damaged.3")] {
        match times {
            1 => fs::write(path("step-2/model.safetensors"), "damaged").unwrap(),
            2 => fs::remove_file(path("step-2/state.json")).unwrap(),
            _ => fs::remove_file(path("step-2/sums.json")).unwrap(),
        }
        let mut checkpoints = training.open(&folder);
        let latest = checkpoints.latest::<(usize, f64)>().unwrap().expect("one is whole");
        assert_eq!(latest.state.0, 1);
        training.save(&mut checkpoints, 2).unwrap();
        assert!(path(name).join("optimizer.safetensors").exists(), "{:?}", names(folder.path()));
    }
    assert_eq!(fs::read(path("step-2.damaged/model.safetensors")).unwrap(), b"damaged");
    assert_eq!(
        names(folder.path()),
        [
            ".checkpoint.lock",
            "step-1",
            "step-2",
            "step-2.damaged",
            "step-2.damaged.2",
            "step-2.damaged.3"
        ]
    );
    assert_eq!(training.resume(&folder), Ok(2));

    for step in [1, 2] {
        fs::remove_file(path(&format!("step-{step}/sums.json"))).unwrap();
    }
    let error = training.resume(&folder).unwrap_err();
    let expected = format!("all checkpoints in {} are damaged", folder.path().display());
    assert!(error.starts_with(&expected) && error.lines().count() == 1, "{error}");
}

#[test]
fn a_damaged_one_that_cannot_be_renamed_stays_until_it_can() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let training = Training::new(3, 1);
    let mut checkpoints = training.open(&folder);
    for step in [1, 2] {
        training.save(&mut checkpoints, step).unwrap();
    }
    fs::write(path("step-2/model.safetensors"), "damaged").unwrap();
    checkpoints.latest::<(usize, f64)>().unwrap().expect("one is whole");

    // No folder takes the name of a link that leads nowhere.
    symlink("nowhere", path("step-2.damaged")).unwrap();
    for _ in 0..2 {
        let error = training.save(&mut checkpoints, 2).unwrap_err().to_string();
        let expected = format!("cannot rename {}: ", path("step-2").display());
        assert!(error.starts_with(&expected) && error.lines().count() == 1, "{error}");
    }
    fs::remove_file(path("step-2.damaged")).unwrap();
    training.save(&mut checkpoints, 2).unwrap();
    assert_eq!(fs::read(path("step-2.damaged/model.safetensors")).unwrap(), b"damaged");
}

#[test]
fn a_disk_that_only_rank_0_cannot_read_is_no_disk_that_is_not_shared() {
    let folders = [tempdir().unwrap(), tempdir().unwrap()];
    let training = Training::new(3, 1);
    for folder in &folders {
        training.save(&mut training.open(folder), 1).unwrap();
    }
    let sums = folders[0].path().join("step-1/sums.json");
    let latest = |folder: &TempDir, group: ProcessGroup| {
        let mut checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        if group.rank() == 0 {
            fs::remove_file(&sums).unwrap();
            symlink("sums.json", &sums).unwrap(); // a loop
        }
        checkpoints.latest::<(usize, f64)>().err().unwrap().to_string()
    };
    let [group_0, group_1] = ProcessGroup::in_process(2).unwrap().try_into().unwrap();
    let errors = std::thread::scope(|scope| {
        let other = scope.spawn(|| latest(&folders[1], group_1));
        [latest(&folders[0], group_0), other.join().unwrap()]
    });
    let expected = format!("cannot read the folder {}: ", folders[0].path().display());
    assert!(errors[0].starts_with(&expected), "{errors:?}");
    assert_eq!(errors[1], format!("rank 0: {}", errors[0]));
}

#[test]
fn what_others_keep_in_the_folder_is_left_alone() {
    let folder = tempdir().unwrap();
    let mut training = Training::new(3, 1);
    let path = |name: &str| folder.path().join(name);
    for name in ["step-900", "step-5"] {
        fs::create_dir(path(name)).unwrap();
        fs::write(path(name).join("of others"), name).unwrap();
    }
    let mut checkpoints = training.open(&folder).keep(1);
    for step in [3, 4] {
        training.save(&mut checkpoints, step).unwrap();
    }
    let error = training.save(&mut checkpoints, 5).unwrap_err().to_string();
    let expected = format!("{} is no checkpoint of Flow", path("step-5").display());
    assert!(error.starts_with(&expected) && error.lines().count() == 1, "{error}");
    drop(checkpoints);
    assert_eq!(training.resume(&folder), Ok(4));
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-4", "step-5", "step-900"]);
    assert_eq!(fs::read_to_string(path("step-900/of others")).unwrap(), "step-900");
}

#[test]
fn what_does_not_fit_is_an_error_of_one_line() {
    let folder = tempdir().unwrap();
    let training = Training::new(3, 1);
    let mut checkpoints = training.open(&folder);
    let path = folder.path().join("step-1");
    let starts = |error: String, expected: &str| {
        assert!(error.starts_with(expected) && error.lines().count() == 1, "{error}");
    };

    let Training { vs, model, optimizer, sampler, .. } = &training;
    let error = checkpoints.save(1, model, vs, optimizer, sampler, &f64::NAN).unwrap_err();
    let expected =
        format!("cannot save the program's state in {}: it cannot be read back", path.display());
    starts(error.to_string(), &expected);
    let complex = Tensor::zeros([1], (Kind::ComplexDouble, Device::Cpu));
    let _ = vs.root().add("complex", complex, false);
    let error = training.save(&mut checkpoints, 1).unwrap_err();
    let expected =
        format!("cannot save complex in {}: it is of kind ComplexDouble", path.display());
    starts(error.to_string(), &expected);
    drop(checkpoints);
    assert_eq!(names(folder.path()), [".checkpoint.lock"]);

    let training = Training::new(3, 1);
    training.save(&mut training.open(&folder), 1).unwrap();
    let model = format!(
        "{} is of another model: its dense.weight is Float [2, 3], not Float [2, 4]; ",
        path.display()
    );
    starts(Training::new(4, 0).resume(&folder).unwrap_err(), &model);
    let mut double = Training::new(3, 0);
    double.vs.double();
    let model = format!(
        "{} is of another model: its dense.bias is Float [2], not Double [2]; ",
        path.display()
    );
    starts(double.resume(&folder).unwrap_err(), &model);
    let mut other = Training::new(3, 0);
    let _ = other.vs.root().zeros("more", &[1]);
    let model = format!("{} is of another model: it has no more; ", path.display());
    starts(other.resume(&folder).unwrap_err(), &model);
    let mut sgd = Training::new(3, 0);
    sgd.optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&sgd.vs, 0.1).unwrap();
    let optimizer = format!(
        "{} is of another optimizer: OptimizerState::load_state: parameter 0 is Adam of [2] Float \
         in the state, SGD with momentum of [2] Float was expected; ",
        path.display()
    );
    starts(sgd.resume(&folder).unwrap_err(), &optimizer);
    let error = Training::new(3, 0).open(&folder).latest::<String>().err().unwrap().to_string();
    starts(error, &format!("{} is of another program: ", path.display()));
}

/// Two ranks with disks of their own: rank 0 writes and reads for both, also the optimizer's parts.
#[test]
fn ranks_that_do_not_see_the_disk_send_and_receive() {
    let folders = [tempdir().unwrap(), tempdir().unwrap()];
    let train = |group: ProcessGroup| {
        let folder = &folders[group.rank()];
        let vs = VarStore::new(Device::Cpu);
        let numbers = Tensor::arange(40_000, (Kind::Float, Device::Cpu)).reshape([200, 200]);
        let weight = vs.root().add("weight", numbers, true);
        let model = Ddp::new((), &vs, &group).unwrap();
        let new = || ZeroRedundancyOptimizer::new(&vs, &group, nn::Adam::default(), 0.1).unwrap();
        let optimizer = new();
        optimizer.backward_step(&weight.square().sum(Kind::Float)).unwrap();
        let mut sampler = DistributedSampler::new(10, &group);
        let mut checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save(1, &model, &vs, &optimizer, &sampler, &7).unwrap();
        let saved = weight.detach().copy();
        optimizer.backward_step(&weight.square().sum(Kind::Float)).unwrap();
        let next = weight.detach().copy();

        let checkpoint = checkpoints.latest::<usize>().unwrap().expect("a checkpoint");
        let mut optimizer = new();
        checkpoint.resume(&vs, &mut optimizer, &mut sampler).unwrap();
        assert_eq!(checkpoint.state, 7);
        assert_eq!(weight.detach(), saved);
        optimizer.backward_step(&weight.square().sum(Kind::Float)).unwrap();
        assert_eq!(weight.detach(), next);
    };
    let groups = ProcessGroup::in_process(2).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| train(group));
        }
    });
    assert_eq!(names(folders[0].path()), [".checkpoint.lock", "step-1"]);
    assert!(names(folders[1].path()).is_empty());
}

/// A flipped bit anywhere in a file of several is found, and the checkpoint before serves.
#[test]
fn damage_anywhere_is_found() {
    let folder = tempdir().unwrap();
    let mut training = Training::new(3, 1);
    let mut checkpoints = training.open(&folder).file_bytes(8);
    for step in [1, 2] {
        training.save(&mut checkpoints, step).unwrap();
    }
    drop(checkpoints);
    let step = folder.path().join("step-2");
    let files = names(&step);
    assert!(files.contains(&"model.safetensors.index.json".to_owned()), "{files:?}");
    for file in files {
        let path = step.join(&file);
        let good = fs::read(&path).unwrap();
        for at in [0, good.len() / 2, good.len() - 1] {
            let mut damaged = good.clone();
            damaged[at] ^= 0x10;
            fs::write(&path, damaged).unwrap();
            assert_eq!(training.resume(&folder), Ok(1), "{file}, byte {at}");
        }
        for damaged in [&good[..good.len() - 1], &[&good[..], b" "].concat()] {
            if file == "sums.json" && damaged.len() > good.len() {
                continue; // a space more is the same JSON
            }
            fs::write(&path, damaged).unwrap();
            assert_eq!(training.resume(&folder), Ok(1), "{file}, {} bytes", damaged.len());
        }
        fs::write(&path, good).unwrap();
    }
    assert_eq!(training.resume(&folder), Ok(2));
}

#[test]
fn memory_is_that_of_flow_launch() {
    let group = ProcessGroup::from_env().unwrap();
    let error = Checkpoints::in_memory(&group).err().unwrap().to_string();
    let expected = "cannot keep checkpoints in memory: FLOW_CHECKPOINT_MEMORY is not set; start the program with \
                    flow-launch, or open checkpoints in a folder";
    assert_eq!(error, expected);
}
