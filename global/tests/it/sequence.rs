//! Ranks that run different operations get an error that says which, and where.

use std::sync::Barrier;
use std::time::Duration;

use crate::common::ranks::ranks;
use flow_global as global;
use flow_global::{B, GlobalTensor, P, Placement, S};
use tch::{Kind, Tensor};

/// Runs `body` on two ranks, each with `x` split, and with `w`, which all have. It returns an error on
/// both, and the errors are returned.
fn errors(body: impl Fn(usize, &Tensor, &Tensor) -> Result<(), String> + Sync) -> Vec<String> {
    let errors = std::sync::Mutex::new(vec![String::new(); 2]);
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let x = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let w = global::ones([6, 6], Kind::Float, &placement, [B]).unwrap();
        let error = body(group.rank(), &x, &w).expect_err("ranks differ");
        errors.lock().unwrap()[group.rank()] = error;
    });
    errors.into_inner().unwrap()
}

fn full(tensor: &Tensor) -> Result<(), String> {
    tensor.full().map(drop).map_err(|error| error.to_string())
}

#[track_caller]
fn all_say(errors: &[String], expected: &[&str]) {
    for error in errors {
        for words in expected {
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }
}

#[test]
fn another_operation() {
    let errors = errors(|rank, x, _| {
        let y = if rank == 0 { x.relu() } else { x.tanh() };
        full(&(y * x))
    });
    all_say(
        &errors,
        &[
            "operation 1 is aten::relu([4, 6] S(0)) on rank 0, aten::tanh([4, 6] S(0)) on rank 1",
            "now rank 0 is at operation 3, boxing([4, 6] S(0)) -> B",
            "all ranks must run the same operations on global tensors, in the same order",
            "tests/it/sequence.rs:",
        ],
    );
}

#[test]
fn other_sizes_and_arguments() {
    all_say(
        &errors(|rank, x, _| full(&x.narrow(1, 0, 3 + rank as i64).sum(Kind::Float))),
        &["operation 1 is aten::sum([4, 3] S(0)", "on rank 0, aten::sum([4, 4] S(0)"],
    );
    all_say(
        &errors(|rank, x, _| {
            let y = x.f_softmax(rank as i64, Kind::Float).map_err(|error| error.to_string())?;
            full(&y)
        }),
        &["operation 1 is aten::_softmax([4, 6] S(0), 0, false) on rank 0"],
    );
}

#[test]
fn another_order() {
    all_say(
        &errors(|rank, x, _| {
            let (y, z) = (x * x, x + x);
            let (first, second) = if rank == 0 { (&y, &z) } else { (&z, &y) };
            full(&first.sin())?;
            full(&second.cos())?;
            // So far all is alike; here the sequences differ.
            let (first, second) = if rank == 0 { (x.exp(), x.abs()) } else { (x.abs(), x.exp()) };
            full(&(first + second))
        }),
        &["operation 7 is aten::exp([4, 6] S(0)) on rank 0, aten::abs([4, 6] S(0)) on rank 1"],
    );
}

#[test]
fn a_step_of_one_rank() {
    all_say(
        &errors(|rank, x, w| {
            let mut w = w.shallow_clone();
            if rank == 0 {
                let _ = w.g_add_(&w.shallow_clone());
            }
            full(&x.matmul(&w))
        }),
        &["operation 1 is aten::add_([6, 6] B, [6, 6] B", "on rank 0, aten::mm([4, 6] S(0)"],
    );
}

#[test]
fn one_rank_is_ahead() {
    all_say(
        &errors(|rank, x, _| {
            let y = if rank == 0 { x.relu() } else { x.shallow_clone() };
            full(&y)
        }),
        &["operation 1 is aten::relu([4, 6] S(0)) on rank 0, boxing([4, 6] S(0)) -> B on rank 1"],
    );
}

/// What is B may be read on one rank: no other rank is needed.
#[test]
fn one_rank_may_print_what_is_b() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let x = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let w = global::arange(12, Kind::Float, &placement, [B]).unwrap();
        if group.rank() == 0 {
            assert_eq!(w.double_value(&[3]), 3.0);
            assert_eq!(format!("{}", w.mean(Kind::Float)), "[5.5000]\nTensor[[], Float]");
            assert!(format!("{w:?} {w}").contains("11"));
            assert_eq!(Vec::<f32>::try_from(&w).unwrap()[11], 11.0);
        }
        assert_eq!(x.sum(Kind::Float).double_value(&[]), 24.0);
    });
}

