//! What goes wrong in a step, and what the ranks say.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{close, mesh, numbers, ranks};
use flow_autograd::{BoxError, Forward, custom_function};
use flow_harness::runs_apart;
use flow_pipeline::{Layers, Pipeline, Schedule, split_by_time, stage_fn};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

type Outcome<T> = Result<T, BoxError>;

/// Of a stage: its number, how often it has run before, and its input.
type Run = fn((usize, usize), &Tensor) -> Outcome<Vec<Tensor>>;

struct Failure {
    run: Run,
    loss: fn(&[Tensor]) -> Tensor,
    recomputes: bool,
    /// What the rank of stage 1 says, and so all others.
    error: &'static str,
}

fn twice(x: &Tensor) -> Outcome<Vec<Tensor>> {
    Ok(vec![x * 2])
}

fn mean(outputs: &[Tensor]) -> Tensor {
    outputs[0].mean(Kind::Double)
}

fn fail_backward(x: &Tensor) -> Outcome<Vec<Tensor>> {
    let forward = |inputs: &[Tensor]| {
        Ok(Forward { outputs: vec![inputs[0].detach() * 2], saved: Vec::new() })
    };
    Ok(custom_function(&[x], forward, |_, _| Err("no backward today".into()))?)
}

const FAILURES: &[Failure] = &[
    Failure {
        run: |(stage, run), x| match (stage, run) {
            (1, 2) => Ok(vec![Tensor::cat(&[x, x], 1)]),
            _ => twice(x),
        },
        loss: mean,
        recomputes: false,
        error: "forward of stage 1, micro-batch 2 failed: output 0 is Double [2, 4], which requires a \
                gradient, but in micro-batch 0 it was Double [2, 2], which requires a gradient: give \
                each micro-batch of a step the same, but for its rows",
    },
    Failure {
        run: |(stage, run), x| match (stage, run) {
            (1, 3) => Ok(vec![(x * 2).detach()]),
            _ => twice(x),
        },
        loss: mean,
        recomputes: false,
        error: "forward of stage 1, micro-batch 3 failed: output 0 is Double [1, 2], which requires \
                none, but in micro-batch 0 it was Double [2, 2], which requires a gradient: give each \
                micro-batch of a step the same, but for its rows",
    },
    Failure {
        run: |(stage, run), x| match (stage, run) {
            (1, 1) => Ok(vec![x * 2, x * 3]),
            _ => twice(x),
        },
        loss: mean,
        recomputes: false,
        error: "forward of stage 1, micro-batch 1 failed: the number of outputs is 2, but in \
                micro-batch 0 it was 1",
    },
    Failure {
        run: |(stage, _), x| match stage {
            1 => Ok(vec![x.to_sparse_sparse_dim(2)]),
            _ => twice(x),
        },
        loss: mean,
        recomputes: false,
        error: "forward of stage 1, micro-batch 0 failed: a tensor that goes to another stage \
                has the layout Sparse: make it dense by to_dense()",
    },
    Failure {
        run: |(stage, _), x| if stage == 1 { fail_backward(x) } else { twice(x) },
        loss: mean,
        recomputes: false,
        error: "backward of stage 1, micro-batch 0 failed: backward: no backward today",
    },
    Failure {
        run: |(stage, run), x| match (stage, run) {
            (1, 4) => Err("out of coffee".into()),
            _ => twice(x),
        },
        loss: mean,
        recomputes: true,
        error: "backward of stage 1, micro-batch 0 failed: out of coffee",
    },
];

#[test]
fn failures_are_named_on_all_ranks() {
    for Failure { run, loss, recomputes, error } in FAILURES {
        let errors = ranks(3, |group| {
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(Schedule::gpipe(3, 4).unwrap())
                .recompute(*recomputes)
                .build(|stage| {
                    let runs = AtomicUsize::new(0);
                    let run = *run;
                    Ok(stage_fn(move |inputs| {
                        run((stage, runs.fetch_add(1, Ordering::Relaxed)), &inputs[0])
                    }))
                })
                .unwrap();
            // Micro-batches of two rows, and a last one of one.
            let x = numbers(&[7, 2], 0.7).set_requires_grad(true);
            pipeline.step(&[x], |outputs, _| loss(outputs)).unwrap_err().to_string()
        });
        let error = format!("rank 1: {error}");
        assert!(errors[1].starts_with(&error), "{errors:#?}");
        assert!(errors.iter().all(|other| other.contains(&error)), "{errors:#?}");
    }
}

