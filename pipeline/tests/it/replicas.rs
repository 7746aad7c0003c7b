//! Stages with replicas on a data-parallel axis: by `Ddp`, and as global tensors.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::replicas::{self, Half, ROWS, Replica, loss};
use crate::common::{close, numbers, ranks};
use flow_comm::Mesh;
use flow_ddp::{Ddp, Fsdp, MixedPrecision};
use flow_global::{B, GlobalTensor, Placement, S, distribute};
use flow_pipeline::{DdpStage, FsdpStage, Pipeline, Schedule, Stage, stage_fn};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Adam, Module, ModuleT, Optimizer, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

fn mesh_of_four(group: &ProcessGroup) -> Mesh {
    Mesh::new(group, &[0, 1, 2, 3], &[2, 2]).unwrap().with_names(&["pp", "dp"]).unwrap()
}

fn batch(step: usize) -> [Tensor; 2] {
    replicas::batch(12, step)
}

const SCHEDULES: [(&str, bool); 3] = [("1f1b", false), ("gpipe", true), ("zb-h1", true)];
/// With two stages on each rank.
const CHUNKED: [(&str, bool); 3] = [("interleaved", false), ("interleaved", true), ("zb-v", false)];

/// On all schedules; micro-batches differ in rows.
fn check_gradients(is_global: bool) {
    for (name, recomputes) in SCHEDULES.into_iter().chain(CHUNKED) {
        let schedule = Schedule::named(name, 2, 2, 3).unwrap();
        let expected = replicas::gradients_alone(schedule.stages());
        let found = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let mut replica = Replica::new(&mesh, &schedule, recomputes, is_global).unwrap();
            replica.gradients().unwrap()
        });
        assert_eq!(found.iter().flatten().count(), 2 * schedule.stages(), "{name}");
        for (stage, found) in found.iter().flatten() {
            close(found, &expected[*stage]);
        }
    }
}

/// The sampler of the data-parallel rank says which rows a pipeline has.
#[test]
fn tied_weights_of_ddp_have_the_gradient_of_one_process() {
    check_gradients(false);
}

#[test]
fn tied_global_weights_have_the_gradient_of_one_process() {
    check_gradients(true);
}

#[test]
fn global_rows_come_out_of_an_evaluation_as_they_went_in() {
    let schedule = Schedule::one_f_one_b(2, 3).unwrap();
    ranks(4, |group| {
        let mut replica = Replica::new(&mesh_of_four(&group), &schedule, false, true).unwrap();
        let [x, _] = replicas::batch(ROWS, 0);
        let part = replica.part(&x, [7, 7]).unwrap();
        for output in replica.pipeline.forward(&[part]).unwrap().iter().flatten() {
            let whole = output.to_sbp([B]).unwrap().to_local().unwrap();
            close(&whole, &replicas::alone(2).iter().fold(&x + 0, |x, half| half.forward(&x)));
        }
        // A rank that fails ends what others are still doing.
        group.barrier().unwrap();
        // What would be weighted wrongly is an error.
        let part = replica.part(&x, [7, 6]).unwrap();
        let step = replica.pipeline.step(&[part], |outputs, _| outputs[0].mean(Kind::Double));
        let error = step.unwrap_err().to_string();
        assert!(error.contains("is split unevenly"), "{error}");
    });
}

/// Two steps of batch normalization: only in the first one replicas have different rows. Within a step
/// each replica has its own, also when forwards run again.
#[test]
fn a_step_begins_with_the_buffers_of_the_first_replica() {
    for recomputes in [false, true] {
        let found = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let replica = mesh.coordinates().unwrap()[1];
            let mut vs = VarStore::new(Device::Cpu);
            let mut mean = Tensor::new();
            let mut pipeline = Pipeline::builder(&mesh, "pp")
                .schedule(Schedule::gpipe(2, 3).unwrap())
                .recompute(recomputes)
                .build(|_| {
                    let layer = nn::batch_norm1d(vs.root(), 4, Default::default());
                    vs.double();
                    mean = layer.running_mean.shallow_clone();
                    Ok(Box::new(DdpStage(Ddp::new(layer, &vs, mesh.group("dp")?)?)))
                })
                .unwrap();
            let means = [[0.7, 0.9][replica], 0.7].map(|factor| {
                let x = numbers(&[12, 4], factor);
                pipeline.step(&[x], |outputs, _| outputs[0].square().mean(Kind::Double)).unwrap();
                mean.copy()
            });
            // Of the first stage after the first step.
            let x = numbers(&[12, 4], [0.7, 0.9][replica]);
            let mut expected = Tensor::zeros([4], (Kind::Double, Device::Cpu));
            for part in [0, 1, 2].repeat(1 + usize::from(recomputes)) {
                let rows = x.narrow(0, 4 * part, 4);
                expected =
                    expected * 0.9 + rows.mean_dim([0_i64].as_slice(), false, Kind::Double) * 0.1;
            }
            (means, expected)
        });
        for pair in found.chunks(2) {
            assert_ne!(pair[0].0[0], pair[1].0[0]);
            assert_eq!(pair[0].0[1], pair[1].0[1]);
        }
        found[..2].iter().for_each(|(means, expected)| close(&means[0], expected));
    }
}

