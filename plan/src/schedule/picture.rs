//! Timelines, and a comparison of schedules, as text.

use std::fmt::Write;

use super::action::Action;
use super::definition::Schedule;
use super::error::Result;
use super::kind::ScheduleKind;
use super::simulator::{Costs, Timeline, simulate};

/// The longest line, without the rank.
const COLUMNS: f64 = 10_000.0;

/// Draws a timeline as text: a line for each rank, with time to the right.
///
/// `F3` is the forward of micro-batch 3, `B3` its backward, `I3` and `W3` the gradients of inputs
/// and of weights alone; `2F3` is the forward of stage 2, where ranks have several stages: torch's
/// names. `-` goes on until the computation is over, and dots are idle time. The shortest
/// computation is as wide as its name, as long as lines do not get longer than 10000 columns.
///
/// ```
/// use flow_plan::schedule::{picture, simulate, Costs, Schedule};
///
/// let timeline = simulate(&Schedule::one_f_one_b(2, 2)?, &Costs::default())?;
/// assert_eq!(
///     picture(&timeline),
///     "\
/// rank 0: F0 F1 ..... B0--- .. B1---
/// rank 1: .. F0 B0--- F1 B1--- .....
/// "
/// );
/// # Ok::<(), flow_plan::schedule::ScheduleError>(())
/// ```
pub fn picture(timeline: &Timeline) -> String {
    let ranks = 0..timeline.ranks();
    let several = ranks.clone().any(|rank| {
        let mut stages = timeline.intervals(rank).iter().map(|interval| interval.action.stage());
        let first = stages.next();
        stages.any(|stage| Some(stage) != first)
    });
    let intervals = ranks.clone().flat_map(|rank| timeline.intervals(rank));
    let visible = intervals.filter(|interval| interval.end > interval.start);
    let mut widest = 0;
    let mut shortest = f64::INFINITY;
    for interval in visible {
        widest = name(interval.action, several).len().max(widest);
        shortest = (interval.end - interval.start).min(shortest);
    }
    let scale = ((widest + 1) as f64 / shortest).min(COLUMNS / timeline.total());
    let digits = timeline.ranks().saturating_sub(1).to_string().len();
    let mut text = String::new();
    for rank in ranks {
        let mut line = format!("rank {rank:digits$}: ");
        let mut now = 0;
        for interval in timeline.intervals(rank) {
            let start = column(interval.start, scale);
            let end = column(interval.end, scale);
            fill(&mut line, "", '.', start - now);
            fill(&mut line, &name(interval.action, several), '-', end - start);
            now = end;
        }
        fill(&mut line, "", '.', column(timeline.total(), scale) - now);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Returns the column of a time, with `scale` columns for a unit of time.
fn column(time: f64, scale: f64) -> usize {
    (time * scale).round() as usize
}

/// Adds so many columns to a line: the name, copies of `filler`, and a space.
fn fill(line: &mut String, name: &str, filler: char, columns: usize) {
    let Some(columns) = columns.checked_sub(1) else { return };
    line.extend(name.chars().chain(std::iter::repeat(filler)).take(columns));
    line.push(' ');
}

fn name(action: Action, with_stage: bool) -> String {
    let letter = match action {
        Action::Forward { .. } => 'F',
        Action::Backward { .. } => 'B',
        Action::BackwardInput { .. } => 'I',
        _ => 'W',
    };
    let name = format!("{letter}{}", action.micro_batch());
    if with_stage {
        return format!("{}{name}", action.stage());
    }
    name
}

/// Compares all schedules in a table. It has how long a step takes, the part of it that ranks are
/// idle, and the most activations that a rank holds at once. `costs` are those of all stages of a
/// rank together. With several stages a rank, each takes an equal part of them, and counts as such
/// a part of an activation.
///
/// # Errors
/// A count of 0, too many computations, or costs that are no times.
pub fn table(ranks: usize, chunks: usize, micro_batches: usize, costs: &Costs) -> Result<String> {
    let mut text = String::from("schedule           time  bubble  activations\n");
    for name in ScheduleKind::ALL.map(ScheduleKind::name) {
        let schedule = Schedule::named(name, ranks, chunks, micro_batches)?;
        let stages = (schedule.stages() / schedule.ranks()) as f64;
        let of_stage = Costs {
            forward: costs.forward / stages,
            backward_input: costs.backward_input / stages,
            backward_weight: costs.backward_weight / stages,
            send: costs.send,
        };
        let timeline = simulate(&schedule, &of_stage)?;
        let ranks = 0..timeline.ranks();
        let bubble = ranks.clone().map(|rank| timeline.bubble(rank)).fold(0.0, f64::max);
        let peak = ranks.map(|rank| timeline.peak_activations(rank)).max().unwrap_or(0);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{name:<12} {:>10.4} {:>6.1}% {:>12.2}",
            timeline.total(),
            100.0 * bubble,
            peak as f64 / stages
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_named_where_ranks_have_several() {
        let timeline = simulate(&Schedule::zb_v(2, 2).unwrap(), &Costs::default()).unwrap();
        assert_eq!(
            picture(&timeline),
            "\
rank 0: 0F0 0F1 ... 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 ... 0I1 0W1
rank 1: ... 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1 ...
"
        );
    }

    #[test]
    fn what_takes_no_time_is_not_drawn_and_long_lines_are_squeezed() {
        let schedule = Schedule::gpipe(1, 2).unwrap();
        let of = |forward, backward_weight| {
            let costs = Costs { forward, backward_input: 0.0, backward_weight, send: 0.0 };
            picture(&simulate(&schedule, &costs).unwrap())
        };
        assert_eq!(of(0.0, 1.0), "rank 0: B0 B1\n");
        assert_eq!(of(0.0, 0.0), "rank 0:\n");
        let squeezed = of(1e-9, 1.0);
        assert!(squeezed.starts_with("rank 0: B0--"), "{squeezed}");
        assert_eq!(squeezed.len(), "rank 0: \n".len() + 9_999);
    }

    #[test]
    fn the_table_counts_parts_of_activations() {
        let table = table(4, 2, 8, &Costs::default()).unwrap();
        let rows: Vec<Vec<&str>> =
            table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        // All have 24 to compute.
        let expected = [
            ["gpipe", "33.0000", "27.3%", "8.00"],
            ["1f1b", "33.0000", "27.3%", "4.00"],
            ["interleaved", "28.5000", "15.8%", "5.50"],
            ["zb-h1", "27.0000", "11.1%", "4.00"],
            ["zb-v", "25.5000", "5.9%", "4.00"],
        ];
        assert_eq!(rows, expected);
    }
}
