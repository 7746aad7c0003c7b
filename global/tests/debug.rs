//! `FLOW_GLOBAL_DEBUG=1`: each operation is compared, and the bytes of plain tensors.

#[path = "it/common/ranks.rs"]
mod common;

use common::ranks;
use flow_global as global;
use flow_global::{B, GlobalTensor, P, Placement, S};
use flow_harness::runs_apart;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const DEBUG: &[(&str, &str)] = &[("FLOW_GLOBAL_DEBUG", "1")];

/// What the ranks get as the result of `body`, on two ranks, each with a split tensor.
fn run(body: impl Fn(usize, &Tensor) -> Result<Tensor, tch::TchError> + Sync) -> Vec<String> {
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
    if runs_apart(the_first_operation_that_differs, DEBUG) {
        return;
    }
    // Nothing is boxed.
    let texts = run(|rank, x| if rank == 0 { x.f_relu() } else { x.f_tanh() });
    all_say(
        &texts,
        &[
            "operation 1 is aten::relu([4, 6] S(0)) on rank 0, aten::tanh([4, 6] S(0)) on rank 1",
            "at tests/debug.rs:45",
            "all ranks must run the same operations",
        ],
    );
}

#[test]
fn plain_tensors() {
    if runs_apart(plain_tensors, DEBUG) {
        return;
    }
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
    if runs_apart(numbers, DEBUG) {
        return;
    }
    all_say(
        &run(|rank, x| x.f_nan_to_num(0.5 + rank as f64, None, None)),
        &["aten::nan_to_num: argument 1, ", "differs from rank 0's on the ranks [1]"],
    );
}

/// What is B is compared as well.
#[test]
fn operations_that_need_no_other_rank() {
    if runs_apart(operations_that_need_no_other_rank, DEBUG) {
        return;
    }
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let w = global::ones([4, 6], Kind::Float, &placement, [B]).unwrap();
        let result = if group.rank() == 0 { w.f_relu() } else { w.f_tanh() };
        let error = result.unwrap_err().to_string();
        all_say(&[error], &["aten::relu([4, 6] B) on rank 0, aten::tanh([4, 6] B) on rank 1"]);
    });
}

/// The counts of operations differ: one rank has taken its part of what it has, which needs no other
/// rank.
#[test]
fn ranks_that_have_run_more_and_less() {
    if runs_apart(ranks_that_have_run_more_and_less, DEBUG) {
        return;
    }
    let texts = run(|rank, x| {
        let placement = x.placement().unwrap();
        let w = global::ones([4, 6], Kind::Float, &placement, [B]).unwrap();
        if rank == 0 {
            let _ = w.to_global(&placement, [S(0)]).unwrap();
        }
        x.f_relu()
    });
    all_say(
        &texts,
        &["operation 1 is boxing([4, 6] B) -> S(0) on rank 0, aten::relu([4, 6] S(0)) on rank 1"],
    );
}

#[test]
fn tensors_that_are_distributed() {
    if runs_apart(tensors_that_are_distributed, DEBUG) {
        return;
    }
    let own = |rank: usize| Tensor::from_slice(&[0_f32, 1.0, 2.0, rank as f32]);
    let distribute = |tensor: &Tensor, x: &Tensor| {
        let placement = x.placement().unwrap();
        let tensor = global::distribute_tensor(tensor, &placement, [S(0)]);
        tensor.map_err(|error| tch::TchError::Convert(error.to_string()))
    };
    all_say(
        &run(|rank, x| distribute(&own(rank), x)),
        &[
            "distribute_tensor: the tensor [4], at tests/debug.rs:",
            "differs from rank 0's on the ranks [1]: give all ranks the same tensor",
        ],
    );
    assert_eq!(run(|_, x| distribute(&own(0), x)), ["[4]", "[4]"]);
    // The sizes, and data that gets a kind first.
    all_say(
        &run(|rank, x| distribute(&own(0).narrow(0, 0, 3 + rank as i64), x)),
        &["on the ranks [1]"],
    );
    let new = |rank: usize, x: &Tensor| {
        let tensor = global::new_tensor(x, &own(rank), &x.placement().unwrap(), [B]);
        tensor.map_err(|error| tch::TchError::Convert(error.to_string()))
    };
    all_say(&run(new), &["distribute_tensor: the tensor [4], at"]);
}

#[test]
fn locals() {
    if runs_apart(locals, DEBUG) {
        return;
    }
    let made = |local: Tensor, x: &Tensor, sizes: [i64; 1], sbp: global::Sbp| {
        let tensor = global::from_local(&local, sizes, &x.placement().unwrap(), [sbp]);
        tensor.map_err(|error| tch::TchError::Convert(error.to_string()))
    };
    let own = |rank: usize| Tensor::from_slice(&[0_f32, 1.0, 2.0, rank as f32]);
    all_say(
        &run(|rank, x| made(own(rank), x, [4], B)),
        &[
            "from_local: the local [4] of B, at tests/debug.rs:",
            "differs from rank 0's on the ranks [1]: what is B is the same on all ranks",
        ],
    );
    // Parts and partial sums differ by nature.
    assert_eq!(run(|rank, x| made(own(rank), x, [8], S(0))), ["[8]", "[8]"]);
    assert_eq!(run(|rank, x| made(own(rank), x, [4], P)), ["[4]", "[4]"]);
    // Rank 1 has more than its part: rank 0 would not know.
    let texts = run(|rank, x| made(Tensor::zeros([3 + rank as i64], F32), x, [6], S(0)));
    all_say(
        &texts,
        &["from_local: ", "of a tensor [6] S(0)", "differs from rank 0's on the ranks [1]"],
    );
}
