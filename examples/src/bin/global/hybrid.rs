//! A pipeline whose first stage is data parallel, and whose second one is model parallel.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let first = Placement::new(group, [0, 1])?;
    let second = Placement::new(group, [2, 3])?;
    let x = global::randn([4, 5], Kind::Float, &first, [S(0)])?;
    let w0 = global::randn([5, 8], Kind::Float, &first, [B])?;
    let out0 = x.matmul(&w0);
    show::layout(group, "out_stage0", &out0)?; // [4, 8], split by rows
    let in1 = out0.to_global(&second, [B])?;
    let w1 = global::randn([8, 3], Kind::Float, &second, [S(1)])?;
    let out1 = in1.matmul(&w1);
    show::layout(group, "out_stage1", &out1)?; // [4, 3], split by columns: 2 and 1
    for (name, tensor) in [("x", &x), ("w0", &w0), ("w1", &w1), ("out", &out1)] {
        show::values(group, name, tensor)?;
    }
    Ok(())
}
