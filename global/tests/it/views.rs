//! Jobs in both views, on ranks that are threads.

use std::sync::{Arc, Mutex};

use crate::common::ranks::ranks;
use flow_global::init::Init;
use flow_global::lr_scheduler::LrScheduler;
use flow_global::random::Generator;
use flow_global::view::{Array, Job, View, devices};
use flow_global::{B, GlobalTensor, Placement, S, distribute};
use flow_tensor::ProcessGroup;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).contiguous().view([-1])).unwrap()
}

/// OneFlow's example of how a loss is normalized: w is what is minimized.
#[test]
fn the_loss_is_the_mean_over_all_elements() {
    for (view, size) in [View::Mirrored, View::Consistent]
        .into_iter()
        .flat_map(|view| [(view, 1), (view, 2), (view, 3)])
    {
        ranks(size, |group| {
            let vs = nn::VarStore::new(Device::Cpu);
            let w = vs.root().ones("w", &[10]);
            let optimizer = nn::Sgd::default().build(&vs, 5.0).unwrap();
            let placement = Placement::all(&group).unwrap();
            let model = |_: &[Tensor]| Ok(w.shallow_clone());
            let mut job = Job::train(view, &placement, &vs, optimizer, model).unwrap();
            for expected in [1.0, 0.5] {
                let loss = job.run(Vec::<Tensor>::new()).unwrap();
                let losses = loss.list();
                assert_eq!(losses.len(), if view == View::Mirrored { size } else { 1 });
                for loss in losses {
                    let numbers = numbers(&loss);
                    assert_eq!(numbers.len(), 10);
                    let is_near = |number: &f64| (number - expected).abs() < 1e-6;
                    assert!(numbers.iter().all(is_near), "{view:?}, {size} ranks: {numbers:?}");
                }
            }
        });
    }
}

/// A batch, and weights that are the same for every view.
fn data() -> (Tensor, Tensor) {
    let images = Tensor::arange(7 * 6, (Kind::Double, Device::Cpu)).sin().view([7, 6]);
    (images, Tensor::from_slice(&[0i64, 1, 2, 3, 2, 1, 0]))
}

fn mlp(path: nn::Path) -> impl Module + use<> {
    nn::seq()
        .add(nn::linear(&path / "hidden", 6, 8, Default::default()))
        .add_fn(Tensor::relu)
        .add(nn::linear(&path / "out", 8, 4, Default::default()))
}

/// The losses of each sample in five steps, and then a prediction.
fn train(group: &ProcessGroup, view: View, parts: &[i64], is_split: bool) -> Vec<Vec<f64>> {
    let placement = Placement::all(group).unwrap();
    let mut vs = nn::VarStore::new(Device::Cpu);
    let net = mlp(vs.root());
    vs.double();
    let mut generator = Generator::new(3);
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (_, variable) in &mut variables {
        let init = Init::TruncatedNormal { mean: 0.0, deviation: 0.3 };
        init.fill(variable, &mut generator).unwrap();
    }
    if is_split {
        let hidden = |name: &str| name.starts_with("hidden");
        distribute(&vs, &placement, |name, _| vec![if hidden(name) { S(0) } else { B }]).unwrap();
    }
    let optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&vs, 1.0).unwrap();
    let (images, labels) = data();
    let arrays = |tensor: &Tensor| match view {
        View::Consistent => Array::Whole(tensor.shallow_clone()),
        View::Mirrored => Array::List(tensor.split_with_sizes(parts, 0)),
    };
    let loss = |inputs: &[Tensor]| {
        let logits = net.forward(&inputs[0]);
        let none = None::<Tensor>;
        Ok(logits.cross_entropy_loss(&inputs[1], none, tch::Reduction::None, -100, 0.0))
    };
    let most = if view == View::Mirrored { *parts.iter().max().unwrap() } else { 7 };
    let mut job = Job::train(view, &placement, &vs, optimizer, loss)
        .unwrap()
        .input("images", [most, 6], Kind::Double)
        .input("labels", [most], Kind::Int64)
        .lr_scheduler(
            LrScheduler::PiecewiseConstant { boundaries: vec![0], values: vec![1.0, 0.5] },
            0,
        );
    let mut results: Vec<Vec<f64>> = Vec::new();
    for _ in 0..5 {
        let result = job.run([arrays(&images), arrays(&labels)]).unwrap();
        if let Array::List(list) = &result {
            let lengths: Vec<i64> = list.iter().map(|losses| losses.size()[0]).collect();
            assert_eq!(lengths, parts);
        }
        results.push(numbers(&result.whole().unwrap()));
    }
    let mut predict = Job::predict(view, &placement, &vs, |inputs| Ok(net.forward(&inputs[0])))
        .unwrap()
        .input("images", [most, 6], Kind::Double);
    let logits = predict.run([arrays(&images)]).unwrap().whole().unwrap();
    assert_eq!(logits.size(), [7, 4]);
    results.push(numbers(&logits));
    results
}

