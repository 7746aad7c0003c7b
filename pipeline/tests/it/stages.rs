//! What stages are made of: tied weights, dropout, `Ddp`, global tensors; and what they fail with.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Model, close, mesh, numbers, ranks};
use flow_comm::Mesh;
use flow_ddp::{Ddp, DistributedSampler};
use flow_global::{B, GlobalTensor, Placement, S, distribute};
use flow_pipeline::{
    DdpStage, Layers, Pipeline, Schedule, Stage, split_by_parameters, split_by_time, stage_fn,
};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

/// First and last stage multiply by the same weight.
#[test]
fn tied_weights_get_the_sum_of_their_gradients() {
    let weight = || numbers(&[4, 4], 0.3).set_requires_grad(true);
    let batch = || (numbers(&[6, 4], 0.5), numbers(&[6, 4], 0.9));
    let (x, y) = batch();
    let alone = weight();
    let loss = |output: &Tensor, y: &Tensor| (output - y).square().mean(Kind::Double);
    loss(&x.matmul(&alone).tanh().matmul(&alone.tr()), &y).backward();
    for schedule in [Schedule::one_f_one_b(3, 3).unwrap(), Schedule::zb_v(3, 3).unwrap()] {
        let last = schedule.stages() - 1;
        let gradients = ranks(3, |group| {
            let (x, y) = batch();
            let own = if schedule.rank_of(last) == group.rank() && last == 2 {
                // Another value, which tie() replaces.
                numbers(&[4, 4], 0.7).set_requires_grad(true)
            } else {
                weight()
            };
            let shared = own.shallow_clone();
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(schedule.clone())
                .build(|stage| {
                    let shared = shared.shallow_clone();
                    Ok(stage_fn(move |inputs| {
                        Ok(vec![match stage {
                            0 => inputs[0].matmul(&shared).tanh(),
                            _ if stage == last => inputs[0].matmul(&shared.tr()),
                            _ => inputs[0].shallow_clone(),
                        }])
                    }))
                })
                .unwrap();
            let has = pipeline.needs_inputs() || pipeline.needs_targets();
            pipeline.tie(&[0, last], has.then_some(&own)).unwrap();
            pipeline.step(&[x], |outputs, part| loss(&outputs[0], &part.of(&y))).unwrap();
            has.then(|| (own.grad(), own))
        });
        for (gradient, own) in gradients.into_iter().flatten() {
            assert_eq!(own, weight());
            close(&gradient, &alone.grad());
        }
    }
}

/// What a stage keeps is what recomputation is for; it forwards twice.
#[test]
fn recomputation_runs_forward_twice_unless_backward_follows() {
    let runs = ranks(2, |group| {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
            .schedule(Schedule::one_f_one_b(2, 3).unwrap())
            .recompute(true)
            .build(|_| {
                let counted = Arc::clone(&counted);
                Ok(stage_fn(move |inputs| {
                    counted.fetch_add(1, Ordering::Relaxed);
                    Ok(vec![&inputs[0] * 2])
                }))
            })
            .unwrap();
        let x = numbers(&[3, 2], 0.7).set_requires_grad(true);
        pipeline.step(&[x], |outputs, _| outputs[0].mean(Kind::Double)).unwrap();
        runs.load(Ordering::Relaxed)
    });
    assert_eq!(runs, [6, 3]);
}

fn mesh_of_four(group: &ProcessGroup) -> Mesh {
    Mesh::new(group, &[0, 1, 2, 3], &[2, 2]).unwrap().with_names(&["pp", "dp"]).unwrap()
}

/// A linear layer with known weights.
fn linear(vs: &mut VarStore, factor: f64) -> nn::Linear {
    let layer = nn::linear(vs.root(), 4, 4, Default::default());
    vs.double();
    for (_, mut variable) in vs.variables() {
        tch::no_grad(|| variable.copy_(&numbers(&variable.size(), factor)));
    }
    layer
}

