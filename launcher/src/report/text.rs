//! Texts in messages.

/// Names ranks, as "rank 3" or "ranks 0, 2-7". The ranks are in ascending order.
pub fn ranks(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let mut list = Vec::new();
    for (first, last) in runs {
        if first == last {
            list.push(first.to_string());
        } else {
            list.push(format!("{first}-{last}"));
        }
    }
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(", "))
}

/// Escapes control characters, so that a terminal does not interpret them.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            printable.extend(character.escape_default());
        } else {
            printable.push(character);
        }
    }
    printable
}

/// Returns the start of a message, for an error about it.
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
