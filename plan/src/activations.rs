//! Formulas of pipeline schedules: how many activations a rank holds.
//!
//! The tests of `bubble` compare them with the simulator.

use crate::schedule::ScheduleKind;

/// Returns the most activations of micro-batches that a rank holds, in all its stages together.
pub fn in_flight(
    kind: ScheduleKind,
    chunks: usize,
    rank: usize,
    ranks: usize,
    micro_batches: usize,
) -> usize {
    match kind {
        ScheduleKind::Gpipe => micro_batches,
        ScheduleKind::OneFOneB => micro_batches.min(ranks - rank),
        // As `Schedule::interleaved` says, by the size of the first group of micro-batches.
        ScheduleKind::Interleaved => {
            let (group, _) = groups(ranks, micro_batches);
            let most = 2 * (ranks - 1 - rank) + (chunks - 1) * group + 1;
            most.min(chunks * micro_batches)
        }
        ScheduleKind::ZbH1 => micro_batches.min(ranks),
        ScheduleKind::ZbV => 2 * micro_batches.min(ranks),
    }
}

/// Returns the most activations of micro-batches that a rank holds of its stage `chunk`.
pub fn in_flight_of_chunk(
    kind: ScheduleKind,
    (chunk, chunks): (usize, usize),
    rank: usize,
    ranks: usize,
    micro_batches: usize,
) -> usize {
    match kind {
        // A chunk's backward comes `later` forwards after its own. Every v-th group of these is the
        // chunk's.
        ScheduleKind::Interleaved => {
            let (group, uneven) = groups(ranks, micro_batches);
            let later = 2 * (chunks - 1 - chunk) * group
                + 2 * (ranks - 1 - rank)
                + 1
                + 2 * uneven * (chunks - 1);
            let rounds = later / (group * chunks);
            let rest = later % (group * chunks);
            micro_batches.min(rounds * group + rest.min(group))
        }
        ScheduleKind::ZbV => {
            micro_batches.min(if chunk == 0 { 2 * ranks - rank } else { rank + 1 })
        }
        _ => in_flight(kind, chunks, rank, ranks, micro_batches),
    }
}

/// Returns the most micro-batches of which a rank has the gradients of inputs, but not yet those of
/// weights, in its stage `chunk`. The micro-batch that is computed counts. Only in zero bubble
/// schedules this can be more than 1.
pub fn weights_pending(kind: ScheduleKind, chunk: usize, rank: usize) -> usize {
    match kind {
        ScheduleKind::Gpipe | ScheduleKind::OneFOneB | ScheduleKind::Interleaved => 1,
        ScheduleKind::ZbV if chunk > 0 => rank.max(1),
        ScheduleKind::ZbH1 | ScheduleKind::ZbV => rank + 1,
    }
}

/// Returns the largest group of micro-batches of an interleaved schedule, and 1 if others are smaller,
/// else 0.
fn groups(ranks: usize, micro_batches: usize) -> (usize, usize) {
    let count = (micro_batches / ranks).max(1);
    (micro_batches.div_ceil(count), usize::from(!micro_batches.is_multiple_of(count)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_activations() {
        // p micro-batches on rank 0, and 1 + (p - 1) / (p v) times as much when interleaved, as in
        // Korthikanti et al. 2022, section 4.2.3.
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 0, 8, 64), 8);
        let interleaved = in_flight(ScheduleKind::Interleaved, 2, 0, 8, 64);
        assert_eq!(interleaved as f64 / 2.0, 8.0 * (1.0 + 7.0 / 16.0));
        assert_eq!(in_flight(ScheduleKind::Gpipe, 1, 0, 8, 64), 64);
        assert_eq!(in_flight(ScheduleKind::OneFOneB, 1, 7, 8, 64), 1);
        // The last stage's, on the last rank: backwards follow their forwards.
        assert_eq!(in_flight_of_chunk(ScheduleKind::Interleaved, (1, 2), 7, 8, 64), 1);
    }
}
