//! Data parallel: each rank has a part of the data, and the whole model.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let placement = Placement::new(group, [0, 1])?;
    let x = global::randn([4, 5], Kind::Float, &placement, [S(0)])?;
    let w = global::randn([5, 8], Kind::Float, &placement, [B])?;
    let w = w.set_requires_grad(true);
    let out = x.matmul(&w);
    show::values(group, "x", &x)?;
    show::values(group, "w", &w)?;
    show::all(group, "out", &out)?; // [4, 8]

    // Each rank's samples give a part of the gradient: their sum is that of w.
    out.sum(Kind::Float).f_backward()?;
    show::all(group, "w.grad", &w.grad())
}
