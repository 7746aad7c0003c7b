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
    fn gpipe_is_idle_for_p_less_1_of_m_plus_p_less_1(p in 1..9usize, m in 1..20usize, costs in costs()) {
        let timeline = simulate(&Schedule::gpipe(p, m).unwrap(), &costs).unwrap();
        prop_assert_eq!(timeline.total(), (m + p - 1) as f64 * work(&costs));
        for rank in 0..p {
            let bubble = (p - 1) as f64 / (m + p - 1) as f64;
            prop_assert!((timeline.bubble(rank) - bubble).abs() < 1e-12);
            prop_assert_eq!(timeline.peak_activations(rank), m);
        }
    }

    #[test]
    fn one_f_one_b_is_as_fast_as_gpipe_and_holds_less(p in 1..9usize, m in 1..20usize, costs in costs()) {
        let timeline = simulate(&Schedule::one_f_one_b(p, m).unwrap(), &costs).unwrap();
        prop_assert_eq!(timeline.total(), (m + p - 1) as f64 * work(&costs));
        let expected: Vec<_> = (0..p).map(|rank| m.min(p - rank)).collect();
        prop_assert_eq!(peaks(&timeline), expected);
    }

    #[test]
    fn interleaving_divides_the_bubble(p in 1..9usize, v in 2..5usize, m in 1..40usize, costs in costs()) {
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
            prop_assert_eq!(timeline.total(), (2 * m) as f64 * work(&costs) + (p - 1) as f64);
            prop_assert_eq!(peaks(&timeline), vec![2 * p; p]);
        } else {
            prop_assert!(peaks(&timeline).into_iter().all(|peak| peak <= 2 * p.min(m)));
        }
    }
}
