//! SBPs on the two axes of a mesh: data parallel on one of them, model parallel on the other.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let placement = Placement::new(group, [[0, 1], [2, 3]])?;
    let x = global::randn([4, 5], Kind::Float, &placement, [S(0), B])?;
    let w = global::randn([5, 8], Kind::Float, &placement, [B, S(1)])?;
    let out = x.matmul(&w);
    show::values(group, "x", &x)?;
    show::values(group, "w", &w)?;
    show::all(group, "out", &out)?; // [4, 8], S(0) and S(1): each rank has [2, 4]
    // The other way round, by the names of the axes.
    let placement = placement.named(["model", "data"])?;
    let x = x.to_global(&placement, placement.sbp([("data", S(0))])?)?;
    let w = w.to_global(&placement, placement.sbp([("model", S(1))])?)?;
    show::all(group, "turned", &x.matmul(&w)) // [4, 8], S(1) and S(0)
}
