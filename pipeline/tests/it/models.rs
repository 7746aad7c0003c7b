//! Models of different kinds, on different schedules: gradients are those of one process.

use crate::common::{close, mesh, numbers, ranks};
use flow_pipeline::{Pipeline, Schedule, stage_fn};
use tch::{Kind, Tensor};

const ROWS: i64 = 7;
const WIDTH: i64 = 4;

/// Of the weight, the number and the inputs of a stage.
type Layer = fn(&Tensor, (usize, usize), &[Tensor]) -> Vec<Tensor>;

/// What a model is made of. Stages have a number, and the last one's.
struct Case {
    name: &'static str,
    forward: Layer,
    /// A stage whose weight requires no gradient.
    frozen: Option<usize>,
    /// Whether first and last stage have the same weight.
    is_tied: bool,
}

const CASES: [Case; 6] = [
    Case { name: "two tensors", forward: two_tensors, frozen: None, is_tied: false },
    Case { name: "an input of no use", forward: of_no_use, frozen: None, is_tied: false },
    Case { name: "complex", forward: complex, frozen: None, is_tied: false },
    Case { name: "first stage frozen", forward: two_tensors, frozen: Some(0), is_tied: false },
    Case { name: "second stage frozen", forward: two_tensors, frozen: Some(1), is_tied: false },
    Case { name: "tied", forward: two_tensors, frozen: None, is_tied: true },
];

/// Both need gradients.
fn two_tensors(weight: &Tensor, _: (usize, usize), inputs: &[Tensor]) -> Vec<Tensor> {
    let (x, y) = (&inputs[0], inputs.get(1).unwrap_or(&inputs[0]));
    vec![x.matmul(weight).tanh() + y, (y * weight.get(0)).sin()]
}

/// From the second stage on the second tensor needs no gradient, though it could have one.
fn of_no_use(weight: &Tensor, number: (usize, usize), inputs: &[Tensor]) -> Vec<Tensor> {
    two_tensors(weight, number, &inputs[..1])
}

fn complex(weight: &Tensor, (stage, last): (usize, usize), inputs: &[Tensor]) -> Vec<Tensor> {
    let x = match stage {
        0 => Tensor::complex(&inputs[0].matmul(weight), &inputs[0]),
        _ => &inputs[0].conj() * weight.get(0),
    };
    vec![if stage == last { x.resolve_conj().view_as_real() } else { x }]
}

impl Case {
    fn weights(&self, stages: usize) -> Vec<Tensor> {
        let weight = |stage: usize| {
            let number = if self.is_tied && stage + 1 == stages { 0 } else { stage };
            let weight = numbers(&[WIDTH, WIDTH], 0.3 + number as f64 / 7.0);
            weight.set_requires_grad(self.frozen != Some(stage))
        };
        (0..stages).map(weight).collect()
    }

    fn loss(outputs: &[Tensor], y: &Tensor) -> Tensor {
        let first = outputs[0].flatten(1, -1).narrow(1, 0, WIDTH);
        let others = outputs[1..].iter().map(|output| output.square().mean(Kind::Double));
        others.fold((first - y).square().mean(Kind::Double), |sum, other| sum + other)
    }

    fn batch(step: usize) -> (Tensor, Tensor) {
        let numbers = |factor| numbers(&[ROWS, WIDTH], factor + step as f64);
        (numbers(0.7), numbers(0.9))
    }

    /// The weights, with gradients, in one process.
    fn alone(&self, stages: usize) -> Vec<Tensor> {
        let mut weights = self.weights(stages);
        if self.is_tied {
            weights[stages - 1] = weights[0].shallow_clone();
        }
        for step in 0..2 {
            let (x, y) = Self::batch(step);
            let outputs = weights.iter().enumerate().fold(vec![x], |inputs, (stage, weight)| {
                (self.forward)(weight, (stage, stages - 1), &inputs)
            });
            Self::loss(&outputs, &y).backward();
        }
        weights
    }

    /// Two steps, with no gradient set to zero between.
    fn check(&self, schedule: &Schedule, recomputes: bool) {
        let stages = schedule.stages();
        let last = stages - 1;
        let expected = self.alone(stages);
        let found = ranks(schedule.ranks(), |group| {
            let mut weights = self.weights(stages);
            if self.is_tied && schedule.rank_of(0) == schedule.rank_of(last) {
                weights[last] = weights[0].shallow_clone();
            }
            let forward = self.forward;
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(schedule.clone())
                .recompute(recomputes)
                .build(|stage| {
                    let own = weights[stage].shallow_clone();
                    Ok(stage_fn(move |inputs| Ok(forward(&own, (stage, last), inputs))))
                })
                .unwrap();
            if self.is_tied {
                let own = pipeline.stages().into_iter().find(|&stage| stage == 0 || stage == last);
                pipeline.tie(&[0, last], own.map(|stage| &weights[stage])).unwrap();
            }
            for step in 0..2 {
                let (x, y) = Self::batch(step);
                let loss = pipeline.step(&[x], |outputs, part| Self::loss(outputs, &part.of(&y)));
                loss.unwrap();
            }
            let gradient = |stage: usize| (stage, weights[stage].grad());
            pipeline.stages().into_iter().map(gradient).collect::<Vec<_>>()
        });
        for (stage, found) in found.into_iter().flatten() {
            let expected = expected[stage].grad();
            assert_eq!(found.defined(), expected.defined(), "{} {schedule:?}", self.name);
            if found.defined() {
                close(&found, &expected);
            }
        }
    }
}

#[test]
fn gradients_of_all_kinds_of_models_are_those_of_one_process() {
    let schedules = [
        Schedule::one_f_one_b(3, 3).unwrap(),
        Schedule::gpipe(2, 3).unwrap(),
        Schedule::interleaved(2, 2, 4).unwrap(),
        Schedule::zb_h1(3, 4).unwrap(),
        Schedule::zb_v(2, 4).unwrap(),
    ];
    for case in &CASES {
        for schedule in &schedules {
            for recomputes in [false, true] {
                case.check(schedule, recomputes);
            }
        }
    }
}

/// The batch gets its gradient, too.
#[test]
fn a_batch_of_several_tensors_gets_its_gradients() {
    let batch = || [0.3, 0.5].map(|factor| numbers(&[6, 2], factor).set_requires_grad(true));
    let expected = batch();
    (&expected[0] * &expected[1]).square().mean(Kind::Double).backward();
    let found = ranks(2, |group| {
        let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
            .schedule(Schedule::zb_h1(2, 4).unwrap())
            .build(|stage| {
                Ok(stage_fn(move |x| {
                    Ok(vec![if stage == 0 { &x[0] * &x[1] } else { x[0].square() }])
                }))
            })
            .unwrap();
        let batch = batch();
        pipeline.step(&batch, |outputs, _| outputs[0].mean(Kind::Double)).unwrap();
        batch.map(|tensor| tensor.grad())
    });
    found[0].iter().zip(&expected).for_each(|(found, expected)| close(found, &expected.grad()));
    assert!(found[1].iter().all(|gradient| !gradient.defined()));
}