/// Without the others it fails, and says what to do.
#[test]
fn a_value_that_one_rank_reads() {
    for sbp in [S(0), P] {
        let has_failed = Barrier::new(2);
        ranks(2, |group| {
            group.set_timeout(Duration::from_millis(300));
            let placement = Placement::all(&group).unwrap();
            let x = global::ones([4, 6], Kind::Float, &placement, [sbp]).unwrap();
            let loss = x.sum(Kind::Float);
            let value = (group.rank() == 0).then(|| loss.f_double_value(&[]));
            // The other rank has not left meanwhile.
            has_failed.wait();
            let Some(value) = value else { return };
            all_say(
                &[value.unwrap_err().to_string()],
                &[
                    "aten::_local_scalar_dense",
                    "all ranks must take part: call full() or double_value() on all of them, or \
                     to_local() on one",
                    "rank 0 is at operation 2",
                    "tests/it/sequence.rs:",
                ],
            );
        });
    }
}

/// The other rank goes on, and both learn of it at once.
#[test]
fn a_value_that_one_rank_reads_while_others_go_on() {
    all_say(
        &errors(|rank, x, _| {
            let loss = x.sum(Kind::Float);
            if rank == 0 {
                loss.f_double_value(&[]).map(drop).map_err(|error| error.to_string())?;
            }
            full(&x.relu())
        }),
        &[
            "operation 2 is aten::_local_scalar_dense([] P) on rank 0, aten::relu([4, 6] S(0)) on rank 1",
        ],
    );
}

/// A tensor that is split has no memory of its own.
#[test]
fn memory_of_a_split_tensor() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let x = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let mut elements = [0_f32; 24];
        let folder = tempfile::tempdir().unwrap();
        let said = [
            Vec::<f32>::try_from(&x.view([24])).unwrap_err().to_string(),
            x.f_copy_data(&mut elements, 24).unwrap_err().to_string(),
            x.save(folder.path().join("x.pt")).unwrap_err().to_string(),
        ];
        let has_no_memory = "use full() for the logical value, or to_local()";
        all_say(&said, &[has_no_memory]);
        // These return no errors in tch: it panics with the error's text.
        let scalar = x.sum(Kind::Float);
        for panic in [
            panic_of(|| _ = x.data_ptr()),
            panic_of(|| drop(format!("{scalar:?}"))),
            panic_of(|| x.print()),
        ] {
            all_say(&[panic], &[has_no_memory]);
        }
        // This needs no memory.
        assert_eq!(format!("{x:?}"), "Tensor[[4, 6], Float]");
        // And this is a collective.
        assert_eq!(scalar.double_value(&[]), 24.0);
    });
}

fn panic_of(body: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    let panic = panic.expect_err("a panic");
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

/// A rank that does not come: the other says where it is itself.
#[test]
fn one_rank_goes_away() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let x = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let _ = x.full().unwrap();
        if group.rank() == 0 {
            let error = x.relu().full().unwrap_err().to_string();
            all_say(
                &[error],
                &[
                    "rank 0 is at operation 3, boxing([4, 6] S(0)) -> B, at tests/it/sequence.rs:",
                    "all ranks must run the same operations",
                    "has left the group",
                ],
            );
        }
    });
}

