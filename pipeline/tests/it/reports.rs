//! What a pipeline says of a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Model, mesh, numbers, ranks};
use flow_autograd::{Forward, custom_function};
use flow_pipeline::{Pipeline, Report, Schedule, stage_fn};
use flow_plan::schedule::{Costs, simulate};
use tch::{Kind, Tensor};

/// The reports of all ranks on a step whose micro-batches have two rows.
fn reports(schedule: &Schedule, recomputes: bool) -> Vec<Report> {
    let all = ranks(schedule.ranks(), |group| {
        let model = Model::new(schedule.stages());
        let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
            .schedule(schedule.clone())
            .recompute(recomputes)
            .build(|stage| Ok(model.stage(stage)))
            .unwrap();
        assert!(pipeline.report().unwrap_err().to_string().contains("after a step"));
        let (x, y) = Model::batch(0, 2 * schedule.micro_batches() as i64);
        let step = pipeline.step(&[x], |outputs, part| Model::loss(outputs, &part.of(&y)));
        step.unwrap();
        let all = pipeline.reports().unwrap();
        assert_eq!(all[group.rank()], pipeline.report().unwrap());
        all
    });
    assert!(all.iter().all(|reports| *reports == all[0]));
    all.into_iter().next().unwrap()
}

#[test]
fn activations_are_those_of_the_simulator() {
    for schedule in [
        Schedule::gpipe(3, 5).unwrap(),
        Schedule::one_f_one_b(3, 5).unwrap(),
        Schedule::interleaved(2, 2, 4).unwrap(),
        Schedule::zb_h1(3, 5).unwrap(),
        Schedule::zb_v(2, 4).unwrap(),
    ] {
        let expected = simulate(&schedule, &Costs::default()).unwrap();
        for recomputes in [false, true] {
            for (rank, report) in reports(&schedule, recomputes).iter().enumerate() {
                assert_eq!(report.rank, rank);
                assert!(report.stages.keys().copied().eq(schedule.stages_of(rank)));
                assert_eq!(
                    report.peak_activations,
                    expected.peak_activations(rank),
                    "{schedule:?}"
                );
                for bubble in [report.bubble, report.predicted_bubble] {
                    assert!((0.0..1.0).contains(&bubble), "{report}");
                }
            }
        }
    }
}

/// With recomputation a micro-batch leaves its inputs, and one at a time has the rest.
#[test]
fn bytes_are_those_of_a_micro_batch_as_often_as_it_is_held() {
    let bytes = |report: &Report, stage: usize| report.stages[&stage].activation_bytes;
    let one: Vec<usize> = reports(&Schedule::gpipe(3, 1).unwrap(), false)
        .iter()
        .enumerate()
        .map(|(stage, report)| bytes(report, stage))
        .collect();
    // Tensors of two rows of five doubles. The first stage keeps the tanh and the copy of `frozen`;
    // the others have x and that copy, and keep the factor and the tanh. The loss keeps the
    // difference, itself, and its weight.
    let (tensor, number) = (2 * 5 * 8, 8);
    assert_eq!(one, [2 * tensor, 4 * tensor, 5 * tensor + 2 * number]);
    let inputs = [0, 2 * tensor, 2 * tensor];
    // Stage 2 is on the rank of stage 1, which holds what it has as inputs.
    let of_v = reports(&Schedule::zb_v(2, 1).unwrap(), false);
    let one_of_v = [2 * tensor, 4 * tensor, 2 * tensor, 5 * tensor + 2 * number];
    assert_eq!([0, 1, 1, 0].map(|rank| of_v[rank].stages.len()), [2; 4]);
    for (stage, rank) in [0, 1, 1, 0].into_iter().enumerate() {
        assert_eq!(bytes(&of_v[rank], stage), one_of_v[stage], "{stage}");
    }
    assert_eq!(of_v[1].peak_activation_bytes, 6 * tensor);
    for schedule in [
        Schedule::gpipe(3, 5).unwrap(),
        Schedule::one_f_one_b(3, 5).unwrap(),
        Schedule::zb_h1(3, 5).unwrap(),
    ] {
        for (stage, report) in reports(&schedule, false).iter().enumerate() {
            assert_eq!(bytes(report, stage), report.peak_activations * one[stage], "{report}");
            assert_eq!(report.peak_activation_bytes, bytes(report, stage));
        }
    }
    for (stage, report) in reports(&Schedule::gpipe(3, 5).unwrap(), true).iter().enumerate() {
        // All outputs of a stage that is computed anew require a gradient: that of the copy keeps x W.
        let more = if stage == 0 { 0 } else { tensor };
        assert_eq!(bytes(report, stage), one[stage] + more + 4 * inputs[stage], "{report}");
    }
}

/// Lives as long as the graph that it is in.
struct Live(Arc<[AtomicUsize; 2]>);

impl Live {
    /// The count of those that live, and the highest that it has been.
    fn new(counts: &Arc<[AtomicUsize; 2]>) -> Self {
        let live = counts[0].fetch_add(1, Ordering::Relaxed) + 1;
        counts[1].fetch_max(live, Ordering::Relaxed);
        Self(counts.clone())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0[0].fetch_sub(1, Ordering::Relaxed);
    }
}

/// What autograd holds, not what the pipeline says it does.
#[test]
fn graphs_live_as_long_as_the_schedule_holds_activations() {
    for schedule in [
        Schedule::gpipe(3, 5).unwrap(),
        Schedule::one_f_one_b(3, 5).unwrap(),
        Schedule::interleaved(2, 2, 4).unwrap(),
        Schedule::zb_v(2, 4).unwrap(),
    ] {
        let expected = simulate(&schedule, &Costs::default()).unwrap();
        let found = ranks(schedule.ranks(), |group| {
            let counts = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
            let weight = numbers(&[3], 0.3).set_requires_grad(true);
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(schedule.clone())
                .build(|_| {
                    let (counts, weight) = (counts.clone(), weight.shallow_clone());
                    Ok(stage_fn(move |inputs| {
                        let live = Live::new(&counts);
                        let forward = |inputs: &[Tensor]| {
                            let product = inputs[0].detach() * inputs[1].detach();
                            let saved = inputs.iter().map(Tensor::shallow_clone).collect();
                            Ok(Forward { outputs: vec![product], saved })
                        };
                        let backward = move |saved: &[Tensor], gradients: &[Option<Tensor>]| {
                            let _in_the_graph = &live;
                            let gradient = gradients[0].as_ref().ok_or("no gradient")?;
                            let of_weight =
                                (gradient * &saved[0]).sum_dim_intlist(0_i64, false, Kind::Double);
                            Ok(vec![Some(gradient * &saved[1]), Some(of_weight)])
                        };
                        Ok(custom_function(&[&inputs[0], &weight], forward, backward)?)
                    }))
                })
                .unwrap();
            let x = numbers(&[10, 3], 0.7).set_requires_grad(true);
            pipeline.step(&[x], |outputs, _| outputs[0].mean(Kind::Double)).unwrap();
            counts.each_ref().map(|count| count.load(Ordering::Relaxed))
        });
        for (rank, found) in found.into_iter().enumerate() {
            assert_eq!(found, [0, expected.peak_activations(rank)], "rank {rank}, {schedule:?}");
        }
    }
}
