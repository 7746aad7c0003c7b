//! Checkpoints that are written beside the training have what was there at the call.

use std::fs;
use std::path::Path;

use crate::common::ranks::ranks;
use flow_global::checkpoint::{ShardedCheckpoints, verify};
use flow_global::{B, GlobalTensor, NdSbp, Placement, S, distribute};
use flow_tensor::ProcessGroup;
use proptest::prelude::*;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

/// The extents of a mesh's axes, and its first rank: the others follow, and rank 0 the last one.
type Mesh = ([usize; 3], usize);

/// The sizes of a tensor, and what chooses its SBP on each of two meshes.
type Drawn = (Vec<i64>, [[usize; 3]; 2]);

fn meshes() -> impl Strategy<Value = Mesh> {
    let extents =
        [[1, 1, 1], [1, 1, 2], [3, 1, 1], [1, 5, 1], [2, 1, 2], [3, 2, 1], [1, 2, 3], [2, 2, 2]];
    (prop::sample::select(extents.to_vec()), 0..8_usize)
}

fn tensors() -> impl Strategy<Value = Vec<Drawn>> {
    let small = prop::collection::vec(prop::sample::select(vec![0, 1, 2, 3, 5, 7]), 0..4);
    // Megabytes: what several ranks have they write together.
    let large: [&[i64]; 4] = [&[1, 700_001], &[6, 300, 299], &[600_000, 1], &[3, 200_000]];
    let large = prop::sample::select(large.map(<[_]>::to_vec).to_vec());
    let sbps = || any::<[[usize; 3]; 2]>();
    (prop::collection::vec((small, sbps()), 1..6), (large, sbps())).prop_map(|(mut all, large)| {
        all.push(large);
        all
    })
}

fn size((extents, _): &Mesh) -> usize {
    extents.iter().product()
}

fn placement(([planes, rows, columns], first): &Mesh, group: &ProcessGroup) -> Placement {
    let rank =
        |plane, row, column| (first + (plane * rows + row) * columns + column) % group.world_size();
    let row = |plane, row| (0..*columns).map(|column| rank(plane, row, column)).collect();
    let plane = |plane| (0..*rows).map(|at| row(plane, at)).collect();
    let ranks: Vec<Vec<Vec<usize>>> = (0..*planes).map(plane).collect();
    Placement::new(group, ranks).unwrap()
}

/// The numbers of the tensors at a step, as one process has them.
fn numbers(tensors: &[Drawn], step: usize) -> Vec<Tensor> {
    let mut all = Vec::new();
    for (sizes, _) in tensors {
        let count = sizes.iter().product::<i64>();
        let numbers = Tensor::arange(count, (Kind::Float, Device::Cpu)).view(&sizes[..]);
        all.push(numbers.sin() + step as f64);
    }
    all
}

/// A model of the tensors, as this rank has it on the mesh with the first or the second of the SBPs.
fn model(tensors: &[Drawn], (mesh, which): (&Mesh, usize), group: &ProcessGroup) -> VarStore {
    let vs = VarStore::new(Device::Cpu);
    for (number, tensor) in numbers(tensors, 0).iter().enumerate() {
        let _ = vs.root().add(&number.to_string(), tensor.shallow_clone(), true);
    }
    let placement = placement(mesh, group);
    let sbp = |name: &str, _: &Tensor| -> NdSbp {
        let (sizes, sbps) = &tensors[name.parse::<usize>().unwrap()];
        sbps[which]
            .iter()
            .map(|choice| match choice % (sizes.len() + 1) {
                0 => B,
                dim => S(dim - 1),
            })
            .collect()
    };
    distribute(&vs, &placement, sbp).unwrap();
    vs
}

fn variable(vs: &VarStore, number: usize) -> Tensor {
    vs.variables()[&number.to_string()].shallow_clone()
}

/// Gives the model the numbers of a step.
fn set(vs: &VarStore, tensors: &[Drawn], step: usize) {
    for (number, tensor) in numbers(tensors, step).iter().enumerate() {
        tch::no_grad(|| variable(vs, number).copy_(tensor));
    }
}

/// The files of a folder, with their bytes.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(&path).unwrap())
        })
        .collect();
    files.sort();
    files
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever the training does meanwhile: each of two checkpoints has the files that `save` writes, and any
    /// other layout reads from them what one process has.
    #[test]
    fn what_is_saved_is_what_was_there_at_the_call(
        tensors in tensors(),
        from in meshes(),
        to in meshes(),
    ) {
        let beside = tempdir().unwrap();
        let at_once = tempdir().unwrap();
        ranks(size(&from), |group| {
            let vs = model(&tensors, (&from, 0), &group);
            let mut checkpoints = ShardedCheckpoints::open(beside.path(), &group).unwrap();
            let mut others = ShardedCheckpoints::open(at_once.path(), &group).unwrap();
            for step in 1..=2 {
                set(&vs, &tensors, step);
                others.save(step, &vs, None, &step).unwrap();
                checkpoints.async_save(step, &vs, None, &step).unwrap();
                set(&vs, &tensors, 9);
            }
            checkpoints.wait().unwrap();
        });
        for step in ["step-1", "step-2"] {
            let saved = files(&beside.path().join(step));
            prop_assert!(saved == files(&at_once.path().join(step)), "{}", step);
            verify(beside.path().join(step)).unwrap();
        }
        ranks(size(&to), |group| {
            let vs = model(&tensors, (&to, 1), &group);
            let mut checkpoints = ShardedCheckpoints::open(beside.path(), &group).unwrap();
            let checkpoint = checkpoints.latest::<usize>().unwrap().unwrap();
            assert_eq!((checkpoint.step(), checkpoint.state), (2, 2));
            checkpoint.resume(&vs, None).unwrap();
            for (number, expected) in numbers(&tensors, 2).iter().enumerate() {
                assert!(variable(&vs, number).full().unwrap() == *expected, "tensor {number}");
            }
        });
    }
}

/// Ranks may have others in plain tensors: rank 0's are saved, not shares of each.
#[test]
fn plain_tensors_are_rank_0s_beside_the_training() {
    let folder = tempdir().unwrap();
    const MANY: i64 = 1 << 20;
    ranks(3, |group| {
        let vs = VarStore::new(Device::Cpu);
        let mut plain = vs.root().zeros_no_train("plain", &[MANY]);
        let _ = plain.fill_(group.rank() as f64 + 1.0);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        checkpoints.async_save(1, &vs, None, &()).unwrap();
        let _ = plain.fill_(9.0);
        // A drop waits, too.
    });
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let plain = vs.root().zeros_no_train("plain", &[MANY]);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        checkpoints.latest::<()>().unwrap().unwrap().resume(&vs, None).unwrap();
        assert_eq!(plain, Tensor::ones([MANY], (Kind::Float, Device::Cpu)));
    });
}