/// Two tensors go from stage to stage, each of which has its own weight.
#[test]
fn ddp_has_stages_of_several_tensors() {
    let weight = |of| numbers(&[4, 4], [0.3, 0.5][of]);
    let pair = |inputs: &[Tensor], weight: &Tensor| {
        let [x, y] = inputs else { panic!("{} inputs", inputs.len()) };
        vec![x.matmul(weight).tanh(), y + x.matmul(&weight.tr())]
    };
    let loss = |outputs: &[Tensor]| (&outputs[0] * &outputs[1]).mean(Kind::Double);
    let [x, y] = batch(0);
    let alone = [0, 1].map(|of| weight(of).set_requires_grad(true));
    loss(&pair(&pair(&[x, y], &alone[0]), &alone[1])).backward();
    for (name, recomputes) in SCHEDULES {
        let schedule = Schedule::named(name, 2, 1, 3).unwrap();
        let found = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let [stage, replica] = mesh.coordinates().unwrap()[..] else { panic!("two axes") };
            let mut vs = VarStore::new(Device::Cpu);
            vs.set_kind(Kind::Double);
            let own = vs.root().var_copy("weight", &weight(stage));
            let mut pipeline = Pipeline::builder(&mesh, "pp")
                .schedule(schedule.clone())
                .recompute(recomputes)
                .build(|_| {
                    let own = own.shallow_clone();
                    let stage = stage_fn(move |inputs| Ok(pair(inputs, &own)));
                    Ok(Box::new(DdpStage(Ddp::new(stage, &vs, mesh.group("dp")?)?)))
                })
                .unwrap();
            let inputs = batch(0).map(|all| all.narrow(0, 6 * replica as i64, 6));
            pipeline.step(&inputs, |outputs, _| loss(outputs)).unwrap();
            (stage, own.grad())
        });
        found.iter().for_each(|(stage, found)| close(found, &alone[*stage].grad()));
    }
}

/// Weights of both stages after each step, with `Ddp` and Adam or with `Fsdp`: the same bits.
#[test]
fn stages_of_fsdp_train_as_those_of_ddp() {
    for (name, recomputes) in SCHEDULES.into_iter().chain(CHUNKED) {
        let schedule = Schedule::named(name, 2, 2, 3).unwrap();
        let weights = |is_sharded: bool| {
            ranks(4, |group| {
                let mesh = mesh_of_four(&group);
                let replica = mesh.coordinates().unwrap()[1] as i64;
                let mut weights = Vec::new();
                let mut plain = Vec::new();
                let mut sharded = Vec::new();
                let mut pipeline = Pipeline::builder(&mesh, "pp")
                    .schedule(schedule.clone())
                    .recompute(recomputes)
                    .build(|stage| -> Result<Box<dyn Stage>, _> {
                        let mut vs = VarStore::new(Device::Cpu);
                        let half = Half::new(&mut vs, stage);
                        weights.push(half.0.shallow_clone());
                        let replicas = mesh.group("dp")?;
                        if is_sharded {
                            let model = Fsdp::new(half, &vs, replicas)?;
                            sharded.push(model.optimizer(Adam::default(), 0.1)?);
                            return Ok(Box::new(FsdpStage(model)));
                        }
                        plain.push(Adam::default().build(&vs, 0.1)?);
                        Ok(Box::new(DdpStage(Ddp::new(half, &vs, replicas)?)))
                    })
                    .unwrap();
                let mut trained = Vec::new();
                for step in 0..4 {
                    plain.iter_mut().for_each(Optimizer::zero_grad);
                    sharded.iter().for_each(|optimizer| optimizer.zero_grad().unwrap());
                    let [x, y] = batch(step).map(|all| all.narrow(0, 6 * replica, 6));
                    pipeline.step(&[x], |outputs, part| loss(&outputs[0], &part.of(&y))).unwrap();
                    plain.iter_mut().for_each(Optimizer::step);
                    sharded.iter().for_each(|optimizer| optimizer.step().unwrap());
                    trained.extend(weights.iter().map(Tensor::copy));
                }
                trained
            })
        };
        assert_eq!(weights(true), weights(false), "{name}");
    }
}

