//! Whether a model can be wrapped, and whether all ranks wrap the same one.

use std::collections::HashMap;

use flow_autograd::GradHook;
use flow_comm::{ProcessGroup, digest};
use flow_tensor::{OVERLAPS, overlaps};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, job_rank};
use crate::grad_layout::GradLayout;
use crate::options::{Delayed, Options};

/// Compares this rank's lines, one for each thing that must be equal, with all ranks'. `Some` is the
/// first difference, in the same words on every rank.
pub(crate) fn first_mismatch(
    group: &ProcessGroup,
    lines: &[String],
) -> flow_comm::Result<Option<String>> {
    let text = lines.join("\n");
    let own = [digest(&text) as i64];
    let mut digests = vec![0i64; group.world_size()];
    group.all_gather(&own, &mut digests)?;
    if digests.iter().all(|other| *other == digests[0]) {
        return Ok(None);
    }
    // Only now are the texts themselves worth sending.
    let texts = gather_texts(group, &text)?;
    Ok(first_difference(group.ranks(), &texts))
}

/// Returns the first line in which a rank's text differs from that of the first rank.
fn first_difference(ranks: &[usize], texts: &[String]) -> Option<String> {
    let first: Vec<&str> = texts[0].lines().collect();
    for (text, &rank) in texts.iter().zip(ranks) {
        let lines: Vec<&str> = text.lines().collect();
        for at in 0..first.len().max(lines.len()) {
            if first.get(at) != lines.get(at) {
                let expected = first.get(at).unwrap_or(&NOTHING);
                let found = lines.get(at).unwrap_or(&NOTHING);
                return Some(format!("rank {} has {expected}, rank {rank} has {found}", ranks[0]));
            }
        }
    }
    None
}

const NOTHING: &str = "nothing in its place";

/// Returns what this rank has made, if all ranks have made theirs. An error of one rank is one of
/// all, so that none goes on to wait for it.
pub(crate) fn agree<T>(group: &ProcessGroup, made: Result<T>) -> Result<T> {
    let error = made.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let errors = gather_texts(group, &error);
    let made = made?;
    match errors?.into_iter().find(|error| !error.is_empty()) {
        Some(reason) => Err(Error::Peer { rank: job_rank(group), reason }),
        None => Ok(made),
    }
}

/// Gathers a text of each rank.
pub fn gather_texts(group: &ProcessGroup, text: &str) -> flow_comm::Result<Vec<String>> {
    let mut lengths = vec![0i64; group.world_size()];
    group.all_gather(&[text.len() as i64], &mut lengths)?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let mut all = vec![0u8; lengths.iter().sum()];
    if !all.is_empty() {
        group.all_gather_v(text.as_bytes(), &mut all[..], &lengths)?;
    }
    let mut texts = Vec::with_capacity(lengths.len());
    let mut rest = &all[..];
    for length in lengths {
        let (text, others) = rest.split_at(length);
        texts.push(String::from_utf8_lossy(text).into_owned());
        rest = others;
    }
    Ok(texts)
}

/// Gives all ranks the bytes of rank `root`.
pub fn broadcast_bytes(
    group: &ProcessGroup,
    root: usize,
    bytes: &mut Vec<u8>,
) -> flow_comm::Result<()> {
    let mut length = [bytes.len() as i64];
    group.broadcast(&mut length, root)?;
    bytes.resize(length[0] as usize, 0);
    if !bytes.is_empty() {
        group.broadcast(bytes, root)?;
    }
    Ok(())
}

/// Names the kind of a device. Ranks may not mix GPUs, whichever they are, and the CPU.
pub(crate) fn device_kind(device: Device) -> String {
    match device {
        Device::Cuda(_) => "a GPU".into(),
        Device::Cpu => "the CPU".into(),
        other => format!("{other:?}"),
    }
}

