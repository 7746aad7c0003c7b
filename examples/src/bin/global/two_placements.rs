//! Two stages of a pipeline, each on a rank of its own.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let first = Placement::new(group, [0])?;
    let second = Placement::new(group, [1])?;
    let w0 = global::randn([5, 8], Kind::Float, &first, [B])?;
    let w1 = global::randn([8, 3], Kind::Float, &second, [B])?;
    let [w0, w1] = [w0, w1].map(|w| w.set_requires_grad(true));
    // Of this plain tensor, the first stage takes that of rank 0.
    let x = Tensor::randn([4, 5], (Kind::Float, group.device()));
    let x = x.to_global(&first, [B])?;
    let out0 = x.matmul(&w0);
    show::layout(group, "out_stage0", &out0)?; // [4, 8]
    let in1 = out0.to_global(&second, [B])?;
    let out1 = in1.matmul(&w1);
    show::layout(group, "out_stage1", &out1)?; // [4, 3]
    for (name, tensor) in [("x", &x), ("w0", &w0), ("w1", &w1), ("out", &out1)] {
        show::values(group, name, tensor)?;
    }
    // The backward goes through the stages the other way round.
    out1.sum(Kind::Float).f_backward()?;
    show::all(group, "w0.grad", &w0.grad())?;
    show::all(group, "w1.grad", &w1.grad())
}
