//! Global tensors are made like others, with a placement and an SBP.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let placement = Placement::new(group, [0, 1])?;
    // The values of one device, whatever the SBP.
    let x = global::randn([4, 5], Kind::Float, &placement, [S(0)])?;
    show::layout(group, "randn", &x)?; // each rank has [2, 5]
    global::manual_seed(&placement, 1)?;
    let rows = global::rand([3, 2], Kind::Float, &placement, [S(0)])?;
    show::all(group, "rows", &rows)?;
    global::manual_seed(&placement, 1)?;
    let columns = global::rand([3, 2], Kind::Float, &placement, [S(1)])?;
    show::all(group, "columns", &columns)?;
    show::all(group, "zeros", &global::zeros([2, 3], Kind::Float, &placement, [B])?)?;
    show::all(group, "ones", &global::ones([2, 3], Kind::Float, &placement, [P])?)?;
    show::all(group, "full", &global::full([2, 3], 7.0, Kind::Float, &placement, [S(1)])?)?;
    show::all(group, "arange", &global::arange(5, Kind::Int64, &placement, [S(0)])?)?;
    show::all(group, "eye", &global::eye(3, Kind::Float, &placement, [S(0)])?)?;
    // The same data on all ranks, of which each keeps its part.
    let data = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    show::all(group, "tensor", &global::distribute_tensor(&data, &placement, [S(0)])?)
}
