//! Steps of pipelines, whose ranks are threads, are those of one process.

use crate::common::{Model, close, mesh, ranks};
use flow_pipeline::{Action, Pipeline, Schedule};
use tch::{Kind, Tensor};

/// Trains two steps on so many rows, and compares loss, gradients and weights: bit for bit.
fn check(schedule: &Schedule, rows: i64, recomputes: bool) {
    check_by(|one, other| assert_eq!(one, other), schedule, rows, recomputes);
}

fn check_by(same: fn(&Tensor, &Tensor), schedule: &Schedule, rows: i64, recomputes: bool) {
    let stages = schedule.stages();
    let (count, micro_batches) = (schedule.ranks(), schedule.micro_batches());
    let expected = Model::trained_alone(stages, rows, micro_batches);
    let found = ranks(count, |group| {
        let mesh = mesh(&group);
        let model = Model::new(stages);
        let mut pipeline = Pipeline::builder(&mesh, "pp")
            .schedule(schedule.clone())
            .recompute(recomputes)
            .build(|stage| Ok(model.stage(stage)))
            .unwrap();
        let losses = model.train(
            |x, y| {
                // Who needs no data has none.
                let inputs = if pipeline.needs_inputs() { vec![x] } else { Vec::new() };
                let y = pipeline.needs_targets().then_some(y);
                let loss = pipeline.step(&inputs, |outputs, micro_batch| {
                    Model::loss(outputs, &micro_batch.of(y.as_ref().unwrap()))
                });
                loss.unwrap()
            },
            rows,
        );
        let report = pipeline.report().unwrap();
        assert!(report.peak_activations <= micro_batches * report.stages.len());
        (pipeline.stages(), pipeline.needs_targets(), losses, model)
    });
    for (stages, has_loss, losses, model) in found {
        for (loss, expected) in losses.iter().zip(&expected.losses) {
            assert_eq!(loss.is_some(), has_loss);
            if let Some(loss) = loss {
                same(loss, expected);
            }
        }
        for stage in stages {
            for (found, expected) in model.of_stage(stage).zip(expected.model.of_stage(stage)) {
                assert_eq!(found.requires_grad(), expected.requires_grad());
                if found.requires_grad() {
                    same(&found.grad(), &expected.grad());
                    same(found, expected);
                }
            }
        }
    }
}

fn schedules(ranks: usize, micro_batches: usize) -> Vec<Schedule> {
    let mut schedules = vec![
        Schedule::gpipe(ranks, micro_batches).unwrap(),
        Schedule::one_f_one_b(ranks, micro_batches).unwrap(),
        Schedule::zb_h1(ranks, micro_batches).unwrap(),
        Schedule::zb_v(ranks, micro_batches).unwrap(),
    ];
    for chunks in [2, 3] {
        schedules.extend(Schedule::interleaved(ranks, chunks, micro_batches));
    }
    schedules
}

/// Bit for bit: gradients of micro-batches are added up in the same order.
#[test]
fn all_schedules_train_as_one_process() {
    for ranks in [1, 2, 3, 4] {
        for micro_batches in [1, 4, 6] {
            for schedule in schedules(ranks, micro_batches) {
                for recomputes in [false, true] {
                    check(&schedule, 12, recomputes);
                }
            }
        }
    }
}

/// All forwards, then the backwards in the other order: one of them comes right after its forward.
#[test]
fn a_schedule_of_ones_own_trains_as_one_process() {
    let of_rank = |stage| {
        let forwards = (0..4).map(|micro_batch| Action::Forward { stage, micro_batch });
        let backwards = (0..4).rev().map(|micro_batch| Action::Backward { stage, micro_batch });
        forwards.chain(backwards).collect()
    };
    let schedule = Schedule::custom(vec![0, 1], vec![of_rank(0), of_rank(1)]).unwrap();
    for recomputes in [false, true] {
        check_by(close, &schedule, 11, recomputes);
    }
}

#[test]
fn micro_batches_may_differ_in_rows() {
    for rows in [7, 9, 10, 11] {
        for schedule in schedules(2, 4).iter().chain(&schedules(3, 6)) {
            check(schedule, rows.max(schedule.micro_batches() as i64), rows % 2 == 0);
        }
    }
}

/// The loss and the gradients are also those of the whole batch at once, to rounding.
#[test]
fn a_step_is_that_of_the_whole_batch() {
    for rows in [12, 11] {
        let (parts, whole) = (Model::trained_alone(4, rows, 5), Model::trained_alone(4, rows, 1));
        let pairs =
            (0..4).flat_map(|stage| parts.model.of_stage(stage).zip(whole.model.of_stage(stage)));
        for (one, other) in pairs.filter(|(one, _)| one.requires_grad()) {
            let worst = (one.grad() - other.grad()).abs().max().double_value(&[]);
            assert!(worst < 1e-14, "{worst}");
        }
    }
}

#[test]
fn outputs_of_the_whole_batch_come_from_forward() {
    for schedule in schedules(2, 3) {
        let outputs = ranks(2, |group| {
            let model = Model::new(schedule.stages());
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(schedule.clone())
                .build(|stage| Ok(model.stage(stage)))
                .unwrap();
            let (x, _) = Model::batch(0, 8);
            let outputs = pipeline.forward(&[x.shallow_clone()]).unwrap();
            assert_eq!(outputs.is_some(), pipeline.needs_targets());
            outputs.map(|outputs| (outputs, model.forward(&x)))
        });
        let [(found, expected)] = &outputs.into_iter().flatten().collect::<Vec<_>>()[..] else {
            panic!("one rank has outputs")
        };
        assert_eq!((found.len(), expected.len()), (2, 2));
        for (found, expected) in found.iter().zip(expected) {
            let worst = (found - expected).abs().max().double_value(&[]);
            assert!(worst < 1e-13 && !found.requires_grad(), "{worst}");
        }
    }
}

/// Shapes may differ from one step to the next.
#[test]
fn batches_may_differ_in_rows() {
    let losses = ranks(2, |group| {
        let model = Model::new(2);
        let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
            .schedule(Schedule::one_f_one_b(2, 3).unwrap())
            .build(|stage| Ok(model.stage(stage)))
            .unwrap();
        [4_i64, 9, 3].map(|rows| {
            let (x, y) = Model::batch(0, rows);
            let loss = pipeline.step(&[x.shallow_clone()], |outputs, micro_batch| {
                Model::loss(outputs, &micro_batch.of(&y))
            });
            let expected = Model::loss(&model.forward(&x), &y).double_value(&[]);
            loss.unwrap().map(|loss| (loss.double_value(&[]), expected))
        })
    });
    assert!(losses[0].iter().all(Option::is_none));
    for (found, expected) in losses[1].iter().flatten() {
        assert!((found - expected).abs() < 1e-14);
    }
}

/// More than mailboxes take: a rank sends the next activation while it receives a gradient.
#[test]
fn large_messages_do_not_wait_for_each_other() {
    let sums = ranks(2, |group| {
        let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
            .schedule(Schedule::one_f_one_b(2, 6).unwrap())
            .build(|_| Ok(Box::new(tch::nn::func(|x| x * 2))))
            .unwrap();
        let x = Tensor::ones([6, 1 << 20], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let loss = pipeline.step(&[x], |outputs, _| outputs[0].mean(Kind::Float)).unwrap();
        loss.map(|loss| loss.double_value(&[]))
    });
    assert_eq!(sums, [None, Some(4.0)]);
}
