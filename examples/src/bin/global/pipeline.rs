//! Trains a pipeline of two stages, with two micro-batches: the model and the numbers of "Pipelining
//! Parallelism" in OneFlow's documents.

use flow::prelude::*;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    const BATCH: i64 = 16;
    const MICRO_BATCHES: usize = 2;
    let mesh = Mesh::new(group, &[0, 1], &[2])?.with_names(&["pp"])?;
    if !mesh.ranks().contains(&group.rank()) {
        return Ok(());
    }
    let vs = nn::VarStore::new(group.device());
    let mut pipeline = Pipeline::builder(&mesh, "pp")
        .schedule(Schedule::one_f_one_b(2, MICRO_BATCHES)?)
        .build(|stage| {
            tch::manual_seed(stage as i64);
            Ok(Box::new(match stage {
                0 => nn::seq()
                    .add_fn(|x| x.flatten(1, -1))
                    .add(nn::linear(vs.root(), 784, 512, Default::default()))
                    .add_fn(|x| x.relu()),
                _ => nn::seq()
                    .add(nn::linear(vs.root(), 512, 512, Default::default()))
                    .add_fn(|x| x.relu())
                    .add(nn::linear(vs.root(), 512, 10, Default::default())),
            }))
        })?;
    let mut optimizer = nn::Sgd::default().build(&vs, 1e-3)?;
    tch::manual_seed(2);
    let x = Tensor::randn([BATCH, 1, 28, 28], (Kind::Float, group.device()));
    let y = Tensor::randint(10, [BATCH], (Kind::Int64, group.device()));
    for iteration in 1..=20 {
        optimizer.zero_grad();
        let loss = pipeline.step(&[x.shallow_clone()], |outputs, micro_batch| {
            outputs[0].cross_entropy_for_logits(&micro_batch.of(&y))
        })?;
        optimizer.step();
        if let Some(loss) = loss {
            println!("{iteration}/20 loss:{}", loss.double_value(&[]));
        }
    }
    Ok(())
}
