//! Parameters that ranks have in common are trained to the bits of those that each rank has.

mod model;

use crate::common::ranks::ranks;
use flow_ddp::is_fully_sharded;
use flow_global::checkpoint::ShardedCheckpoints;
use flow_global::{GlobalTensor, Placement, ShardedOptimizer};
use model::{DP, Model, STEPS, same_bits, variables};
use tch::{Kind, Tensor, nn};

#[test]
fn weights_have_the_bits_of_those_that_each_rank_has() {
    ranks(4, |group| same_bits(&group));
}

/// What one rank writes the others read. Shards are the parameter's own memory where they can be.
#[test]
fn ranks_have_memory_in_common() {
    ranks(2, |group| {
        let placement = Placement::new(&group, [[0], [1]]).unwrap();
        for (kind, steps_in_place) in [(Kind::Double, true), (Kind::BFloat16, false)] {
            let model = Model::new(&placement, kind);
            let optimizer =
                ShardedOptimizer::fully_sharded(&model.vs, DP, nn::Adam::default(), 0.1).unwrap();
            for (name, parameter) in variables(&model.vs) {
                let mut local = parameter.detach().to_local().unwrap();
                assert!(is_fully_sharded(&local), "{name}");
                if group.rank() == 0 {
                    let _ = tch::no_grad(|| local.fill_(5.0));
                }
                group.barrier().unwrap();
                assert_eq!(local, local.full_like(5.0), "{name}");
                group.barrier().unwrap();
                let shard = optimizer.shards().variables()[&name].detach().to_local().unwrap();
                if name == "whole.weight" {
                    assert_eq!(is_fully_sharded(&shard), steps_in_place);
                }
            }
        }
    });
}

/// Saved by ranks that have parameters in common, and loaded by ones that have not, and the other way.
#[test]
fn a_checkpoint_goes_on_either_way() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let config = nn::Adam::default();
    ranks(4, |group| {
        let placement = Placement::new(&group, [[0, 1], [2, 3]]).unwrap();
        let expected = Model::new(&placement, Kind::Double);
        let mut own = ShardedOptimizer::new(&expected.vs, DP, config, 0.1).unwrap();
        expected.train(&mut own, 0..STEPS);
        let mut checkpoints = ShardedCheckpoints::open(folder, &group).unwrap();
        for is_shared in [true, false, true] {
            let make = |model: &Model, is_shared: bool| {
                if is_shared {
                    ShardedOptimizer::fully_sharded(&model.vs, DP, config, 0.1).unwrap()
                } else {
                    ShardedOptimizer::new(&model.vs, DP, config, 0.1).unwrap()
                }
            };
            let model = Model::new(&placement, Kind::Double);
            let mut optimizer = make(&model, is_shared);
            model.train(&mut optimizer, 0..2);
            optimizer.save(&mut checkpoints, 2, &()).unwrap();
            model.train(&mut optimizer, 2..3);
            let resumed = Model::new(&placement, Kind::Double);
            for (model, is_shared) in [(&resumed, !is_shared), (&model, is_shared)] {
                let mut optimizer = make(model, is_shared);
                optimizer.resume(&checkpoints.latest::<()>().unwrap().unwrap()).unwrap();
                model.train(&mut optimizer, 2..STEPS);
                assert_eq!(model.weights(), expected.weights());
            }
            std::fs::remove_dir_all(folder.join("step-2")).ok();
            group.barrier().unwrap();
        }
    });
}

#[test]
fn a_change_by_each_rank_is_an_error() {
    ranks(2, |group| {
        let placement = Placement::new(&group, [[0], [1]]).unwrap();
        let changes: [&dyn Fn(&mut Tensor); 3] = [
            &|weight| drop(weight.g_mul_scalar_(0.5)),
            &|weight| drop(weight.detach().g_mul_scalar_(0.5)),
            &|weight| drop(weight.to_local().unwrap().g_mul_scalar_(0.5)),
        ];
        for change in changes {
            let model = Model::new(&placement, Kind::Double);
            let mut optimizer =
                ShardedOptimizer::fully_sharded(&model.vs, DP, nn::Adam::default(), 0.1).unwrap();
            model.train(&mut optimizer, 0..1);
            let mut weight = model.vs.variables()["whole.weight"].shallow_clone();
            tch::no_grad(|| change(&mut weight));
            model.backward(1);
            let error = optimizer.step().unwrap_err().to_string();
            assert!(error.contains("a parameter was changed in place"), "{error}");
        }
    });
}

#[test]
fn parameters_that_are_in_common_need_an_optimizer_that_knows() {
    ranks(2, |group| {
        let placement = Placement::new(&group, [[0], [1]]).unwrap();
        let model = Model::new(&placement, Kind::Double);
        let config = nn::Adam::default();
        drop(ShardedOptimizer::fully_sharded(&model.vs, DP, config, 0.1).unwrap());
        let error = ShardedOptimizer::new(&model.vs, DP, config, 0.1).err().unwrap().to_string();
        assert!(error.contains("have parameters in common"), "{error}");
        assert!(ShardedOptimizer::fully_sharded(&model.vs, 2, config, 0.1).is_err());
        let mut anew = ShardedOptimizer::fully_sharded(&model.vs, DP, config, 0.1).unwrap();
        model.train(&mut anew, 0..1);
    });
}