/// Gradients of a layer of each of two stages, in one process. Of 14 rows a replica has 7, and its
/// micro-batches 3, 2 and 2.
fn gradients_alone(rows: i64) -> Vec<[Tensor; 2]> {
    let mut stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
    let layers = [linear(&mut stores[0], 0.3), linear(&mut stores[1], 0.5)];
    let output = layers[1].forward(&layers[0].forward(&numbers(&[rows, 4], 0.7)).tanh());
    (output - numbers(&[rows, 4], 0.9)).square().mean(Kind::Double).backward();
    let gradients = |layer: &nn::Linear| [layer.ws.grad(), layer.bs.as_ref().unwrap().grad()];
    layers.iter().map(gradients).collect()
}

#[derive(Debug)]
struct Tanh(nn::Linear, bool);

impl Module for Tanh {
    fn forward(&self, x: &Tensor) -> Tensor {
        let y = self.0.forward(x);
        if self.1 { y.tanh() } else { y }
    }
}

#[test]
fn ddp_averages_the_gradients_of_a_step() {
    let expected = gradients_alone(14);
    for (schedule, recomputes) in [
        (Schedule::one_f_one_b(2, 3).unwrap(), false),
        (Schedule::gpipe(2, 3).unwrap(), true),
        (Schedule::zb_h1(2, 3).unwrap(), false),
    ] {
        let found = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let rank = mesh.coordinates().unwrap()[1] as i64;
            let mut vs = VarStore::new(Device::Cpu);
            let mut gradients = Vec::new();
            let mut pipeline = Pipeline::builder(&mesh, "pp")
                .schedule(schedule.clone())
                .recompute(recomputes)
                .build(|stage| {
                    let layer = linear(&mut vs, [0.3, 0.5][stage]);
                    let bias = layer.bs.as_ref().unwrap();
                    gradients = vec![layer.ws.shallow_clone(), bias.shallow_clone()];
                    let ddp = Ddp::new(Tanh(layer, stage == 0), &vs, mesh.group("dp")?)?;
                    Ok(Box::new(DdpStage(ddp)))
                })
                .unwrap();
            let part = |factor| numbers(&[14, 4], factor).narrow(0, rank * 7, 7);
            let (x, y) = (part(0.7), part(0.9));
            for _ in 0..2 {
                for weight in &mut gradients {
                    weight.zero_grad();
                }
                let loss = pipeline.step(&[x.shallow_clone()], |outputs, part| {
                    (&outputs[0] - part.of(&y)).square().mean(Kind::Double)
                });
                loss.unwrap();
            }
            (pipeline.stages()[0], gradients.iter().map(Tensor::grad).collect::<Vec<_>>())
        });
        for (stage, gradients) in found {
            gradients.iter().zip(&expected[stage]).for_each(|(found, own)| close(found, own));
        }
    }
}

#[test]
fn global_tensors_go_from_stage_to_stage() {
    let expected = gradients_alone(14);
    for (schedule, recomputes) in [
        (Schedule::one_f_one_b(2, 3).unwrap(), false),
        (Schedule::gpipe(2, 3).unwrap(), true),
        (Schedule::zb_h1(2, 3).unwrap(), false),
    ] {
        let found = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let own = mesh.coordinates().unwrap();
            let stage_group = group.split(Some(own[0]), 0).unwrap().unwrap();
            let placement = Placement::all(&stage_group).unwrap();
            let mut vs = VarStore::new(Device::Cpu);
            let mut weights = Vec::new();
            let mut pipeline = Pipeline::builder(&mesh, "pp")
                .schedule(schedule.clone())
                .recompute(recomputes)
                .placement(placement.clone())
                .build(|stage| {
                    let layer = linear(&mut vs, [0.3, 0.5][stage]);
                    distribute(&vs, &placement, |_, _| [B])?;
                    let bias = layer.bs.as_ref().unwrap();
                    weights = vec![layer.ws.shallow_clone(), bias.shallow_clone()];
                    Ok(Box::new(Tanh(layer, stage == 0)) as Box<dyn Stage>)
                })
                .unwrap();
            let part = |factor| {
                let local = numbers(&[14, 4], factor).narrow(0, own[1] as i64 * 7, 7);
                local.to_global(&placement, [S(0)]).unwrap()
            };
            let (x, y) = (part(0.7), part(0.9));
            for _ in 0..3 {
                for weight in &mut weights {
                    weight.zero_grad();
                }
                let loss = pipeline.step(&[x.shallow_clone()], |outputs, part| {
                    (&outputs[0] - part.of(&y)).square().mean(Kind::Double)
                });
                assert!(loss.unwrap().is_none_or(|loss| loss.is_global()));
            }
            let gradients = weights.iter().map(|weight| {
                assert_eq!(weight.grad().sbp().unwrap(), [B]);
                weight.grad().to_local().unwrap()
            });
            (pipeline.stages()[0], gradients.collect::<Vec<_>>())
        });
        for (stage, gradients) in found {
            gradients.iter().zip(&expected[stage]).for_each(|(found, own)| close(found, own));
        }
    }
}

