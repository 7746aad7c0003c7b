//! Gradient hooks in real backwards.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::common::{error_text, loss, parameter};
use flow_autograd::{Error, GradHook, at_end_of_backward, grad_is_exclusive, set_grad};
use tch::{Device, Kind, Tensor};

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor).unwrap()
}

/// A hook that counts its calls.
fn counting_hook(parameter: &Tensor) -> (GradHook, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let hook_calls = calls.clone();
    let hook = GradHook::install(parameter, move |_| {
        hook_calls.fetch_add(1, SeqCst);
        Ok(())
    });
    (hook.unwrap(), calls)
}

#[test]
fn hooks_fire_in_reverse_layer_order_and_the_callback_before_backward_returns() {
    let layers: Vec<Tensor> = (0..4)
        .map(|_| Tensor::randn([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true))
        .collect();
    let events = Arc::new(Mutex::new(Vec::<String>::new()));
    let caller = std::thread::current().id();
    let hooks: Vec<GradHook> = (layers.iter().enumerate())
        .map(|(index, layer)| {
            let events = events.clone();
            GradHook::install(layer, move |layer| {
                assert!(layer.grad().defined() && layer.size() == [8, 8]);
                assert_eq!(std::thread::current().id(), caller);
                let mut recorded = events.lock().unwrap();
                if recorded.is_empty() {
                    let events = events.clone();
                    at_end_of_backward(move || {
                        events.lock().unwrap().push("end".into());
                        Ok(())
                    })?;
                }
                recorded.push(format!("layer {index}"));
                Ok(())
            })
            .unwrap()
        })
        .collect();
    for _ in 0..2 {
        let input = Tensor::randn([3, 8], (Kind::Float, Device::Cpu));
        let output = layers.iter().fold(input, |input, layer| input.matmul(layer).tanh());
        output.sum(Kind::Float).backward();
        let recorded = std::mem::take(&mut *events.lock().unwrap());
        assert_eq!(recorded, ["layer 3", "layer 2", "layer 1", "layer 0", "end"]);
    }
    drop(hooks);
}

#[test]
fn an_error_in_a_hook_is_the_error_of_backward() {
    let weight = parameter(&[1.0, 2.0]);
    let fails = Arc::new(AtomicUsize::new(1));
    let counter = fails.clone();
    let _hook = GradHook::install(&weight, move |_| match counter.fetch_sub(1, SeqCst) {
        1 => Err("bucket 3: rank 1 is gone".into()),
        _ => Ok(()),
    })
    .unwrap();
    assert!(error_text(loss(&weight).f_backward()).contains("bucket 3: rank 1 is gone"));
    loss(&weight).f_backward().expect("the next backward works");
}

#[test]
fn a_panic_in_a_hook_is_the_error_of_backward() {
    let weight = parameter(&[1.0]);
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let _hook = GradHook::install(&weight, move |_| {
        let call = counter.fetch_add(1, SeqCst);
        assert!(call != 0, "the first call");
        Ok(())
    })
    .unwrap();
    assert!(
        error_text(loss(&weight).f_backward()).contains("a gradient hook panicked: the first call")
    );
    loss(&weight).f_backward().expect("the next backward works");
    assert_eq!(calls.load(SeqCst), 2);
}

#[test]
fn removal_frees_the_closure_and_stops_the_calls() {
    for fails in [false, true] {
        let weight = parameter(&[1.0]);
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let hook = GradHook::install(&weight, move |_| {
            counter.fetch_add(1, SeqCst);
            if fails { Err("no".into()) } else { Ok(()) }
        })
        .unwrap();
        assert_eq!(loss(&weight).f_backward().is_err(), fails);
        assert_eq!(Arc::strong_count(&calls), 2);
        drop(hook);
        assert_eq!(Arc::strong_count(&calls), 1);
        loss(&weight).backward();
        assert_eq!(calls.load(SeqCst), 1);
    }
}

#[test]
fn a_hook_may_outlive_its_parameter() {
    let weight = parameter(&[1.0]);
    let (hook, calls) = counting_hook(&weight);
    let output = loss(&weight);
    drop(weight);
    output.backward(); // the graph keeps the parameter alive
    assert_eq!(calls.load(SeqCst), 1);
    drop(output);
    drop(hook);
    assert_eq!(Arc::strong_count(&calls), 1);
}

#[test]
fn a_hook_may_remove_itself() {
    let weight = parameter(&[1.0]);
    let own = Arc::new(Mutex::new(None::<GradHook>));
    let calls = Arc::new(AtomicUsize::new(0));
    let (inside, counter) = (own.clone(), calls.clone());
    let hook = GradHook::install(&weight, move |_| {
        drop(inside.lock().unwrap().take());
        counter.fetch_add(1, SeqCst); // what it captured is still there
        Ok(())
    });
    *own.lock().unwrap() = Some(hook.unwrap());
    loss(&weight).backward();
    loss(&weight).backward();
    assert_eq!((calls.load(SeqCst), Arc::strong_count(&calls)), (1, 1));
}

#[test]
fn a_second_hook_is_refused_until_the_first_is_gone() {
    let weight = parameter(&[1.0]);
    assert!(!GradHook::is_installed(&weight).unwrap());
    let (first, calls) = counting_hook(&weight);
    assert!(GradHook::is_installed(&weight).unwrap());
    let second = GradHook::install(&weight.shallow_clone(), |_| Ok(()));
    assert!(matches!(second, Err(Error::HookInstalled)));
    loss(&weight).backward();
    assert_eq!(calls.load(SeqCst), 1, "the first is untouched");
    drop(first);
    assert!(!GradHook::is_installed(&weight).unwrap());
    let (_second, calls) = counting_hook(&weight);
    loss(&weight).backward();
    assert_eq!(calls.load(SeqCst), 1);
    assert!(GradHook::is_installed(&(&weight * 2)).is_err(), "not a leaf");
}

#[test]
fn only_leaves_that_require_a_gradient_take_a_hook() {
    let weight = parameter(&[1.0]);
    let witness = Arc::new(());
    for tensor in [&weight * 2, Tensor::ones([2], (Kind::Float, Device::Cpu)), Tensor::new()] {
        let captured = witness.clone();
        let result = GradHook::install(&tensor, move |_| {
            drop(captured.clone());
            Ok(())
        });
        let text = result.expect_err("it should have been refused").to_string();
        assert!(text.contains("only a leaf tensor that requires a gradient"), "{text}");
    }
    assert_eq!(Arc::strong_count(&witness), 1);
}

#[test]
fn a_thousand_hooks_come_and_go() {
    let weight = parameter(&[1.0]);
    let calls = Arc::new(AtomicUsize::new(0));
    for _ in 0..1000 {
        let counter = calls.clone();
        let hook = GradHook::install(&weight, move |_| {
            counter.fetch_add(1, SeqCst);
            Ok(())
        });
        loss(&weight).backward();
        drop(hook.unwrap());
    }
    assert_eq!((calls.load(SeqCst), Arc::strong_count(&calls)), (1000, 1));
}

#[test]
fn hooks_may_be_dropped_while_another_thread_runs_backward() {
    let weight = parameter(&[1.0; 64]);
    let running = Arc::new(AtomicUsize::new(0));
    let seen = running.clone();
    let clone = weight.shallow_clone();
    let backwards = std::thread::spawn(move || {
        while seen.load(SeqCst) == 0 {
            loss(&clone).backward();
        }
    });
    for _ in 0..500 {
        drop(counting_hook(&weight));
    }
    running.store(1, SeqCst);
    backwards.join().unwrap();
}

#[test]
fn accumulation_calls_the_hook_in_each_backward() {
    let weight = parameter(&[1.0, 1.0]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let gradients = seen.clone();
    let _hook = GradHook::install(&weight, move |weight| {
        gradients.lock().unwrap().push(weight.grad().double_value(&[0]));
        Ok(())
    })
    .unwrap();
    loss(&weight).backward();
    loss(&weight).backward();
    assert_eq!(*seen.lock().unwrap(), [2.0, 4.0]);
}

#[test]
fn one_backward_that_uses_a_parameter_twice_calls_the_hook_once() {
    let weight = parameter(&[3.0]);
    let (_hook, calls) = counting_hook(&weight);
    (&weight * &weight + &weight).sum(Kind::Float).backward();
    assert_eq!((calls.load(SeqCst), values(&weight.grad())), (1, vec![7.0]));
}

#[test]
fn a_parameter_that_takes_no_part_has_no_call() {
    let (used, unused) = (parameter(&[1.0]), parameter(&[1.0]));
    let (_used, used_calls) = counting_hook(&used);
    let (_unused, unused_calls) = counting_hook(&unused);
    loss(&used).backward();
    assert_eq!((used_calls.load(SeqCst), unused_calls.load(SeqCst)), (1, 0));
}

#[test]
fn a_hook_may_replace_the_gradient() {
    let weight = parameter(&[1.0, 2.0]);
    let flat = Tensor::zeros([4], (Kind::Float, Device::Cpu));
    let view = flat.narrow(0, 1, 2);
    let _hook = GradHook::install(&weight, move |weight| {
        view.shallow_clone().copy_(&(weight.grad() * 10));
        Ok(set_grad(weight, Some(&view))?)
    })
    .unwrap();
    loss(&weight).backward();
    assert_eq!(values(&weight.grad()), [20.0, 20.0]);
    assert_eq!(values(&flat), [0.0, 20.0, 20.0, 0.0]);
    assert_eq!(weight.grad().data_ptr(), flat.narrow(0, 1, 1).data_ptr());
}

#[test]
fn set_grad_sets_resets_and_checks() {
    let weight = parameter(&[1.0, 2.0]);
    let grad = Tensor::from_slice(&[5f32, 6.0]);
    set_grad(&weight, Some(&grad)).unwrap();
    assert_eq!(weight.grad().data_ptr(), grad.data_ptr());
    set_grad(&weight, None).unwrap();
    assert!(!weight.grad().defined());
    for unfit in [Tensor::from_slice(&[1f32]), Tensor::from_slice(&[1f64, 2.0])] {
        let text = set_grad(&weight, Some(&unfit)).unwrap_err().to_string();
        assert!(text.contains("does not fit a tensor of shape [2]"), "{text}");
    }
    assert!(!weight.grad().defined());
    assert!(set_grad(&weight, Some(&Tensor::new())).is_err());
    assert!(set_grad(&Tensor::new(), None).is_err());
}

#[test]
fn a_gradient_owns_its_memory_unless_backward_still_reads_it() {
    let float = (Kind::Float, Device::Cpu);
    let parameter = |shape: &[i64]| Tensor::ones(shape, float).set_requires_grad(true);
    let owns = Arc::new(Mutex::new(Vec::<bool>::new()));
    let watch = |parameter: &Tensor| {
        let owns = owns.clone();
        let hook = GradHook::install(parameter, move |parameter| {
            owns.lock().unwrap().push(grad_is_exclusive(parameter));
            Ok(())
        });
        hook.unwrap()
    };
    let asked = || std::mem::take(&mut *owns.lock().unwrap());

    let (weight, bias) = (parameter(&[4, 3]), parameter(&[4]));
    let hooks = [watch(&weight), watch(&bias)];
    for _ in 0..2 {
        // The second time the gradients are there and are added to.
        Tensor::ones([2, 3], float)
            .linear(&weight, Some(&bias))
            .sum(Kind::Float)
            .f_backward()
            .unwrap();
        assert_eq!(asked(), [true, true]);
    }
    assert!(!grad_is_exclusive(&parameter(&[1])), "it has neither gradient nor hook");
    drop(hooks);

    // What comes to `second` is a view of what flows on to `first`.
    let (first, second) = (parameter(&[6]), parameter(&[6]));
    let _hook = watch(&second);
    let sum = (&first * 5).view([2, 3]) + second.view([2, 3]);
    (sum * Tensor::ones([2, 3], float)).sum(Kind::Float).f_backward().unwrap();
    assert_eq!(asked(), [false]);

    // Another tensor shares the gradient's memory.
    let third = parameter(&[6]);
    let _hook = watch(&third);
    loss(&third).f_backward().unwrap();
    let shared = third.grad().detach();
    loss(&third).f_backward().unwrap();
    drop(shared);
    loss(&third).f_backward().unwrap();
    assert_eq!(asked(), [true, false, true]);
}
