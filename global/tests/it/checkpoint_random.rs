//! Random numbers, and the order of samples, go on after a checkpoint as without it: for another
//! number of ranks too.

use crate::common::ranks::ranks;
use flow_ddp::{DistributedSampler, SamplerState};
use flow_global::checkpoint::ShardedCheckpoints;
use flow_global::{
    B, GlobalTensor, NdSbp, Placement, S, distribute, distribute_tensor, manual_seed, randn,
};
use flow_tensor::ProcessGroup;
use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

#[test]
fn random_numbers_go_on() {
    let folder = tempdir().unwrap();
    let draw = |placement: &Placement, sbp| {
        let numbers = randn([6], Kind::Double, placement, [sbp]).unwrap().full().unwrap();
        Vec::<f64>::try_from(numbers).unwrap()
    };
    let drawn = ranks(3, |group| {
        let placement = Placement::new(&group, [0, 1, 2]).unwrap();
        manual_seed(&placement, 5).unwrap();
        draw(&placement, S(0));
        let vs = VarStore::new(Device::Cpu);
        ShardedCheckpoints::open(folder.path(), &group).unwrap().save(1, &vs, None, &()).unwrap();
        draw(&placement, S(0))
    });
    let resumed = ranks(2, |group| {
        let placement = Placement::new(&group, [1]).unwrap();
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        let checkpoint = checkpoints.latest::<()>().unwrap().unwrap();
        checkpoint.resume(&VarStore::new(Device::Cpu), None).unwrap();
        draw(&placement, B)
    });
    assert_eq!(resumed, vec![drawn[0].clone(); 2]);
}

/// The losses of three steps with dropout after the checkpoint, which is made after three others
/// where there is none. `reseed`: with other random numbers than the checkpoint's.
fn with_dropout(
    checkpoints: &mut ShardedCheckpoints,
    placement: &Placement,
    (weights, batches): (NdSbp, NdSbp),
    reseed: bool,
) -> Vec<f64> {
    let mut vs = VarStore::new(Device::Cpu);
    let net = nn::seq_t()
        .add(nn::linear(vs.root() / "one", 6, 8, Default::default()))
        .add_fn_t(|hidden, train| hidden.relu().dropout(0.5, train))
        .add(nn::linear(vs.root() / "two", 8, 3, Default::default()));
    vs.double();
    distribute(&vs, placement, |_, _| weights.clone()).unwrap();
    let mut optimizer = nn::Adam::default().build(&vs, 0.01).unwrap();
    let start = match checkpoints.latest::<usize>().unwrap() {
        Some(checkpoint) => {
            checkpoint.resume(&vs, Some(&mut optimizer)).unwrap();
            checkpoint.state
        }
        None => 0,
    };
    if reseed {
        manual_seed(placement, 4).unwrap();
    }
    let mut losses = Vec::new();
    for step in start..6 {
        let batch = Tensor::arange(24, (Kind::Double, Device::Cpu)).view([4, 6]);
        let batch = (batch * (step as f64 + 1.0)).sin();
        let batch = tch::no_grad(|| distribute_tensor(&batch, placement, &batches)).unwrap();
        let loss = net.forward_t(&batch, true).square().mean(Kind::Double);
        optimizer.backward_step(&loss);
        losses.push(loss.full().unwrap().double_value(&[]));
        if start == 0 && step == 2 {
            checkpoints.save(3, &vs, Some(&optimizer), &3).unwrap();
        }
    }
    losses.split_off(losses.len() - 3)
}

#[test]
fn dropout_goes_on() {
    let folder = tempdir().unwrap();
    let open = |group: &ProcessGroup| ShardedCheckpoints::open(folder.path(), group).unwrap();
    let uninterrupted = ranks(2, |group| {
        let placement = Placement::new(&group, [0, 1]).unwrap();
        with_dropout(&mut open(&group), &placement, (vec![B], vec![S(0)]), true)
    });
    let line = |group: ProcessGroup, reseed| {
        let placement = Placement::new(&group, [2, 0, 1]).unwrap();
        with_dropout(&mut open(&group), &placement, (vec![S(0)], vec![S(0)]), reseed)
    };
    let mesh = |group: ProcessGroup| {
        let placement = Placement::new(&group, [[0, 1], [2, 3]]).unwrap();
        with_dropout(&mut open(&group), &placement, (vec![B, S(0)], vec![S(0), B]), false)
    };
    let differ = |losses: &[f64]| {
        let pairs = losses.iter().zip(&uninterrupted[0]);
        pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f64::max)
    };
    for losses in [&ranks(3, |group| line(group, false))[0], &ranks(4, mesh)[0]] {
        assert!(differ(losses) < 1e-12, "{losses:?} {uninterrupted:?}");
    }
    let other = &ranks(3, |group| line(group, true))[0];
    assert!(differ(other) > 1e-6, "dropout makes no difference: {other:?}");
}

/// A sampler's state is what a program may keep in its own.
#[test]
fn the_order_of_samples_goes_on() {
    let folder = tempdir().unwrap();
    let sampler = |group: &ProcessGroup| DistributedSampler::new(24, group).shuffle(true).seed(7);
    let taken = ranks(2, |group| {
        let sampler = sampler(&group);
        let taken: Vec<usize> = sampler.iter().take(6).collect();
        let vs = VarStore::new(Device::Cpu);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        checkpoints.save(1, &vs, None, &sampler.state()).unwrap();
        taken
    });
    let rest = ranks(3, |group| {
        let mut sampler = sampler(&group);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        let checkpoint = checkpoints.latest::<SamplerState>().unwrap().unwrap();
        checkpoint.resume(&VarStore::new(Device::Cpu), None).unwrap();
        sampler.resume(&checkpoint.state).unwrap();
        sampler.iter().collect::<Vec<_>>()
    });
    // Sample by sample, the order of one process.
    let dealt = |parts: &[&Vec<usize>]| -> Vec<usize> {
        (0..parts[0].len()).flat_map(|place| parts.iter().map(move |part| part[place])).collect()
    };
    let start = dealt(&[&taken[0], &taken[1]]);
    let rest = dealt(&[&rest[0], &rest[1], &rest[2]]);
    assert_eq!((start.len(), rest.len()), (12, 12));
    let mut whole: Vec<_> = start.iter().chain(&rest).copied().collect();
    assert_eq!(whole, ranks(1, |group| sampler(&group).iter().collect::<Vec<_>>())[0]);
    whole.sort_unstable();
    assert_eq!(whole, (0..24).collect::<Vec<_>>());
}
