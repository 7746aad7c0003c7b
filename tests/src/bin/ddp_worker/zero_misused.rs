//! `ZeroRedundancyOptimizer` where it cannot work: errors that say what would be right, on all ranks.

use anyhow::{Result, ensure};
use flow_autograd::OptimizerState;
use flow_comm::{ProcessGroup, ReduceOp};
use flow_ddp::{
    BoxError, CommHook, Ddp, DdpBuilder, Error, GradBucket, JoinOptions, Pending,
    TensorCollectives, TryBackwardStep, ZeroRedundancyOptimizer, join,
};
use tch::nn::{Adam, Sgd, VarStore};
use tch::{Kind, Tensor};

use crate::helpers::{error, failure, own_group, says};
use crate::models::{Vectors, device, on_gpu, store};
use crate::optimizers::LARGE;

fn adam(store: &VarStore, group: &ProcessGroup) -> flow_ddp::Result<ZeroRedundancyOptimizer> {
    ZeroRedundancyOptimizer::new(store, group, Adam::default(), 0.1)
}

/// An optimizer that cannot be made, and one that cannot do what is asked and goes on.
pub fn misused(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let like = (Kind::Float, device());
    let says_in_a_line = |text: String, words: &[&str]| {
        ensure!(text.lines().count() == 1, "{text}");
        says(&text, words)
    };

    let words = ["ZeroRedundancyOptimizer: the VarStore has no trainable variables", "model first"];
    says_in_a_line(error(adam(&store(), group))?, &words)?;
    let own = store();
    let _model = Vectors::new(&own, &[10]);
    let text = error(ZeroRedundancyOptimizer::new(&own, group, Adam::default(), -1.0))?;
    says_in_a_line(text, &["Invalid learning rate: -1"])?;
    let text = error(ZeroRedundancyOptimizer::new(&own, group, Sgd::default(), 1.0 + rank as f64))?;
    says_in_a_line(
        text,
        &["differs between ranks", "SGD with learning rate 1,", "SGD with learning rate 2"],
    )?;
    let gaps = store();
    let _ = gaps.root().add("gaps", Tensor::ones([4, 6], like).slice(1, 0, 6, 2), true);
    says_in_a_line(error(adam(&gaps, group))?, &["gaps has gaps in its memory", "contiguous()"])?;
    let overlapping = store();
    let _ = overlapping.root().add("same", Tensor::ones([1], like).expand([4], false), true);
    says_in_a_line(error(adam(&overlapping, group))?, &["same has elements that share memory"])?;
    // One rank only has a fault, or another model.
    let unlike = store();
    let _model = Vectors::new(&unlike, if rank == 1 { &[10, 11] } else { &[10, 10] });
    let words = ["rank 0 has parameter w1 [10]", "rank 1 has parameter w1 [11]"];
    says_in_a_line(error(adam(&unlike, group))?, &words)?;
    let unfit = store();
    let ones = Tensor::ones([4, 6], like);
    let tensor = if rank == 1 { ones.slice(1, 0, 6, 2) } else { ones };
    let _ = unfit.root().add("w", tensor, true);
    says_in_a_line(error(adam(&unfit, group))?, &["rank 1 has", "w has gaps in its memory"])?;

    let own = store();
    let model = Vectors::new(&own, &[10, LARGE]);
    let mut zero = adam(&own, group)?;
    let words = ["no parameter is in group 3", "Path::set_group"];
    says_in_a_line(error(zero.set_lr_group(3, 0.1))?, &words)?;
    let words = ["let all call consolidate_state_dict(to)"];
    says_in_a_line(error(zero.state())?, &words)?;
    zero.backward_step(&model.weighted_sum(&[(0, 1.0), (1, 2.0)]))?;
    zero.consolidate_state_dict(1)?;
    if rank == 1 {
        ensure!(zero.state()?.tensors.len() == 6, "{:?}", zero.state()?);
    } else {
        says_in_a_line(error(zero.state())?, &words)?;
    }
    zero.backward_step(&model.weighted_sum(&[(0, 1.0), (1, 2.0)]))?;
    says_in_a_line(error(zero.state())?, &words)?;

    // States that do not fit leave it as it was.
    let mut reference = tch::nn::OptimizerConfig::build(Adam::default(), &own, 0.1)?;
    reference.step();
    let mut state = reference.state()?;
    state.parameters[1] = "Adagrad of [10] Float".to_owned();
    says(&error(zero.load_state(&state))?, &["parameter 1 is Adagrad of [10] Float in the state"])?;
    let mut state = reference.state()?;
    state.tensors.push(("7.step".to_owned(), Tensor::from(1i64)));
    says(&error(zero.load_state(&state))?, &["7.step, which the optimizer has no place for"])?;
    let mut state = reference.state()?;
    for (name, tensor) in &mut state.tensors {
        if name == "1.exp_avg" {
            *tensor = Tensor::zeros([LARGE, 1], like);
        }
    }
    says(
        &error(zero.load_state(&state))?,
        &[&format!("1.exp_avg has the shape [{LARGE}, 1]"), &format!("w1 has [{LARGE}]")],
    )?;

    // A part that only the rank of w0 has no place for, and keeps what it had.
    let mut state = reference.state()?;
    for (_, tensor) in &mut state.tensors {
        *tensor = tensor.zeros_like();
    }
    state.tensors.push(("0.nonsense".to_owned(), Tensor::from(1i64)));
    says(&error(zero.load_state(&state))?, &["nonsense"])?;
    zero.consolidate_state_dict(0)?;
    if rank == 0 {
        let steps = zero.state()?.tensors.into_iter().filter(|(name, _)| name.ends_with("step"));
        let steps: Vec<i64> = steps.map(|(_, count)| count.int64_value(&[])).collect();
        ensure!(steps == [2, 2], "{steps:?} steps");
    }
    says(&error(zero.consolidate_state_dict(9))?, &["there is no rank 9"])?;

    let twice = error(join(&[&zero, &zero], JoinOptions::default(), || Ok::<_, Error>(())))?;
    says_in_a_line(twice, &["the optimizer is in a join already"])?;
    Ok(())
}