/// Describes a model's tensors, each in a line, by what must be equal on all ranks.
pub(crate) fn describe(
    parameters: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
) -> Vec<String> {
    let mut first_names: HashMap<usize, String> = HashMap::new();
    let mut lines = Vec::with_capacity(parameters.len() + buffers.len());
    let parameters = parameters.iter().map(|named| ("parameter", named));
    let buffers = buffers.iter().map(|named| ("buffer", named));
    for (what, (name, tensor)) in parameters.chain(buffers) {
        let name = name.replace('\n', " ");
        let mut line = format!(
            "{what} {name} {:?} {:?} requires_grad={}",
            tensor.size(),
            tensor.kind(),
            tensor.requires_grad()
        );
        if what == "parameter" {
            // Ranks add up what lies at the same place in memory.
            line += &GradLayout::of(tensor).to_string();
        }
        let identity = flow_autograd::identity(tensor);
        match first_names.get(&identity) {
            Some(first) => line += &format!(", the same tensor as {first}"),
            None => drop(first_names.insert(identity, name)),
        }
        lines.push(line);
    }
    lines
}

/// Checks that no other `Ddp` has hooks on the parameters.
pub(crate) fn check_hooks(parameters: &[(String, Tensor)]) -> Result<(), String> {
    for (name, tensor) in parameters.iter().filter(|(_, tensor)| tensor.requires_grad()) {
        match GradHook::is_installed(tensor) {
            Ok(false) => {}
            Ok(true) => {
                return Err(format!(
                    "parameter {name} is wrapped in a Ddp already: drop the first"
                ));
            }
            Err(error) => return Err(format!("parameter {name}: {error}")),
        }
    }
    Ok(())
}

/// Checks a model without other ranks. The error says what is wrong.
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
    let Delayed { names, until } = &options.delayed;
    for wanted in names.iter().chain(Some(until).filter(|_| !names.is_empty())) {
        if !parameters.iter().any(|(name, _)| name == wanted) {
            return Err(format!(
                "delay_all_reduce_named_params names {wanted}, which is no parameter: {} is one",
                parameters[0].0
            ));
        }
    }
    if names.contains(until) {
        return Err(format!(
            "delay_all_reduce_named_params delays {until} until its own gradient has come: name \
             another parameter to wait for"
        ));
    }
    for wanted in &options.sparse {
        let Some((_, tensor)) = parameters.iter().find(|(name, _)| name == wanted) else {
            return Err(format!(
                "sparse_gradients names {wanted}, which is no parameter: {} is one",
                parameters[0].0
            ));
        };
        if !can_be_averaged(tensor.kind()) || tensor.dim() == 0 {
            return Err(format!(
                "sparse_gradients names {wanted}, which is {:?} of {} dimensions: it must be Float, \
                 Double, Half or BFloat16, of one dimension or more",
                tensor.kind(),
                tensor.dim()
            ));
        }
    }
    if !options.caps.are_positive() {
        return Err("bucket caps must be positive, and there must be at least one".into());
    }
    let first = &parameters[0].0;
    let device = parameters[0].1.device();
    for (name, tensor) in parameters.iter().chain(buffers) {
        if tensor.device() != device {
            let other = tensor.device();
            return Err(format!(
                "{first} is on {device:?} and {name} on {other:?}: a model must be on one device"
            ));
        }
        let kind = tensor.kind();
        let is_complex = matches!(kind, Kind::ComplexFloat | Kind::ComplexDouble);
        if tensor.requires_grad() && !is_complex && !can_be_averaged(kind) {
            return Err(format!(
                "{name} is {kind:?}: parameters must be Float, Double, Half, BFloat16, ComplexFloat \
                 or ComplexDouble"
            ));
        }
    }
    let written = parameters.iter().chain(buffers.iter().filter(|_| broadcast_buffers));
    if let Some((name, _)) = written.into_iter().find(|(_, tensor)| overlaps(tensor)) {
        return Err(format!("{name} {OVERLAPS}"));
    }
    match options.communication {
        Some(kind) if !can_be_averaged(kind) => Err(format!(
            "gradients cannot be sent as {kind:?}: use Float, Double, Half or BFloat16"
        )),
        _ => Ok(()),
    }
}

/// Returns whether gradients of a kind can be averaged.
pub(crate) fn can_be_averaged(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
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
