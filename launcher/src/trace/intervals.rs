//! Stretches of time. Pure.

/// The start and the end, in microseconds.
pub type Interval = (f64, f64);

/// Intervals in order, merged where they overlap.
pub fn union(mut intervals: Vec<Interval>) -> Vec<Interval> {
    intervals.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut merged: Vec<Interval> = Vec::with_capacity(intervals.len());
    for (start, end) in intervals {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}

/// Returns the common parts of two lists of intervals that are in order and do not overlap.
pub fn overlap(first: &[Interval], second: &[Interval]) -> Vec<Interval> {
    let mut common = Vec::new();
    let mut index = 0;
    for (start, end) in first.iter().copied() {
        while index < second.len() && second[index].1 <= start {
            index += 1;
        }
        let later = second[index..].iter().take_while(|other| other.0 < end);
        common.extend(later.map(|other| (start.max(other.0), end.min(other.1))));
    }
    common
}

/// Returns the length of all of them.
pub fn total(intervals: &[Interval]) -> f64 {
    // Not `sum`, which is -0 for no intervals.
    intervals.iter().fold(0.0, |total, (start, end)| total + end - start)
}

/// Returns the lower one of two in the middle; 0 of nothing.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}