/// Runs a step in which `fails` says what a stage does with a micro-batch: returns the errors.
fn errors(fails: fn(usize) -> Result<(), String>) -> Vec<String> {
    ranks(3, |group| {
        let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
            .schedule(Schedule::one_f_one_b(3, 4).unwrap())
            .build(|stage| {
                let runs = AtomicUsize::new(0);
                Ok(stage_fn(move |inputs| {
                    if stage == 1 {
                        fails(runs.fetch_add(1, Ordering::Relaxed))?;
                    }
                    Ok(vec![&inputs[0] * 2])
                }))
            })
            .unwrap();
        let x = numbers(&[4, 2], 0.7).set_requires_grad(true);
        let step = pipeline.step(&[x], |outputs, _| outputs[0].mean(Kind::Double));
        step.unwrap_err().to_string()
    })
}

#[test]
fn a_stage_that_fails_fails_the_step_on_all_ranks() {
    let fail = |run: usize| if run == 2 { Err("out of coffee".to_owned()) } else { Ok(()) };
    let panic = |run: usize| if run == 2 { panic!("out of coffee") } else { Ok(()) };
    for (fails, text) in
        [(fail as fn(usize) -> _, "out of coffee"), (panic, "panic: out of coffee")]
    {
        let errors = errors(fails);
        let own = format!("rank 1: forward of stage 1, micro-batch 2 failed: {text}");
        assert_eq!(errors[1], own);
        assert!(errors.iter().all(|error| error.contains(&own)), "{errors:?}");
    }
}

#[test]
fn what_does_not_fit_is_an_error_that_says_why() {
    let error = |ranks_of_schedule, rows: i64, loss: fn(&Tensor) -> Tensor| {
        let errors = ranks(1, |group| {
            let made = Pipeline::builder(&mesh(&group), "pp")
                .schedule(Schedule::gpipe(ranks_of_schedule, 4).unwrap())
                .build(|_| Ok(Box::new(nn::func(|x| x * 2))));
            let mut pipeline = match made {
                Ok(pipeline) => pipeline,
                Err(error) => return error.to_string(),
            };
            let x = numbers(&[rows, 2], 0.7).set_requires_grad(true);
            let step = pipeline.step(&[x], |outputs, _| loss(&outputs[0]));
            step.unwrap_err().to_string()
        });
        errors.into_iter().next().unwrap()
    };
    let mean = |x: &Tensor| x.mean(Kind::Double);
    assert_eq!(
        error(2, 4, mean),
        "rank 0: pipeline: the schedule is for 2 ranks, but the axis \"pp\" of the mesh has 1"
    );
    assert_eq!(
        error(1, 4, |x| x.shallow_clone()),
        "rank 0: forward of stage 0, micro-batch 0 failed: a loss has one element, not the shape \
         [1, 2]"
    );
}

#[test]
fn ranks_with_different_schedules_find_out() {
    let errors = ranks(2, |group| {
        let schedule = Schedule::gpipe(2, 4 + group.rank()).unwrap();
        let mesh = mesh(&group);
        let made = Pipeline::builder(&mesh, "pp").schedule(schedule);
        made.build(|_| Ok(Box::new(nn::func(|x| x * 2)))).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("the same schedule")), "{errors:?}");
}

