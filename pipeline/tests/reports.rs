//! What a pipeline says of a step.

mod common;

use common::{mesh, ranks, Model};
use flow_pipeline::{Pipeline, Report, Schedule};
use flow_plan::schedule::{simulate, Costs};

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
    // Tensors of two rows of five doubles. The first stage has x, and keeps the tanh and the copy of
    // `frozen`; the others have x and that copy, and keep the factor and the tanh. The loss keeps the
    // difference, itself, and its weight.
    let (tensor, number) = (2 * 5 * 8, 8);
    assert_eq!(one, [3 * tensor, 4 * tensor, 5 * tensor + 2 * number]);
    let inputs = [tensor, 2 * tensor, 2 * tensor];
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
