//! Prints global tensors.

use flow::prelude::*;

/// Each rank prints the logical size, the SBP, and the size of what it has.
pub fn layout(group: &ProcessGroup, name: &str, tensor: &Tensor) -> anyhow::Result<()> {
    println!(
        "rank {}: {name} {:?} {:?} on {}, here {:?}",
        group.rank(),
        tensor.size(),
        tensor.sbp()?,
        tensor.placement()?,
        tensor.to_local()?.size()
    );
    Ok(())
}

/// Rank 0 prints all elements. All ranks call this.
pub fn values(group: &ProcessGroup, name: &str, tensor: &Tensor) -> anyhow::Result<()> {
    let all = tensor.full()?.to_kind(Kind::Float);
    if group.rank() == 0 {
        match all.dim() {
            1 => println!("{name} = {:?}", Vec::<f32>::try_from(all)?),
            _ => println!("{name} = {:?}", Vec::<Vec<f32>>::try_from(all)?),
        }
    }
    Ok(())
}

/// Both.
pub fn all(group: &ProcessGroup, name: &str, tensor: &Tensor) -> anyhow::Result<()> {
    layout(group, name, tensor)?;
    values(group, name, tensor)
}