#[test]
fn both_views_have_the_results_of_one_process() {
    let alone = ranks(1, |group| train(&group, View::Consistent, &[7], false)).swap_remove(0);
    assert!(alone[4].iter().sum::<f64>() < 0.98 * alone[0].iter().sum::<f64>(), "{alone:?}");
    let check = |size: usize, view: View, parts: &[i64], is_split: bool| {
        for results in ranks(size, |group| train(&group, view, parts, is_split)) {
            for (results, alone) in results.iter().zip(&alone) {
                assert_eq!(results.len(), alone.len());
                for (result, alone) in results.iter().zip(alone) {
                    let case = (view, parts, is_split);
                    assert!((result - alone).abs() < 1e-12, "{case:?}: {result}, alone {alone}");
                }
            }
        }
    };
    check(2, View::Consistent, &[], false);
    check(3, View::Consistent, &[], false);
    check(2, View::Consistent, &[], true);
    check(3, View::Consistent, &[], true);
    check(2, View::Mirrored, &[4, 3], false);
    check(2, View::Mirrored, &[1, 6], false);
    check(3, View::Mirrored, &[0, 2, 5], false);
}

#[test]
fn callbacks_get_results_in_the_order_of_calls() {
    for view in [View::Mirrored, View::Consistent] {
        ranks(2, |group| {
            let placement = devices(&group, 2).unwrap();
            let vs = nn::VarStore::new(Device::Cpu);
            let mut job = Job::predict(view, &placement, &vs, |inputs| Ok(&inputs[0] * 2))
                .unwrap()
                .input("x", [2], Kind::Int64);
            let seen: Arc<Mutex<Vec<Vec<f64>>>> = Arc::default();
            for number in 0..3 {
                let x = Tensor::from_slice(&[number, number + 10i64]);
                let x = match view {
                    View::Consistent => Array::Whole(x),
                    View::Mirrored => Array::List(x.chunk(2, 0)),
                };
                let seen = Arc::clone(&seen);
                let callback = move |result: Array| {
                    seen.lock().unwrap().push(numbers(&result.whole().unwrap()));
                };
                job.run_then([x], callback).unwrap();
            }
            assert_eq!(seen.lock().unwrap().len(), 2, "the last waits");
            job.wait().unwrap();
            job.wait().unwrap();
            let expected = [0.0, 1.0, 2.0].map(|number| vec![2.0 * number, 2.0 * number + 20.0]);
            assert_eq!(*seen.lock().unwrap(), expected);
        });
    }
}

