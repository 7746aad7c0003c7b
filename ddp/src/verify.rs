//! Whether all ranks wrapped the same model.

use std::hash::Hasher;

use flow_comm::{ProcessGroup, Result};

/// Compares `own`, one line for each thing that must be equal, over all ranks. `Some` is the first
/// difference, in the same words on every rank.
pub(crate) fn difference(group: &ProcessGroup, own: &[String]) -> Result<Option<String>> {
    let text = own.join("\n").into_bytes();
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(&text);
    let digest = [hasher.finish() as i64, text.len() as i64];
    let mut digests = vec![0i64; 2 * group.world_size()];
    group.all_gather(&digest, &mut digests)?;
    if digests.chunks(2).all(|d| d == &digests[..2]) {
        return Ok(None);
    }
    // Only now are the texts themselves worth sending.
    let longest = digests.chunks(2).map(|d| d[1]).max().unwrap_or(0) as usize;
    let mut padded = text;
    padded.resize(longest, b'\n');
    let mut all = vec![0u8; longest * group.world_size()];
    group.all_gather(&padded, &mut all)?;
    let texts: Vec<String> =
        all.chunks(longest).map(|t| String::from_utf8_lossy(t).into_owned()).collect();
    let lines: Vec<Vec<&str>> =
        texts.iter().map(|t| t.trim_end_matches('\n').lines().collect()).collect();
    let (rank, first, theirs) = lines
        .iter()
        .enumerate()
        .find_map(|(rank, theirs)| {
            let at = (0..lines[0].len().max(theirs.len()))
                .find(|&i| lines[0].get(i) != theirs.get(i))?;
            Some((rank, lines[0].get(at).copied(), theirs.get(at).copied()))
        })
        .unwrap_or_default();
    let told = |rank: usize, line: Option<&str>| match line {
        Some(line) => format!("rank {} has {line}", group.ranks()[rank]),
        None => format!("rank {} has nothing in its place", group.ranks()[rank]),
    };
    Ok(Some(format!("{}, {}", told(0, first), told(rank, theirs))))
}
