//! What a checkpoint has, and how two differ.

use std::collections::BTreeSet;
use std::path::Path;

use flow_ddp::checkpoint::Result;
use flow_ddp::checkpoint::layout::Described;
use flow_ddp::checkpoint::safetensors::size;

use super::opened::Opened;

/// Describes the tensors of a checkpoint of either kind, or of a safetensors file: a line for each, and
/// one for all.
///
/// # Errors
/// There is none at `path`, or its headers are damaged.
pub fn inspect(path: impl AsRef<Path>) -> Result<Vec<String>> {
    let opened = Opened::new(path.as_ref())?;
    let mut lines = Vec::new();
    let mut bytes = 0;
    for (name, tensor) in &opened.tensors {
        lines.push(format!("{name}: {}", described(tensor)));
        bytes += size(&tensor.0, &tensor.1).unwrap_or_default();
    }
    lines.push(format!("{} tensors, {bytes} bytes", opened.tensors.len()));
    Ok(lines)
}

/// Compares two checkpoints of either kind, or files, bit by bit. Returns a line for each tensor that
/// differs. They need not fit into memory.
///
/// # Errors
/// One of them cannot be read.
pub fn diff(one: impl AsRef<Path>, other: impl AsRef<Path>) -> Result<Vec<String>> {
    let [one_path, other_path] = [one.as_ref(), other.as_ref()];
    let [one, other] = [Opened::new(one_path)?, Opened::new(other_path)?];
    let names: BTreeSet<_> = one.tensors.keys().chain(other.tensors.keys()).collect();
    let mut lines = Vec::new();
    for name in names {
        let difference = match (one.tensors.get(name), other.tensors.get(name)) {
            (Some(_), None) => Some(format!("only in {}", one_path.display())),
            (None, _) => Some(format!("only in {}", other_path.display())),
            (Some(left), Some(right)) if left != right => {
                Some(format!("{}, and {}", described(left), described(right)))
            }
            (Some(tensor), Some(_)) => differing(&one, &other, name, tensor)?,
        };
        lines.extend(difference.map(|difference| format!("{name}: {difference}")));
    }
    Ok(lines)
}

/// Says how many elements of a tensor that both have differ, if any do.
fn differing(
    one: &Opened,
    other: &Opened,
    name: &str,
    (dtype, shape): &Described,
) -> Result<Option<String>> {
    let element = size(dtype, &[]).unwrap_or(1);
    let mut count = 0;
    let mut left = Vec::new();
    let mut right = Vec::new();
    for block in one.blocks(name) {
        one.read(name, &block, &mut left)?;
        other.read(name, &block, &mut right)?;
        let pairs = left.chunks(element).zip(right.chunks(element));
        count += pairs.filter(|(left, right)| left != right).count();
    }
    let elements: usize = shape.iter().product();
    Ok((count > 0).then(|| format!("{count} of {elements} elements differ")))
}

fn described((dtype, shape): &Described) -> String {
    format!("{dtype} {shape:?}")
}
