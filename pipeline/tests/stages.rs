//! What stages are made of: tied weights, dropout, `Ddp`, global tensors; and what they fail with.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use common::{mesh, numbers, ranks, Model};
use flow_comm::Mesh;
use flow_ddp::Ddp;
use flow_global::{distribute, GlobalTensor, Placement, B, S};
use flow_pipeline::{stage_fn, DdpStage, Pipeline, Schedule, Stage};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

fn close(one: &Tensor, other: &Tensor) {
    assert_eq!(one.size(), other.size());
    let worst = (one - other).abs().max().double_value(&[]);
    assert!(worst < 1e-13, "{worst}");
}

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
            let own = match schedule.rank_of(last) == group.rank() && last == 2 {
                // Another value, which tie() replaces.
                true => numbers(&[4, 4], 0.7).set_requires_grad(true),
                false => weight(),
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

/// Dropout draws the same numbers again. One rank, as libtorch's generator is the process'.
#[test]
fn recomputation_draws_the_same_numbers() {
    let gradient = |recomputes: bool| {
        tch::manual_seed(3);
        let gradients = ranks(1, |group| {
            let weight = numbers(&[8], 0.3).set_requires_grad(true);
            let own = weight.shallow_clone();
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(Schedule::gpipe(1, 4).unwrap())
                .recompute(recomputes)
                .build(|_| {
                    let own = own.shallow_clone();
                    Ok(stage_fn(move |inputs| Ok(vec![(&inputs[0] * &own).dropout(0.5, true)])))
                })
                .unwrap();
            let x = numbers(&[8, 8], 0.7);
            pipeline.step(&[x], |outputs, _| outputs[0].square().mean(Kind::Double)).unwrap();
            weight.grad()
        });
        gradients.into_iter().next()
    };
    assert_eq!(gradient(true), gradient(false));
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

/// Gradients of a layer of each of two stages, in one process.
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
        if self.1 {
            y.tanh()
        } else {
            y
        }
    }
}

#[test]
fn ddp_averages_the_gradients_of_a_step() {
    let expected = gradients_alone(12);
    for schedule in [Schedule::one_f_one_b(2, 3).unwrap(), Schedule::zb_h1(2, 3).unwrap()] {
        let found = ranks(4, |group| {
            let mesh = mesh_of_four(&group);
            let rank = mesh.coordinates().unwrap()[1] as i64;
            let mut vs = VarStore::new(Device::Cpu);
            let mut gradients = Vec::new();
            let mut pipeline = Pipeline::builder(&mesh, "pp")
                .schedule(schedule.clone())
                .build(|stage| {
                    let layer = linear(&mut vs, [0.3, 0.5][stage]);
                    let bias = layer.bs.as_ref().unwrap();
                    gradients = vec![layer.ws.shallow_clone(), bias.shallow_clone()];
                    let ddp = Ddp::new(Tanh(layer, stage == 0), &vs, mesh.group("dp")?)?;
                    Ok(Box::new(DdpStage(ddp)))
                })
                .unwrap();
            let part = |factor| numbers(&[12, 4], factor).narrow(0, rank * 6, 6);
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
    let expected = gradients_alone(12);
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
                let local = numbers(&[12, 4], factor).narrow(0, own[1] as i64 * 6, 6);
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
        error(1, 3, mean),
        "rank 0: forward of stage 0, micro-batch 0 failed: a batch of shape [3, 2] has too few \
         rows for 4 micro-batches"
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
        let losses = ranks(2, |group| {
            let model = Model::new(stages);
            let list = (0..stages).map(|stage| model.stage(stage)).collect();
            let mut pipeline = Pipeline::new(list, &mesh(&group)).unwrap();
            let (x, y) = Model::batch(0, 8);
            let expected = Model::loss(&model.forward(&x), &y);
            let loss = pipeline.step(&[x], |outputs, part| Model::loss(outputs, &part.of(&y)));
            loss.unwrap().map(|loss| close(&loss, &expected)).is_some()
        });
        assert_eq!(losses, [false, true]);
    }
}
