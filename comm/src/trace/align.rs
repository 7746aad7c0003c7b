//! Clocks of several machines: by how much this one's differs from rank 0's.
//!
//! Processes of one machine share its monotonic clock. The first rank of each other machine asks
//! rank 0 for the time, through the store, some times. The answer that came fastest counts: the
//! time in it was that of the middle between question and answer.

use std::time::{Duration, Instant};

use flow_store::{Error, Store, clock};

/// The number of times that rank 0 is asked.
const ROUNDS: usize = 8;
/// The time that ranks wait for each other: all are joining the job at the same time.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Returns how far rank 0's monotonic clock is ahead of this machine's, in nanoseconds. All ranks
/// call this; `leaders` are the first ranks of their machines, that of rank 0 first, and `leader`
/// is this rank's.
pub fn clock_offset(
    store: &Store,
    prefix: &str,
    rank: usize,
    leaders: &[usize],
    leader: usize,
) -> Result<i64, Error> {
    if rank == 0 {
        for &leader in leaders.iter().skip(1) {
            for round in 0..ROUNDS {
                store.get(&key(prefix, "question", leader, round), TIMEOUT)?;
                let answer = now().to_string();
                store.set(&key(prefix, "answer", leader, round), answer.as_bytes())?;
            }
        }
        return Ok(0);
    }
    if Some(&leader) == leaders.first() {
        return Ok(0);
    }
    let offset = key(prefix, "offset", leader, 0);
    if rank != leader {
        return Ok(number(&store.get(&offset, TIMEOUT)?));
    }
    let mut rounds = [Round::default(); ROUNDS];
    for (index, round) in rounds.iter_mut().enumerate() {
        round.asked = now();
        store.set(&key(prefix, "question", leader, index), b"")?;
        round.theirs = number(&store.get(&key(prefix, "answer", leader, index), TIMEOUT)?);
        round.answered = now();
    }
    let found = best_offset(&rounds);
    store.set(&offset, found.to_string().as_bytes())?;
    Ok(found)
}

/// Returns the key of what a leader asks rank 0, or is answered.
fn key(prefix: &str, what: &str, leader: usize, round: usize) -> String {
    format!("{prefix}clock/{what}/{leader}/{round}")
}

/// One question to rank 0, in nanoseconds on this machine's clock and, `theirs`, on rank 0's.
#[derive(Default, Clone, Copy)]
struct Round {
    asked: i64,
    theirs: i64,
    answered: i64,
}

/// Returns how far rank 0's clock is ahead of this machine's, by the fastest round.
fn best_offset(rounds: &[Round]) -> i64 {
    let fastest = rounds.iter().min_by_key(|round| round.answered - round.asked);
    fastest.map_or(0, |round| round.theirs - (round.asked + round.answered) / 2)
}

/// Nanoseconds on this machine's monotonic clock.
fn now() -> i64 {
    clock::monotonic_of(Instant::now()).as_nanos() as i64
}

fn number(text: &[u8]) -> i64 {
    std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_is_that_of_the_fastest_round() {
        for offset in [5_000, -5_000] {
            // The answer of the second round takes longest to arrive.
            let round = |asked: i64, question: i64, answer: i64| Round {
                asked,
                theirs: asked + question + offset,
                answered: asked + question + answer,
            };
            let rounds = [round(10_000, 30, 50), round(11_000, 10, 90), round(12_000, 20, 20)];
            assert_eq!(best_offset(&rounds), offset);
            assert_eq!(best_offset(&rounds[1..2]), offset - 40);
        }
    }
}
