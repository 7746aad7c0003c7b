//! `FLOW_GLOBAL_DEBUG=1`: the ranks of a placement compare what must be the same on all of them.

use std::sync::OnceLock;

use flow_comm::digest;
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::line::line;
use crate::placement::Placement;
use crate::policy;
use crate::runtime::Runtime;
use crate::sequence;

/// Returns whether `FLOW_GLOBAL_DEBUG` is 1.
pub fn is_on() -> bool {
    static IS_ON: OnceLock<bool> = OnceLock::new();
    *IS_ON.get_or_init(|| policy::is_set("FLOW_GLOBAL_DEBUG"))
}

/// Compares the operations that the ranks have run.
///
/// # Errors
/// They differ: which ones.
pub fn operations(operation: &str, placement: &Placement, runtime: &Runtime) -> Result<()> {
    let ranks = placement.ranks();
    let groups = &runtime.groups;
    if ranks.len() < 2 {
        return Ok(());
    }
    let own = digest(placement);
    let words = [own, sequence::digest_of(groups, own), sequence::count(groups, own) as u64];
    let all = gather(placement, runtime, &words)?;
    if all.iter().all(|words| words[..2] == all[0][..2]) {
        return Ok(());
    }
    let group = groups.group(ranks)?;
    let first = &all[0];
    let key = format!("debug {:x} {}", first[0], first[2]);
    let what = sequence::differences(&key, groups, (&group, ranks), own);
    let reason = format!(
        "{what}; all ranks must run the same operations on global tensors, in the same order"
    );
    Err(Error::Differs { operation: operation.to_owned(), reason })
}

/// Compares what the ranks give to an operation: words for errors, and a digest. The positions of a
/// group must have the same.
///
/// # Errors
/// They differ: which ones, on which ranks, and `remedy`.
pub fn values(
    operation: &str,
    (placement, positions): (&Placement, &[Vec<usize>]),
    runtime: &Runtime,
    given: &[(String, u64)],
    remedy: &str,
) -> Result<()> {
    let ranks = placement.ranks();
    if ranks.len() < 2 || given.is_empty() {
        return Ok(());
    }
    let words: Vec<u64> = given.iter().map(|(_, digest)| *digest).collect();
    let all = gather(placement, runtime, &words)?;
    for (index, (what, _)) in given.iter().enumerate() {
        for group in positions {
            let others: Vec<usize> = group
                .iter()
                .filter(|&&position| all[position][index] != all[group[0]][index])
                .map(|&position| ranks[position])
                .collect();
            if !others.is_empty() {
                let at = line().map_or(String::new(), |line| format!(" at {line},"));
                let first = ranks[group[0]];
                return Err(Error::Differs {
                    operation: operation.to_owned(),
                    reason: format!(
                        "{what},{at} differs from rank {first}'s on the ranks {others:?}: {remedy}"
                    ),
                });
            }
        }
    }
    Ok(())
}

/// Returns the words of each rank of the placement, in its order.
fn gather(placement: &Placement, runtime: &Runtime, own: &[u64]) -> Result<Vec<Vec<u64>>> {
    let ranks = placement.ranks();
    let group = runtime.groups.group(ranks)?;
    let own: Vec<i64> = own.iter().map(|&word| word as i64).collect();
    let mut all = vec![0_i64; own.len() * ranks.len()];
    group.all_gather(&own[..], &mut all[..]).map_err(|error| {
        let group = Some((&group, ranks));
        sequence::explained(error.into(), &runtime.groups, group, digest(placement))
    })?;
    let words: Vec<u64> = all.into_iter().map(|word| word as u64).collect();
    Ok(words.chunks(own.len()).map(<[u64]>::to_vec).collect())
}

/// Returns the digest of a plain tensor's kind, sizes and bytes.
pub fn digest_of_tensor(tensor: &Tensor) -> Result<u64> {
    let own = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
    Ok(digest(&(own.kind() as i64, own.size(), flow_autograd::bytes(&own)?)))
}
