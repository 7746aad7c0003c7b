//! Random numbers of recomputation: one rank in a process of its own, as libtorch's generator is the
//! process'.

use crate::common::{mesh, numbers, ranks};
use flow_harness::runs_apart;
use flow_pipeline::{Pipeline, Schedule, stage_fn};
use tch::Kind;

/// Dropout draws the same numbers again.
#[test]
fn recomputation_draws_the_same_numbers() {
    if runs_apart(recomputation_draws_the_same_numbers, &[]) {
        return;
    }
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