#[test]
fn variables_that_are_saved_in_one_view_are_loaded_in_the_other() {
    let folder = std::env::temp_dir().join(format!("flow-views-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let make = |placement: &Placement, seed: i64, is_split: bool| {
        tch::manual_seed(seed);
        let vs = nn::VarStore::new(Device::Cpu);
        let net = mlp(vs.root());
        if is_split {
            distribute(&vs, placement, |_, _| vec![S(0)]).unwrap();
        }
        (vs, net)
    };
    let values = |vs: &nn::VarStore| {
        let mut variables: Vec<_> = vs.variables().into_iter().collect();
        variables.sort_by(|(one, _), (other, _)| one.cmp(other));
        let full = |(_, tensor): &(String, Tensor)| numbers(&tensor.full().unwrap());
        variables.iter().map(full).collect::<Vec<_>>()
    };
    for (from, to) in [(View::Consistent, View::Mirrored), (View::Mirrored, View::Consistent)] {
        let path = folder.join(format!("{from:?}.safetensors"));
        ranks(2, |group| {
            let placement = Placement::all(&group).unwrap();
            let rank = group.rank() as i64;
            let (vs, net) = make(&placement, 1 + rank, from == View::Consistent);
            let model = |inputs: &[Tensor]| Ok(net.forward(&inputs[0]));
            let saved = Job::predict(from, &placement, &vs, model).unwrap();
            saved.save(&path).unwrap();

            let (other, net) = make(&placement, 7, to == View::Consistent);
            let model = |inputs: &[Tensor]| Ok(net.forward(&inputs[0]));
            let mut loaded = Job::predict(to, &placement, &other, model).unwrap();
            assert_ne!(values(&vs), values(&other));
            loaded.load(&path).unwrap();
            assert_eq!(values(&vs), values(&other));

            let few = nn::VarStore::new(Device::Cpu);
            let _more = few.root().zeros("more", &[1]);
            let mut job = Job::predict(to, &placement, &few, |_| Ok(Tensor::new())).unwrap();
            let error = job.load(&path).unwrap_err().to_string();
            assert_eq!(error, format!("load {}: it has no more", path.display()));
        });
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_a_job_cannot_do_is_an_error() {
    ranks(2, |group| {
        let error = devices(&group, 3).unwrap_err().to_string();
        let expected = "asked for 3 devices, found 2: start as many ranks (flow-launch \
                        --nproc_per_node 3), or ask for fewer";
        assert_eq!(error, expected);

        let one = devices(&group, 1).unwrap();
        let vs = nn::VarStore::new(Device::Cpu);
        let error = Job::predict(View::Mirrored, &one, &vs, |_| Ok(Tensor::new())).err().unwrap();
        let expected = "a mirrored job: the placement [0] has 1 of 2 ranks, and every rank needs a \
                        model; use View::Consistent, or a group of these ranks only";
        assert_eq!(error.to_string(), expected);

        let two = devices(&group, 2).unwrap();
        let mut job =
            Job::predict(View::Consistent, &two, &vs, |inputs| Ok(inputs[0].shallow_clone()))
                .unwrap()
                .input("images", [2, 3], Kind::Float)
                .input("labels", [2], Kind::Int64);
        let images = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let error = job.run([images.shallow_clone()]).unwrap_err().to_string();
        assert_eq!(error, "a job: it declares 2 inputs (images, labels), but got 1");
        let error = job.run([images.shallow_clone(), images]).unwrap_err().to_string();
        let expected = "the input labels: is [2, 3] of Float, but the job declares [2] of Int64";
        assert_eq!(error, expected);

        let w = vs.root().zeros("w", &[2]);
        distribute(&vs, &two, |_, _| vec![B]).unwrap();
        assert!(w.is_global());
        let error = Job::predict(View::Mirrored, &two, &vs, |_| Ok(Tensor::new())).err().unwrap();
        let expected = "a mirrored job: the variable w is global; use View::Consistent, or another \
                        VarStore";
        assert_eq!(error.to_string(), expected);
    });
}

/// A job on some ranks: the others have no part of anything, and get the results.
#[test]
fn a_consistent_job_may_leave_out_ranks() {
    let results = ranks(3, |group| {
        let placement = devices(&group, 2).unwrap();
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[4]);
        let optimizer = nn::Sgd::default().build(&vs, 1.0).unwrap();
        let mut job =
            Job::train(View::Consistent, &placement, &vs, optimizer, |inputs| Ok(&inputs[0] * &w))
                .unwrap()
                .input("x", [4], Kind::Float);
        let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]);
        let first = numbers(&job.run([x.shallow_clone()]).unwrap().whole().unwrap());
        let second = numbers(&job.run([x]).unwrap().whole().unwrap());
        (first, second)
    });
    for result in results {
        assert_eq!(result, (vec![1.0, 2.0, 3.0, 4.0], vec![0.75, 1.0, 0.75, 0.0]));
    }
}

/// First weights are those of a plain tensor, for every placement and SBP.
#[test]
fn a_global_variable_has_the_first_weights_of_a_plain_one() {
    ranks(4, |group| {
        let init = Init::xavier_uniform(1.0);
        let mut plain = Tensor::zeros([5, 3], (Kind::Float, Device::Cpu));
        init.fill(&mut plain, &mut Generator::new(9)).unwrap();
        let line = Placement::new(&group, [2, 0, 1]).unwrap();
        let mesh = Placement::new(&group, [[0, 1], [2, 3]]).unwrap();
        let cases = [(&line, vec![S(0)]), (&line, vec![B]), (&line, vec![flow_global::P])];
        let meshes = [vec![S(0), S(1)], vec![S(1), flow_global::P], vec![B, S(0)]];
        for (placement, sbp) in cases.into_iter().chain(meshes.map(|sbp| (&mesh, sbp))) {
            let mut global = flow_global::ones([5, 3], Kind::Float, placement, &sbp).unwrap();
            init.fill(&mut global, &mut Generator::new(9)).unwrap();
            assert_eq!(global.sbp().unwrap(), sbp);
            assert_eq!(numbers(&global.full().unwrap()), numbers(&plain), "{placement} {sbp:?}");
        }
    });
}