fn sgd(store: &VarStore, group: &ProcessGroup) -> flow_ddp::Result<ZeroRedundancyOptimizer> {
    ZeroRedundancyOptimizer::new(store, group, Sgd::default(), 0.5)
}

/// A bucket for each parameter, which `zero` steps.
fn builder(group: &ProcessGroup, zero: &ZeroRedundancyOptimizer) -> DdpBuilder {
    Ddp::builder(group).bucket_cap_mb(0.00001).hook_with_zero_step(zero)
}

/// An optimizer that steps in backward, where it cannot.
pub fn in_backward(group: &ProcessGroup) -> Result<()> {
    let own = store();
    let net = Vectors::new(&own, &[10, LARGE]);
    let mut zero = sgd(&own, group)?;

    let other = store();
    let wrapped = builder(group, &zero).wrap(Vectors::new(&other, &[10, LARGE]), &other);
    says(&error(wrapped)?, &["it has no w0, which the model has", "all parameters of the model"])?;
    let parameters = vec![("w0".to_owned(), net.0[0].shallow_clone())];
    let wrapped = builder(group, &zero).wrap_tensors((), parameters, Vec::new());
    says(&error(wrapped)?, &["it has 2 parameters and the model 1"])?;
    let both = builder(group, &zero).optimizer_in_backward(Adam::default(), 0.1);
    let wrapped = both.wrap(Vectors::new(&other, &[1]), &other);
    says(&error(wrapped)?, &["two optimizers cannot step", "without optimizer_in_backward"])?;
    let alone = own_group(group)?;
    let of_one = sgd(&own, &alone)?;
    let builder_of_one = Ddp::builder(group).hook_with_zero_step(&of_one);
    let wrapped = builder_of_one.wrap(Vectors::new(&other, &[1]), &other);
    says(&error(wrapped)?, &["the optimizer is of the ranks [", "both with one group"])?;

    let slower = ZeroRedundancyOptimizer::new(&own, group, Sgd::default(), 0.25)?;
    let last = group.world_size() - 1;
    let chosen = if group.rank() == last { &slower } else { &zero };
    let wrapped = builder(group, chosen).wrap(Vectors::new(&other, &[1]), &other);
    let words = ["SGD with learning rate 0.5", "SGD with learning rate 0.25"];
    says(&error(wrapped)?, &words)?;

    let model = builder(group, &zero).wrap(net, &own)?;
    let words = ["a Ddp steps it in backward: leave step out", "without hook_with_zero_step"];
    says(&error(zero.step())?, &words)?;
    let words = ["clipped to the norm 1 of all", "without hook_with_zero_step"];
    says(&error(zero.clip_grad_norm(1.0))?, &words)?;
    let words = ["join: build without hook_with_zero_step"];
    says(&error(model.join(|| Ok::<_, Error>(())))?, &words)?;
    says(&error(model.optimizer_in_backward())?, &["no optimizer steps in backward"])?;
    let joined = join(&[&zero], JoinOptions::default(), || Ok::<_, Error>(()));
    says(&error(joined)?, &["join: build the Ddp without hook_with_zero_step"])?;
    zero.consolidate_state_dict(group.rank())?;
    zero.state()?;
    // It is as it was, and steps once.
    zero.try_backward_step(&model.weighted_sum(&[(0, 1.0), (1, 2.0)]))?;
    for (index, expected) in [(0, 0.5), (1, 0.0)] {
        let value = model.0[index].double_value(&[0]);
        ensure!(value == expected, "w{index} is {value}, not {expected}");
    }
    says(&error(zero.state())?, &["let all call consolidate_state_dict(to)"])?;
    // Without the Ddp it steps as before.
    let net = model.into_inner();
    zero.backward_step(&net.weighted_sum(&[(0, 1.0), (1, 2.0)]))?;
    let value = net.0[0].double_value(&[0]);
    ensure!(value == 0.0, "w0 is {value} after the second step");

    // What one rank cannot step is an error of all.
    let model = builder(group, &zero).wrap(net, &own)?;
    if group.rank() == last {
        model.0[1].shallow_clone().set_data(&Tensor::zeros_like(&model.0[1]));
    }
    let text = failure(&model, || model.weighted_sum(&[(0, 1.0), (1, 2.0)]).f_backward())?;
    says(&text, &["w1 has other memory since", &format!("rank {last}")])?;
    let net = model.into_inner();
    says(&error(zero.step())?, &["w1 has other memory since"])?;
    let wrapped = builder(group, &zero).wrap(net, &own);
    says(&error(wrapped)?, &["w1 has other memory since", "make the optimizer anew"])?;

    // The others are about to gather what the last rank has not stepped.
    let own = store();
    let net = Vectors::new(&own, &[10]);
    let zero = sgd(&own, group)?;
    let model = builder(group, &zero).comm_hook(TooLong).wrap(net, &own)?;
    let text = failure(&model, || model.weighted_sum(&[(0, 1.0)]).f_backward())?;
    says(&text, &[&format!("rank {last}"), "it must return a tensor of one dimension"])
}

