//! Ranks that run different operations on global tensors, and what cannot be done with one that is
//! split: errors that say which operation, where, and what to do.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use flow_comm::ProcessGroup;
use flow_global::{GlobalTensor, Placement, S, ones};
use flow_tests::registry::{Job, Scenario, by_hand, launched, scenario};
use tch::{Kind, Tensor};

const JOBS: &[Job] = &[launched(2), launched(3), by_hand(&[1, 1]), by_hand(&[2, 1])];
const COMPARED: &[Job] = &[debug(launched(2)), debug(by_hand(&[1, 1]))];
const STRICT: &[Job] = &[launched(2).mode("strict", "FLOW_GLOBAL_STRICT", "1")];

const fn debug(job: Job) -> Job {
    job.mode("debug", "FLOW_GLOBAL_DEBUG", "1")
}

pub const SCENARIOS: &[Scenario] = &[
    scenario("another_operation", another_operation, JOBS),
    scenario("another_operation_is_compared", at_once, COMPARED),
    scenario("another_plain_tensor_is_compared", another_plain_tensor, COMPARED),
    scenario("one_rank_reads", one_rank_reads, &[by_hand(&[2])]),
    scenario("one_rank_reads_and_others_go_on", one_rank_reads_first, JOBS),
    scenario("prints_and_saves", prints_and_saves, &[launched(2)]),
    scenario("no_rule", no_rule, STRICT),
];

fn split(group: &ProcessGroup) -> Result<Tensor> {
    Ok(ones([6, 6], Kind::Float, &Placement::all(group)?, [S(0)])?)
}

/// That it is an error with all of these words.
fn fails_with<T>(result: Result<T, impl std::fmt::Display>, words: &[&str]) -> Result<()> {
    let error = result.err().ok_or_else(|| anyhow!("there is no error"))?.to_string();
    for words in words {
        ensure!(error.contains(words), "{words:?} is not in: {error}");
    }
    Ok(())
}

fn another_operation(group: &ProcessGroup) -> Result<()> {
    let x = split(group)?;
    let _ = x.full()?;
    let y = if group.rank() == 1 { x.tanh() } else { x.relu() };
    let result = (y * &x).full();
    fails_with(
        result,
        &[
            "operation 2 is aten::relu([6, 6] S(0)) on rank 0, aten::tanh([6, 6] S(0)) on rank 1",
            "rank 1 is at operation 4, boxing([6, 6] S(0)) -> B, at ",
            "src/bin/ddp_worker/out_of_step.rs:",
            "all ranks must run the same operations on global tensors, in the same order",
        ],
    )
}

/// Before anything is boxed.
fn at_once(group: &ProcessGroup) -> Result<()> {
    let x = split(group)?;
    let result = if group.rank() == 1 { x.f_tanh() } else { x.f_relu() };
    fails_with(
        result,
        &[
            "operation 1 is aten::relu([6, 6] S(0)) on rank 0, aten::tanh([6, 6] S(0)) on rank 1",
            "src/bin/ddp_worker/out_of_step.rs:",
        ],
    )
}

fn another_plain_tensor(group: &ProcessGroup) -> Result<()> {
    let x = split(group)?;
    let bias = Tensor::from(group.rank() as f64);
    fails_with(
        x.f_add(&bias),
        &[
            "aten::add: argument 1, a plain tensor [], at ",
            "differs from rank 0's on the ranks [1]",
        ],
    )
}

const READ: &str =
    "all ranks must take part: call full() or double_value() on all of them, or to_local() on one";

fn one_rank_reads(group: &ProcessGroup) -> Result<()> {
    group.barrier()?;
    let loss = split(&group.with_timeout(Duration::from_secs(5)))?.sum(Kind::Float);
    if group.rank() == 0 {
        fails_with(loss.f_double_value(&[]), &["rank 0 is at operation 2, ", READ])?;
    }
    // The other rank does something else meanwhile.
    Ok(group.barrier()?)
}

fn one_rank_reads_first(group: &ProcessGroup) -> Result<()> {
    let x = split(group)?;
    let loss = x.sum(Kind::Float);
    if group.rank() == 0 {
        let words = "operation 2 is aten::_local_scalar_dense([] P) on rank 0, boxing([6, 6] S(0)) \
                     -> B on rank 1";
        return fails_with(loss.f_double_value(&[]), &[words, READ]);
    }
    fails_with(x.full(), &["operation 2 is aten::_local_scalar_dense([] P) on rank 0"])
}

fn prints_and_saves(group: &ProcessGroup) -> Result<()> {
    let x = split(group)?;
    let has_no_memory = "use full() for the logical value, or to_local()";
    fails_with(x.save_to_stream(std::io::sink()), &[has_no_memory])?;
    fails_with(Vec::<f32>::try_from(&x.view([36])), &[has_no_memory])?;
    let panics = [
        catch_unwind(AssertUnwindSafe(|| drop(x.to_string(80)))),
        catch_unwind(AssertUnwindSafe(|| drop(format!("{x}")))),
        catch_unwind(AssertUnwindSafe(|| _ = x.data_ptr())),
    ];
    let mut ran = 0;
    for panic in panics {
        let Err(panic) = panic else {
            ran += 1;
            continue;
        };
        let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        ensure!(text.contains(has_no_memory), "{text}");
    }
    // `to_string` returns its error.
    ensure!(ran == 1, "{ran} of them ran");
    fails_with(x.to_string(80), &[has_no_memory])?;
    Ok(())
}

fn no_rule(group: &ProcessGroup) -> Result<()> {
    let x = split(group)?;
    fails_with(
        x.f_masked_select(&x.gt(0)),
        &["masked_select: it has no rule, and FLOW_GLOBAL_STRICT=1 forbids to gather its inputs"],
    )
}