/// The loss of the third micro-batch, and the last backward while another rank adds up the tied
/// gradient.
#[test]
fn a_loss_that_fails_and_one_who_waits_for_a_tied_gradient() {
    for fails_in_loss in [true, false] {
        let errors = ranks(2, |group| {
            let weight = numbers(&[2], 0.3).set_requires_grad(true);
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(Schedule::one_f_one_b(2, 4).unwrap())
                .build(|stage| {
                    let (weight, runs) = (weight.shallow_clone(), AtomicUsize::new(0));
                    Ok(stage_fn(move |inputs| {
                        let x = &inputs[0] * &weight;
                        let run = runs.fetch_add(1, Ordering::Relaxed);
                        if !fails_in_loss && (stage, run) == (0, 3) {
                            return fail_backward(&x);
                        }
                        Ok(vec![x])
                    }))
                })
                .unwrap();
            pipeline.tie(&[0, 1], Some(&weight)).unwrap();
            let step = pipeline.step(&[numbers(&[8, 2], 0.7)], |outputs, part| {
                assert!(!fails_in_loss || part.index != 2, "no loss today");
                mean(outputs)
            });
            step.unwrap_err().to_string()
        });
        let error = if fails_in_loss {
            "rank 1: forward of stage 1, micro-batch 2 failed: panic: no loss today"
        } else {
            "rank 0: backward of stage 0, micro-batch 3 failed: backward: no backward today"
        };
        assert!(errors.iter().all(|other| other.contains(error)), "{errors:#?}");
    }
}

/// In training and in evaluation.
#[test]
fn a_batch_that_is_too_small_is_an_error_of_all_ranks() {
    for trains in [true, false] {
        let errors = ranks(2, |group| {
            let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
                .schedule(Schedule::gpipe(2, 4).unwrap())
                .build(|_| Ok(stage_fn(|x| twice(&x[0]))))
                .unwrap();
            let batch = [numbers(&[3, 2], 0.7).set_requires_grad(true)];
            let error = if trains {
                pipeline.step(&batch, |outputs, _| mean(outputs)).unwrap_err()
            } else {
                pipeline.forward(&batch).unwrap_err()
            };
            error.to_string()
        });
        let cause = "rank 0: pipeline: a batch of 3 rows has too few for 4 micro-batches: drop such a \
                     last batch, or pad it";
        assert_eq!(errors[0], cause);
        assert!(errors[1].contains(cause), "{errors:?}");
    }
}

/// In a forward without gradients, and when it is computed anew.
#[test]
fn who_has_failed_trains_again_with_a_new_pipeline() {
    ranks(1, |group| {
        let mesh = mesh(&group);
        let pipeline = |panics_in: usize| {
            Pipeline::builder(&mesh, "pp")
                .schedule(Schedule::gpipe(1, 2).unwrap())
                .recompute(true)
                .build(|_| {
                    let runs = AtomicUsize::new(0);
                    Ok(stage_fn(move |x| {
                        assert_ne!(runs.fetch_add(1, Ordering::Relaxed), panics_in, "no forward");
                        Ok(vec![x[0].square()])
                    }))
                })
                .unwrap()
        };
        let x = || numbers(&[4, 2], 0.7).set_requires_grad(true);
        for panics_in in [0, 2] {
            let error = pipeline(panics_in).step(&[x()], |y, _| mean(y)).unwrap_err().to_string();
            assert!(error.contains("no forward"), "{error}");
            let batch = x();
            pipeline(usize::MAX).step(&[batch.shallow_clone()], |y, _| mean(y)).unwrap();
            close(&batch.grad(), &(batch.detach() / 4));
        }
    });
}

