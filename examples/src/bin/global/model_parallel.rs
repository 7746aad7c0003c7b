//! Model parallel: each rank has the whole data, and a part of the model.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let placement = Placement::new(group, [0, 1])?;
    let x = global::randn([4, 5], Kind::Float, &placement, [B])?;
    let w = global::randn([5, 8], Kind::Float, &placement, [S(1)])?;
    let out = x.matmul(&w);
    show::values(group, "x", &x)?;
    show::values(group, "w", &w)?;
    show::all(group, "out", &out) // [4, 8]
}
