//! `FLOW_GLOBAL_DEBUG=1`: each operation is compared, and the bytes of plain tensors.

#[path = "common/ranks.rs"]
mod common;

use common::ranks;
use flow_global as global;
use flow_global::{Placement, B, S};
use tch::{Kind, Tensor};

/// What the ranks get as the result of `body`, on two ranks, each with a split tensor.
fn run(body: impl Fn(usize, &Tensor) -> Result<Tensor, tch::TchError> + Sync) -> Vec<String> {
    // Before any operation on a global tensor reads it.
    std::env::set_var("FLOW_GLOBAL_DEBUG", "1");
    let texts = std::sync::Mutex::new(vec![String::new(); 2]);
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let x = global::ones([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let text = match body(group.rank(), &x) {
            Ok(tensor) => format!("{:?}", tensor.size()),
            Err(error) => error.to_string(),
        };
        texts.lock().unwrap()[group.rank()] = text;
    });
    texts.into_inner().unwrap()
}

#[track_caller]
fn all_say(texts: &[String], expected: &[&str]) {
    for text in texts {
        for words in expected {
            assert!(text.contains(words), "{words:?} is not in: {text}");
        }
    }
}

#[test]
fn the_first_operation_that_differs() {
    // Nothing is boxed.
    let texts = run(|rank, x| if rank == 0 { x.f_relu() } else { x.f_tanh() });
    all_say(
        &texts,
        &[
            "operation 1 is aten::relu([4, 6] S(0)) on rank 0, aten::tanh([4, 6] S(0)) on rank 1",
            "at tests/debug.rs:40",
            "all ranks must run the same operations",
        ],
    );
}

#[test]
fn plain_tensors() {
    let bias = |rank: usize| Tensor::from_slice(&[0_f32, 1.0, 2.0, 3.0, 4.0, rank as f32]);
    all_say(
        &run(|rank, x| x.f_add(&bias(rank))),
        &[
            "aten::add: argument 1, a plain tensor [6], at tests/debug.rs:",
            "differs from rank 0's on the ranks [1]",
            "plain tensors and numbers count as B",
        ],
    );
    all_say(&run(|_, x| x.f_add(&bias(0))), &["[4, 6]"]);
}

#[test]
fn numbers() {
    all_say(
        &run(|rank, x| x.f_nan_to_num(0.5 + rank as f64, None, None)),
        &["aten::nan_to_num: argument 1, ", "differs from rank 0's on the ranks [1]"],
    );
}

/// What is B is compared as well.
#[test]
fn operations_that_need_no_other_rank() {
    ranks(2, |group| {
        std::env::set_var("FLOW_GLOBAL_DEBUG", "1");
        let placement = Placement::all(&group).unwrap();
        let w = global::ones([4, 6], Kind::Float, &placement, [B]).unwrap();
        let result = if group.rank() == 0 { w.f_relu() } else { w.f_tanh() };
        let error = result.unwrap_err().to_string();
        all_say(&[error], &["aten::relu([4, 6] B) on rank 0, aten::tanh([4, 6] B) on rank 1"]);
    });
}
