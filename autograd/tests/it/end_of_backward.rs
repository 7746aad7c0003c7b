//! Callbacks in and at the end of real backwards.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::common::{error_text, loss, parameter};
use flow_autograd::{GradHook, at_end_of_backward, on_backward};
use tch::{Kind, Tensor};

#[test]
fn errors_and_panics_of_the_callback_are_errors_of_backward() {
    let weight = parameter(&[1.0]);
    let step = Arc::new(AtomicUsize::new(0));
    let counter = step.clone();
    let _hook = GradHook::install(&weight, move |_| {
        let step = counter.fetch_add(1, SeqCst);
        Ok(at_end_of_backward(move || match step {
            0 => Err("timed out".into()),
            1 => panic!("at step {step}"),
            _ => Ok(()),
        })?)
    })
    .unwrap();
    assert!(error_text(loss(&weight).f_backward()).contains("timed out"));
    assert!(
        error_text(loss(&weight).f_backward())
            .contains("an end-of-backward callback panicked: at step 1")
    );
    loss(&weight).f_backward().expect("the next backward works");
    assert_eq!(step.load(SeqCst), 3);
}

#[test]
fn a_callback_is_freed_uncalled_when_backward_fails_first() {
    let (early, late) = (parameter(&[1.0]), parameter(&[1.0]));
    let witness = Arc::new(());
    let captured = witness.clone();
    let _queues = GradHook::install(&late, move |_| {
        let captured = captured.clone();
        Ok(at_end_of_backward(move || panic!("called with {captured:?}"))?)
    })
    .unwrap();
    let _fails = GradHook::install(&early, |_| Err("no".into())).unwrap();
    let result = ((&early * 2).tanh() * &late).sum(Kind::Float).f_backward();
    let text = error_text(result);
    assert!(text.contains("no") && !text.contains("called with"), "{text}");
    assert_eq!(Arc::strong_count(&witness), 2, "the hook's and ours");
}

#[test]
fn callbacks_run_in_order_and_may_queue_more() {
    let weight = parameter(&[1.0]);
    let order = Arc::new(Mutex::new(Vec::new()));
    let recorded = order.clone();
    let _hook = GradHook::install(&weight, move |_| {
        for index in 0..20 {
            let recorded = recorded.clone();
            at_end_of_backward(move || {
                recorded.lock().unwrap().push(index);
                Ok(at_end_of_backward(move || {
                    recorded.lock().unwrap().push(100 + index);
                    Ok(())
                })?)
            })?;
        }
        Ok(())
    })
    .unwrap();
    loss(&weight).backward();
    assert_eq!(*order.lock().unwrap(), (0..20).chain(100..120).collect::<Vec<_>>());
}

/// The outer gradients are those of a gate, in whose hook another backward runs, and of what comes
/// before the gate.
#[test]
fn the_end_of_an_inner_backward_is_not_the_end() {
    let events = Arc::new(Mutex::new(Vec::<String>::new()));
    let note = |event: &str| events.lock().unwrap().push(event.into());
    let noting = |parameter: &Tensor, name: &'static str| {
        let events = events.clone();
        GradHook::install(parameter, move |_| {
            events.lock().unwrap().push(name.into());
            let events = events.clone();
            Ok(at_end_of_backward(move || {
                events.lock().unwrap().push(format!("end for {name}"));
                Ok(())
            })?)
        })
        .unwrap()
    };
    let (innermost, inner, last) = (parameter(&[1.0]), parameter(&[1.0]), parameter(&[1.0]));
    let _hooks = [noting(&innermost, "innermost"), noting(&inner, "inner"), noting(&last, "last")];
    let gates = [parameter(&[1.0]), parameter(&[1.0])];
    let through = |gate: &Tensor, before: &Tensor| (before.tanh() * gate).sum(Kind::Float);
    let inner_gate = gates[0].shallow_clone();
    let hooks = [
        GradHook::install(
            &gates[0],
            move |_| Ok(tch::with_grad(|| loss(&innermost)).f_backward()?),
        ),
        GradHook::install(&gates[1], move |_| {
            Ok(tch::with_grad(|| through(&inner_gate, &inner)).f_backward()?)
        }),
    ];
    hooks.iter().for_each(|hook| assert!(hook.is_ok()));
    for _ in 0..2 {
        through(&gates[1], &last).f_backward().unwrap();
        note("returned");
        let ends = ["end for innermost", "end for inner", "end for last", "returned"];
        assert_eq!(
            std::mem::take(&mut *events.lock().unwrap()),
            [&["innermost", "inner", "last"], &ends[..]].concat()
        );
    }
}

#[test]
fn a_callback_of_an_inner_backward_is_freed_uncalled_when_the_outer_one_fails() {
    let (gate, weight) = (parameter(&[1.0]), parameter(&[1.0]));
    let witness = Arc::new(());
    let captured = witness.clone();
    let _queues = GradHook::install(&weight, move |_| {
        let captured = captured.clone();
        Ok(at_end_of_backward(move || panic!("called with {captured:?}"))?)
    })
    .unwrap();
    let _fails = GradHook::install(&gate, move |_| {
        tch::with_grad(|| loss(&weight)).f_backward()?;
        Err("no".into())
    })
    .unwrap();
    let outer = loss(&gate);
    let text = error_text(outer.f_backward());
    assert!(text.contains("no") && !text.contains("called with"), "{text}");
    drop(outer);
    assert_eq!(Arc::strong_count(&witness), 2, "the hook's and ours");
}

#[test]
fn a_tensor_calls_back_in_its_backwards_and_at_the_end_of_its_graph() {
    let weight = parameter(&[1.0]);
    let calls = Arc::new(AtomicUsize::new(0));
    let watched = |fails: bool| {
        let (output, counter) = (loss(&weight), calls.clone());
        let hook = move || {
            counter.fetch_add(1, SeqCst);
            if fails { Err("no".into()) } else { Ok(()) }
        };
        on_backward(&output, hook).unwrap();
        output
    };
    let outputs = [false, false, true].map(watched);
    assert_eq!(Arc::strong_count(&calls), 4);
    Tensor::run_backward(&[&outputs[0] * 2], &[&weight], true, false);
    (&outputs[0] * 2).backward();
    assert!(error_text((&outputs[2] + &weight).sum(Kind::Float).f_backward()).contains("no"));
    assert_eq!((calls.load(SeqCst), Arc::strong_count(&calls)), (3, 4));
    drop(outputs);
    assert_eq!(Arc::strong_count(&calls), 1);
    // What no operation has made has none.
    let captured = calls.clone();
    let hook = move || {
        let _ = &captured;
        Ok(())
    };
    on_backward(&weight, hook).unwrap();
    assert_eq!(Arc::strong_count(&calls), 1);
}

#[test]
fn a_callback_outside_backward_is_refused_and_freed() {
    let witness = Arc::new(());
    let captured = witness.clone();
    let error = at_end_of_backward(move || {
        drop(captured);
        Ok(())
    })
    .unwrap_err();
    assert!(error.to_string().contains("no backward runs on this thread"), "{error}");
    assert_eq!(Arc::strong_count(&witness), 1);
}