/// Gradients, statistics and random numbers are what they were, also after an error.
#[test]
fn splitting_by_time_leaves_a_model_as_it_was() {
    // The random numbers are those of the process.
    if runs_apart(splitting_by_time_leaves_a_model_as_it_was, &[]) {
        return;
    }
    let split = |fails: bool| {
        ranks(2, |group| {
            let mut vs = VarStore::new(Device::Cpu);
            let mut of_layers = [Tensor::new(), Tensor::new()];
            let mut layers = Layers::default()
                .add(&vs, |path| {
                    let linear = nn::linear(path, 4, 4, Default::default());
                    of_layers[0] = linear.ws.shallow_clone();
                    linear
                })
                .add(&vs, |path| {
                    let norm = nn::batch_norm1d(path, 4, Default::default());
                    of_layers[1] = norm.running_mean.shallow_clone();
                    norm
                })
                .add(&vs, |_| nn::func_t(|x, train| x.dropout(0.5, train)));
            if fails {
                layers = layers.add(&vs, |_| nn::func(|x| x.matmul(&numbers(&[5, 5], 0.3))));
            }
            vs.double();
            let [weight, mean] = of_layers;
            weight.square().sum(Kind::Double).backward();
            let drawn = || Tensor::rand([3], (Kind::Double, Device::Cpu));
            let x = numbers(&[6, 4], 0.7);
            // From here on only rank 0 draws, and measures.
            group.barrier().unwrap();
            let mut expected = None;
            if group.rank() == 0 {
                tch::manual_seed(3);
                expected = Some(drawn());
                tch::manual_seed(3);
            }
            let ranges = split_by_time(&layers, &vs, &x, 2, &group);
            if let Some(expected) = expected {
                assert_eq!(drawn(), expected);
            }
            assert_eq!(weight.grad(), weight.detach() * 2);
            assert_eq!(mean, mean.zeros_like());
            ranges.map_err(|error| error.to_string())
        })
    };
    let ranges = split(false).into_iter().map(|ranges| ranges.unwrap()).collect::<Vec<_>>();
    assert_eq!(ranges[0], ranges[1]);
    assert_eq!((ranges[0].len(), ranges[0][0].start, ranges[0][1].end), (2, 0, 3));
    let errors: Vec<_> = split(true).into_iter().map(|ranges| ranges.unwrap_err()).collect();
    assert!(errors[0].starts_with("layer 3 cannot be measured: "), "{errors:?}");
    let other = "rank 1: pipeline: the layers cannot be measured: see the error of rank 0";
    assert_eq!(errors[1], other);
}

/// The other rank has made its stage, and learns of it in its step.
#[test]
fn a_stage_that_cannot_be_made_fails_all_ranks() {
    for panics in [false, true] {
        let errors = ranks(2, |group| {
            let made = Pipeline::builder(&mesh(&group), "pp").build(|stage| {
                assert!(!panics || stage == 0, "out of coffee");
                match stage {
                    0 => Ok(stage_fn(|x| twice(&x[0]))),
                    _ => Err("out of coffee".into()),
                }
            });
            let step = made.and_then(|mut pipeline| {
                pipeline.step(&[numbers(&[8, 2], 0.7)], |outputs, _| mean(outputs))
            });
            // The cause is there once also where an error is shown with its sources.
            format!("{:#}", anyhow::Error::from(step.unwrap_err()))
        });
        for error in errors {
            assert_eq!(error.matches("stage 1 cannot be made").count(), 1, "{error}");
            assert_eq!(error.matches("out of coffee").count(), 1, "{error}");
        }
    }
}

/// The other rank waits for this one.
#[test]
fn a_list_of_stages_that_does_not_fit_fails_all_ranks() {
    let errors = ranks(2, |group| {
        let list = (0..2 + group.rank()).map(|_| stage_fn(|x| twice(&x[0]))).collect();
        Pipeline::new(list, &mesh(&group)).unwrap_err().to_string()
    });
    let cause = "rank 1: pipeline: there are 3 stages; give a multiple of the 2 ranks";
    assert!(errors.iter().all(|error| error.contains(cause)), "{errors:?}");
}

#[test]
fn outputs_that_some_micro_batches_lack_are_not_lost() {
    ranks(1, |group| {
        let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
            .schedule(Schedule::gpipe(1, 3).unwrap())
            .build(|_| {
                let runs = AtomicUsize::new(0);
                Ok(stage_fn(move |x| {
                    let count = if runs.fetch_add(1, Ordering::Relaxed) == 1 { 1 } else { 2 };
                    Ok((0..count).map(|_| x[0].shallow_clone()).collect())
                }))
            })
            .unwrap();
        let error = pipeline.forward(&[numbers(&[6, 2], 0.7)]).unwrap_err().to_string();
        assert!(
            error.contains("the number of outputs is 1, but in micro-batch 0 it was 2"),
            "{error}"
        );
    });
}
