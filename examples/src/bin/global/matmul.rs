//! The product that the other programs distribute.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    tch::manual_seed(0);
    let x = Tensor::randn([4, 5], (Kind::Float, group.device()));
    let w = Tensor::randn([5, 8], (Kind::Float, group.device()));
    let out = x.matmul(&w);
    if group.rank() == 0 {
        println!("{:?}", out.size()); // [4, 8]
    }
    for (name, tensor) in [("x", &x), ("w", &w), ("out", &out)] {
        show::values(group, name, tensor)?;
    }
    Ok(())
}