/// Averages, and returns one element more on the last rank.
struct TooLong;

impl CommHook for TooLong {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let mut mean = bucket.buffer()?.copy();
        let group = bucket.group();
        group.all_reduce_tensor(&mut mean, ReduceOp::Avg)?;
        if group.rank() + 1 == group.world_size() {
            mean = mean.pad([0, 1], "constant", 0.0);
        }
        Ok(Pending::ready(mean))
    }

    fn waits_for_ranks(&self) -> bool {
        true
    }
}

/// What one rank cannot step is an error of all ranks, which go on with none of it.
pub fn failing(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let like = (Kind::Float, device());
    let last = group.world_size() - 1;
    type Fault = fn(&VarStore, &Vectors) -> Result<()>;
    let faults: [(Fault, &[&str]); 3] = [
        (
            |store, _| {
                let _ = store.root().ones("later", &[1]);
                Ok(())
            },
            &["the VarStore has got variables since", "once the model is complete"],
        ),
        (
            |_, model| {
                model.0[0].shallow_clone().set_data(&Tensor::zeros_like(&model.0[0]));
                Ok(())
            },
            &["w0 has other memory since", "make the optimizer anew"],
        ),
        (
            |_, model| {
                let sparse = model.0[0].detach().to_sparse_sparse_dim(1);
                Ok(flow_autograd::set_grad(&model.0[0], Some(&sparse))?)
            },
            &["the gradient of w0 is sparse", "sparse_as_dense(true)"],
        ),
    ];
    for (fault, words) in faults {
        let own = store();
        let model = Vectors::new(&own, &[LARGE, 10]);
        let zero = adam(&own, group)?;
        for w in &model.0 {
            flow_autograd::set_grad(w, Some(&Tensor::ones(w.size(), like)))?;
        }
        zero.step()?;
        if rank == last {
            fault(&own, &model)?;
        }
        let first = zero.step();
        // No rank waits for others on a GPU.
        ensure!(first.is_err() || on_gpu(), "the step has succeeded");
        group.barrier()?;
        let text = error(first.and_then(|()| zero.step()))?;
        says(&text, words)?;
        says(&text, &[&format!("rank {last}")])?;
        let again = error(zero.step())?;
        says(&again, words)?;
    }
    group.barrier()?;
    Ok(())
}
