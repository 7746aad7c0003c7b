//! Whether a model can be wrapped, and whether all ranks wrap the same one.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::hash::Hasher;

use flow_autograd::GradHook;
use flow_comm::ProcessGroup;
use flow_tensor::{overlaps, OVERLAPS};
use tch::{Device, Kind, Tensor};

use crate::error::{job_rank, Error, Result};
use crate::grad_layout::GradLayout;
use crate::options::Options;

/// Compares `own`, one line for each thing that must be equal, over all ranks. `Some` is the first
/// difference, in the same words on every rank.
pub(crate) fn first_mismatch(
    group: &ProcessGroup,
    own: &[String],
) -> flow_comm::Result<Option<String>> {
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
    let texts = gather_texts(group, &own.join("\n"))?;
    let lines: Vec<Vec<&str>> = texts.iter().map(|text| text.lines().collect()).collect();
    let (rank, first, theirs) = lines
        .iter()
        .enumerate()
        .find_map(|(rank, theirs)| {
            let at = (0..lines[0].len().max(theirs.len()))
                .find(|&i| lines[0].get(i) != theirs.get(i))?;
            Some((rank, lines[0].get(at).copied(), theirs.get(at).copied()))
        })
        .unwrap_or_default();
    let described = |rank: usize, line: Option<&str>| match line {
        Some(line) => format!("rank {} has {line}", group.ranks()[rank]),
        None => format!("rank {} has nothing in its place", group.ranks()[rank]),
    };
    Ok(Some(format!("{}, {}", described(0, first), described(rank, theirs))))
}

/// What this rank has made, if all ranks have made theirs. An error of one rank is one of all, so
/// that none goes on to wait for it.
pub(crate) fn agree<T>(group: &ProcessGroup, made: Result<T>) -> Result<T> {
    let own = made.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let texts = gather_texts(group, &own);
    let made = made?;
    match texts?.into_iter().find(|text| !text.is_empty()) {
        Some(reason) => Err(Error::Peer { rank: job_rank(group), reason }),
        None => Ok(made),
    }
}

/// All ranks' texts.
fn gather_texts(group: &ProcessGroup, own: &str) -> flow_comm::Result<Vec<String>> {
    let mut lengths = vec![0i64; group.world_size()];
    group.all_gather(&[own.len() as i64], &mut lengths)?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let mut all = vec![0u8; lengths.iter().sum()];
    if !all.is_empty() {
        group.all_gather_v(own.as_bytes(), &mut all[..], &lengths)?;
    }
    let mut rest = &all[..];
    let text = |length| {
        let (text, others) = rest.split_at(length);
        rest = others;
        String::from_utf8_lossy(text).into_owned()
    };
    Ok(lengths.into_iter().map(text).collect())
}

/// What ranks may not mix: GPUs, whichever they are, and the CPU.
pub(crate) fn device_kind(device: Device) -> String {
    match device {
        Device::Cuda(_) => "a GPU".into(),
        Device::Cpu => "the CPU".into(),
        other => format!("{other:?}"),
    }
}

/// What must be equal on all ranks of the model's tensors, each in a line.
pub(crate) fn describe(
    parameters: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
) -> Vec<String> {
    let mut first_names = HashMap::new();
    let parameters = parameters.iter().map(|named| ("parameter", named));
    let line = |(what, (name, tensor)): (&str, &(String, Tensor))| {
        let name = name.replace('\n', " ");
        let form = format!(
            "{:?} {:?} requires_grad={}",
            tensor.size(),
            tensor.kind(),
            tensor.requires_grad()
        );
        // What lies at the same place in memory is added up.
        let layout =
            if what == "parameter" { GradLayout::of(tensor).to_string() } else { String::new() };
        let line = format!("{what} {name} {form}{layout}");
        match first_names.entry(flow_autograd::identity(tensor)) {
            Entry::Occupied(first) => format!("{line}, the same tensor as {}", first.get()),
            Entry::Vacant(none) => {
                none.insert(name);
                line
            }
        }
    };
    parameters.chain(buffers.iter().map(|named| ("buffer", named))).map(line).collect()
}

/// No other `Ddp` may have hooks on the parameters.
pub(crate) fn check_hooks(parameters: &[(String, Tensor)]) -> Result<(), String> {
    for (name, tensor) in parameters.iter().filter(|(_, tensor)| tensor.requires_grad()) {
        match GradHook::is_installed(tensor) {
            Ok(false) => {}
            Ok(true) => {
                return Err(format!("parameter {name} is wrapped in a Ddp already: drop the first"))
            }
            Err(error) => return Err(format!("parameter {name}: {error}")),
        }
    }
    Ok(())
}

/// What this rank finds wrong with a model, without other ranks.
pub(crate) fn check(
    parameters: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
    options: &Options,
    broadcast_buffers: bool,
) -> Result<(), String> {
    for (name, tensor) in parameters.iter().chain(buffers) {
        if let Some(reason) = flow_autograd::unsendable(tensor) {
            return Err(format!("{name} {reason}"));
        }
    }
    if !parameters.iter().any(|(_, t)| t.requires_grad()) {
        return Err(
            "the model has no parameter that requires a gradient: there is nothing to wrap".into(),
        );
    }
    if options.caps.first == 0 || options.caps.rest == 0 {
        return Err("bucket caps must be positive".into());
    }
    let (first, device) = (&parameters[0].0, parameters[0].1.device());
    for (name, tensor) in parameters.iter().chain(buffers) {
        if tensor.device() != device {
            let other = tensor.device();
            return Err(format!(
                "{first} is on {device:?} and {name} on {other:?}: a model must be on one device"
            ));
        }
        let floating =
            matches!(tensor.kind(), Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
        if tensor.requires_grad() && !floating {
            return Err(format!(
                "{name} is {:?}: parameters must be Float, Double, Half or BFloat16",
                tensor.kind()
            ));
        }
    }
    let written = parameters.iter().chain(buffers.iter().filter(|_| broadcast_buffers));
    if let Some((name, _)) = written.into_iter().find(|(_, tensor)| overlaps(tensor)) {
        return Err(format!("{name} {OVERLAPS}"));
    }
    match options.communication {
        Some(kind) if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) => {
            Err(format!(
                "gradients cannot be sent as {kind:?}: use Float, Double, Half or BFloat16"
            ))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_gpus_of_their_own_but_one_kind_of_device() {
        assert_eq!(device_kind(Device::Cuda(0)), device_kind(Device::Cuda(7)));
        assert_ne!(device_kind(Device::Cuda(0)), device_kind(Device::Cpu));
    }
}
