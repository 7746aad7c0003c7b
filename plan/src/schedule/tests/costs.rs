//! Schedules in the simulator: what the papers say of their time and memory.

use proptest::prelude::*;

use super::super::*;

/// Times of computations, such that sums of them are exact.
fn costs() -> impl Strategy<Value = Costs> {
    let cost = || (1..8u8).prop_map(|cost| f64::from(cost) / 4.0);
    (cost(), cost(), cost()).prop_map(|(forward, backward_input, backward_weight)| Costs {
        forward,
        backward_input,
        backward_weight,
        send: 0.0,
    })
}

fn work(costs: &Costs) -> f64 {
    costs.forward + costs.backward_input + costs.backward_weight
}

fn peaks(timeline: &Timeline) -> Vec<usize> {
    (0..timeline.ranks()).map(|rank| timeline.peak_activations(rank)).collect()
}

proptest! {
    #[test]
    fn gpipe_is_idle_for_p_less_1_of_m_plus_p_less_1(
        p in 1..9usize, m in 1..20usize, costs in costs(),
    ) {
        let timeline = simulate(&Schedule::gpipe(p, m).unwrap(), &costs).unwrap();
        prop_assert_eq!(timeline.total(), (m + p - 1) as f64 * work(&costs));
        for rank in 0..p {
            let bubble = (p - 1) as f64 / (m + p - 1) as f64;
            prop_assert!((timeline.bubble(rank) - bubble).abs() < 1e-12);
            prop_assert_eq!(timeline.peak_activations(rank), m);
        }
    }

    #[test]
    fn one_f_one_b_is_as_fast_as_gpipe_and_holds_less(
        p in 1..9usize, m in 1..20usize, costs in costs(),
    ) {
        let timeline = simulate(&Schedule::one_f_one_b(p, m).unwrap(), &costs).unwrap();
        prop_assert_eq!(timeline.total(), (m + p - 1) as f64 * work(&costs));
        let expected: Vec<_> = (0..p).map(|rank| m.min(p - rank)).collect();
        prop_assert_eq!(peaks(&timeline), expected);
    }

    #[test]
    fn interleaving_divides_the_bubble(
        p in 1..9usize, v in 2..5usize, m in 1..40usize, costs in costs(),
    ) {
        let timeline = simulate(&Schedule::interleaved(p, v, m).unwrap(), &costs).unwrap();
        if m >= p {
            prop_assert_eq!(timeline.total(), (v * m + p - 1) as f64 * work(&costs));
        }
        let group = m.div_ceil((m / p).max(1));
        let expected: Vec<_> =
            (0..p).map(|rank| (v * m).min((v - 1) * group + 2 * (p - 1 - rank) + 1)).collect();
        prop_assert_eq!(peaks(&timeline), expected);
    }

    #[test]
    fn zb_h1_fills_the_end(p in 1..9usize, m in 1..30usize, costs in costs()) {
        let timeline = simulate(&Schedule::zb_h1(p, m).unwrap(), &costs).unwrap();
        let Costs { forward, backward_input, backward_weight, .. } = costs;
        if m >= p && backward_weight <= forward.min(backward_input) {
            let bubble = forward + backward_input - backward_weight;
            prop_assert_eq!(timeline.total(), m as f64 * work(&costs) + (p - 1) as f64 * bubble);
        }
        prop_assert_eq!(peaks(&timeline), vec![m.min(p); p]);
    }

    #[test]
    fn zb_v_is_never_idle_once_begun(p in 1..9usize, m in 1..40usize) {
        let costs = Costs::default();
        let timeline = simulate(&Schedule::zb_v(p, m).unwrap(), &costs).unwrap();
        if m >= 2 * p - 1 {
            for rank in 0..p {
                let intervals = timeline.intervals(rank);
                let span = intervals.last().unwrap().end - intervals[0].start;
                prop_assert_eq!(span, (2 * m) as f64 * work(&costs));
            }
        }
    }

    #[test]
    fn zb_v_holds_as_much_on_all_ranks_as_1f1b_on_rank_0(
        p in 1..9usize,
        m in 1..40usize,
        costs in costs(),
    ) {
        let timeline = simulate(&Schedule::zb_v(p, m).unwrap(), &costs).unwrap();
        let Costs { forward, backward_input, backward_weight, .. } = costs;
        if m >= 2 * p - 1 {
            prop_assert_eq!(peaks(&timeline), vec![2 * p; p]);
            if backward_weight <= forward && forward <= backward_input {
                let hop = backward_input.max(2.0 * (backward_input - backward_weight));
                let expected = (2 * m) as f64 * work(&costs) + (p - 1) as f64 * hop;
                prop_assert_eq!(timeline.total(), expected);
            }
        } else {
            prop_assert!(peaks(&timeline).into_iter().all(|peak| peak <= 2 * p.min(m)));
        }
    }

    #[test]
    fn none_is_slower_than_1f1b(
        p in 1..9usize, v in 1..5usize, m in 1..30usize, costs in costs(),
    ) {
        let slowest = (m + p - 1) as f64 * work(&costs);
        for name in ScheduleKind::ALL.map(ScheduleKind::name) {
            let schedule = Schedule::named(name, p, v, m).unwrap();
            let stages = (schedule.stages() / p) as f64;
            let total = simulate(&schedule, &costs).unwrap().total() / stages;
            prop_assert!(total <= slowest + 1e-9, "{name}: {total}");
        }
    }

    #[test]
    fn a_transfer_delays_the_way_there_and_back(p in 1..9usize, m in 1..20usize, send in 0..4u8) {
        let costs = Costs { send: f64::from(send), ..Costs::default() };
        let timeline = simulate(&Schedule::gpipe(p, m).unwrap(), &costs).unwrap();
        let hops = 2 * (p - 1);
        let expected = (m + p - 1) as f64 * work(&costs) + hops as f64 * costs.send;
        prop_assert_eq!(timeline.total(), expected);
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_an_error() {
    // Stages 0 and 2 are on rank 0, which begins with stage 2.
    let of = |stage| {
        [Action::Forward { stage, micro_batch: 0 }, Action::Backward { stage, micro_batch: 0 }]
    };
    let ([f0, b0], [f2, b2]) = (of(0), of(2));
    let error = |first: Vec<Action>| {
        let computations = vec![first, of(1).to_vec()];
        Schedule::custom(vec![0, 1, 0], computations).unwrap_err().to_string()
    };
    assert_eq!(
        error(vec![f2, f0, b2, b0]),
        "the schedule does not end: rank 0 waits for the receive of the input of stage 2, \
         micro-batch 0; rank 1 waits for the receive of the input of stage 1, micro-batch 0"
    );
    assert_eq!(
        error(vec![f0, b2, f2, b0]),
        "the schedule does not end: rank 0: forward of stage 2, micro-batch 0 must come before \
         backward of stage 2, micro-batch 0; rank 1 waits for the receive of the output's gradient \
         of stage 1, micro-batch 0"
    );
}

#[test]
fn receives_in_another_order_than_the_sends_are_an_error() {
    let mut schedule = Schedule::gpipe(2, 2).unwrap();
    let receives = |micro_batch| Action::RecvActivation { stage: 1, micro_batch };
    let actions = &mut schedule.actions[1];
    actions.retain(|action| ![receives(0), receives(1)].contains(action));
    actions.splice(0..0, [receives(1), receives(0)]);
    assert_eq!(
        simulate(&schedule, &Costs::default()).unwrap_err().to_string(),
        "rank 1: receive of the input of stage 1, micro-batch 1: rank 0 sends what the receive of \
         the input of stage 1, micro-batch 0 takes before"
    );
}

#[test]
fn costs_are_times() {
    let schedule = Schedule::gpipe(1, 1).unwrap();
    for cost in [-1.0, f64::NAN, f64::INFINITY] {
        let costs = Costs { backward_weight: cost, ..Costs::default() };
        let error = simulate(&schedule, &costs).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("a cost of {cost}; costs are finite numbers, 0 or more")
        );
    }
}