/// Its schema does not say that it writes the running statistics.
#[test]
fn a_batch_norm_in_training_on_one_rank() {
    let errors = errors(|rank, x, w| {
        let [mean, variance] = [0, 1].map(|row| w.get(row).copy());
        if rank == 0 {
            let none = None::<Tensor>;
            let _ = w.batch_norm(
                none.as_ref(),
                none.as_ref(),
                Some(&mean),
                Some(&variance),
                true,
                0.1,
                1e-5,
                false,
            );
        }
        full(x)
    });
    all_say(&errors, &["aten::native_batch_norm"]);
}

/// Autograd copies a gradient for its leaf where something else has the gradient too.
#[test]
fn a_gradient_that_one_rank_keeps() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let w = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let w = w.set_requires_grad(true);
        let y = &w + 1;
        let kept = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        if group.rank() == 0 {
            let kept = kept.clone();
            flow_autograd::map_gradient(&y, move |gradient| {
                kept.lock().unwrap().push(gradient.shallow_clone());
                Ok(None)
            })
            .unwrap();
        }
        // Split as the leaf is: else the leaf gets another tensor.
        let threes = global::full([4, 6], 3, Kind::Float, &placement, [S(0)]).unwrap();
        (&y * &threes).sum(Kind::Float).backward();
        assert_eq!(kept.lock().unwrap().len(), 1 - group.rank());
        assert_eq!(w.grad().full().unwrap(), Tensor::from(3_f32).expand([4, 6], false));
        // A copy that the program makes counts.
        let (mut x, other) = (w.detach().copy(), w.grad() * 2);
        if group.rank() == 0 {
            x.copy_(&other);
        }
        let error = x.full().unwrap_err().to_string();
        all_say(&[error], &["is aten::copy_([4, 6] S(0), [4, 6] S(0), false) on rank 0"]);
    });
}

/// The group has failed: nothing differs anew.
#[test]
fn a_second_mismatch_says_what_this_rank_does() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let x = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let y = if group.rank() == 0 { x.relu() } else { x.tanh() };
        all_say(&[full(&y).unwrap_err()], &["operation 1 is aten::relu([4, 6] S(0)) on rank 0"]);
        let y = if group.rank() == 0 { x.exp() } else { x.abs() };
        let error = full(&y).unwrap_err();
        let own = format!("rank {} is at operation 4, boxing([4, 6] S(0)) -> B", group.rank());
        all_say(std::slice::from_ref(&error), &[&own, "unusable since an earlier failure"]);
        assert!(!error.contains("operation 1 is"), "{error}");
    });
}

/// Ranks that reduce other gradients, or in another order, get an error that names the parameter.
#[test]
fn buckets_that_differ() {
    ranks(2, |group| {
        let leaf = |sizes: &[i64]| {
            Tensor::zeros(sizes, (Kind::Float, tch::Device::Cpu)).set_requires_grad(true)
        };
        let (weight, bias) =
            (("weight".to_owned(), leaf(&[4, 6])), ("bias".to_owned(), leaf(&[4])));
        let own = if group.rank() == 0 { vec![weight, bias] } else { vec![bias, weight] };
        let error = flow_ddp::GradReducer::new(&group, own).unwrap_err().to_string();
        all_say(
            &[error],
            &["rank 0 has parameter weight [4, 6] Float", "rank 1 has parameter bias [4] Float"],
        );
    });
}

/// The same operations, on other leaves.
#[test]
fn buckets_of_other_leaves() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let vs = tch::nn::VarStore::new(tch::Device::Cpu);
        let leaves = ["one", "other"].map(|name| vs.root().zeros(name, &[6, 6]));
        global::distribute(&vs, &placement, |_, _| [B]).unwrap();
        let x = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let loss = x.matmul(&leaves[group.rank()]).sum(Kind::Float);
        let error = loss.f_backward().unwrap_err().to_string();
        all_say(
            &[error],
            &["rank 0 has parameter one [6, 6] Float", "rank 1 has parameter other [6, 6] Float"],
        );
    });
}