/// A stage is called without the forward of the `Ddp`, which would cast.
#[test]
fn mixed_precision_of_a_stage_is_an_error() {
    let half = MixedPrecision { param: Some(Kind::BFloat16), ..Default::default() };
    let errors = ranks(4, |group| {
        let mesh = mesh_of_four(&group);
        let vs = VarStore::new(Device::Cpu);
        let mut pipeline = Pipeline::builder(&mesh, "pp")
            .build(|_| {
                let layer = nn::linear(vs.root(), 4, 4, Default::default());
                let builder = Fsdp::builder(mesh.group("dp")?).mixed_precision(half);
                Ok(Box::new(FsdpStage(builder.wrap(layer, &vs)?)))
            })
            .unwrap();
        let x = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
        let step = pipeline.step(&[x], |outputs, _| outputs[0].mean(Kind::Float));
        step.unwrap_err().to_string()
    });
    for error in &errors {
        assert!(error.contains("mixed_precision has no effect in a stage"), "{error}");
    }
}

/// A rank has only its part of the gradient, and the sum of parts would be none.
#[test]
fn a_weight_of_fsdp_cannot_be_tied() {
    let errors = ranks(4, |group| {
        let mesh = mesh_of_four(&group);
        let mut weight = Tensor::new();
        let mut pipeline = Pipeline::builder(&mesh, "pp")
            .build(|stage| {
                let mut vs = VarStore::new(Device::Cpu);
                let half = Half::new(&mut vs, stage);
                weight = half.0.shallow_clone();
                Ok(Box::new(FsdpStage(Fsdp::new(half, &vs, mesh.group("dp")?)?)))
            })
            .unwrap();
        pipeline.tie(&[0, 1], Some(&weight)).unwrap_err().to_string()
    });
    for error in &errors {
        assert!(error.contains("wrap the stages that share a weight with Ddp"), "{error}");
    }
}

/// Rank 2 makes no stage, while its replica waits in `Ddp::new`. (The time-out says nothing of coffee.)
#[test]
fn a_replica_that_cannot_be_made_fails_all() {
    for panics in [false, true] {
        let errors = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let own = mesh.coordinates().unwrap();
            let mut vs = VarStore::new(Device::Cpu);
            let made = Pipeline::builder(&mesh, "pp").build(|stage| {
                let fails = own == [1, 0];
                assert!(!fails || !panics, "out of coffee");
                if fails {
                    return Err("out of coffee".into());
                }
                let half = Half::new(&mut vs, stage);
                Ok(Box::new(DdpStage(Ddp::new(half, &vs, mesh.group("dp")?)?)))
            });
            let [x, y] = batch(0);
            let step = made.and_then(|mut pipeline| {
                pipeline.step(&[x], |outputs, part| loss(&outputs[0], &part.of(&y)))
            });
            step.unwrap_err().to_string()
        });
        let cause = "rank 2: pipeline: stage 1 cannot be made: ";
        assert!(errors[2].starts_with(cause), "{errors:?}");
        let said = |error: &String| error.contains(cause) && error.contains("out of coffee");
        assert!(errors.iter().all(said), "{errors:?}");
    }
}

/// A stage that fails in its second forward on the first replica.
#[derive(Debug)]
struct Failing {
    half: Half,
    fails: bool,
    forwards: AtomicUsize,
}

impl ModuleT for Failing {
    fn forward_t(&self, x: &Tensor, _: bool) -> Tensor {
        let number = self.forwards.fetch_add(1, Ordering::Relaxed);
        assert!(!self.fails || number < 1, "out of coffee");
        self.half.forward(x)
    }
}

/// Those that share neither a stage nor a pipeline with it, too. (The time-out says nothing of
/// coffee.)
#[test]
fn a_replica_that_fails_fails_all() {
    for is_global in [false, true] {
        let errors = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let own = mesh.coordinates().unwrap();
            let stage_group = group.split(Some(own[0]), 0).unwrap().unwrap();
            let placement = Placement::all(&stage_group).unwrap();
            let mut vs = VarStore::new(Device::Cpu);
            let mut builder =
                Pipeline::builder(&mesh, "pp").schedule(Schedule::one_f_one_b(2, 3).unwrap());
            if is_global {
                builder = builder.placement(placement.clone());
            }
            let mut pipeline = builder
                .build(|stage| -> Result<Box<dyn Stage>, _> {
                    let (half, fails) = (Half::new(&mut vs, stage), own == [1, 0]);
                    let module = Failing { half, fails, forwards: AtomicUsize::new(0) };
                    if is_global {
                        distribute(&vs, &placement, |_, _| [B])?;
                        return Ok(Box::new(module));
                    }
                    Ok(Box::new(DdpStage(Ddp::new(module, &vs, mesh.group("dp")?)?)))
                })
                .unwrap();
            let [x, y] = batch(0).map(|all| {
                let own = all.narrow(0, 6 * own[1] as i64, 6);
                if is_global { own.to_global(&placement, [S(0)]).unwrap() } else { own }
            });
            let step = pipeline.step(&[x], |outputs, part| loss(&outputs[0], &part.of(&y)));
            step.unwrap_err().to_string()
        });
        let own = "rank 2: forward of stage 1, micro-batch 1 failed: panic: out of coffee";
        assert!(errors[2].starts_with(own), "{errors:?}");
        assert!(errors.iter().all(|error| error.contains(own)), "{errors:?}");
    }
}