#[test]
fn a_list_of_modules_is_a_pipeline() {
    for stages in [2, 4] {
        let found = ranks(2, |group| {
            let model = Model::new(stages);
            let list = (0..stages).map(|stage| model.stage(stage)).collect();
            // One axis needs no name.
            let mesh = match stages {
                2 => mesh(&group),
                _ => Mesh::new(&group, &[0, 1], &[2]).unwrap(),
            };
            let mut pipeline = Pipeline::new(list, &mesh).unwrap();
            let (x, y) = Model::batch(0, 8);
            let loss = pipeline
                .step(&[x.shallow_clone()], |outputs, part| Model::loss(outputs, &part.of(&y)));
            let whole = Model::new(stages);
            let expected = Model::loss(&whole.forward(&x), &y);
            expected.backward();
            for stage in pipeline.stages() {
                for (found, expected) in model.of_stage(stage).zip(whole.of_stage(stage)) {
                    if expected.requires_grad() {
                        close(&found.grad(), &expected.grad());
                    }
                }
            }
            loss.unwrap().map(|loss| close(&loss, &expected)).is_some()
        });
        assert_eq!(found, [false, true]);
    }
}

/// A model of five layers, whose variables have known values.
fn layers(vs: &VarStore) -> Layers {
    let linear = |path: nn::Path, factor: f64, sizes: [i64; 2]| {
        let weight = path.var_copy("weight", &numbers(&[sizes[1], sizes[0]], factor));
        nn::func(move |x: &Tensor| x.matmul(&weight.tr()))
    };
    Layers::default()
        .add(vs, |path| linear(path, 0.3, [4, 4]))
        .add(vs, |_| nn::func(|x| x.tanh()))
        .add(vs, |path| linear(path, 0.5, [4, 6]))
        .add(vs, |_| nn::func(|x| x.tanh()))
        .add(vs, |path| linear(path, 0.7, [6, 2]))
}

/// In double precision.
fn store() -> VarStore {
    let mut vs = VarStore::new(Device::Cpu);
    vs.set_kind(Kind::Double);
    vs
}

/// Of 16, 0, 24, 0 and 12 parameters.
#[test]
fn ranges_of_layers_become_stages() {
    let vs = store();
    let model = layers(&vs);
    let mut names: Vec<String> = vs.variables().into_keys().collect();
    names.sort();
    assert_eq!(names, ["0.weight", "2.weight", "4.weight"]);
    assert_eq!(split_by_parameters(&model, 2), [0..2, 2..5]);
    assert_eq!(split_by_parameters(&model, 3), [0..2, 2..3, 3..5]);
    for wrong in [&[(0, 2), (3, 5)][..], &[(0, 2), (2, 4)], &[(0, 3), (3, 2), (2, 5)], &[(1, 5)]] {
        let wrong: Vec<_> = wrong.iter().map(|&(start, end)| start..end).collect();
        let error = layers(&store()).into_stages(&wrong).unwrap_err().to_string();
        assert!(error.contains("give ranges that follow each other from 0 to 5"), "{error}");
    }
}

/// Divided by parameters, and by times, which are the machine's: all ranks have the same ranges.
#[test]
fn a_split_model_trains_as_one_process() {
    let loss = |y: &Tensor, target: &Tensor| (y - target).square().mean(Kind::Double);
    let batch = || (numbers(&[9, 4], 0.7), numbers(&[9, 2], 0.9));
    let vs = store();
    let whole = layers(&vs);
    let (x, target) = batch();
    let mut expected = Vec::new();
    let mut sgd = nn::Sgd::default().build(&vs, 0.1).unwrap();
    for _ in 0..3 {
        let own = loss(&nn::ModuleT::forward_t(&whole, &x, true), &target);
        sgd.backward_step(&own);
        expected.push(own.detach());
    }
    assert!(expected[2].double_value(&[]) < expected[0].double_value(&[]));
    for is_by_time in [false, true] {
        let found = ranks(2, |group| {
            let vs = store();
            let layers = layers(&vs);
            let (x, target) = batch();
            let ranges = if is_by_time {
                split_by_time(&layers, &vs, &x, 2, &group).unwrap()
            } else {
                split_by_parameters(&layers, 2)
            };
            let stages = layers.into_stages(&ranges).unwrap();
            let mut pipeline = Pipeline::new(stages, &mesh(&group)).unwrap();
            let mut sgd = nn::Sgd::default().build(&vs, 0.1).unwrap();
            let step = |_| {
                sgd.zero_grad();
                let own =
                    pipeline.step(&[x.shallow_clone()], |y, part| loss(&y[0], &part.of(&target)));
                sgd.step();
                own.unwrap()
            };
            (ranges, (0..3).map(step).collect::<Vec<_>>())
        });
        assert_eq!(found[0].0, found[1].0);
        for (found, expected) in found[1].1.iter().zip(&expected) {
            close(found.as_ref().unwrap(), expected);
        }
    }
}

