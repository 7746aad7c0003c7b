//! A pipeline schedule of one's own, and when its ranks do what.

use flow_plan::schedule::{Action, Action::*, Costs, Schedule, picture, simulate};

fn main() -> Result<(), flow_plan::schedule::ScheduleError> {
    // Two ranks, two micro-batches; the last forward's backward comes first.
    let schedule = Schedule::custom(vec![0, 1], vec![computations(0), computations(1)])?;
    let costs = Costs { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, send: 0.5 };
    let timeline = simulate(&schedule, &costs)?;
    print!("{}", picture(&timeline));
    println!("a step takes {}, rank 0 is idle for {}", timeline.total(), timeline.idle(0));
    println!("rank 0 holds {} activations at most", timeline.peak_activations(0));
    Ok(())
}

/// What the rank of a stage computes, in order.
fn computations(stage: usize) -> Vec<Action> {
    let forwards = [0, 1].map(|micro_batch| Forward { stage, micro_batch });
    let backwards = [1, 0].map(|micro_batch| Backward { stage, micro_batch });
    [forwards, backwards].concat()
}
