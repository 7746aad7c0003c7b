//! Texts in messages.

/// "rank 3", "ranks 0, 2-7". The ranks are in ascending order.
pub fn ranks(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let run = |(first, last): &(u32, u32)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    let list = runs.iter().map(run).collect::<Vec<_>>().join(", ");
    format!("{} {list}", if ranks.len() == 1 { "rank" } else { "ranks" })
}

/// The text with control characters escaped, so that a terminal does not interpret them.
pub fn printable(text: &str) -> String {
    let escaped = |character: char| match character.is_control() {
        true => character.escape_default().to_string(),
        false => character.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// The start of a message, for an error about it.
pub fn excerpt(message: &[u8]) -> String {
    const BYTES: usize = 200;
    printable(&String::from_utf8_lossy(&message[..message.len().min(BYTES)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_in_runs() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 2, 3, 4, 7]), "ranks 0, 2-4, 7");
    }
}