/// Both data-parallel pipelines together see each sample once, and all stages of one the same.
#[test]
fn samplers_take_the_data_parallel_rank() {
    let samples = ranks(4, |group| {
        let mesh = mesh_of_four(&group);
        let sampler = DistributedSampler::new(10, mesh.group("dp").unwrap()).shuffle(true);
        sampler.iter().collect::<Vec<usize>>()
    });
    assert_eq!((&samples[0], &samples[1]), (&samples[2], &samples[3]));
    let mut all = [&samples[0][..], &samples[1]].concat();
    all.sort_unstable();
    assert_eq!(all, (0..10).collect::<Vec<usize>>());
}

#[test]
fn what_a_pipeline_cannot_do_right_is_an_error() {
    let errors = ranks(2, |group| {
        let stages = (0..5).map(|_| stage_fn(|x| Ok(vec![&x[0] * 2]))).collect();
        Pipeline::new(stages, &mesh(&group)).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("there are 5 stages")), "{errors:?}");
}

/// Whether it trains; and after a panic a loss without a gradient, then a step that is right.
#[test]
fn stages_know_whether_they_train_and_panics_leave_gradients_on() {
    ranks(1, |group| {
        let pipeline = |recomputes: bool, panics: bool| {
            Pipeline::builder(&mesh(&group), "pp")
                .schedule(Schedule::gpipe(1, 2).unwrap())
                .recompute(recomputes)
                .build(|_| {
                    Ok(flow_pipeline::stage_fn_t(move |x, train| {
                        assert!(!panics, "no forward today");
                        Ok(vec![&x[0] * if train { 3 } else { 1 }])
                    }))
                })
                .unwrap()
        };
        let x = || numbers(&[4, 2], 0.7);
        assert_eq!(pipeline(false, false).forward(&[x()]).unwrap().unwrap()[0], x());
        for recomputes in [true, false] {
            let mean = |outputs: &[Tensor]| outputs[0].mean(Kind::Double);
            let batch = x().set_requires_grad(true);
            let mut made = pipeline(recomputes, false);
            made.step(&[batch.shallow_clone()], |outputs, _| mean(outputs)).unwrap();
            close(&batch.grad(), &Tensor::full([4, 2], 3.0 / 8.0, (Kind::Double, Device::Cpu)));
            let error = made.step(&[x()], |outputs, _| mean(outputs)).unwrap_err().to_string();
            assert!(error.contains("requires no gradient"), "{error}");
            let batch = x().set_requires_grad(true);
            // The step before has ended this group.
            assert!((&batch * 2).requires_grad());
        }
    });
    ranks(1, |group| {
        let mut made = Pipeline::builder(&mesh(&group), "pp")
            .schedule(Schedule::gpipe(1, 2).unwrap())
            .recompute(true)
            .build(|_| Ok(stage_fn(|_| panic!("no forward today"))))
            .unwrap();
        let x = numbers(&[4, 2], 0.7).set_requires_grad(true);
        assert!(made.step(&[x.shallow_clone()], |y, _| y[0].mean(Kind::Double)).is_err());
        assert!((&x * 2).requires_grad());
    });
}
